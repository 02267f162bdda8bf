"""The signs of life of the XML term against naive loops, and what is said of a dead one."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests import oracles
from training.losses.loss import build_loss
from training.method.cross_batch import cross_batch_loss
from training.method.past import Past
from training.method.term import dead_note, gradient_share, watch_term
from training.recipes.recipe import Recipe

LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 3])
FIRST = torch.tensor([True, True, False, False, True, True, False])


def _batch(sharpness: float = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = sharpness * torch.randn(7, 4, generator=generator, dtype=torch.float64)
    return scores.softmax(dim=1), torch.randn(7, 3, generator=generator, dtype=torch.float64)


def test_histograms_that_have_all_collapsed_are_measured() -> None:
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        codebook = functional.normalize(torch.randn(64, 8, generator=generator), dim=1)
        near = functional.normalize(codebook[3] + 0.05 * torch.randn(7, 32, 8, generator=generator), dim=2)
        histograms = (100 * near @ codebook.T).softmax(dim=2).flatten(0, 1)
        labels = torch.arange(7).repeat_interleave(32)
        told = watch_term(histograms, near.flatten(0, 1), labels, labels < 3, ridge=0.05)
        assert 1 <= told["eigenvalues"] < 4


@pytest.mark.parametrize("ridge_on", ["absolute", "trace"])
def test_every_sign_is_its_loop(ridge_on: Any) -> None:
    histograms, embeddings = _batch()
    told = watch_term(histograms, embeddings, LABELS, FIRST, ridge=0.1, ridge_on=ridge_on)
    z, y, first = histograms.numpy(), embeddings.numpy(), FIRST.numpy()
    expected = oracles.signs_of_life(z, y, LABELS.numpy(), first, 0.1, trace=ridge_on == "trace")
    assert told == pytest.approx(expected, rel=1e-9)


def test_the_past_counts_in_what_is_fitted() -> None:
    histograms, embeddings = _batch()
    past = Past(4, 4, 3, decay=0.5)
    alone = watch_term(histograms, embeddings, LABELS, FIRST, ridge=0.4)
    past.push(20 * histograms.float(), 20 * embeddings.float(), LABELS)
    assert (
        watch_term(histograms, embeddings, LABELS, FIRST, ridge=0.4, past=past)["eigenvalues"]
        > (alone["eigenvalues"])
    )


def test_uniform_histograms_have_one_direction_and_every_prototype_in_use() -> None:
    told = watch_term(torch.full((7, 4), 0.25), _batch()[1].float(), LABELS, FIRST, ridge=0.05)
    assert told["eigenvalues"] == 1
    assert told["prototypes_in_use"] == pytest.approx(4)
    assert told["prototypes_an_image"] == pytest.approx(4)
    assert told["expressed_cosine"] == pytest.approx(1)


def test_hard_histograms_have_one_prototype_an_image() -> None:
    told = watch_term(torch.eye(4)[LABELS], _batch()[1].float(), LABELS, FIRST, ridge=0.05)
    assert told["prototypes_an_image"] == 1
    assert 1 < told["prototypes_in_use"] <= 4


def test_what_a_batch_does_not_have_is_left_out() -> None:
    histograms, embeddings = _batch()
    one = torch.zeros(7, dtype=torch.int64)
    none = torch.zeros(7, dtype=torch.bool)
    told = watch_term(histograms, embeddings, one, none, ridge=0.1)
    assert set(told) == {"prototypes_in_use", "prototypes_an_image"}
    two = FIRST.long()  # one class a half
    assert "expressed_cosine" not in watch_term(histograms, embeddings, two, FIRST, ridge=0.1)
    embeddings[0, 0] = torch.nan
    assert watch_term(histograms, embeddings, LABELS, FIRST, ridge=0.1) == {}


def test_the_share_is_the_ratio_of_the_gradients() -> None:
    histograms, start = _batch()
    weights = torch.eye(3, dtype=torch.float64, requires_grad=True)
    embeddings = start @ weights
    loss = build_loss("contrastive", classes=4, dimension=3)
    generator = torch.Generator().manual_seed(0)
    dml = loss(embeddings, LABELS)
    xml = cross_batch_loss(histograms, embeddings, LABELS, loss, generator=generator)
    share = gradient_share(dml, xml, [weights], weight=0.2)
    lengths = list[float]()
    for term in (0.2 * xml, 0.8 * dml):
        weights.grad = None
        torch.autograd.backward(term, retain_graph=True)
        assert weights.grad is not None
        lengths.append(float(np.linalg.norm(weights.grad.numpy())))
    assert share == pytest.approx(lengths[0] / lengths[1])


def test_a_dead_term_is_told_with_what_wakes_it() -> None:
    recipe = Recipe(prototypes=64)
    note = dead_note([{"epoch": 1, "eigenvalues": 9}, {"epoch": 2, "eigenvalues": 1.5}, {"epoch": 3}], recipe)
    assert note is not None
    assert "dead at epoch 2: 1.5 of 64" in note
    for setting in ("assignment_scale", "assign_on", "codebook_init", "ridge"):
        assert setting in note
    small = Recipe(classes_per_batch=2, images_per_class=2)
    assert "A half of a batch is 2 images" in str(dead_note([{"epoch": 1, "eigenvalues": 2}], small))
    assert dead_note([{"epoch": 1, "eigenvalues": 1}, {"epoch": 2, "eigenvalues": 4}], recipe) is None
    assert dead_note([{"epoch": 1}], recipe) is None
    assert dead_note([{"epoch": 1, "eigenvalues": 1}], Recipe(xml_weight=0, reconstruction_weight=1)) is None
    assert dead_note([{"epoch": 1, "eigenvalues": 2}], Recipe(prototypes=2)) is None
