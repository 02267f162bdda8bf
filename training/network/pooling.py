"""Pooling: the backbone's map to one vector, before the head.

Letters: B images, C channels of the backbone, n = h * w locations. What a channel has at n places becomes one
number; an embedding is the head of these C numbers. Reductions are plain ones: an adaptive pooling does not
survive the export to ONNX for every size of map.
"""

from typing import Final, Literal

import torch
from torch import Tensor, nn

__all__ = ["PoolingName", "build_pooling", "generalised_mean", "mean", "mean_and_maximum"]

PoolingName = Literal["gap", "gap_gmp", "gem"]

EXPONENT: Final = 3.0
"""Where the generalised mean's exponent starts, as in Radenovic et al."""
LEAST: Final = 1e-6
"""What features below it count as in the generalised mean, which has no negative ones."""


def mean(maps: Tensor) -> Tensor:
    """Average over locations (GAP): (B, C, h, w) to (B, C)."""
    return maps.mean(dim=(2, 3))


def mean_and_maximum(maps: Tensor) -> Tensor:
    """Add up average and maximum over locations (GAP + GMP): (B, C, h, w) to (B, C)."""
    return maps.mean(dim=(2, 3)) + maps.amax(dim=(2, 3))


def generalised_mean(maps: Tensor, exponent: Tensor | float) -> Tensor:
    """Take (1/n sum_j max(x_j, LEAST)^p)^(1/p) over locations, (3) of Radenovic et al., arXiv 1711.02512.

    p = 1 is the average of what is positive, and the larger p is, the nearer it comes to the maximum.

    Args:
        maps: (B, C, h, w); meant for features after a ReLU.
        exponent: p, not 0.

    Returns:
        (B, C), at least float32.
    """
    maps = maps.to(torch.promote_types(maps.dtype, torch.float32)).clamp_min(LEAST)
    # in shares of the largest, which no power makes infinite; it cancels, so it needs no gradient
    largest = maps.amax(dim=(2, 3), keepdim=True).detach()
    means = (maps / largest).pow(exponent).mean(dim=(2, 3))
    return largest[:, :, 0, 0] * means.pow(1 / exponent)


def build_pooling(name: PoolingName) -> nn.Module:
    """Give the pooling of that name, (B, C, h, w) to (B, C)."""
    return {"gap": _Mean, "gap_gmp": _MeanAndMaximum, "gem": _GeneralisedMean}[name]()


class _Mean(nn.Module):
    def forward(self, maps: Tensor) -> Tensor:
        return mean(maps)


class _MeanAndMaximum(nn.Module):
    def forward(self, maps: Tensor) -> Tensor:
        return mean_and_maximum(maps)


class _GeneralisedMean(nn.Module):
    """A generalised mean that learns its exponent, one for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.exponent = nn.Parameter(torch.full((1,), EXPONENT))

    def forward(self, maps: Tensor) -> Tensor:
        return generalised_mean(maps, self.exponent)
