"""Losses on embeddings, by pytorch-metric-learning where it has them: one short entry in `LOSSES` each.

To add one, write a function that returns a module from embeddings and labels to a scalar, and that takes its
own options with types and defaults, and `classes` and `dimension` if it needs them; name it in `LOSSES`. One
on pairs returns a `PairLoss`, for the memory.
"""

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pytorch_metric_learning import distances, losses, miners
from pytorch_metric_learning.utils import loss_and_miner_utils
from torch import Tensor, nn
from torch.nn import functional

from serving.errors import BadSetting
from training.method.prototypes import full_precision

__all__ = ["LIBC", "LOSSES", "MetricLoss", "PairLoss", "TripletMiner", "TripletRule", "build_loss"]

Positive = Annotated[float, Field(gt=0)]
Cosine = Annotated[float, Field(ge=-1, le=1)]
Count = Annotated[int, Field(ge=1, le=64)]
TripletRule = Literal["all", "semihard", "hard"]


def all_pairs(embeddings: Tensor, labels: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Take every pair: anchors and positives, anchors and negatives, int64; nothing pairs with itself."""
    return tuple(loss_and_miner_utils.get_all_pairs_indices(labels, *others[1:]))


class TripletMiner:
    """The library's `TripletMarginMiner` without its B x R x R candidates: 2 GB an anchor for R = 45,000.

    Triplets whose negative is not farther than the positive by the margin, or a part of them.
    """

    def __init__(self, margin: float, rule: TripletRule, distance: distances.LpDistance) -> None:
        self.margin, self.rule, self.distance = margin, rule, distance

    @torch.no_grad()
    def __call__(self, embeddings: Tensor, labels: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Find anchors, positives and negatives, int64 (T,) each, in the batch or among others."""
        matches, differs = loss_and_miner_utils.get_matches_and_diffs(labels, *others[1:])
        between = self.distance(embeddings, *others[:1])  # (B, R)
        anchors, positives = torch.where(matches)  # (P,)
        gaps = between[anchors] - between[anchors, positives][:, None]  # d(a, n) - d(a, p), (P, R)
        taken = differs[anchors].bool() & (gaps <= self.margin)
        if self.rule == "semihard":
            taken &= gaps > 0
        elif self.rule == "hard":
            taken &= gaps <= 0
        pairs, negatives = torch.where(taken)
        return anchors[pairs], positives[pairs], negatives


class PairLoss(nn.Module):
    """A loss of the library without weights of its own, and the miner that chooses its pairs or triplets."""

    def __init__(self, loss: nn.Module, miner: Callable[..., Any] = all_pairs) -> None:
        super().__init__()
        self.loss = loss
        self.miner = miner

    def forward(self, embeddings: Tensor, labels: Tensor, *references: Tensor) -> Tensor:
        """Compare a batch (B, d) with one another, or with references (R, d) and their labels alone."""
        # The library takes tensors that are its first ones for the batch itself, and a slice for others.
        others = tuple(each[:] for each in references)
        mined = tuple(self.miner(embeddings, labels, *others))
        if max(map(len, mined)) == 1:
            # The library takes a single pair of a kind for none. Named twice it counts, and no mean changes.
            mined = tuple(torch.cat([places, places]) for places in mined)
        return cast(Tensor, self.loss(embeddings, labels, mined, *others))


def _contrastive(
    *, pos_margin: Cosine = 1.0, neg_margin: Cosine = 0.5, distance: Literal["cosine", "euclidean"] = "cosine"
) -> nn.Module:
    # Margins are cosines: positives are pulled up to pos_margin, negatives pushed down to neg_margin. Or
    # distances at unit length: positives are pulled within pos_margin, negatives pushed out of neg_margin.
    between = distances.CosineSimilarity() if distance == "cosine" else distances.LpDistance()
    return PairLoss(losses.ContrastiveLoss(pos_margin=pos_margin, neg_margin=neg_margin, distance=between))


def _triplet(
    *, margin: Annotated[float, Field(gt=0, le=2)] = 0.2, miner: TripletRule = "semihard"
) -> nn.Module:
    # Distances are Euclidean, of embeddings at unit length: from 0 to 2.
    distance = distances.LpDistance()
    triplets = TripletMiner(margin, miner, distance)
    return PairLoss(losses.TripletMarginLoss(margin=margin, distance=distance), triplets)


def _multi_similarity(
    *,
    alpha: Positive = 2.0,
    beta: Positive = 50.0,
    base: Cosine = 0.5,
    epsilon: Annotated[float, Field(ge=0)] = 0.1,
) -> nn.Module:
    # The miner keeps negatives nearer than the farthest positive less epsilon, and positives likewise.
    loss = losses.MultiSimilarityLoss(alpha=alpha, beta=beta, base=base)
    return PairLoss(loss, miners.MultiSimilarityMiner(epsilon=epsilon))


def _proxy_nca(*, classes: int, dimension: int, temperature: Positive = 1 / 9) -> nn.Module:
    # ProxyNCA++ is a softmax of -|x - p|² / temperature = (2 cos - 2) / temperature. The library's
    # ProxyNCALoss drops an image whose probability rounds to 0: the very one that is farthest off. Its
    # softmax of cosines is the same loss, computed in logarithms.
    return cast(nn.Module, losses.NormalizedSoftmaxLoss(classes, dimension, temperature=temperature / 2))


def _proxy_anchor(
    *, classes: int, dimension: int, margin: Annotated[float, Field(ge=0, le=1)] = 0.1, alpha: Positive = 32.0
) -> nn.Module:
    return cast(nn.Module, losses.ProxyAnchorLoss(classes, dimension, margin=margin, alpha=alpha))


class LIBC(nn.Module):
    """LIBC: label-smoothed cross-entropy on embeddings as they are and as the whole batch refines them.

    Seidenschwarz, Elezi and Leal-Taixé, "Learning Intra-Batch Connections for Deep Metric Learning", ICML
    2021. A batch is a full graph, over which a layer of torch's transformer encoder passes messages. What the
    paper leaves open: messages have the embedding's own dimension; both cross-entropies count alike and are
    divided by the same temperature.
    """

    def __init__(
        self,
        *,
        classes: int,
        dimension: int,
        layers: Count = 1,
        heads: Count = 2,
        temperature: Positive = 0.2,
        smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1,
    ) -> None:
        super().__init__()
        if dimension % heads:
            raise BadSetting(
                f"the libc loss has {heads} heads, which do not divide the {dimension} dimensions of an"
                " embedding; choose a number of heads that does"
            )
        self.temperature, self.smoothing = temperature, smoothing
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
        layer = functools.partial(nn.TransformerEncoderLayer, dimension, heads, 4 * dimension, **options)
        self.messages = nn.Sequential(*(layer() for _ in range(layers)))
        self.classify = nn.Linear(dimension, classes)
        self.classify_refined = nn.Linear(dimension, classes)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Sum the two cross-entropies of raw embeddings (B, d); zero with a zero gradient for one class."""
        nodes = embeddings.to(self.classify.weight.dtype)
        refined = self.messages(nodes[None])[0]  # one graph of B nodes: (1, B, d) -> (B, d)
        logits = torch.stack([self.classify(nodes), self.classify_refined(refined)])  # (2, B, C)
        loss = functional.cross_entropy(
            logits.flatten(0, 1) / self.temperature, labels.repeat(2), label_smoothing=self.smoothing
        )
        return 2 * loss  # the mean over both, so twice it is their sum


LOSSES: dict[str, Callable[..., nn.Module]] = {
    "contrastive": _contrastive,
    "triplet": _triplet,
    "multi_similarity": _multi_similarity,
    "proxy_nca": _proxy_nca,
    "proxy_anchor": _proxy_anchor,
    "libc": LIBC,
}


class MetricLoss(nn.Module):
    """A loss in full precision; a module, for those with proxies or classifiers have weights to save."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def on_pairs(self) -> bool:
        """Whether it compares pairs, with no weights of its own, so that a memory can be used."""
        return isinstance(self.inner, PairLoss)

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Loss of a batch, raw (B, d); zero with a zero gradient where a loss on pairs finds none."""
        return cast(Tensor, self.inner(embeddings, labels))

    @full_precision
    def against(
        self, embeddings: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor
    ) -> Tensor:
        """Loss of a batch (B, d) compared with references (R, d) alone, none of which is of the batch."""
        references = references.to(embeddings.dtype)
        return cast(Tensor, self.inner(embeddings, labels, references, reference_labels))


def build_loss(name: str, *, classes: int, dimension: int, **options: float | str) -> MetricLoss:
    """Build a loss by its key of `LOSSES`; its weights start from torch's global generator.

    Losses with a proxy a class take the number of training classes and d of the embeddings. An unknown name
    or option, or one out of range, is a `BadSetting`.
    """
    if name not in LOSSES:
        raise BadSetting(f"there is no loss {name!r}: {_suggest(name, LOSSES)}")
    entry = LOSSES[name]
    takes = inspect.signature(entry).parameters
    types = typing.get_type_hints(vars(entry).get("__init__", entry), include_extras=True)
    sizes = {"classes": classes, "dimension": dimension}
    known = takes.keys() - sizes
    given: dict[str, Any] = {size: sizes[size] for size in sizes.keys() & takes}
    for option, value in options.items():
        if option not in known:
            raise BadSetting(
                f"the {name} loss has no option {option!r}: {_suggest(option, known)}"
                " (a recipe's own go by --set 'loss_options={}')"
            )
        given[option] = _check(name, option, value, types[option])
    return MetricLoss(entry(**given))


def _check(name: str, option: str, value: float | str, kind: Any) -> Any:
    """Give an option's value as the type that its loss declares."""
    # A recipe holds every number as a float, a count too.
    given = int(value) if isinstance(value, float) and value.is_integer() else value
    try:
        return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(given)
    except ValidationError as error:
        expected = error.errors()[0]["msg"].removeprefix("Input ")
        raise BadSetting(f"the {name} loss has {option} set to {value!r}, but it {expected}") from error


def _suggest(word: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(names) or 'none'}"
