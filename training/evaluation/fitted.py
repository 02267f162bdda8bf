"""MAP_c and MAP_x: how well images are told apart by prototypes fitted to their histograms.

An image is V z, its histogram z expressed by prototypes V that were fitted to histograms and embeddings (eq.
2.8): of the classes that are then measured for MAP_c, of other classes for MAP_x.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from serving.errors import BadData
from serving.progress import progress
from training.evaluation.metrics import Floats, Ints, retrieval_metrics
from training.method.prototypes import fit_prototypes

__all__ = ["draw_halvings", "fitted_figures"]

_RIDGE = 0.05  # ϵ of eq. 2.8


@torch.no_grad()
def fitted_figures(
    histograms: Floats | Tensor, embeddings: Floats | Tensor, labels: Ints, *, draws: int, seed: int = 0
) -> dict[str, Any]:
    """Measure the prototypes that are fitted to all classes, and to half of them for the other half.

    Takes z, float (N, m), y, float (N, d), of any norm and taken at unit length, and labels, int64 (N,), of
    the images, and cuts the classes into halves at random `draws` times. Gives `map_c`, MAP@R of all images
    in V z with V fitted to all; `map_x`, MAP@R of the images of one half of the classes among themselves with
    V fitted to the other half, mean over the halvings (both in 0..1); `halvings`, how many of those drawn had
    a query, and `distinct`, how many of these differ.
    """
    classes, numbers = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise BadData("MAP_x is measured across classes, and all images are of one: give two or more")
    z, y = torch.as_tensor(histograms), functional.normalize(torch.as_tensor(embeddings), dim=1)

    def measure(fitted: NDArray[np.bool_], measured: NDArray[np.bool_]) -> float | None:
        """MAP@R in V z of the measured images; None where none has a match."""
        if np.bincount(numbers[measured]).max() < 2:
            return None
        some = torch.from_numpy(fitted)
        prototypes = fit_prototypes(z[some].double(), y[some].double(), ridge=_RIDGE)  # V (d, m)
        # V = Q R, and Q keeps lengths and angles: R z does for V z, in no more than m dimensions.
        triangle: Tensor = torch.linalg.qr(prototypes, mode="r").R
        expressed = z[torch.from_numpy(measured)].double() @ triangle.T
        return retrieval_metrics(expressed.float(), numbers[measured], at=()).map_at_r

    everyone = np.full(len(labels), True)
    map_c = measure(everyone, everyone)
    if map_c is None:
        raise BadData("every image is alone in its class: give at least two images of one class")
    total, measured, distinct = 0.0, 0, 0
    halvings = draw_halvings(len(classes), draws, seed=seed)
    for half, times in progress(halvings.items(), "Halving classes", total=len(halvings), unit="halving"):
        fitted = np.isin(numbers, half)
        value = measure(fitted, ~fitted)
        if value is not None:
            total, measured, distinct = total + times * value, measured + times, distinct + 1
    if measured == 0:
        raise BadData(
            f"in none of {draws} halvings of {len(classes)} classes has an image a match: draw more"
        )
    return {"map_c": map_c, "map_x": total / measured, "halvings": measured, "distinct": distinct}


def draw_halvings(classes: int, draws: int, *, seed: int) -> Counter[tuple[int, ...]]:
    """Tell how often each half of the classes was drawn, of an odd count the smaller; in drawing order."""
    random = np.random.default_rng(seed)
    halves = (np.sort(random.permutation(classes)[: classes // 2]) for _ in range(draws))
    return Counter(tuple(half.tolist()) for half in halves)
