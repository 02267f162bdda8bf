"""Closed-form starts of the 1x1 convolution from the backbone's features of the training images.

Letters: N images, C channels, d dimensions. Rows of `features` are images; all sums run in float64. The head
has no bias, so nothing can be centred: a share of the mean's direction can be projected out instead.
"""

from typing import Literal

import torch
from torch import Tensor

from serving.errors import BadData, BadSetting

__all__ = ["closed_form_head"]


def closed_form_head(
    features: Tensor,
    labels: Tensor,
    *,
    form: Literal["pca", "whiten", "whiten_within"],
    dimension: int,
    shrinkage: float = 1.0,
    power: float = 0.5,
    centre: float = 0.0,
    length: float = 1.0,
) -> Tensor:
    """Find the head W, float32 (d, C), that keeps the d principal axes of the features, whitened or not.

    With P = I - centre * mu mu' / |mu|^2 and S the scatter of the features P f (`whiten`: about their mean,
    `whiten_within`: about the means of their classes), T = P (S + shrinkage * mean(diag S) I)^-power, or
    T = P for `pca`. The rows of W are the d leading eigenvectors of the second moment of T'f, times T': inner
    products of embeddings are the best approximation, of rank d, of those of T'f.

    Args:
        features: Means of the backbone's maps, (N, C).
        labels: Class of each row, (N,).
        form: Which of the three.
        dimension: d, at most C.
        shrinkage: How far the scatter is drawn towards a multiple of the identity.
        power: 0.5 whitens fully.
        centre: Share of the mean's direction that is projected out.
        length: Mean length of the rows of `features @ W.T`.
    """
    rows = features.double()
    channels = rows.shape[1]
    if dimension > channels:
        raise BadSetting(
            f"head_init {form} gives at most the backbone's {channels} dimensions, but dimension is"
            f" {dimension}: lower it, or use head_init random"
        )
    mean = rows.mean(dim=0)  # mu, (C,)
    transform: Tensor = torch.eye(channels, dtype=torch.float64, device=rows.device)
    if centre > 0 and mean.any():
        transform = transform - centre * torch.outer(mean, mean) / (mean @ mean)  # P
    if form != "pca":
        scatter = _scatter(rows @ transform, labels if form == "whiten_within" else torch.zeros_like(labels))
        transform = transform @ _negative_power(scatter, shrinkage=shrinkage, power=power)  # T
    seen = rows @ transform  # (N, C)
    _, axes = torch.linalg.eigh(seen.T @ seen)  # eigenvalues ascend
    head: Tensor = transform @ axes[:, -dimension:].flip(1)  # (C, d), the leading axis first
    scale = length / (rows @ head).norm(dim=1).mean().clamp_min(1e-12)
    weights: Tensor = (head * scale).T
    return weights.contiguous().float()


def _scatter(rows: Tensor, labels: Tensor) -> Tensor:
    """Covariance (C, C) of rows (N, C) about the mean of their own class."""
    _, members = labels.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    counts = members.bincount().to(rows.dtype)
    means = torch.zeros(len(counts), rows.shape[1], dtype=rows.dtype, device=rows.device)
    means.index_add_(0, members, rows).div_(counts[:, None])
    centred = rows - means[members]
    return centred.T @ centred / len(rows)


def _negative_power(scatter: Tensor, *, shrinkage: float, power: float) -> Tensor:
    """Give (S + shrinkage * mean(diag S) I)^-power of a positive semidefinite S."""
    values, vectors = torch.linalg.eigh(scatter)
    values = values.clamp_min(0)
    if not values.mean() > 0:
        raise BadData(
            "the training images' features do not vary within their classes, so that head_init cannot whiten"
            " them: give more images a class, or use head_init pca"
        )
    powers: Tensor = (values + shrinkage * values.mean()) ** -power
    return torch.einsum("ik,k,jk->ij", vectors, powers, vectors)
