"""Augmentation: a training image to the S x S pixels of one draw, decided by that draw's seed alone."""

import threading

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from training.recipes.recipe import Recipe

__all__ = ["Augmentation"]


_MEAN_COLOUR = [124, 116, 104]
"""Of ImageNet's pixels, RGB: what is 0 once a network has normalised it."""
_DRAWING = threading.Lock()
"""Torchvision draws from the one generator that all threads share."""


class Augmentation:
    """Random crops, flips, affine maps, colours and erasing as the recipe has them, torchvision's own."""

    def __init__(self, recipe: Recipe) -> None:
        size = recipe.image_size
        resampling = InterpolationMode(recipe.resampling)
        steps: list[v2.Transform] = []
        if recipe.rotation or recipe.translation or recipe.zoom or recipe.shear:
            steps.append(
                v2.RandomAffine(
                    recipe.rotation,
                    translate=(recipe.translation, recipe.translation),
                    scale=(1 - recipe.zoom, 1 + recipe.zoom),
                    shear=recipe.shear or None,
                    interpolation=InterpolationMode.BILINEAR,  # affine maps know no lanczos
                    fill=recipe.fill,
                )
            )
        if recipe.crop_scale < 1:
            ratio = recipe.crop_ratio
            steps.append(
                v2.RandomResizedCrop(
                    size, scale=(recipe.crop_scale, 1.0), ratio=(1 / ratio, ratio), interpolation=resampling
                )
            )
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
        """Draw one view of `image`, uint8 (H, W, 3).

        Returns:
            uint8 (S, S, 3); the same for the same seed, whatever was drawn before, in any process and thread.
        """
        with _DRAWING, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds all devices: 25 times slower
            return np.asarray(self._steps(Image.fromarray(image)))
