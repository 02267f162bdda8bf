"""The cross-batch loss against a float64 loop, its gradient by differences, and every degenerate batch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serving.errors import BadSetting
from tests import oracles
from training.losses.loss import build_loss
from training.method.cross_batch import FitOn, cross_batch_loss, split_classes

MARGINS = (0.9, 0.2)
# Labels by name: the usual batch, an odd class count, halves of unequal size, and classes of one image.
BATCHES = {
    "even": [0, 0, 1, 1, 2, 2, 3, 3],
    "odd": [5, 5, 7, 7, 9, 9],
    "unequal": [0, 0, 0, 0, 0, 1, 1, 2],
    "interleaved": [0, 1, 2, 3, 0, 1, 2, 3, 0],
    "no positive pair": [0, 1, 2, 3, 4],
}


def contrastive() -> Callable[[Tensor, Tensor], Tensor]:
    return build_loss("contrastive", classes=10, dimension=3, pos_margin=MARGINS[0], neg_margin=MARGINS[1])


def batch(labels: list[int], prototypes: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(len(labels), prototypes, generator=generator, dtype=torch.float64)
    embeddings = torch.randn(len(labels), 3, generator=generator, dtype=torch.float64)
    return scores.softmax(dim=1), embeddings, torch.tensor(labels)


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("fit_on", ["raw", "unit"])
@pytest.mark.parametrize("prototypes", [3, 12])
@pytest.mark.parametrize("labels", BATCHES.values(), ids=BATCHES)
def test_the_loss_is_the_loop(labels: list[int], prototypes: int, fit_on: FitOn) -> None:
    z, y, names = batch(labels, prototypes)
    value = cross_batch_loss(z, y, names, contrastive(), ridge=0.05, generator=seeded(), fit_on=fit_on)
    first = split_classes(names, seeded())[0].tolist()
    expected = oracles.cross_batch(
        z.numpy(), y.numpy(), names.numpy(), first, 0.05, MARGINS, unit=fit_on == "unit"
    )
    assert value.item() == pytest.approx(expected, abs=1e-10)
    assert expected > 0


@pytest.mark.parametrize("fit_on", ["raw", "unit"])
def test_many_images_a_prototype_are_the_loop_too(fit_on: FitOn) -> None:
    z, y, names = batch([0, 1, 2] * 4, 2)  # more than are expressed at once
    value = cross_batch_loss(z, y, names, contrastive(), ridge=0.05, generator=seeded(), fit_on=fit_on)
    first = split_classes(names, seeded())[0].tolist()
    expected = oracles.cross_batch(
        z.numpy(), y.numpy(), names.numpy(), first, 0.05, MARGINS, unit=fit_on == "unit"
    )
    assert value.item() == pytest.approx(expected, abs=1e-10)
    assert expected > 0


@pytest.mark.parametrize(
    ("name", "prototypes", "fit_on"),
    [("odd", 3, "raw"), ("unequal", 6, "raw"), ("odd", 6, "unit"), ("no positive pair", 3, "unit")],
)
def test_the_gradient_is_the_difference_quotient(name: str, prototypes: int, fit_on: FitOn) -> None:
    z, y, names = batch(BATCHES[name], prototypes)

    def value(histograms: Tensor, embeddings: Tensor) -> Tensor:
        return cross_batch_loss(
            histograms, embeddings, names, contrastive(), generator=seeded(), fit_on=fit_on
        )

    inputs = (z.requires_grad_(), y.requires_grad_())
    assert torch.autograd.gradcheck(value, inputs)
    torch.autograd.backward(value(*inputs))
    step = 1e-6
    for which, tensor in enumerate(inputs):
        assert tensor.grad is not None
        for place in np.ndindex(2, 3):  # the first rows are enough: every row takes the same path
            sides = []
            for sign in (step, -step):
                moved = [t.detach().clone() for t in inputs]
                moved[which][place] += sign
                sides.append(value(*moved).item())
            quotient = (sides[0] - sides[1]) / (2 * step)
            assert tensor.grad[place].item() == pytest.approx(quotient, abs=1e-7, rel=1e-6)


def test_the_gradient_reaches_both_halves_through_both_fits() -> None:
    z, y, names = batch(BATCHES["even"], 4)
    z, y = z.requires_grad_(), y.requires_grad_()
    torch.autograd.backward(cross_batch_loss(z, y, names, contrastive(), generator=seeded()))
    for grad in (z.grad, y.grad):
        assert grad is not None
        assert (grad.abs().sum(dim=1) > 0).all()


@pytest.mark.parametrize("labels", [[4, 4, 4], [1]])
def test_one_class_gives_zero_with_a_zero_gradient(labels: list[int]) -> None:
    z, y, names = batch(labels, 4)
    value = cross_batch_loss(z.requires_grad_(), y.requires_grad_(), names, contrastive())
    torch.autograd.backward(value)
    assert value.item() == 0
    for grad in (z.grad, y.grad):
        assert grad is not None
        assert (grad == 0).all()


def test_two_classes_of_one_image_have_no_pair_and_a_zero_gradient() -> None:
    z, y, names = batch([0, 1], 4)
    value = cross_batch_loss(z.requires_grad_(), y.requires_grad_(), names, contrastive())
    torch.autograd.backward(value)
    assert value.item() == 0
    assert z.grad is not None
    assert (z.grad == 0).all()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=14), st.randoms(use_true_random=False))
def test_the_order_of_the_batch_does_not_matter(labels: list[int], random: object) -> None:
    z, y, names = batch(labels, 5)
    order = torch.from_numpy(np.random.default_rng(random.randrange(99)).permutation(len(labels)))  # type: ignore[attr-defined]
    values = [
        cross_batch_loss(z[o], y[o], names[o], contrastive(), generator=seeded())
        for o in (torch.arange(len(labels)), order)
    ]
    torch.testing.assert_close(*values)


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


def test_the_split_is_drawn_anew_but_repeats_with_the_seed() -> None:
    labels = torch.arange(8).repeat(2)
    generator = seeded()
    draws = {tuple(split_classes(labels, generator)[0].tolist()) for _ in range(20)}
    assert len(draws) > 10
    assert torch.equal(split_classes(labels, seeded())[0], split_classes(labels, seeded())[0])


def test_bf16_autocast_changes_nothing() -> None:
    z, y, names = batch(BATCHES["even"], 4)
    z, y = z.bfloat16(), y.bfloat16()
    expected = cross_batch_loss(z.float(), y.float(), names, contrastive(), generator=seeded())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = cross_batch_loss(z.requires_grad_(), y, names, contrastive(), generator=seeded())
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)
    torch.autograd.backward(value)
    assert z.grad is not None
    assert z.grad.isfinite().all()


def test_an_unknown_fit_is_refused() -> None:
    with pytest.raises(BadSetting, match="raw, unit"):
        cross_batch_loss(*batch([0, 1], 2), contrastive(), fit_on="both")  # type: ignore[arg-type]
