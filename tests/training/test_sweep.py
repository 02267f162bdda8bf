"""The sweep: every arm from every seed, kept in a table, compared in pairs; means and intervals."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from serving.errors import AlreadyExists, BadSetting
from tests.training.small import draw_folder, read_table
from training import train
from training.evaluation.paired import interval, summarise, tell
from training.evaluation.sweep import Settings, render, run
from training.loop.run import reserved

SHARES = st.floats(min_value=0, max_value=1, width=32)


@pytest.fixture(scope="module")
def swept(data: Path, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    over, out = ["xml_weight=0,0.5", "loss=contrastive"], tmp_path_factory.mktemp("sweep") / "out"
    settings = Settings(recipe=recipe, data=data, out=out, over=over, seeds=2, set=["epochs=1"])
    run(settings)
    return settings


def rewrite(table: Path, changes: dict[int, dict[str, str | None]]) -> None:
    """Change cells of some rows, the first of which is 0; one that is None is left out."""
    head, *_ = table.read_text().splitlines()
    rows = [(row | changes.get(number, {})).values() for number, row in enumerate(read_table(table))]
    lines = [head, *(",".join(cell for cell in row if cell is not None) for row in rows)]
    table.write_text("\n".join(lines))


def test_every_arm_has_a_run_of_every_seed(swept: Settings, recipe: str, tmp_path: Path) -> None:
    rows = read_table(swept.out / "runs.csv")
    expected = [("0", "0"), ("0.5", "0"), ("0", "1"), ("0.5", "1")]
    assert [(row["xml_weight"], row["seed"]) for row in rows] == expected
    assert {row["scored_on"] for row in rows} == {"validation"}
    assert not (swept.out / "current").exists()
    given = ["epochs=1", "xml_weight=0.5"]
    train.run(train.Settings(recipe=recipe, data=swept.data, out=tmp_path / "r", set=given))
    last = read_table(tmp_path / "r" / "metrics.csv")[-1]
    assert float(rows[1]["map_at_r"]) == pytest.approx(float(last["map_at_r"]), abs=1e-5)


def test_differences_are_over_pairs_of_one_seed(
    swept: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "run", None)  # nothing that is in the table trains again
    result = run(swept)
    rows = read_table(swept.out / "runs.csv")
    without, with_xml = (
        np.array([float(row["map_at_r"]) for row in rows if row["xml_weight"] == weight])
        for weight in ("0", "0.5")
    )
    pair = result["arms"][1]["map_at_r"]["difference"]
    assert pair["mean"] == pytest.approx((with_xml - without).mean())
    assert pair["half_width"] == pytest.approx(interval(with_xml.tolist(), without.tolist())[1])
    assert "difference" not in result["arms"][0]["map_at_r"]
    told = render(result)
    assert "xml_weight=0.5 loss=contrastive" in told
    assert f"{100 * pair['mean']:+.2f} ±" in told
    some = swept.model_copy(update={"out": shutil.copytree(swept.out, tmp_path / "out")})
    rewrite(some.out / "runs.csv", {0: {"map_c": "0.5"}, 3: {"map_c": "0.6"}})  # of two seeds
    assert run(some)["arms"][1]["map_c"].keys() == {"mean", "half_width"}


def test_the_final_score_is_of_the_test_classes(data: Path, recipe: str, tmp_path: Path) -> None:
    settings = Settings(
        recipe=recipe, data=data, out=tmp_path / "out", over=["freeze=none,backbone"], seeds=1,
        set=["epochs=1", "split_train=3"], final=True, fitted=3, cache=tmp_path / "cache",
    )  # fmt: skip
    result = run(settings)
    assert result["scored_on"] == "test"
    assert "MAP_x" in render(result)
    rows = read_table(settings.out / "runs.csv")
    assert all(0 <= float(row[name]) <= 1 for row in rows for name in ("map_at_r", "map_c", "map_x"))
    assert result["arms"][0]["map_at_r"]["half_width"] is None


def test_what_does_not_fit_is_told(swept: Settings) -> None:
    for changes, told in (
        ({"over": ["loss"]}, "--over takes KEY=V1,V2"),
        ({"over": ["los=triplet"]}, "unknown key 'los'"),
        ({"over": ["dimension=4,8"]}, "choose another folder for --out"),
        ({"over": ["seed=4,5"]}, "the sweep sets evaluate_every, patience, seed itself"),
        ({"over": ["validation=0.4,0.5"]}, "would be scored on different classes"),
        ({"over": ["xml_weight=0,0"]}, "a value twice"),
        ({"fitted": 5}, "add --final"),
        ({"set": ["epochs=2"]}, "epochs = 1, but now 2 is asked for"),
    ):
        with pytest.raises(BadSetting, match=told):
            run(swept.model_copy(update=changes))


def test_runs_of_other_images_are_not_gone_on_with(swept: Settings, tmp_path: Path) -> None:
    shutil.copytree(swept.data, tmp_path / "data")
    next((tmp_path / "data").rglob("*.png")).unlink()
    with pytest.raises(BadSetting, match="was trained with images = "):
        run(swept.model_copy(update={"data": tmp_path / "data"}))
    with reserved(swept.out), pytest.raises(AlreadyExists, match="another process trains in"):
        run(swept)


@pytest.mark.parametrize("cells", [{"seed": None}, {"seed": "1.5"}, {"map_at_r": "e"}, {"map_x": "nan"}])
def test_what_is_damaged_is_named(swept: Settings, tmp_path: Path, cells: dict[str, str | None]) -> None:
    damaged = swept.model_copy(update={"out": shutil.copytree(swept.out, tmp_path / "out")})
    rewrite(damaged.out / "runs.csv", {3: cells})
    with pytest.raises(BadSetting, match="line 5, is no run: take the line out"):
        run(damaged)
    for contents in (b"", b"\xff", b"[]", b'{"validation": 1}'):
        (damaged.out / "sweep.json").write_bytes(contents)
        with pytest.raises(BadSetting, match=r"sweep\.json is damaged: give another --out"):
            run(damaged)


def test_a_value_may_hold_commas_and_a_small_folder_two_classes_to_score(recipe: str, tmp_path: Path) -> None:
    options = ["{pos_margin: 1.0, neg_margin: 0.1}", "{pos_margin: 0.9, neg_margin: 0.3}"]
    data, over = draw_folder(tmp_path / "data", classes=8), [f"loss_options={','.join(options)}"]
    settings = Settings(
        recipe=recipe, data=data, out=tmp_path / "out", over=[*over, "drop_epochs=[1, 2]"], seeds=1,
        set=["epochs=1", "schedule=drops", "classes_per_batch=2", "validation=0", "patience=3"],
    )  # fmt: skip
    with pytest.raises(BadSetting, match="patience"):
        run(settings)
    arms = run(settings.model_copy(update={"set": settings.set[:-1]}))["arms"]
    assert [arm["settings"]["loss_options"] for arm in arms] == options


@given(st.lists(SHARES, min_size=2, max_size=30))
def test_the_interval_is_scipys(values: list[float]) -> None:
    mean, half = interval(values)
    spread = stats.sem(values)
    assert mean == pytest.approx(np.mean(values))
    if spread == 0:
        assert half == 0
    else:
        low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=spread)
        assert half == pytest.approx((high - low) / 2, rel=1e-6)


def test_one_value_has_no_interval_and_pairs_are_of_two() -> None:
    assert interval([0.5, 0.9, 0.3], [0.25, 0.5, 0.5]) == interval([0.25, 0.4, -0.2])  # as the paired t-test
    assert (interval([0.5]), interval([0.5], [0.25])) == ((0.5, None), (0.25, None))
    with pytest.raises(ValueError, match="longer"):
        interval([0.5], [0.5, 0.6])


def test_summaries_are_told_in_percent() -> None:
    lone, two = summarise([0.25]), summarise([0.5, 0.6], [0.4, 0.45])
    assert (tell(lone), tell(None)) == ("25.00", "")
    assert tell(two, "+") == f"+12.50 ± {100 * 12.7062 * 0.025:.2f}"
