"""What a data loader draws from: augmented views of pictures, each draw decided by its number."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from training.data.augment import Augmentation
from training.data.pictures import Pictures, QuarterTurns

__all__ = ["Draws", "TrainingSet"]

_Items = list[tuple[int, int]]
"""Image numbers and numbers of the draws in the epoch."""


class TrainingSet(Dataset[tuple[Tensor, int]]):
    """Augmented draws of `pictures`; asked for as (image number, number of the draw in the epoch)."""

    def __init__(
        self, pictures: Pictures | QuarterTurns, augmentation: Augmentation, *, seed: int, epoch: int
    ) -> None:
        self._pictures = pictures
        self._augmentation = augmentation
        self._seed = seed
        self._epoch = epoch

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int]:
        """Give uint8 (S, S, 3) and the class number."""
        index, draw = item
        entropy = np.random.SeedSequence((self._seed, self._epoch, draw))
        view = self._augmentation(self._pictures[index], int(entropy.generate_state(1)[0]))
        return torch.from_numpy(view.copy()), int(self._pictures.labels[index])


class Draws(Sampler[_Items]):
    """Numbers the draws of a batch sampler, so that an image drawn twice in an epoch is augmented twice.

    Args:
        batches: The sampler.
        mine: Takes this process's rows out of a batch, whose draws are numbered as one process would.
    """

    def __init__(self, batches: Sampler[list[int]], mine: Callable[[_Items], _Items] = list) -> None:
        self._batches = batches
        self._mine = mine

    def __iter__(self) -> Iterator[_Items]:
        draw = itertools.count()
        for batch in self._batches:
            yield self._mine([(index, next(draw)) for index in batch])

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]
