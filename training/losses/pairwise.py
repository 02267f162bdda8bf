"""Losses that compare pairs, within a batch or with other embeddings, and a memory of such others."""

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from pytorch_metric_learning import distances
from pytorch_metric_learning.utils import loss_and_miner_utils
from torch import Tensor, nn

from serving.errors import BadSetting

__all__ = ["Memory", "PairLoss", "TripletMiner", "TripletRule", "all_pairs"]

TripletRule = Literal["all", "semihard", "hard"]


def all_pairs(
    embeddings: Tensor,
    labels: Tensor,
    references: Tensor | None = None,
    reference_labels: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Take every pair: anchors and positives, anchors and negatives, int64; nothing pairs with itself."""
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
        """Find anchors, positives and negatives, int64 (T,) each, in the batch or among references."""
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
    """A loss of the library without weights of its own, and the miner that chooses its pairs or triplets."""

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


class Memory(nn.Module):
    """Cross-batch memory: a ring of the last embeddings and labels; the oldest make room for the newest.

    Wang, Zhang, Huang and Scott, "Cross-Batch Memory for Embedding Learning", CVPR 2020: embeddings drift
    slowly once training has settled, so those of past batches still serve as references. All state is in
    buffers, so that a checkpoint brings back the very memory that was saved.
    """

    embeddings: Tensor  # float32 (size, d)
    labels: Tensor  # int64 (size,)
    position: Tensor  # int64 (), where the next embedding goes
    filled: Tensor  # int64 (), how many rows hold one

    def __init__(self, dimension: int, size: int) -> None:
        super().__init__()
        if size < 1:
            raise BadSetting(f"a memory of {size} embeddings can hold none; it needs room for at least 1")
        self.register_buffer("embeddings", torch.zeros(size, dimension))
        self.register_buffer("labels", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def push(self, embeddings: Tensor, labels: Tensor) -> None:
        """Add a batch, raw (B, d), in its order; of one larger than the memory the last rows stay."""
        size, count = len(self.labels), len(labels)
        kept = min(count, size)
        # Places are counted on the device: reading the position back would wait for it.
        places = (self.position + torch.arange(count - kept, count, device=self.labels.device)) % size
        self.embeddings[places] = embeddings[count - kept :].to(self.embeddings)
        self.labels[places] = labels[count - kept :].to(self.labels)
        self.position.add_(count).remainder_(size)
        self.filled.add_(count).clamp_(max=size)

    def contents(self) -> tuple[Tensor, Tensor]:
        """Give embeddings (R, d) and labels (R,), in no order of time: views, which the next push changes."""
        filled = int(self.filled)
        return self.embeddings[:filled], self.labels[:filled]
