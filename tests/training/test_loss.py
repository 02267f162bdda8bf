"""Every loss against its loop in float64, on batches usual and degenerate; their options; the registry."""

import inspect
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_metric_learning.losses import ProxyNCALoss
from torch import Tensor

from serving.errors import BadSetting
from tests import loss_oracles, oracles
from tests.training.small import seeded
from training.losses.loss import LOSSES, MetricLoss, build_loss

Options = dict[str, float | str]
CLASSES, D = 5, 4
# Batches by name: the usual one, and those with nothing to compare, or next to nothing.
BATCHES = {
    "usual": [0, 0, 1, 1, 2, 2, 2, 4],
    "interleaved": [0, 1, 2, 0, 1, 2],
    "one class": [3, 3, 3],
    "no positive pair": [0, 1, 2, 3, 4],
    "one pair of each kind": [0, 0, 1],
    "one image": [2],
}
# Each option away from its default at least once.
VARIANTS: list[tuple[str, Options]] = [
    *((name, {}) for name in LOSSES),
    ("contrastive", {"pos_margin": 0.3841, "neg_margin": -0.2}),
    ("contrastive", {"distance": "euclidean", "pos_margin": 0.2652, "neg_margin": 1.0}),
    ("contrastive", {"distance": "euclidean", "pos_margin": -0.2, "neg_margin": 0.9}),
    ("triplet", {"margin": 0.5, "miner": "all"}),
    ("triplet", {"margin": 0.05, "miner": "hard"}),
    ("multi_similarity", {"alpha": 18.0, "beta": 75.0, "base": 0.77, "epsilon": 0.0}),
    ("multi_similarity", {"epsilon": 3.0}),
    ("proxy_nca", {"temperature": 0.5}),
    ("proxy_anchor", {"margin": 0.3, "alpha": 5.0}),
    ("libc", {"layers": 3.0, "heads": 4.0, "temperature": 0.7, "smoothing": 0.0}),
]
ON_PAIRS: dict[str, Callable[..., float]] = {
    "contrastive": oracles.contrastive,
    "triplet": loss_oracles.triplet,
    "multi_similarity": loss_oracles.multi_similarity,
}
# Labels of a batch and of what it is compared with.
AGAINST = {
    "usual": ([0, 0, 1, 2, 2], [0, 1, 1, 2, 3, 3, 0]),
    "one pair of each kind": ([0], [0, 1]),
    "one positive pair": ([0], [0]),
    "one negative pair": ([0], [1]),
    "nothing to compare with": ([0, 1], []),
    "no class in common": ([0, 0, 1], [2, 3]),
}


def batch(labels: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    x = 2 * torch.randn(len(labels), D, generator=seeded(seed), dtype=torch.float64)
    return x, torch.tensor(labels, dtype=torch.int64)


def build(name: str, **options: float | str) -> MetricLoss:
    torch.manual_seed(5)
    return build_loss(name, classes=CLASSES, dimension=D, **options).double()


def oracle(name: str, function: MetricLoss, x: Tensor, labels: Tensor, options: Options) -> float:
    """The loop's value, with the weights of `function` where it has any."""
    numbers: dict[str, Any] = {k: int(v) if k in ("layers", "heads") else v for k, v in options.items()}
    weights = {k.removeprefix("inner."): v.detach().numpy() for k, v in function.named_parameters()}
    batch = x.detach().numpy(), labels.numpy()
    if name == "proxy_nca":
        return loss_oracles.proxy_nca(*batch, weights["W"].T, **numbers)
    if name == "proxy_anchor":
        return loss_oracles.proxy_anchor(*batch, weights["proxies"], **numbers)
    if name == "libc":
        return loss_oracles.libc(*batch, weights, **numbers)
    return ON_PAIRS[name](*batch, **numbers)


@pytest.mark.parametrize("labels", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda v: str(v))
def test_a_loss_is_its_loop(name: str, options: Options, labels: list[int]) -> None:
    function = build(name, **options)
    assert function.on_pairs == (name in ON_PAIRS)
    for seed in range(4):
        x, names = batch(labels, seed)
        value = function(x.requires_grad_(), names)
        assert value.item() == pytest.approx(oracle(name, function, x, names, options), abs=1e-10)
        assert torch.autograd.grad(value, x)[0].isfinite().all()


@pytest.mark.parametrize("case", AGAINST.values(), ids=AGAINST)
@pytest.mark.parametrize("name", ON_PAIRS)
def test_against_references_a_loss_is_its_loop(name: str, case: tuple[list[int], list[int]]) -> None:
    function, seen = build(name), 0.0
    for seed in range(8):
        (x, labels), others = batch(case[0], seed), batch(case[1], 100 + seed)
        value = function.against(x.requires_grad_(), labels, *others)
        expected = ON_PAIRS[name](*(each.detach().numpy() for each in (x, labels, *others)))
        assert value.item() == pytest.approx(expected, abs=1e-10)
        (gradient,) = torch.autograd.grad(value, x)
        assert gradient.isfinite().all()
        assert gradient.any() == (expected > 0)
        seen += expected
    assert seen > 0 or case != AGAINST["usual"]


@pytest.mark.parametrize("name", ON_PAIRS)
def test_references_of_the_batchs_very_labels_are_others_all_the_same(name: str) -> None:
    x, labels = batch(AGAINST["usual"][0])
    function = build(name, **({"epsilon": 3.0} if name == "multi_similarity" else {}))  # it takes every pair
    for references in (batch(AGAINST["usual"][0], 1)[0], x):
        value = function.against(x, labels, references, labels)
        torch.testing.assert_close(value, function.against(x, labels, references.clone(), labels.clone()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_widened_under_autocast_and_without(name: str, dtype: torch.dtype) -> None:
    x, names = batch(BATCHES["usual"])
    half = (1000 * x).to(dtype).requires_grad_()  # squared, these do not fit into float16
    function = build(name).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = function(half, names)
    assert value.dtype == torch.float32
    assert torch.equal(value, function(half.float(), names))
    assert torch.autograd.grad(value, half)[0].isfinite().all()
    assert value.isfinite()


def test_proxy_nca_keeps_the_image_that_the_librarys_drops() -> None:
    """One opposite to its proxy: its probability rounds to 0, and the library leaves it out of the mean."""
    rows, labels = torch.eye(4)[:2], torch.tensor([0, 2])
    proxies = torch.cat([-rows[:1], rows, torch.eye(4)[2:]])
    ours, theirs = build("proxy_nca", temperature=0.01).float(), ProxyNCALoss(CLASSES, D, softmax_scale=100)
    ours.inner.W.data, theirs.proxies.data = proxies.T.clone(), proxies.clone()
    assert theirs(rows, labels).item() == pytest.approx(0)
    assert ours(rows, labels).item() == pytest.approx(200)


@pytest.mark.parametrize("name", LOSSES)
def test_the_docs_list_every_loss_with_its_options_and_defaults(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "method.md").read_text()
    (row,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
    for option in inspect.signature(LOSSES[name]).parameters.values():
        default = option.default
        if option.name in ("classes", "dimension"):
            continue
        if isinstance(default, float):
            exact = Fraction(default).limit_denominator(99)
            default = f"{default:g}" if default == round(default, 3) else str(exact)
        assert f"`{option.name}` {default}" in row


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("contrastiv", {}, "did you mean 'contrastive'"),
        ("contrastive", {"pos_margn": 1.0}, "no option 'pos_margn': did you mean 'pos_margin'"),
        ("contrastive", {"pos_margin": 1.5}, "set to 1.5, but it should be less than or equal to 1"),
        ("contrastive", {"pos_margin": "half"}, "set to 'half', but it should be a valid number"),
        ("contrastive", {"neg_margin": float("nan")}, "should be a finite number"),
        ("triplet", {"margin": -0.1}, "margin set to -0.1, but it should be greater than 0"),
        ("triplet", {"miner": "semihrd"}, "set to 'semihrd', but it should be 'all', 'semihard' or 'hard'"),
        ("libc", {"layers": 1.5}, "layers set to 1.5, but it should be a valid integer"),
        ("libc", {"heads": 3.0}, "3 heads, which do not divide the 4 dimensions"),
    ],
)
def test_a_wrong_setting_is_answered_with_what_is_right(name: str, options: Options, message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        build(name, **options)
