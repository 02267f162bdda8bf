"""The past of a training by class: sums over earlier batches from which some classes can be left out.

It takes the place of one running fit over all classes: a half of a batch that is expressed with the help of a
fit to its own classes is expressed by what it should be kept from.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from serving.errors import BadSetting
from training.method.precision import full_precision

__all__ = ["Past"]

_MOST_BYTES = 2 * 2**30
"""Every step passes over the sums once, and every checkpoint holds them."""


class Past(nn.Module):
    """ZZᵀ and ZYᵀ of each class over all steps so far, an older step counting less; buffers.

    Args:
        classes: C, number of training classes.
        prototypes: m.
        dimension: d.
        decay: α in (0, 1], how much a batch counts one step later.

    Raises:
        BadSetting: If the sums would take more than 2 GiB, or `decay` is out of its range.
    """

    def __init__(self, classes: int, prototypes: int, dimension: int, *, decay: float) -> None:
        super().__init__()
        if not 0 < decay <= 1:
            raise BadSetting(f"recursion_decay is {decay}, but it must be above 0 and at most 1")
        size = 4 * classes * prototypes * (prototypes + dimension)
        if size > _MOST_BYTES:
            raise BadSetting(
                f"xml_prototypes is recursion, whose sums for {classes:,} classes, {prototypes} prototypes"
                f" and {dimension} dimensions would take {size / 2**30:.1f} GiB, and"
                f" {_MOST_BYTES / 2**30:.0f} GiB are the most: set prototypes or dimension lower, or"
                " xml_prototypes to batch"
            )
        self._decay = decay
        self._sums: Tensor
        self.register_buffer("_sums", torch.zeros(classes, prototypes, prototypes + dimension))

    @full_precision
    def without(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over all classes but those named, each step before the last one times α once more.

        The classes that count are added up, and none is taken away from a total: what is left of a
        difference of large sums would be rounding.

        Args:
            labels: int64 (k,), each in [0, C).

        Returns:
            ZZᵀ, float32 (m, m), and ZYᵀ, float32 (m, d).
        """
        kept = self._sums.new_ones(len(self._sums)).index_fill(0, labels, 0)  # (C,)
        total = (kept @ self._sums.flatten(1)).view(self._sums.shape[1:])  # (m, m + d)
        return total[:, : len(total)], total[:, len(total) :]

    @torch.no_grad()
    @full_precision
    def push(self, histograms: Tensor, targets: Tensor, labels: Tensor) -> None:
        """Take in one more batch, and let all of it fade by α until the next.

        Args:
            histograms: Zᵀ, float (B, m).
            targets: Yᵀ that prototypes are fitted to, float (B, d).
            labels: int64 (B,), each in [0, C).
        """
        kinds, members = torch.unique(labels, return_inverse=True)
        sorted_out = functional.one_hot(members, len(kinds)).T[:, :, None] * histograms  # (P, B, m)
        self._sums[kinds] += sorted_out.mT @ torch.cat((histograms, targets), dim=1)  # (P, m, m + d)
        self._sums *= self._decay
