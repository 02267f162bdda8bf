"""The cross-batch loss and its signs of life against float64 loops, and every degenerate batch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import oracles
from tests.training.small import draw_batch, seeded
from training.losses.loss import MetricLoss, build_loss
from training.method.cross_batch import cross_batch_loss, gradient_share, split_classes, watch_term
from training.method.recursion import Past
from training.recipes.recipe import FitOn

MARGINS: dict[str, Any] = {"pos_margin": 0.9, "neg_margin": 0.2}
# Labels by name: the usual batch, an odd class count, halves of unequal size, and classes of one image.
BATCHES = {
    "even": [0, 0, 1, 1, 2, 2, 3, 3],
    "odd": [5, 5, 7, 7, 9, 9],
    "unequal": [0, 0, 0, 0, 0, 1, 1, 2],
    "interleaved": [0, 1, 2, 3, 0, 1, 2, 3, 0],
    "no positive pair": [0, 1, 2, 3, 4],
    "more than are expressed at once": [0, 1, 2] * 5,
}
LABELS = [0, 0, 1, 1, 2, 2, 3]


def contrastive() -> MetricLoss:
    return build_loss("contrastive", classes=10, dimension=3, **MARGINS)


def batch(labels: list[int], prototypes: int) -> tuple[Tensor, Tensor, Tensor]:
    return *draw_batch(len(labels), prototypes, 3), torch.tensor(labels)


@pytest.mark.parametrize("fit_on", ["raw", "unit"])
@pytest.mark.parametrize("prototypes", [3, 12])
@pytest.mark.parametrize("labels", BATCHES.values(), ids=BATCHES)
def test_the_loss_is_the_loop(labels: list[int], prototypes: int, fit_on: FitOn) -> None:
    z, y, names = batch(labels, prototypes)
    value = cross_batch_loss(z, y, names, contrastive(), ridge=0.05, generator=seeded(), fit_on=fit_on)
    first, arrays = split_classes(names, seeded())[0].tolist(), (z.numpy(), y.numpy(), names.numpy())
    expected = oracles.cross_batch(*arrays, first, 0.05, fit_on == "unit", **MARGINS)
    assert value.item() == pytest.approx(expected, abs=1e-10)
    assert expected > 0


@pytest.mark.parametrize(("name", "fit_on"), [("odd", "raw"), ("unequal", "unit")])
def test_the_gradient_is_the_difference_quotient(name: str, fit_on: FitOn) -> None:
    z, y, names = batch(BATCHES[name], 3)

    def value(z: Tensor, y: Tensor) -> Tensor:
        return cross_batch_loss(z, y, names, contrastive(), generator=seeded(), fit_on=fit_on)

    assert torch.autograd.gradcheck(value, (z.requires_grad_(), y.requires_grad_()))


@pytest.mark.parametrize("labels", [[4, 4, 4], [1]])
def test_one_class_gives_zero_with_a_zero_gradient(labels: list[int]) -> None:
    z, y, names = batch(labels, 4)
    value = cross_batch_loss(z.requires_grad_(), y.requires_grad_(), names, contrastive())
    assert value.item() == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(value, (z, y)))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-(2**40), 2**40), max_size=20), st.integers(0, 1000))
def test_the_split_is_by_class_and_covers_the_batch(labels: list[int], seed: int) -> None:
    first, second = split_classes(torch.tensor(labels, dtype=torch.int64), seeded(seed))
    assert torch.equal(second, ~first)
    one = {label for label, mine in zip(labels, first, strict=True) if mine}
    two = {label for label, mine in zip(labels, second, strict=True) if mine}
    assert not one & two
    assert 0 <= len(two) - len(one) <= 1
    assert one | two == set(labels)


def test_bf16_autocast_changes_nothing() -> None:
    z, y, names = batch(BATCHES["even"], 4)
    z, y = z.bfloat16(), y.bfloat16()
    expected = cross_batch_loss(z.float(), y.float(), names, contrastive(), generator=seeded())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = cross_batch_loss(z.requires_grad_(), y, names, contrastive(), generator=seeded())
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)
    assert torch.autograd.grad(value, z)[0].isfinite().all()


FIRST = torch.tensor([True, True, False, False, True, True, False])


@pytest.mark.parametrize("ridge_on", ["absolute", "trace"])
def test_every_sign_is_its_loop(ridge_on: Any) -> None:
    z, y, names = batch(LABELS, 4)
    told = watch_term(z, y, names, FIRST, ridge=0.1, ridge_on=ridge_on)
    trace = ridge_on == "trace"
    expected = oracles.signs_of_life(z.numpy(), y.numpy(), names.numpy(), FIRST.numpy(), 0.1, trace=trace)
    assert told == pytest.approx(expected, rel=1e-9)


def test_the_past_counts_in_what_is_fitted() -> None:
    z, y, names = batch(LABELS, 4)
    past = Past(4, 4, 3, decay=0.5)
    past.push(20 * z.float(), 20 * y.float(), names)
    alone, more = (watch_term(z, y, names, FIRST, ridge=0.4, past=each) for each in (None, past))
    assert more["eigenvalues"] > alone["eigenvalues"]


def test_what_a_batch_does_not_have_is_left_out() -> None:
    z, y, names = batch(LABELS, 4)
    told = watch_term(z, y, torch.zeros_like(names), torch.zeros_like(FIRST), ridge=0.1)
    assert set(told) == {"prototypes_in_use", "prototypes_an_image"}
    two = FIRST.long()  # one class a half
    assert "expressed_cosine" not in watch_term(z, y, two, FIRST, ridge=0.1)
    y[0, 0] = torch.nan
    assert watch_term(z, y, names, FIRST, ridge=0.1) == {}


def test_the_share_is_the_ratio_of_the_gradients() -> None:
    z, start, names = batch(LABELS, 4)
    weights = torch.eye(3, dtype=torch.float64, requires_grad=True)
    y, loss = start @ weights, contrastive()
    dml, xml = loss(y, names), cross_batch_loss(z, y, names, loss, generator=seeded())
    share = gradient_share(dml, xml, [weights], weight=0.2)
    terms = (0.2 * xml, 0.8 * dml)
    lengths = [float(torch.autograd.grad(term, weights, retain_graph=True)[0].norm()) for term in terms]
    assert share == pytest.approx(lengths[0] / lengths[1])
