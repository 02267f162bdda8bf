"""The histogram operator: the share of an image that each prototype of a codebook takes, soft and exact.

Letters: B images, n locations, d dimensions, m prototypes. The paper calls both the ν of this operator and
the V fitted to a batch prototypes; ν is the `codebook` here, and V are the fitted prototypes.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from training.evaluation.metrics import k_means
from training.method.prototypes import full_precision
from training.recipes.recipe import AssignOn, Recipe

__all__ = ["Metric", "assign", "covering_radius", "exact_histogram", "histogram", "start_codebook"]

Metric = Literal["euclidean", "inner", "cosine"]
_POINTS = 20_000  # most local features that a codebook is started from


@full_precision
def histogram(
    locations: Tensor, codebook: Tensor, *, assignment_scale: float = 60.0, assign_on: AssignOn = "unit"
) -> Tensor:
    """Share of an image's locations that each prototype takes, by soft assignment (eq. 2.4).

    Local features x_j, float (B, n, d), and prototypes ν_i, float (m, d), give histograms z, at least float32
    (B, m), in [0, 1], each row of which sums to one. The scale is ε: the larger, the harder. `unit` compares
    unit features with unit prototypes; `raw` takes both as they are; `ball` shrinks features alone into the
    unit ball, x / max(1, |x|), as the authors' own layer does (Gürbüz et al., "Generalized Sum Pooling for
    Metric Learning", ICCV 2023).
    """
    if assign_on == "unit":
        codebook = functional.normalize(codebook, dim=1)
    scores = locations @ (assignment_scale * codebook).T  # (B, n, d) x (d, m) -> (B, n, m)
    if assign_on != "raw":  # the products are divided and not the features, of which there are more
        least = {"unit": 1e-12, "ball": 1.0}[assign_on]
        scores = scores * locations.norm(dim=2, keepdim=True).clamp_min(least).reciprocal()
    return scores.softmax(dim=2).mean(dim=1)  # π_ij = softmax_i(ε ν_i·x_j) / n; z_i = Σ_j π_ij


def assign(locations: Tensor, prototypes: Tensor, *, metric: Metric = "euclidean") -> Tensor:
    """Assign each location (B, n, d) to one prototype (m, d) (Definition 1); int64 (B, n), lowest of equals.

    The paper assigns by the largest inner product, while its Lemma 1 needs the nearest prototype; the two
    agree only where all prototypes have one norm.
    """
    if metric == "euclidean":
        return _distances(locations, prototypes).argmin(dim=2)
    if metric == "cosine":  # a location's own norm does not change which prototype wins
        prototypes = functional.normalize(prototypes, dim=1)
    elif metric != "inner":
        raise ValueError(f"metric cannot be {metric!r}; it must be euclidean, inner or cosine")
    return (locations @ prototypes.T).argmax(dim=2)


def exact_histogram(locations: Tensor, prototypes: Tensor, *, metric: Metric = "euclidean") -> Tensor:
    """Share of an image's locations assigned to each prototype (Definition 1), (B, m); each row sums to one.

    With the nearest prototype, ‖Σ z_i ν_i − y‖ ≤ δ for the mean y of the locations (Lemma 1), where δ is the
    `covering_radius`.
    """
    chosen = functional.one_hot(assign(locations, prototypes, metric=metric), len(prototypes))  # (B, n, m)
    return chosen.to(locations.dtype).mean(dim=1)


def covering_radius(locations: Tensor, prototypes: Tensor) -> Tensor:
    """Distance δ within which every location of an image has a prototype (the cover of Lemma 1), (B,)."""
    return _distances(locations, prototypes).amin(dim=2).amax(dim=1)


def _distances(locations: Tensor, prototypes: Tensor) -> Tensor:
    # Differences, not the product form: that one cancels to noise near a prototype.
    mode = "donot_use_mm_for_euclid_dist"
    return torch.cdist(locations, prototypes.expand(len(locations), -1, -1), compute_mode=mode)  # (B, n, m)


def start_codebook(locations: Tensor, recipe: Recipe) -> Tensor:
    """Find m prototypes among local features (b, n, d), as the histogram operator compares them.

    `k_means` is k-means++ (Arthur and Vassilvitskii, SODA 2007) and Lloyd's iterations. With `k_centre` each
    prototype is the feature farthest from those before, so that the covering radius is at most twice the
    least possible (Gonzalez, 1985). Features are taken at unit length or shrunk into the unit ball as
    `assign_on` says, and repeat where there are fewer than m. Gives float32 (m, d) on the CPU.
    """
    points, count = locations.flatten(0, 1), recipe.prototypes  # (P, d), m
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(recipe.seed))[:_POINTS]
    points = points[order.repeat(-(-count // len(order)))] if len(order) < count else points[order]
    if recipe.assign_on == "unit":
        points = functional.normalize(points, dim=1)
    if recipe.assign_on == "ball":
        points = points / points.norm(dim=1, keepdim=True).clamp_min(1)
    if recipe.codebook_init == "k_means":
        found = k_means(points.double().numpy(), count, rounds=20, seed=recipe.seed)
        return torch.from_numpy(found.cluster_centers_).float()
    chosen = [0]
    distances = (points - points[0]).norm(dim=1)  # of each point to the nearest that was taken, (P,)
    for _ in range(count - 1):
        chosen.append(int(distances.argmax()))
        distances = torch.minimum(distances, (points - points[chosen[-1]]).norm(dim=1))
    return points[chosen]
