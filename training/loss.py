"""Losses on embeddings, by pytorch-metric-learning: one short entry in `LOSSES` each.

To add one, write a function that takes its own options with their defaults, `classes` and `dimension`, and
returns the library's module; then name it in `LOSSES`. Its options become settings of that name.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import cast

from pytorch_metric_learning import distances, losses
from torch import Tensor, nn

from serving.errors import BadSetting
from training.precision import full_precision

__all__ = ["LOSSES", "MetricLoss", "build_loss"]


def _contrastive(
    *, classes: int, dimension: int, pos_margin: float = 1.0, neg_margin: float = 0.5
) -> nn.Module:
    # Margins are cosines: positives are pulled up to pos_margin, negatives pushed down to neg_margin.
    return cast(
        nn.Module,
        losses.ContrastiveLoss(
            pos_margin=pos_margin, neg_margin=neg_margin, distance=distances.CosineSimilarity()
        ),
    )


LOSSES: dict[str, Callable[..., nn.Module]] = {
    "contrastive": _contrastive,
}


class MetricLoss(nn.Module):
    """A loss of the library in full precision; a module, for proxy losses have weights to save."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @full_precision
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Loss of a batch.

        Args:
            embeddings: Raw, float (B, d); the loss's own distance normalises them.
            labels: int64 (B,).

        Returns:
            A scalar; zero with a zero gradient where the batch has no valid pair.
        """
        return cast(Tensor, self.inner(embeddings, labels))


def build_loss(name: str, *, classes: int, dimension: int, **options: float | str) -> MetricLoss:
    """Build a loss by its name.

    Args:
        name: A key of `LOSSES`.
        classes: Number of training classes, for losses with a proxy each.
        dimension: d of the embeddings, for the same.
        options: The loss's own settings; its defaults where left out.

    Returns:
        A function from raw embeddings (B, d) and labels (B,) to a scalar.

    Raises:
        BadSetting: When the name or an option is unknown.
    """
    if name not in LOSSES:
        raise BadSetting(f"there is no loss {name!r}: {_suggest(name, LOSSES)}")
    known = set(inspect.signature(LOSSES[name]).parameters) - {"classes", "dimension"}
    for option in options:
        if option not in known:
            raise BadSetting(f"the {name} loss has no option {option!r}: {_suggest(option, known)}")
    return MetricLoss(LOSSES[name](classes=classes, dimension=dimension, **options))


def _suggest(word: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(names) or 'none'}"
