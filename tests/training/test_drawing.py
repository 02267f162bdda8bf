"""The drawn catalogue: distinct products, repeatable pictures, nuisance that varies."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from training.data.drawing import Product, draw_catalogue, draw_product, products


def test_every_part_of_the_unseen_half_is_seen_in_the_other() -> None:
    chosen = products(200)
    assert len(set(chosen)) == 200
    for seen, unseen in zip(zip(*chosen[:100], strict=True), zip(*chosen[100:], strict=True), strict=True):
        assert set(unseen) <= set(seen)


@pytest.mark.parametrize("product", products(20, seed=1), ids="-".join)
def test_two_pictures_of_a_product_differ_and_fill_the_frame(product: Product) -> None:
    rng = np.random.default_rng(0)
    one, two = (np.asarray(draw_product(product, rng)) for _ in range(2))
    assert one.shape == two.shape == (64, 64, 3)
    assert one.std() > 5
    assert np.abs(one.astype(int) - two).mean() > 5


def test_a_catalogue_has_a_folder_for_each_product(tmp_path: Path) -> None:
    chosen = draw_catalogue(tmp_path, classes=3, images=2, size=16, seed=5)
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == [f"{i:04d}-{'-'.join(product)}" for i, product in enumerate(chosen)]
    pictures = sorted(tmp_path.rglob("*.jpg"))
    assert len(pictures) == 6
    first = [path.read_bytes() for path in pictures]
    draw_catalogue(tmp_path, classes=3, images=2, size=16, seed=5)
    assert first == [path.read_bytes() for path in pictures]
    with Image.open(pictures[0]) as picture:
        assert picture.size == (16, 16)
