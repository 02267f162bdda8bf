"""The study of XML and the ideas beyond the paper, in short: each arm, variant and criterion has its row."""

import itertools
from pathlib import Path

import pytest
import torch

from benchmarks import ideas, study
from tests.training.small import draw_folder, read_table
from training import train
from training.network.backbone import build_backbone
from training.recipes.recipe import Recipe
from training.recipes.recipe_file import load_recipe

SMALL = (
    "backbone=resnet20 weights=none image_size=16 views=1 head_init=random dimension=4 prototypes=4"
    " batches_per_epoch=2 classes_per_batch=2 images_per_class=2"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_both_arms_are_tuned_and_then_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_folder(tmp_path / "clothing", classes=10, images=4, size=18)
    words = f"--data {tmp_path} --out {tmp_path / 'out'} --only clothing --heads whitened"
    asked = f"{words} --losses contrastive --seeds 2 --tuning 1 --set {SMALL} epochs=1 validation=0.4".split()
    assert study.main(asked) == 0
    table = (tmp_path / "out" / "study.csv").read_bytes()
    rows = read_table(tmp_path / "out" / "study.csv")
    assert tuple(rows[0]) == study.COLUMNS
    tuned, final = ([row for row in rows if row["scored_on"] == on] for on in ("validation", "test"))
    _, rates, weights = study.HEADS["whitened"]
    tried = {(row["xml_weight"], row["head_learning_rate"]) for row in tuned}
    assert tried == set(itertools.product(weights, rates))
    scored = [(row["xml_weight"], row["seed"]) for row in final]
    assert scored == list(itertools.product(("0", study.CONTROL, "0.1"), "01"))
    for weight in weights:
        own = [row for row in tuned if row["xml_weight"] == weight]
        best = max(own, key=lambda row: float(row["map_at_r"]))
        chosen = {row["head_learning_rate"] for row in final if row["xml_weight"] == weight}
        assert chosen == {best["head_learning_rate"]}

    monkeypatch.setattr(train, "run", lambda _: pytest.fail("trained again"))
    assert study.main(asked) == 0
    assert (tmp_path / "out" / "study.csv").read_bytes() == table


def test_each_cell_is_of_settings_of_the_recipe() -> None:
    for settings, rates, _ in study.HEADS.values():
        for sizes in study.SETS.values():
            for loss, options in study.LOSSES.items():
                changes = [*settings.split(), *sizes.split(), f"loss={loss}", f"loss_options={options}"]
                load_recipe("head", [*changes, f"head_learning_rate={rates[0]}"])


def _read(idea: str, tmp_path: Path, *words: str) -> list[dict[str, str]]:
    draw_folder(tmp_path / "data", classes=12, images=4, size=18)
    out = tmp_path / "out.csv"
    asked = [idea, "--data", str(tmp_path / "data"), "--out", str(out), "--set", *SMALL.split(), *words]
    assert ideas.main([*asked, "--runs", "1" if idea == "criterion" else "2"]) == 0
    return read_table(out)


def test_each_variant_is_scored_on_each_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "HEADS", {"whitened": study.HEADS["whitened"]})
    rows = _read("variants", tmp_path, "epochs=1", "image_size=32")
    found = [(row["head"], row["fold"], row["variant"]) for row in rows]
    assert found == list(itertools.product(["whitened"], "01", ideas.VARIANTS))


@pytest.mark.filterwarnings("ignore:An input array is constant")  # so few images
def test_each_criterion_chooses_among_the_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ideas, "_LENGTHS", (1,))
    rows = {row["criterion"]: row for row in _read("criterion", tmp_path)}
    assert list(rows) == ["the best there is", "MAP@R", "R@1", "MAP_x", "L_XML"]
    assert max(rows.values(), key=lambda row: float(row["map_at_r"]))["criterion"] == "the best there is"


def test_a_grid_of_cells_tells_where_a_prototype_is_found() -> None:
    recipe = Recipe(image_size=32, dimension=4, prototypes=3)
    embedder = ideas.GridEmbedder(build_backbone("resnet20", "none", image_size=32), recipe)
    height, width = embedder.grid
    locations = torch.randn(2, height * width, 4)
    turned = locations.view(2, height, width, 4).flip(2).flatten(1, 2)
    embedder.cells = 1
    torch.testing.assert_close(embedder.histogram(locations), embedder.histogram(turned))
    embedder.cells = 2
    found, mirrored = embedder.histogram(locations), embedder.histogram(turned)
    assert found.shape == (2, 12)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(2))
    left, right = found.view(2, 2, 2, 3).unbind(dim=2)
    torch.testing.assert_close(torch.stack((right, left), dim=2).flatten(1), mirrored)
