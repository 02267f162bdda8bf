"""Closed-form heads against their definitions in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from serving.errors import BadData, BadSetting
from training.loop import trainee
from training.recipes.recipe import Recipe


def closed_form_head(rows: Tensor, labels: Tensor, *, form: str, dimension: int, **more: float) -> Tensor:
    chosen = {f"head_{name}": value for name, value in more.items()}
    recipe = Recipe.model_validate({"head_init": form, "dimension": dimension} | chosen)
    return trainee.closed_form_head(rows, labels, recipe)


@pytest.fixture(scope="module")
def features() -> tuple[Tensor, Tensor]:
    """(40, 6) of 4 classes, with a mean far from zero and axes of unequal spread."""
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 4
    centres = rng.normal(size=(4, 6)) * 2
    rows = 5 + centres[labels] + rng.normal(size=(40, 6)) * np.array([3, 2, 1, 0.5, 0.3, 0.1])
    return torch.from_numpy(rows), torch.from_numpy(labels)


def test_pca_is_the_best_approximation_of_its_rank(features: tuple[Tensor, Tensor]) -> None:
    rows, labels = features
    head = closed_form_head(rows, labels, form="pca", dimension=2).double()
    _, _, axes = np.linalg.svd(rows.numpy(), full_matrices=False)
    for i in range(2):  # the axes of the uncentred rows, up to sign and the common scale
        cosine = float(head[i] @ torch.from_numpy(axes[i]) / head[i].norm())
        assert abs(cosine) == pytest.approx(1, abs=1e-6)
    assert head[0].norm() == pytest.approx(float(head[1].norm()), rel=1e-5)


def _scatter(rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    total = np.zeros((rows.shape[1],) * 2)
    for row, label in zip(rows, labels, strict=True):
        mean = np.mean([r for r, one in zip(rows, labels, strict=True) if one == label], axis=0)
        total += np.outer(row - mean, row - mean)
    return total / len(rows)


@pytest.mark.parametrize("form", ["whiten", "whiten_within"])
def test_whitening_makes_the_scatter_a_multiple_of_the_identity(
    form: str, features: tuple[Tensor, Tensor]
) -> None:
    rows, labels = features
    head = closed_form_head(rows, labels, form=form, dimension=6, shrinkage=1e-9)
    groups = labels if form == "whiten_within" else torch.zeros_like(labels)
    scatter = _scatter((rows @ head.double().T).numpy(), groups.numpy())
    np.testing.assert_allclose(scatter / scatter[0, 0], np.eye(6), atol=1e-4)


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0])
def test_shrinkage_and_power_against_the_formula(power: float, features: tuple[Tensor, Tensor]) -> None:
    rows, labels = features
    more = {"shrinkage": 0.7, "power": power}
    head = closed_form_head(rows, labels, form="whiten_within", dimension=6, **more).double()
    scatter = _scatter(rows.numpy(), labels.numpy())
    values, vectors = np.linalg.eigh(scatter)
    metric = vectors @ np.diag((values + 0.7 * np.trace(scatter) / 6) ** (-2 * power)) @ vectors.T
    found = (head.T @ head).numpy()  # the axes rotate, the metric W'W stays
    np.testing.assert_allclose(found / np.trace(found), metric / np.trace(metric), atol=1e-5)


def test_the_means_direction_is_taken_out_whole_or_in_part(features: tuple[Tensor, Tensor]) -> None:
    rows, labels = features
    mean = rows.mean(dim=0)
    whole = closed_form_head(rows, labels, form="pca", dimension=5, centre=1.0).double()
    assert float((whole @ mean).norm() / mean.norm() / whole.norm()) < 1e-6
    half = closed_form_head(rows, labels, form="pca", dimension=6, centre=0.5).double()
    none = closed_form_head(rows, labels, form="pca", dimension=6).double()
    relative = [float((head @ mean).norm() / head.norm()) for head in (none, half)]
    assert 0 < relative[1] < relative[0]


def test_length_is_the_mean_of_the_embeddings(features: tuple[Tensor, Tensor]) -> None:
    rows, labels = features
    head = closed_form_head(rows, labels, form="whiten", dimension=3, length=5.0)
    assert head.dtype == torch.float32
    assert head.shape == (3, 6)
    assert float((rows @ head.double().T).norm(dim=1).mean()) == pytest.approx(5, rel=1e-5)


def test_what_cannot_be_done_is_said(features: tuple[Tensor, Tensor]) -> None:
    rows, labels = features
    with pytest.raises(BadSetting, match="at most the backbone's 6"):
        closed_form_head(rows, labels, form="pca", dimension=7)
    with pytest.raises(BadData, match="do not vary"):
        closed_form_head(rows, torch.arange(40), form="whiten_within", dimension=3)  # one image a class
