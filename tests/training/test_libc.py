"""LIBC beyond its loop (test_loss.py): what a batch's neighbours change, and one class."""

import pytest
import torch
from torch import Tensor

from training.losses.libc import LIBC


def build(classes: int = 3, **options: float) -> LIBC:
    torch.manual_seed(2)
    return LIBC(classes=classes, dimension=4, **options).double()  # type: ignore[arg-type]


def batch(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator, dtype=torch.float64), torch.arange(count) % 3


def test_an_image_is_refined_by_every_other() -> None:
    function = build()
    x, _ = batch(6)
    refined = function.messages(x.requires_grad_()[None])[0]
    torch.autograd.backward(refined[0].square().sum())
    assert x.grad is not None
    assert (x.grad.abs().sum(dim=1) > 0).all()


def test_the_first_term_is_that_of_each_image_alone() -> None:
    function = build(smoothing=0.0)
    x, labels = batch(6)
    for weight in function.classify_refined.parameters():
        weight.data.zero_()  # the refined term is then log C, whatever the messages
    alone = torch.stack([function(x[i : i + 1], labels[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(function(x, labels), alone.mean())


def test_one_class_gives_zero_with_a_zero_gradient() -> None:
    x, _ = batch(4)
    value = build(classes=1)(x.requires_grad_(), torch.zeros(4, dtype=torch.int64))
    torch.autograd.backward(value)
    assert value.item() == pytest.approx(0, abs=1e-12)
    assert x.grad is not None
    assert x.grad.abs().max() < 1e-12


def test_nothing_is_random_after_the_start() -> None:
    function, (x, labels) = build(layers=2), batch(6)
    assert torch.equal(function.train()(x, labels), function(x, labels))
    with torch.no_grad():
        torch.testing.assert_close(function.eval()(x, labels), function.train()(x, labels))


def test_each_layer_has_weights_of_its_own() -> None:
    shapes = {name: tuple(weight.shape) for name, weight in build(layers=3).messages.named_parameters()}
    for layer in range(3):
        assert shapes[f"{layer}.self_attn.in_proj_weight"] == (12, 4)  # queries, keys and values
        assert shapes[f"{layer}.linear1.weight"] == (16, 4)  # four units a dimension
    assert len({name.split(".")[0] for name in shapes}) == 3


def test_double_embeddings_meet_the_weights_at_their_precision() -> None:
    x, labels = batch(6)
    function = build().float()
    assert torch.equal(function(x, labels), function(x.float(), labels))
