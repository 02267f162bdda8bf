"""Near-duplicates: images of the test that are as good as in the training, by the untrained backbone."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.evaluation.metrics import ExactSearch, unit_rows

__all__ = ["NEAR", "find_duplicates"]

NEAR = 0.92
"""Least cosine of a near-duplicate.

Chosen by looking at the most alike pairs of pooled features of EfficientNet-Lite0 (ImageNet weights, 224
px). Of 100 classes of CUB-200-2011 all 13 pairs above it are one photograph twice, cropped or mirrored, or
two of one moment; below 0.91 most are birds alike in one pose. Between 50 train and 50 test classes it is
one pair, at 0.93 (a Chuck-will's-widow that is a Whip-poor-will too), and the next, no copy, is at 0.88. Of
clothes no pair of two kinds is above 0.85, though different trousers before one wall reach 0.93. Strokes on
white are all alike: of Omniglot 96 of 2,420 test images are above it, none a copy, so what is told wants a
look.
"""


def find_duplicates(
    tests: NDArray[np.floating[Any]], trains: NDArray[np.floating[Any]], *, near: float = NEAR
) -> list[tuple[int, int, float]]:
    """Find the test images whose most alike training image is near.

    Args:
        tests: Features, finite float (N, C).
        trains: Features, finite float (G, C), at least one.
        near: Least cosine.

    Returns:
        Of each such image its place in `tests`, that of its most alike in `trains`, and their cosine; the
        highest first.
    """
    tests, trains = unit_rows(tests), unit_rows(trains)
    nobody = np.zeros(len(tests), dtype=np.int64), np.ones(len(trains), dtype=np.int64)
    nearest = ExactSearch(tests, trains, *nobody).nearest(np.arange(len(tests)), 1)[:, 0]
    cosines = (tests * trains[nearest]).sum(axis=1)
    found = [place for place in np.argsort(-cosines, kind="stable").tolist() if cosines[place] >= near]
    return [(place, int(nearest[place]), float(cosines[place])) for place in found]
