"""Starts of the codebook from local features, and the training that takes them."""

from pathlib import Path

import pytest
import torch

from training.loop.run import load_run
from training.method.codebook import greedy_k_centre, k_means, start_codebook
from training.network.embedder import build_embedder
from training.recipes.recipe import CodebookInit
from training.train import Settings, run

BLOBS = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])


def test_k_centre_takes_the_farthest_again_and_again() -> None:
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [9.0, 0.0], [0.0, 5.0]])
    assert greedy_k_centre(points, 3).tolist() == [[0, 0], [9, 0], [0, 5]]
    assert greedy_k_centre(points[:1].repeat(4, 1), 3).tolist() == [[0, 0]] * 3


def test_k_means_finds_the_blobs() -> None:
    generator = torch.Generator().manual_seed(0)
    points = BLOBS.repeat(50, 1) + 0.1 * torch.randn(150, 2, generator=generator)
    found = k_means(points, 3, seed=0)
    assert float(torch.cdist(BLOBS, found).amin(dim=1).max()) < 0.1


@pytest.mark.parametrize("form", ["k_means", "k_centre"])
def test_features_are_taken_as_the_histogram_sees_them(form: CodebookInit) -> None:
    locations = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1)) * 4
    unit = start_codebook(locations, 15, form=form, assign_on="unit", seed=0)
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(15))
    ball = start_codebook(locations, 15, form=form, assign_on="ball", seed=0)
    assert float(ball.norm(dim=1).max()) <= 1 + 1e-5
    raw = start_codebook(locations, 15, form=form, assign_on="raw", seed=0)
    assert float(torch.cdist(raw, locations.flatten(0, 1)).amin(dim=1).max()) < 1e-3


def test_fewer_features_than_prototypes_repeat() -> None:
    found = start_codebook(torch.randn(1, 2, 3), 5, form="k_centre", assign_on="raw", seed=0)
    assert found.shape == (5, 3)
    assert len({tuple(row) for row in found.tolist()}) == 2


def test_a_training_starts_from_its_images(data: Path, recipe: str, tmp_path: Path) -> None:
    words = ["codebook_init=k_means", "validation=0", "prototype_learning_rate=0", "epochs=1"]
    run(Settings(recipe=recipe, data=data, out=tmp_path / "run", set=words))
    trained = load_run(tmp_path / "run")
    random = build_embedder(trained.recipe)
    assert not torch.equal(trained.embedder.codebook, random.codebook)
    assert float(trained.embedder.codebook.detach().norm(dim=1).max()) <= 1 + 1e-5  # means of unit features
