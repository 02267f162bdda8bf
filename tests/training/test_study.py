"""The study of XML, in short: each arm tuned on validation classes, then scored on the unseen ones."""

import csv
from pathlib import Path

import pytest

from benchmarks import study
from tests.training.drawn import draw_folder
from training import train
from training.recipes.recipe_file import load_recipe

SMALL = (
    "backbone=resnet20 weights=none image_size=16 views=1 head_init=random dimension=4 prototypes=4"
    " epochs=1 batches_per_epoch=2 classes_per_batch=2 images_per_class=2 validation=0.4"
)


def test_both_arms_are_tuned_before_the_unseen_classes_score_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_folder(tmp_path / "clothing", classes=10, images=4, size=18)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = f"--data {tmp_path} --out {tmp_path / 'out'} --only clothing --heads whitened"
    asked = f"{words} --losses contrastive --seeds 2 --tuning 1 --set {SMALL}".split()
    assert study.main(asked) == 0
    table = (tmp_path / "out" / "study.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(table.splitlines()))
    assert tuple(rows[0]) == study.COLUMNS
    tuned, final = ([row for row in rows if row["scored_on"] == on] for on in ("validation", "test"))
    _, rates, weights = study.HEADS["whitened"]
    assert {(row["xml_weight"], row["head_learning_rate"]) for row in tuned} == {
        (weight, rate) for weight in weights for rate in rates
    }
    assert [(row["xml_weight"], row["seed"]) for row in final] == [
        (weight, seed) for weight in ("0", study.CONTROL, "0.1") for seed in "01"
    ]
    for weight in weights:
        own = [row for row in tuned if row["xml_weight"] == weight]
        best = max(own, key=lambda row: float(row["map_at_r"]))
        chosen = {row["head_learning_rate"] for row in final if row["xml_weight"] == weight}
        assert chosen == {best["head_learning_rate"]}

    monkeypatch.setattr(train, "run", lambda _: pytest.fail("trained again"))
    assert study.main(asked) == 0
    assert (tmp_path / "out" / "study.csv").read_text(encoding="utf-8") == table


def test_each_cell_is_of_settings_of_the_recipe() -> None:
    for settings, rates, _ in study.HEADS.values():
        for sizes in study.SETS.values():
            for loss, options in study.LOSSES.items():
                changes = [*settings.split(), *sizes.split(), f"loss={loss}", f"loss_options={options}"]
                load_recipe("head", [*changes, f"head_learning_rate={rates[0]}"])
