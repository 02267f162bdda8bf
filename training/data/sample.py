"""A sample of a data set's rows for what cannot show them all: seeded, and fair to its classes."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from serving.catalog.catalog import Row

__all__ = ["draw_sample"]

_CLASSES = 100
"""Classes that share the room at least, where there are so many."""


def draw_sample(rows: Sequence[Row], *, most: int, seed: int) -> tuple[Row, ...]:
    """Draw at most `most` rows, class by class, so that what is drawn still has its matches.

    Classes come in an order drawn by the seed; each gives all of its images, or an even share of the room
    where it has more, and the last what still goes in.

    Returns:
        In the order of `rows`; all of them where they are no more than `most`.
    """
    if len(rows) <= most:
        return tuple(rows)
    members = defaultdict[str, list[int]](list)
    for place, row in enumerate(rows):
        members[row.label].append(place)
    rng = np.random.default_rng(seed)
    share = max(2, most // min(len(members), _CLASSES))
    chosen = list[int]()
    for label in rng.permutation(sorted(members)).tolist():
        chosen += rng.permutation(members[label])[:share].tolist()
        if len(chosen) >= most:
            break
    return tuple(rows[place] for place in sorted(chosen[:most]))
