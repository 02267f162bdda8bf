"""The ablation benchmark, in short: a run a variant and seed, none done twice."""

from pathlib import Path

import pytest

from benchmarks.ablation import VARIANTS, ablate, told
from tests.training.drawn import draw_folder
from training import train
from training.recipe_file import load_recipe

SMALL = ["image_size=16", "dimension=8", "classes_per_batch=2", "images_per_class=2", "epochs=1", "threads=1"]


def test_each_variant_is_trained_once_with_each_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = draw_folder(tmp_path / "data", classes=6, images=3)
    variants = {"without XML": "xml_weight=0", "warm-up": "xml_warmup=0.5"}
    found = ablate("demo", data, tmp_path / "runs", variants, 2, SMALL)
    assert [len(rows) for rows in found.values()] == [2, 2]
    assert all(0 < row["map_at_r"] <= 1 for rows in found.values() for row in rows)
    assert found["without XML"][0] != found["without XML"][1]
    monkeypatch.setattr(train, "run", lambda _: pytest.fail("trained again"))
    assert ablate("demo", data, tmp_path / "runs", variants, 2, SMALL) == found


def test_the_variants_are_settings() -> None:
    for changes in VARIANTS.values():
        load_recipe("demo", changes.split())


def test_figures_are_told_with_their_spread() -> None:
    assert told([0.5]) == "50.00"
    assert told([0.4, 0.6]) == "50.00 ± 14.14"
