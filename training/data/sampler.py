"""Which images are drawn: P×K batches over an epoch that leaves no image out, and a fair sample of rows."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from serving.catalog.catalog import Row

__all__ = ["PKSampler", "draw_sample"]

_CLASSES = 100  # that share the room of a sample at least


class PKSampler(Sampler[list[int]]):
    """Batch sampler whose order depends on labels, seed and epoch alone, so that a resume is exact.

    Each class is cut into groups of K images, the last one filled up with images of the class. A round deals
    all groups out so that the P classes of a batch differ; an epoch is one round, or `batches` batches.
    """

    def __init__(
        self,
        labels: Sequence[int] | npt.NDArray[Any],
        *,
        classes_per_batch: int,
        images_per_class: int,
        batches: int | None = None,
        seed: int = 0,
    ) -> None:
        _, members, sizes = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
        by_class = np.argsort(members, kind="stable")
        self._images = np.split(by_class, np.cumsum(sizes)[:-1])  # image numbers of each class
        self._groups = -(-sizes // images_per_class)  # ceil(n_c / K)
        self._p, self._k = classes_per_batch, images_per_class
        # Enough room for all groups, and no class twice in a batch.
        self._round = max(int(self._groups.max()), math.ceil(int(self._groups.sum()) / classes_per_batch))
        self._batches = self._round if batches is None else batches
        self.seed = seed
        self.epoch = 0  # which the next iteration draws

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the epoch's batches, each P·K image numbers, class after class."""
        rounds = (np.random.default_rng([self.seed, self.epoch, number]) for number in itertools.count())
        batches = itertools.chain.from_iterable(map(self._draw_round, rounds))
        yield from itertools.islice(batches, self._batches)

    def _draw_round(self, rng: np.random.Generator) -> Iterator[list[int]]:
        queues = [self._cut(images, rng) for images in self._images]
        remaining = self._groups.copy()
        for batches_left in range(self._round, 0, -1):
            chosen = self._choose(remaining, batches_left, rng)
            remaining[chosen] = np.maximum(remaining[chosen] - 1, 0)
            batch: list[int] = []
            for c in chosen.tolist():
                # A class whose images are used up fills a place that no other class can.
                group = queues[c].pop() if queues[c] else self._cut(self._images[c], rng)[0]
                batch.extend(group.tolist())
            yield batch

    def _cut(self, images: npt.NDArray[np.int64], rng: np.random.Generator) -> list[npt.NDArray[np.int64]]:
        """Shuffle a class and cut it into groups of K, filled up from the front of the same shuffle."""
        whole = -(-len(images) // self._k) * self._k
        return list(np.resize(rng.permutation(images), whole).reshape(-1, self._k))

    def _choose(
        self, remaining: npt.NDArray[np.int64], batches_left: int, rng: np.random.Generator
    ) -> npt.NDArray[np.intp]:
        """Draw P classes in proportion to the groups they still have; those that cannot wait come first."""
        with np.errstate(divide="ignore"):
            keys = np.log(remaining) + rng.gumbel(size=len(remaining))
        keys[remaining == batches_left] = np.inf
        order = np.lexsort((rng.random(len(keys)), keys))[::-1]  # equals at random; -inf is a spent class
        return order[: self._p]


def draw_sample(rows: Sequence[Row], *, most: int, seed: int) -> tuple[Row, ...]:
    """Draw at most `most` rows, in their order: of classes at random all, or an even share of the room."""
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
