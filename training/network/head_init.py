"""Closed-form starts of the 1x1 convolution from the backbone's features of the training images.

Letters: N images, C channels, d dimensions. Rows of `features` are images; all sums run in float64. The head
has no bias, so nothing can be centred: a share of the mean's direction can be projected out instead.
"""

import torch
from torch import Tensor

from serving.errors import BadData, BadSetting
from training.recipes.recipe import Recipe

__all__ = ["closed_form_head"]


def closed_form_head(features: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """Find the head W, float32 (d, C), that keeps the d principal axes of the features, whitened or not.

    With P = I - centre * mu mu' / |mu|^2 and S the scatter of the features P f (`whiten`: about their mean,
    `whiten_within`: about the means of their classes), T = P (S + shrinkage * mean(diag S) I)^-power, or
    T = P for `pca`. The rows of W are the d leading eigenvectors of the second moment of T'f, times T': inner
    products of embeddings are the best approximation, of rank d, of those of T'f.

    Features (N, C) are means of the backbone's maps, and labels (N,) their classes. The recipe's `head_init`
    says which of the three, and `head_centre`, `head_shrinkage` and `head_power` the rest; `head_length` is
    the mean length of the rows of `features @ W.T`.
    """
    form, dimension, centre = recipe.head_init, recipe.dimension, recipe.head_centre
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
        transform = transform @ _negative_power(scatter, recipe.head_shrinkage, recipe.head_power)  # T
    seen = rows @ transform  # (N, C)
    _, axes = torch.linalg.eigh(seen.T @ seen)  # eigenvalues ascend
    head: Tensor = transform @ axes[:, -dimension:].flip(1)  # (C, d), the leading axis first
    scale = recipe.head_length / (rows @ head).norm(dim=1).mean().clamp_min(1e-12)
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


def _negative_power(scatter: Tensor, shrinkage: float, power: float) -> Tensor:
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
