"""Losses on embeddings, by pytorch-metric-learning where it has them: one short entry in `LOSSES` each.

To add one, write a function that takes its own options with their types and defaults, `classes` and
`dimension`, and returns a module from embeddings and labels to a scalar; then name it in `LOSSES`. Its
options become settings of that name. One that compares pairs returns a `PairLoss`, and can use a memory.
"""

import contextlib
import difflib
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pytorch_metric_learning import distances, losses, miners
from torch import Tensor, nn

from serving.errors import BadSetting
from training.losses.libc import LIBC
from training.losses.pairwise import PairLoss, TripletMiner, TripletRule
from training.method.precision import full_precision

__all__ = ["LOSSES", "MetricLoss", "build_loss"]

Positive = Annotated[float, Field(gt=0)]
Cosine = Annotated[float, Field(ge=-1, le=1)]
Count = Annotated[int, Field(ge=1, le=64)]


def _contrastive(
    *,
    classes: int,
    dimension: int,
    pos_margin: Cosine = 1.0,
    neg_margin: Cosine = 0.5,
    distance: Literal["cosine", "euclidean"] = "cosine",
) -> nn.Module:
    # Margins are cosines: positives are pulled up to pos_margin, negatives pushed down to neg_margin. Or
    # distances at unit length: positives are pulled within pos_margin, negatives pushed out of neg_margin.
    between = distances.CosineSimilarity() if distance == "cosine" else distances.LpDistance()
    return PairLoss(losses.ContrastiveLoss(pos_margin=pos_margin, neg_margin=neg_margin, distance=between))


def _triplet(
    *,
    classes: int,
    dimension: int,
    margin: Annotated[float, Field(gt=0, le=2)] = 0.2,
    miner: TripletRule = "semihard",
) -> nn.Module:
    # Distances are Euclidean, of embeddings at unit length: from 0 to 2.
    distance = distances.LpDistance()
    return PairLoss(
        losses.TripletMarginLoss(margin=margin, distance=distance), TripletMiner(margin, miner, distance)
    )


def _multi_similarity(
    *,
    classes: int,
    dimension: int,
    alpha: Positive = 2.0,
    beta: Positive = 50.0,
    base: Cosine = 0.5,
    epsilon: Annotated[float, Field(ge=0)] = 0.1,
) -> nn.Module:
    # The miner keeps negatives nearer than the farthest positive less epsilon, and positives likewise.
    return PairLoss(
        losses.MultiSimilarityLoss(alpha=alpha, beta=beta, base=base),
        miners.MultiSimilarityMiner(epsilon=epsilon),
    )


def _proxy_nca(*, classes: int, dimension: int, temperature: Positive = 1 / 9) -> nn.Module:
    # ProxyNCA++ is a softmax of -|x - p|² / temperature = (2 cos - 2) / temperature. The library's
    # ProxyNCALoss drops an image whose probability rounds to 0: the very one that is farthest off. Its
    # softmax of cosines is the same loss, computed in logarithms.
    return cast(nn.Module, losses.NormalizedSoftmaxLoss(classes, dimension, temperature=temperature / 2))


def _proxy_anchor(
    *,
    classes: int,
    dimension: int,
    margin: Annotated[float, Field(ge=0, le=1)] = 0.1,
    alpha: Positive = 32.0,
) -> nn.Module:
    return cast(nn.Module, losses.ProxyAnchorLoss(classes, dimension, margin=margin, alpha=alpha))


def _libc(
    *,
    classes: int,
    dimension: int,
    layers: Count = 1,
    heads: Count = 2,
    temperature: Positive = 0.2,
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1,
) -> nn.Module:
    return LIBC(
        classes=classes,
        dimension=dimension,
        layers=layers,
        heads=heads,
        temperature=temperature,
        smoothing=smoothing,
    )


LOSSES: dict[str, Callable[..., nn.Module]] = {
    "contrastive": _contrastive,
    "triplet": _triplet,
    "multi_similarity": _multi_similarity,
    "proxy_nca": _proxy_nca,
    "proxy_anchor": _proxy_anchor,
    "libc": _libc,
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
        """Loss of a batch.

        Args:
            embeddings: Raw, float (B, d); the loss normalises them where it works on cosines.
            labels: int64 (B,); below the number of classes for a loss with weights.

        Returns:
            A scalar; zero with a zero gradient where the loss is on pairs and the batch has no valid one.
        """
        return cast(Tensor, self.inner(embeddings, labels))

    @full_precision
    def against(
        self, embeddings: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor
    ) -> Tensor:
        """Loss of a batch compared with references alone, its miner looking at them.

        Args:
            embeddings: Raw, float (B, d).
            labels: int64 (B,).
            references: Raw, float (R, d); none of the batch is among them.
            reference_labels: int64 (R,).

        Returns:
            A scalar; zero with a zero gradient where there is no valid pair.

        Raises:
            BadSetting: When the loss does not compare pairs.
        """
        if not isinstance(self.inner, PairLoss):
            raise BadSetting(
                "this loss has no use for a memory, for it does not compare pairs of images; choose one that"
                " does, such as contrastive, or set memory_batches to 0"
            )
        return self.inner.against(embeddings, labels, references, reference_labels)


def build_loss(name: str, *, classes: int, dimension: int, **options: float | str) -> MetricLoss:
    """Build a loss by its name; what weights it has start from torch's global generator.

    Args:
        name: A key of `LOSSES`.
        classes: Number of training classes, for losses with a proxy each.
        dimension: d of the embeddings, for the same.
        options: The loss's own settings; its defaults where left out.

    Returns:
        A function from raw embeddings (B, d) and labels (B,) to a scalar.

    Raises:
        BadSetting: When the name or an option is unknown, or an option ill-typed or out of range.
    """
    if name not in LOSSES:
        raise BadSetting(f"there is no loss {name!r}: {_suggest(name, LOSSES)}")
    entry = LOSSES[name]
    known = set(inspect.signature(entry).parameters) - {"classes", "dimension"}
    for option in options:
        if option not in known:
            raise BadSetting(
                f"the {name} loss has no option {option!r}: {_suggest(option, known)}"
                " (a recipe's own go by --set 'loss_options={}')"
            )
    types = typing.get_type_hints(entry, include_extras=True)
    checked = {
        option: _check(name, option, value, types.get(option, Any)) for option, value in options.items()
    }
    return MetricLoss(entry(classes=classes, dimension=dimension, **checked))


def _check(name: str, option: str, value: float | str, kind: Any) -> Any:
    """Give an option's value as the type that its loss declares."""
    if isinstance(value, str):  # YAML takes 1e-1 for text
        with contextlib.suppress(ValueError):
            value = float(value)
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
