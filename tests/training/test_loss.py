"""The contrastive loss against its loop, and the registry."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from serving.errors import BadSetting
from tests import oracles
from training import loss
from training.loss import build_loss


def batch(labels: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 5 * torch.randn(len(labels), 3, generator=generator, dtype=torch.float64), torch.tensor(labels)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
    st.integers(0, 1000),
    st.sampled_from([(1.0, 0.5), (0.8, 0.0), (0.3841, -0.2)]),
)
def test_contrastive_is_the_loop(labels: list[int], seed: int, margins: tuple[float, float]) -> None:
    embeddings, names = batch(labels, seed)
    function = build_loss("contrastive", classes=5, dimension=3, pos_margin=margins[0], neg_margin=margins[1])
    value = function(embeddings.requires_grad_(), names)
    expected = oracles.contrastive(embeddings.detach().numpy(), names.numpy(), *margins)
    assert value.item() == pytest.approx(expected, abs=1e-10)
    torch.autograd.backward(value)
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()


def test_the_default_margins() -> None:
    embeddings, names = batch([0, 0, 1, 1, 2])
    value = build_loss("contrastive", classes=3, dimension=3)(embeddings, names)
    assert value.item() == pytest.approx(oracles.contrastive(embeddings.numpy(), names.numpy(), 1.0, 0.5))


def test_the_scale_of_an_embedding_does_not_matter() -> None:
    embeddings, names = batch([0, 0, 1, 1])
    function = build_loss("contrastive", classes=2, dimension=3)
    torch.testing.assert_close(function(embeddings, names), function(7 * embeddings, names))


def test_the_loss_leaves_autocast() -> None:
    embeddings, names = batch([0, 0, 1, 1, 2])
    half = embeddings.bfloat16()
    function = build_loss("contrastive", classes=3, dimension=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = function(half, names)
    assert value.dtype == torch.float32
    assert torch.equal(value, function(half.float(), names))


def test_a_researcher_adds_a_loss_in_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    class Proxies(nn.Module):
        def __init__(self, classes: int, dimension: int, scale: float) -> None:
            super().__init__()
            self.proxies = nn.Parameter(scale * torch.ones(classes, dimension))

        def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
            return (embeddings - self.proxies[labels]).square().sum()

    def proxies(*, classes: int, dimension: int, scale: float = 1.0) -> nn.Module:
        return Proxies(classes, dimension, scale)

    monkeypatch.setitem(loss.LOSSES, "proxies", proxies)
    function = build_loss("proxies", classes=2, dimension=3, scale=2.0)
    assert [tuple(p.shape) for p in function.parameters()] == [(2, 3)]
    assert function(torch.zeros(1, 3), torch.tensor([1])).item() == 12


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("contrastiv", {}, "did you mean 'contrastive'"),
        ("quux", {}, "choose from contrastive"),
        ("contrastive", {"pos_margn": 1.0}, "no option 'pos_margn': did you mean 'pos_margin'"),
        ("contrastive", {"quux": 1.0}, "choose from neg_margin, pos_margin"),
    ],
)
def test_what_is_unknown_is_answered_with_what_is_known(
    name: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(BadSetting, match=message):
        build_loss(name, classes=2, dimension=3, **options)
