"""Starts of the codebook from the data: prototypes among the local features, rather than anywhere."""

import torch
from sklearn.cluster import KMeans
from torch import Tensor
from torch.nn import functional

from training.recipes.recipe import AssignOn, CodebookInit

__all__ = ["greedy_k_centre", "k_means", "start_codebook"]

_POINTS = 20_000
"""Most local features that a codebook is started from."""


def start_codebook(
    locations: Tensor, count: int, *, form: CodebookInit, assign_on: AssignOn, seed: int
) -> Tensor:
    """Find a codebook among local features, as the histogram operator compares them.

    Args:
        locations: Of some images, float (b, n, d).
        count: m.
        form: `k_means` (k-means++ and Lloyd's iterations) or `k_centre` (greedy: each prototype is the
            feature farthest from those before).
        assign_on: With `unit` the features are taken at unit length, with `ball` shrunk into the unit ball.
        seed: Of the sample, and of the first prototype.

    Returns:
        float32 (m, d) on the CPU; features repeat where there are fewer than m.
    """
    points = locations.flatten(0, 1)  # (P, d)
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))[:_POINTS]
    points = points[order.repeat(-(-count // len(order)))] if len(order) < count else points[order]
    if assign_on == "unit":
        points = functional.normalize(points, dim=1)
    if assign_on == "ball":
        points = points / points.norm(dim=1, keepdim=True).clamp_min(1)
    return k_means(points, count, seed=seed) if form == "k_means" else greedy_k_centre(points, count)


def k_means(points: Tensor, count: int, *, seed: int) -> Tensor:
    """Give the centres of k-means, started by k-means++ (Arthur and Vassilvitskii, SODA 2007).

    Returns:
        float32 (m, d) for points (P, d), P at least m.
    """
    found = KMeans(count, n_init=1, max_iter=20, random_state=seed).fit(points.double().numpy())
    return torch.from_numpy(found.cluster_centers_).float()


def greedy_k_centre(points: Tensor, count: int) -> Tensor:
    """Take the first point, then again and again the one farthest from all that were taken.

    The covering radius is at most twice the least possible (Gonzalez, 1985).

    Returns:
        float (m, d) for points (P, d), P at least m.
    """
    chosen = [0]
    distances = (points - points[0]).norm(dim=1)  # of each point to the nearest that was taken, (P,)
    for _ in range(count - 1):
        chosen.append(int(distances.argmax()))
        distances = torch.minimum(distances, (points - points[chosen[-1]]).norm(dim=1))
    return points[chosen]
