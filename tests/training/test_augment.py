"""Augmented draws: each depends on its own seed, wherever it is made."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch

from serving.catalog.catalog import read
from tests.serving.test_parquet import make_parquet
from tests.serving.test_webdataset import make_tar
from training.data.augment import Augmentation, TrainingSet
from training.data.pictures import Pictures, training_decoder
from training.recipes.recipe import Recipe

RECIPE = Recipe(image_size=16, classes_per_batch=2, images_per_class=2)


def test_a_draw_depends_on_its_seed_alone_in_any_thread() -> None:
    image = np.random.default_rng(0).integers(0, 256, (24, 30, 3), dtype=np.uint8)
    recipe = Recipe(
        image_size=16, crop_scale=0.4, flip=0.5, jitter=0.3, rotation=10, translation=0.1, zoom=0.1, shear=5
    )
    augmentation = Augmentation(recipe)
    torch.manual_seed(3)
    expected = [augmentation(image, seed) for seed in range(100)]
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))  # nothing was taken from the global generator
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda seed: augmentation(image, seed), range(100)))
    np.testing.assert_array_equal(found, expected)
    assert found[0].dtype == np.uint8
    assert len({view.tobytes() for view in found}) == 100


def test_erasing_paints_a_part_in_the_mean_colour() -> None:
    white = np.full((20, 20, 3), 255, np.uint8)
    erased = Augmentation(Recipe(image_size=20, erasing=1))(white, 0)
    colours = {tuple(pixel) for pixel in erased.reshape(-1, 3).tolist()}
    assert colours == {(255, 255, 255), (124, 116, 104)}


def test_an_image_drawn_twice_is_augmented_twice(root: Path) -> None:
    pictures = Pictures(read(root).rows, training_decoder(RECIPE), keep=inf, label="Reading")
    recipe = RECIPE.model_copy(update={"crop_scale": 0.3})
    views = TrainingSet(pictures, Augmentation(recipe), seed=0, epoch=0)
    image, label = views[(4, 0)]
    assert (image.shape, label) == ((16, 16, 3), 1)
    assert torch.equal(image, views[(4, 0)][0])
    assert not torch.equal(image, views[(4, 1)][0])
    assert not torch.equal(image, TrainingSet(pictures, Augmentation(recipe), seed=0, epoch=1)[(4, 0)][0])


@pytest.mark.parametrize("form", ["folder", "webdataset", "parquet"])
def test_a_training_set_can_be_handed_to_a_process(root: Path, form: str) -> None:
    images = [(row.key.partition(".")[0], row.image.read_bytes()) for row in read(root).rows]
    if form == "webdataset":
        root = make_tar(root / "a.tar", {f"{key}.png": data for key, data in images})
    elif form == "parquet":
        root = make_parquet(root / "a.parquet", image=[data for _, data in images])
    rows = read(root).rows
    assert [row.image.read_bytes() for row in rows] == [data for _, data in images]
    pictures = Pictures(rows, training_decoder(RECIPE), keep=0, label="Reading")
    views = TrainingSet(pictures, Augmentation(RECIPE), seed=0, epoch=0)
    copy = pickle.loads(pickle.dumps(views))
    assert torch.equal(copy[(4, 0)][0], views[(4, 0)][0])
