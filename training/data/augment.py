"""Augmented training images: each draw is S x S pixels decided by its number alone, in any process."""

import threading

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode, v2

from training.data.pictures import Pictures, QuarterTurns
from training.recipes.recipe import Recipe

__all__ = ["Augmentation", "TrainingSet"]

_MEAN_COLOUR = [124, 116, 104]  # of ImageNet's pixels, RGB: 0 once a network has normalised it
_DRAWING = threading.Lock()  # torchvision draws from the one generator that all threads share


class Augmentation:
    """Random crops, flips, affine maps, colours and erasing as the recipe has them, torchvision's own."""

    def __init__(self, recipe: Recipe) -> None:
        size, resampling = recipe.image_size, InterpolationMode(recipe.resampling)
        steps: list[v2.Transform] = []
        if recipe.rotation or recipe.translation or recipe.zoom or recipe.shear:
            affine = v2.RandomAffine(
                recipe.rotation,
                translate=(recipe.translation, recipe.translation),
                scale=(1 - recipe.zoom, 1 + recipe.zoom),
                shear=recipe.shear or None,
                interpolation=InterpolationMode.BILINEAR,  # affine maps know no lanczos
                fill=recipe.fill,
            )
            steps.append(affine)
        if recipe.crop_scale < 1:
            scale, ratio = (recipe.crop_scale, 1.0), (1 / recipe.crop_ratio, recipe.crop_ratio)
            steps.append(v2.RandomResizedCrop(size, scale=scale, ratio=ratio, interpolation=resampling))
        else:  # as the model is used, but for the place of the crop
            steps.append(v2.Resize(round(size / recipe.crop_fraction), interpolation=resampling))
            steps.append(v2.RandomCrop(size))
        if recipe.flip:
            steps.append(v2.RandomHorizontalFlip(recipe.flip))
        if recipe.jitter:
            steps.append(v2.ColorJitter(recipe.jitter, recipe.jitter, recipe.jitter))
        if recipe.erasing:
            steps += [v2.PILToTensor(), v2.RandomErasing(recipe.erasing, value=_MEAN_COLOUR), v2.ToPILImage()]
        self._steps = v2.Compose(steps)

    def __call__(self, image: NDArray[np.uint8], seed: int) -> NDArray[np.uint8]:
        """Draw one view, uint8 (S, S, 3), of `image`, uint8 (H, W, 3); the same for the same seed."""
        with _DRAWING, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds all devices: 25 times slower
            return np.asarray(self._steps(Image.fromarray(image)))


class TrainingSet(Dataset[tuple[Tensor, int]]):
    """Augmented draws of `pictures`; asked for as (image number, number of the draw in the epoch)."""

    def __init__(
        self, pictures: Pictures | QuarterTurns, augmentation: Augmentation, *, seed: int, epoch: int
    ) -> None:
        self._pictures, self._augmentation, self._entropy = pictures, augmentation, (seed, epoch)

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int]:
        """Give uint8 (S, S, 3) and the class number."""
        index, draw = item
        seed = int(np.random.SeedSequence((*self._entropy, draw)).generate_state(1)[0])
        view = self._augmentation(self._pictures[index], seed)
        return torch.from_numpy(view.copy()), int(self._pictures.labels[index])
