"""Images inside the page: small JPEGs as data URIs."""

import base64
import functools
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from serving.catalog.catalog import Row
from serving.model.preprocess import preprocess
from training.data.pictures import Stream
from training.recipes.recipe import Recipe
from training.report.markup import Markup, element

__all__ = ["picture", "thumbnails"]

_QUALITY = 80


def thumbnails(rows: Sequence[Row], recipe: Recipe, *, side: int) -> dict[str, str]:
    """Show what the model sees of each image: its centre crop, but `side` pixels a side.

    Returns:
        Data URIs by key; an image that can no longer be read has none.
    """
    decode = functools.partial(
        preprocess, size=side, crop_fraction=recipe.crop_fraction, resampling="lanczos"
    )
    stream = Stream(rows, decode)
    made = [_data_uri(pixels) for pixels in stream]
    return {row.key: uri for row, uri in zip(stream.rows, made, strict=True)}


def picture(uri: str | None, alt: str, side: int) -> Markup:
    """Show an image, or say that it cannot be shown."""
    if uri is None:
        return element("div", f"{alt}: can no longer be read", class_="gone")
    return element("img", src=uri, alt=alt, width=side, height=side)


def _data_uri(pixels: NDArray[np.uint8]) -> str:
    """Encode pixels, uint8 (S, S, 3)."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=_QUALITY, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
