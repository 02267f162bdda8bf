"""Losses that compare pairs: one of the library with its miner, on a batch or against other embeddings."""

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from pytorch_metric_learning import distances
from pytorch_metric_learning.utils import loss_and_miner_utils
from torch import Tensor, nn

__all__ = ["PairLoss", "TripletMiner", "TripletRule", "all_pairs"]

TripletRule = Literal["all", "semihard", "hard"]


def all_pairs(
    embeddings: Tensor,
    labels: Tensor,
    references: Tensor | None = None,
    reference_labels: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Take every pair: a miner that leaves nothing out.

    Returns:
        Anchors and positives, then anchors and negatives, int64 (P,), (P,), (N,), (N,). Positives and
        negatives count the references, where given; else the batch, in which nothing pairs with itself.
    """
    return tuple(loss_and_miner_utils.get_all_pairs_indices(labels, reference_labels))


class TripletMiner:
    """The triplets whose negative is not farther than the positive by the margin, or a part of them.

    Its rules are those of the library's `TripletMarginMiner`, which lists B x R x R candidates first: for a
    memory of R = 45,000 embeddings that is 2 GB an anchor. This one looks at each positive pair's row.
    """

    def __init__(self, margin: float, rule: TripletRule, distance: distances.LpDistance) -> None:
        self.margin = margin
        self.rule = rule
        self.distance = distance

    @torch.no_grad()
    def __call__(
        self,
        embeddings: Tensor,
        labels: Tensor,
        references: Tensor | None = None,
        reference_labels: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Find the triplets of a batch, or of a batch against references.

        Returns:
            Anchors, positives and negatives, int64 (T,) each.
        """
        matches, differs = loss_and_miner_utils.get_matches_and_diffs(labels, reference_labels)
        between = self.distance(embeddings, references)  # (B, R)
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
    """A loss of the library without weights of its own, and the miner that chooses its pairs or triplets.

    Both take what the library's take: embeddings, labels and, for a comparison with other embeddings, the
    references and their labels.
    """

    def __init__(self, loss: nn.Module, miner: Callable[..., Any] = all_pairs) -> None:
        super().__init__()
        self.loss = loss
        self.miner = miner

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compare the images of a batch, embeddings (B, d), with one another; gives a scalar."""
        return self._compare(embeddings, labels)

    def against(
        self, embeddings: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor
    ) -> Tensor:
        """Compare a batch, embeddings (B, d), with references (R, d) alone; gives a scalar."""
        # The library takes tensors that are its first ones for the batch itself, and a slice for others.
        return self._compare(embeddings, labels, references.to(embeddings.dtype)[:], reference_labels[:])

    def _compare(self, embeddings: Tensor, labels: Tensor, *others: Tensor) -> Tensor:
        mined = tuple(self.miner(embeddings, labels, *others))
        if max(map(len, mined)) == 1:
            # The library takes a single pair of a kind for none. Named twice it counts, and no mean changes.
            mined = tuple(torch.cat([places, places]) for places in mined)
        return cast(Tensor, self.loss(embeddings, labels, mined, *others))
