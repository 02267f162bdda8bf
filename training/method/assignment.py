"""Hard assignment of locations to prototypes: the exact form of the histogram operator (Definition 1).

The paper assigns by the largest inner product, while its Lemma 1 needs the nearest prototype; the two agree
only where all prototypes have one norm. The metric is therefore an argument.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from serving.errors import BadSetting

__all__ = ["Metric", "assign", "covering_radius", "exact_histogram"]

Metric = Literal["euclidean", "inner", "cosine"]


def assign(locations: Tensor, prototypes: Tensor, *, metric: Metric = "euclidean") -> Tensor:
    """Assign each location to one prototype (Definition 1).

    Args:
        locations: x_j, float (B, n, d).
        prototypes: ν_i, float (m, d).
        metric: The nearest prototype, or the one of largest inner product or cosine.

    Returns:
        Prototype numbers, int64 (B, n), in [0, m); the lowest number among equals.

    Raises:
        BadSetting: When `metric` is unknown.
    """
    if metric == "euclidean":
        return _distances(locations, prototypes).argmin(dim=2)
    if metric == "cosine":
        # A location's own norm does not change which prototype wins.
        return (locations @ functional.normalize(prototypes, dim=1).T).argmax(dim=2)
    if metric == "inner":
        return (locations @ prototypes.T).argmax(dim=2)
    raise BadSetting(f"metric is {metric!r}, but it must be one of {', '.join(get_args(Metric))}")


def exact_histogram(locations: Tensor, prototypes: Tensor, *, metric: Metric = "euclidean") -> Tensor:
    """Share of an image's locations assigned to each prototype (Definition 1).

    With the nearest prototype, ‖Σ z_i ν_i − y‖ ≤ δ for the mean y of the locations (Lemma 1), where δ is the
    `covering_radius`.

    Returns:
        Histograms z, of the dtype of `locations`, (B, m); each row sums to one.

    Raises:
        BadSetting: When `metric` is unknown.
    """
    chosen = functional.one_hot(assign(locations, prototypes, metric=metric), len(prototypes))  # (B, n, m)
    return chosen.to(locations.dtype).mean(dim=1)


def covering_radius(locations: Tensor, prototypes: Tensor) -> Tensor:
    """Distance δ within which every location has a prototype (the cover of Lemma 1).

    Returns:
        δ for each image, float (B,).
    """
    return _distances(locations, prototypes).amin(dim=2).amax(dim=1)


def _distances(locations: Tensor, prototypes: Tensor) -> Tensor:
    # Differences, not the product form: that one cancels to noise near a prototype.
    mode = "donot_use_mm_for_euclid_dist"
    return torch.cdist(locations, prototypes.expand(len(locations), -1, -1), compute_mode=mode)  # (B, n, m)
