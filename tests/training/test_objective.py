"""The objective: its parts against the formulas, and what it remembers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from serving.errors import BadSetting
from tests import oracles
from tests.training.small import seeded
from training.losses.loss import build_loss
from training.losses.metrix import Pairs, draw_pairs, mix, mixed_loss
from training.losses.objective import Objective, Terms
from training.method.cross_batch import cross_batch_loss, split_classes
from training.method.prototypes import fit_prototypes
from training.recipes.recipe import Recipe

LABELS = torch.arange(4).repeat_interleave(3)


def _recipe(**settings: Any) -> Recipe:
    small = {"dimension": 5, "prototypes": 3, "classes_per_batch": 4, "images_per_class": 3}
    return Recipe.model_validate(small | settings)


def _batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = seeded(seed)
    embeddings = torch.randn(12, 5, generator=generator, requires_grad=True)
    histograms = torch.randn(12, 3, generator=generator).softmax(dim=1).requires_grad_()
    return embeddings, histograms


def measure(objective: Objective, *, step: int = 0, weight: float = 0.3, seed: int = 0, **more: Any) -> Terms:
    embeddings, histograms = _batch(seed)
    halves = seeded(7)
    told: Terms = objective(embeddings, histograms, LABELS, step=step, weight=weight, halves=halves, **more)
    return told


def test_the_whole_is_the_weighted_sum_of_its_parts() -> None:
    embeddings, histograms = _batch()
    loss = build_loss("contrastive", classes=4, dimension=5, neg_margin=0.2)
    terms = measure(Objective(_recipe(loss_options={"neg_margin": 0.2}, ridge=0.05), classes=4))
    halves = seeded(7)
    assert torch.equal(terms.dml, loss(embeddings, LABELS))
    assert torch.equal(terms.xml, cross_batch_loss(histograms, embeddings, LABELS, loss, generator=halves))
    torch.testing.assert_close(terms.total, 0.7 * terms.dml + 0.3 * terms.xml)


def test_the_memory_counts_from_its_start_and_never_holds_the_batch_itself() -> None:
    objective = Objective(_recipe(memory_batches=2, memory_start=1, memory_weight=0.5), classes=4)
    loss = objective.loss
    batches = [_batch(seed)[0] for seed in range(5)]
    told = [measure(objective, step=step, seed=step).dml for step in range(5)]
    for step, embeddings in enumerate(batches):
        expected = loss(embeddings, LABELS)
        held = batches[max(1, step - 2) : step]
        if step > 1:
            expected = expected + 0.5 * loss.against(
                embeddings, LABELS, torch.cat(held), LABELS.repeat(len(held))
            )
        torch.testing.assert_close(told[step], expected)
    objective.zero_grad()
    measure(objective, step=9).total.backward()  # type: ignore[no-untyped-call]  # no gradient flows into the memory
    assert objective.memory is not None
    assert not objective.memory.contents()[0].requires_grad


@pytest.mark.parametrize("ridge_on", ["absolute", "trace"])
def test_a_half_is_expressed_by_the_other_half_and_the_past_without_its_own_classes(ridge_on: str) -> None:
    decay, ridge = 0.8, 0.1
    recipe = _recipe(xml_prototypes="recursion", recursion_decay=decay, ridge=ridge, ridge_on=ridge_on)
    objective = Objective(recipe, classes=4)
    steps: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    for seed in range(3):
        y, z = (tensor.detach().double() for tensor in _batch(seed))
        steps.append((z.numpy(), y.numpy()))
        expected = torch.zeros((), dtype=torch.float64)
        for mine in split_classes(LABELS, seeded(7)):
            other = ~mine.numpy()  # every step has the same labels, so that its classes are these rows
            parts = [(decay ** (seed - k), zk[other], yk[other]) for k, (zk, yk) in enumerate(steps)]
            trace = sum(w * float((zk**2).sum()) for w, zk, _ in parts)
            penalty = ridge * trace / 3 if ridge_on == "trace" else ridge
            fitted = torch.from_numpy(oracles.weighted_ridge(parts, penalty))
            expected = expected + objective.loss(z[mine] @ fitted.T, LABELS[mine])
        terms = measure(objective, seed=seed)
        torch.testing.assert_close(terms.xml.double(), expected, rtol=1e-4, atol=1e-5)
        terms.total.backward()  # type: ignore[no-untyped-call]


def test_a_past_too_large_is_refused_with_its_size() -> None:
    with pytest.raises(BadSetting, match=r"11,318 classes, 128 prototypes and 1024 dimensions .* 6\.2 GiB"):
        Objective(_recipe(prototypes=128, dimension=1024, xml_prototypes="recursion"), classes=11_318)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 11), min_size=2, max_size=12), st.integers(0, 99))
def test_quarter_turns_of_a_class_are_never_parted(labels: list[int], seed: int) -> None:
    objective = Objective(_recipe(quarter_turns=True, ridge=0.05), classes=12)  # three classes, four turns
    names = torch.tensor(labels)
    embeddings, histograms = torch.randn(len(labels), 5), torch.randn(len(labels), 3).softmax(dim=1)
    told: Terms = objective(embeddings, histograms, names, step=0, weight=0.3, halves=seeded(seed))
    expected = torch.zeros(())
    first, second = split_classes(names % 3, seeded(seed))
    if first.any():
        for mine, other in ((first, second), (second, first)):
            fitted = fit_prototypes(histograms[other], embeddings[other])
            expected = expected + objective.loss(histograms[mine] @ fitted.T, names[mine])
    torch.testing.assert_close(told.xml, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("fit_on", ["raw", "unit"])
def test_the_reconstruction_moves_histograms_alone(weight: float, fit_on: str) -> None:
    recipe = _recipe(xml_weight=weight, reconstruction_weight=2.0, fit_on=fit_on, ridge=0.1)
    detached = _batch()[1]
    with_it, without = (
        measure(Objective(recipe, classes=4), weight=weight, detached=each) for each in (detached, None)
    )
    y, z = (tensor.detach().double().numpy() for tensor in _batch())
    y = y / np.linalg.norm(y, axis=1, keepdims=True) if fit_on == "unit" else y
    error = z @ oracles.ridge(z, y, 0.1).T - y
    expected = 2 * np.mean([row @ row for row in error])
    assert (with_it.total - without.total).item() == pytest.approx(expected, rel=1e-4)
    assert torch.autograd.grad(with_it.total - without.total, detached)[0].any()


def test_mixed_examples_add_their_weighted_loss() -> None:
    recipe = _recipe(
        loss="multi_similarity", loss_options={"alpha": "15e-1"}, mixing="embedding", mixing_weight=0.7
    )
    objective = Objective(recipe, classes=4)  # YAML takes 15e-1 for text
    embeddings, _ = _batch()
    pairs: Pairs = draw_pairs(LABELS, alpha=2.0, generator=seeded())
    mixed = mix(embeddings, pairs)
    plain, more = measure(objective), measure(objective, mixed=(mixed, pairs))
    added = mixed_loss(embeddings, LABELS, mixed, pairs, alpha=1.5)
    assert added > 0
    torch.testing.assert_close(more.dml - plain.dml, 0.7 * added)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"loss": "proxy_anchor", "memory_batches": 2}, "compares no pairs that a memory"),
        ({"loss": "contrastive", "mixing": "input"}, "mixed examples are defined for the multi_similarity"),
    ],
)
def test_what_does_not_go_together_is_refused(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSetting, match=words):
        Objective(_recipe(**chosen), classes=4)
