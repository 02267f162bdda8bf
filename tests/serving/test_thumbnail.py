"""Image bytes to thumbnails: bounded, upright, in shape, without metadata."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from serving.errors import BadImage, BadSetting
from serving.gallery.item import MAX_THUMBNAIL_BYTES
from serving.model.preprocess import thumbnail
from tests.pictures import encoded, far, picture


def made(data: bytes, side: int = 256, most_bytes: int = MAX_THUMBNAIL_BYTES) -> Image.Image:
    found = thumbnail(data, side=side, most_bytes=most_bytes)
    assert len(found) <= most_bytes
    image = Image.open(io.BytesIO(found))
    assert (image.format, image.mode) == ("JPEG", "RGB")
    return image


@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 700), height=st.integers(1, 700), side=st.integers(1, 300))
def test_a_thumbnail_is_bounded_keeps_its_shape_and_is_never_enlarged(
    width: int, height: int, side: int
) -> None:
    found = made(encoded(picture(width, height)), side)
    scale = min(1.0, side / max(width, height))
    assert max(found.size) == min(side, max(width, height))
    assert max(abs(found.width - width * scale), abs(found.height - height * scale)) <= 1


def test_a_thumbnail_shows_the_whole_picture_upright() -> None:
    upright = picture(400, 300)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(np.rot90(upright), "JPEG", exif=exif, quality=95)
    found = made(turned, 200)
    assert found.size == (200, 150)
    assert far(np.asarray(found), np.asarray(Image.fromarray(upright).resize((200, 150)))) < 16


def test_the_quality_of_a_thumbnail_is_lowered_until_it_fits() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    for most in (MAX_THUMBNAIL_BYTES, 40_000, 8_000):
        assert made(encoded(noise), most_bytes=most).size == (256, 256)
    with pytest.raises(BadImage, match="no thumbnail of 256 x 256 pixels fits into 100 bytes"):
        thumbnail(encoded(noise), side=256, most_bytes=100)
    with pytest.raises(BadSetting, match="0 pixels"):
        thumbnail(encoded(noise), side=0, most_bytes=100)


def test_a_thumbnail_has_nothing_of_the_files_metadata() -> None:
    exif = Image.Exif()
    exif[0x010E] = "alice's garden"
    data = encoded(picture(), "JPEG", exif=exif, comment=b"alice was here", dpi=(72, 72))
    assert data.count(b"alice") == 2
    assert b"alice" not in thumbnail(data, side=32, most_bytes=MAX_THUMBNAIL_BYTES)
