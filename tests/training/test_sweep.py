"""The sweep: every arm from every seed, kept in a table, compared in pairs."""

import csv
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from serving.errors import BadSetting
from training import train
from training.sweep import Settings, render, run


@pytest.fixture(scope="module")
def swept(data: Path, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    settings = Settings(
        recipe=recipe,
        data=data,
        out=tmp_path_factory.mktemp("sweep") / "out",
        over=["xml_weight=0,0.5", "loss=contrastive"],
        seeds=2,
        set=["epochs=1"],
    )
    run(settings)
    return settings


def _rows(settings: Settings) -> list[dict[str, str]]:
    with (settings.out / "runs.csv").open() as lines:
        return list(csv.DictReader(lines))


def test_every_arm_has_a_run_of_every_seed(swept: Settings) -> None:
    rows = _rows(swept)
    assert [(row["xml_weight"], row["seed"]) for row in rows] == [
        ("0", "0"), ("0.5", "0"), ("0", "1"), ("0.5", "1"),
    ]  # fmt: skip
    assert {row["scored_on"] for row in rows} == {"validation"}
    assert all(0 <= float(row["map_at_r"]) <= 1 for row in rows)
    assert not (swept.out / "current").exists()


def test_a_run_scores_what_its_last_epoch_does(
    swept: Settings, data: Path, recipe: str, tmp_path: Path
) -> None:
    train.run(
        train.Settings(recipe=recipe, data=data, out=tmp_path / "r", set=["epochs=1", "xml_weight=0.5"])
    )
    with (tmp_path / "r" / "metrics.csv").open() as lines:
        last = list(csv.DictReader(lines))[-1]
    assert float(_rows(swept)[1]["map_at_r"]) == pytest.approx(float(last["map_at_r"]), abs=1e-5)


def test_differences_are_over_pairs_of_one_seed(swept: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "run", None)  # nothing that is in the table trains again
    result = run(swept)
    rows = _rows(swept)
    without, with_xml = (
        np.array([float(row["map_at_r"]) for row in rows if row["xml_weight"] == weight])
        for weight in ("0", "0.5")
    )
    pair = result["arms"][1]["map_at_r"]["difference"]
    assert pair["mean"] == pytest.approx((with_xml - without).mean())
    test = stats.ttest_rel(with_xml, without).confidence_interval()
    assert pair["half_width"] == pytest.approx((test.high - test.low) / 2)
    assert "difference" not in result["arms"][0]["map_at_r"]
    told = render(result)
    assert "xml_weight=0.5 loss=contrastive" in told
    assert f"{100 * pair['mean']:+.2f} ±" in told


def test_the_final_score_is_of_the_test_classes(data: Path, recipe: str, tmp_path: Path) -> None:
    settings = Settings(
        recipe=recipe,
        data=data,
        out=tmp_path / "out",
        over=["freeze=none,backbone"],
        seeds=1,
        set=["epochs=1", "split_train=3"],
        final=True,
        fitted=3,
        cache=tmp_path / "cache",
    )
    result = run(settings)
    assert result["scored_on"] == "test"
    rows = _rows(settings)
    assert all(0 <= float(row[name]) <= 1 for row in rows for name in ("map_at_r", "map_c", "map_x"))
    assert result["arms"][0]["map_at_r"]["half_width"] is None


def test_what_does_not_fit_is_told(swept: Settings) -> None:
    with pytest.raises(BadSetting, match="--over takes KEY=V1,V2"):
        run(swept.model_copy(update={"over": ["loss"]}))
    with pytest.raises(BadSetting, match="unknown key 'los'"):
        run(swept.model_copy(update={"over": ["los=triplet"]}))
    with pytest.raises(BadSetting, match="give another --out"):
        run(swept.model_copy(update={"over": ["dimension=4,8"]}))
