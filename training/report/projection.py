"""Embeddings on a plane: their first two principal components."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from training.method.precision import full_precision

__all__ = ["Projection", "project"]


class Projection(NamedTuple):
    """Where N embeddings lie on a plane, and what the plane shows of them."""

    points: NDArray[np.float64]
    """(N, 2)."""
    explained: tuple[float, float]
    """Share of the variance along each axis, in 0..1; 0 where there is no variance at all."""


@torch.no_grad()
@full_precision
def project(embeddings: Tensor) -> Projection:
    """Project embeddings, float (N, d), at unit length, as a search sees them.

    The axes are the two eigenvectors of largest eigenvalue of the covariance matrix; each points to where
    its largest component is positive, so that the same embeddings always give the same picture.
    """
    unit = functional.normalize(embeddings.double(), dim=1)
    centred = unit - unit.mean(dim=0)
    # the scatter of components, (d, d), or of images, (N, N): they share their eigenvalues but for zeros
    wide = centred.shape[1] > centred.shape[0]
    values, vectors = torch.linalg.eigh(centred @ centred.T if wide else centred.T @ centred)
    values, vectors = values.flip(0).clamp(min=0)[:2], vectors.flip(1)[:, :2]
    axes = centred.T @ vectors / values.sqrt().clamp(min=1e-12) if wide else vectors  # (d, 2)
    largest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    axes = axes * torch.where(largest < 0, -1.0, 1.0)
    points = centred @ axes
    total = float(centred.square().sum())
    if points.shape[1] < 2:
        points = functional.pad(points, (0, 2 - points.shape[1]))
    shares = [float(value) / total if total > 1e-12 else 0.0 for value in values.tolist()]
    first, second = (*shares, 0.0)[:2]
    return Projection(points.numpy(), (first, second))
