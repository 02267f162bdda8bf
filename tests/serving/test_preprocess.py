"""Image bytes to pixels and thumbnails: every colour mode right, no fault of others, any bytes survived."""

import contextlib
import io
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from serving.errors import BadImage, BadSetting
from serving.gallery.item import MAX_THUMBNAIL_BYTES
from serving.model.preprocess import FORMATS, RESAMPLINGS, open_rgb, preprocess, thumbnail
from tests.pictures import chunk, cmyk, encoded, far, picture, rgb, run

SETTINGS: dict[str, Any] = {"size": 8, "crop_fraction": 0.875, "resampling": "bicubic"}


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_read(format: str) -> None:
    options = (
        {"quality": 100} if format in ("JPEG", "AVIF") else {"lossless": True} if format == "WebP" else {}
    )
    assert far(rgb(encoded(picture(), format, **options)), picture()) <= (25 if format == "GIF" else 8)


@pytest.mark.parametrize(("width", "height"), [(48, 32), (32, 48), (34, 34)])
@pytest.mark.parametrize("resampling", RESAMPLINGS)
def test_one_step_equals_resize_then_crop(width: int, height: int, resampling: str) -> None:
    """Sizes are such that the two-step rule rounds nothing: shorter side x 2, crop half of it."""
    side = min(width, height)
    one = preprocess(encoded(picture(width, height)), size=side, crop_fraction=0.5, resampling=resampling)
    filter = Image.Resampling[resampling.upper()]
    large = Image.fromarray(picture(width, height)).resize((2 * width, 2 * height), filter)
    left, top = width - side // 2, height - side // 2
    assert far(one, np.asarray(large.crop((left, top, left + side, top + side)))) <= 1


def test_whole_square_at_its_own_size_is_unchanged() -> None:
    pixels = preprocess(encoded(picture(16, 16)), size=16, crop_fraction=1.0, resampling="bicubic")
    np.testing.assert_array_equal(pixels, picture(16, 16))


@pytest.mark.parametrize("least", [10, 50, 64, 65, 100, 127, 1000])
def test_large_jpeg_is_never_decoded_below_the_need(least: int) -> None:
    data = encoded(picture(600, 401), "JPEG")
    assert min(open_rgb(data, least=least).size) >= min(least, 401)


def test_large_jpeg_is_decoded_small_and_looks_the_same() -> None:
    data = encoded(picture(2048, 1536), "JPEG", quality=95)
    assert open_rgb(data, least=64).size == (256, 192)
    small = preprocess(data, size=56, crop_fraction=0.875, resampling="bicubic")
    whole = preprocess(encoded(rgb(data)), size=56, crop_fraction=0.875, resampling="bicubic")
    assert far(small, whole) <= 3


@pytest.mark.parametrize("wrong", [{"size": 0}, {"crop_fraction": float("nan")}, {"resampling": "cubic"}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadSetting, match="give at least 1, a number in"):
        preprocess(encoded(picture()), **SETTINGS | wrong)


def test_alpha_is_laid_over_white() -> None:
    rgba = np.array([[[0, 0, 0, 0], [0, 0, 0, 255], [200, 100, 0, 51]]], np.uint8)
    expected = [[255, 255, 255], [0, 0, 0], [244, 224, 204]]
    assert far(rgb(encoded(rgba)), np.array([expected], np.uint8)) <= 1
    grey = Image.merge("LA", [Image.fromarray(rgba[..., 0]), Image.fromarray(rgba[..., 3])])
    assert rgb(encoded(grey))[0, :, 0].tolist() == [255, 0, 244]


def test_palette_with_and_without_transparency() -> None:
    palette = Image.new("P", (3, 1))
    palette.putdata([0, 1, 2])
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    assert rgb(encoded(palette)).tolist() == [[[255, 0, 0], [0, 255, 0], [0, 0, 255]]]
    for transparency, format in ((1, "PNG"), (bytes([255, 0, 255]), "PNG"), (1, "GIF")):
        pixels = rgb(encoded(palette, format, transparency=transparency))
        assert pixels.tolist() == [[[255, 0, 0], [255, 255, 255], [0, 0, 255]]]


def test_key_colour_is_transparent_in_grey_and_rgb() -> None:
    grey = Image.fromarray(np.array([[0, 100, 200]], np.uint8))
    assert rgb(encoded(grey, transparency=100))[0, :, 0].tolist() == [0, 255, 200]
    deep = Image.fromarray(np.array([[0, 25_700, 65_535]], np.uint16))
    assert rgb(encoded(deep, transparency=25_700))[0, :, 0].tolist() == [0, 255, 255]
    colour = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    assert rgb(encoded(colour, transparency=(1, 2, 3))).tolist() == [[[255, 255, 255], [4, 5, 6]]]


def test_one_bit_is_black_and_white() -> None:
    bits = Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1")
    for format in ("PNG", "TIFF", "BMP", "GIF"):
        assert rgb(encoded(bits, format)).tolist() == [[[0, 0, 0], [255, 255, 255]]], format


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


@pytest.mark.parametrize("data", [b"a text file named .jpg\n", b"\0" * 100, b"%PDF-1.7", b"8BPS\0\1"])
def test_what_is_no_image_is_named(data: bytes) -> None:
    with pytest.raises(BadImage, match=rf"the {len(data)} bytes, beginning .* give JPEG, PNG, .* or AVIF"):
        run(data)


def test_other_formats_that_pillow_knows_are_not_read() -> None:
    for format in ("PPM", "TGA", "ICO", "PCX", "JPEG2000"):
        with pytest.raises(BadImage):
            run(encoded(Image.new("RGB", (16, 16)), format))


def test_memory_that_runs_out_is_a_bad_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: ImageFile.ImageFile) -> None:
        raise MemoryError

    data = encoded(picture())
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(BadImage, match="PNG image cannot be decoded: it needs more memory than there is"):
        run(data)


def test_filter_for_pillow_goes_in_once() -> None:
    run(encoded(picture()))
    before = len(warnings.filters)
    run(encoded(picture()))
    assert len(warnings.filters) == before
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn("ours", stacklevel=1)


_EXIF = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
_SEEDS = {
    "JPEG": encoded(picture(), "JPEG", exif=_EXIF),
    "progressive JPEG": encoded(picture(), "JPEG", progressive=True),
    "CMYK JPEG": encoded(cmyk(picture()), "JPEG"),
    "PNG": encoded(picture()),
    "palette PNG": encoded(Image.fromarray(picture()).quantize(8), transparency=0),
    "16-bit PNG": encoded(Image.fromarray(picture()[..., 0].astype(np.uint16) * 257)),
    "GIF": encoded(picture(), "GIF"),
    "WebP": encoded(picture(), "WebP"),
    "TIFF": encoded(picture(), "TIFF", compression="tiff_lzw"),
    "BMP": encoded(picture(), "BMP"),
    "AVIF": encoded(picture(), "AVIF"),
}


def _survives(data: bytes) -> None:
    """Either pixels or `BadImage`; a warning is an error here, and the time limit of a test stops a hang."""
    with contextlib.suppress(BadImage):
        run(data)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(_SEEDS)),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=4)), max_size=6),
    st.floats(0, 1),
    st.binary(max_size=8),
)
@example("PNG", [], 1.0, b"")
def test_mutations_give_pixels_or_bad_image(
    name: str, edits: list[tuple[float, bytes]], keep: float, tail: bytes
) -> None:
    data = bytearray(_SEEDS[name])
    for place, patch in edits:
        at = int(place * len(data))
        data[at : at + len(patch)] = patch
    _survives(bytes(data[: int(len(data) * max(keep, 0.3))]) + tail)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.binary(min_size=1, max_size=2)), min_size=1, max_size=4))
def test_png_with_mutated_header_and_right_checksums(edits: list[tuple[int, bytes]]) -> None:
    """A checksum guards a PNG's header, so blind changes rarely get past it."""
    header = bytearray(_SEEDS["PNG"][16:29])
    for at, patch in edits:
        header[at : at + len(patch)] = patch
    _survives(_SEEDS["PNG"][:8] + chunk(b"IHDR", bytes(header[:13])) + _SEEDS["PNG"][33:])
