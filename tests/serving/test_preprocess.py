"""Image bytes to pixels: nine numbered faults of other services, colour modes, any bytes."""

import contextlib
import struct
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngInfo

from serving.errors import BadImage, BadSetting
from serving.model.preprocess import FORMATS, MAX_BYTES, RESAMPLINGS, open_rgb, preprocess
from tests.pictures import chunk, cmyk, encoded, far, picture, png, png_header, rgb, run, tiff

SETTINGS: dict[str, Any] = {"size": 8, "crop_fraction": 0.875, "resampling": "bicubic"}


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_read(format: str) -> None:
    options = {"lossless": True} if format == "WebP" else {"quality": 100}
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
    for depth, row, shown in ((1, 0x40, [0, 255, 0]), (2, 0x1B, [0, 255, 170]), (4, 2, [0, 34, 255])):
        assert rgb(png(3, 1, depth, 0, bytes([row, 0x10]), b"\0\1"))[0, :, 0].tolist() == shown
    fine = struct.pack(">9H", 1000, 2000, 3000, 1001, 2000, 3000, 65_535, 0, 0)
    assert rgb(png(3, 1, 16, 2, fine, fine[:6])).tolist() == [[[255, 255, 255], [3, 7, 11], [255, 0, 0]]]


def test_one_bit_is_black_and_white() -> None:
    bits = Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1")
    for format in ("PNG", "TIFF", "BMP", "GIF"):
        assert rgb(encoded(bits, format)).tolist() == [[[0, 0, 0], [255, 255, 255]]], format


@pytest.mark.parametrize("data", [b"a text file named .jpg\n", b"\0" * 100, b"%PDF-1.7", b"8BPS\0\1"])
def test_what_is_no_image_is_named(data: bytes) -> None:
    with pytest.raises(BadImage, match=rf"the {len(data)} bytes, beginning .* give JPEG, PNG, .* or \w+IF"):
        run(data)


def test_heic_without_its_reader_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.model.preprocess.FORMATS", FORMATS[:7])
    for brand in (b"heic", b"hevx", b"mif1"):
        with pytest.raises(BadImage, match=r"needs pillow-heif; install crossbatch\[heic\]"):
            run(b"\0\0\0\x18ftyp" + brand + bytes(12))


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
    **{format: encoded(picture(), format) for format in FORMATS[7:]},
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


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WebP", "TIFF", "AVIF", *FORMATS[7:]])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_1_exif_orientation_is_applied(format: str, orientation: int) -> None:
    upright = picture()
    flips = [upright, upright[:, ::-1], upright[::-1, ::-1], upright[::-1]]
    flipped = flips[(orientation - 1) % 4]
    stored = flipped.transpose(1, 0, 2) if orientation > 4 else flipped
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if format == "WebP" else {} if format == "TIFF" else {"quality": 100}
    data = encoded(np.ascontiguousarray(stored), format, exif=exif.tobytes(), **options)
    assert far(rgb(data), upright) <= 8


@pytest.mark.parametrize("value", [0, 9, 65_535])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])
def test_2_invalid_exif_orientation_counts_as_upright(value: int, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    assert rgb(encoded(picture(), format, exif=exif)).shape == (32, 48, 3)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WebP", "TIFF", "AVIF", *FORMATS[7:]])
def test_2_an_orientation_in_xmp_turns_nothing(format: str) -> None:
    xmp, upright = (b'<rdf:Description tiff:Orientation="%d"/>' % value for value in (6, 1))
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp.decode())
    options: Any = {"PNG": {"pnginfo": text}, "TIFF": {"tiffinfo": {700: xmp}}}.get(format, {"xmp": upright})
    for exif in (Image.Exif().tobytes(), _EXIF.replace(b"\x12\1", b"\x0f\1")):  # without an orientation
        data = encoded(picture(), format, exif=exif, **options).replace(upright, xmp)
        assert xmp in data
        assert rgb(data).shape == (32, 48, 3)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_3_16_bit_grey_is_scaled_not_clipped(format: str) -> None:
    ramp = np.linspace(0, 65_535, 256).astype(np.uint16)[None]
    np.testing.assert_array_equal(rgb(encoded(Image.fromarray(ramp), format))[0, :, 1], np.arange(256))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 65_535]], np.int32), [0, 255]),  # I, of 16-bit range
        (np.array([[-7, 93, 193]], np.int32), [0, 128, 255]),  # I, of a range of its own
        (np.array([[0, 1 << 30]], np.int32), [0, 255]),
        (np.array([[0.0, 0.5, 1.0]], np.float32), [0, 128, 255]),  # F
        (np.array([[0.0, 7.0, 200.0]], np.float32), [0, 7, 200]),
        (np.array([[0.0, 65_535.0]], np.float32), [0, 255]),
        (np.array([[-1.0, 1.0]], np.float32), [0, 255]),
        (np.array([[np.nan, 0.5, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[-3e38, 3e38, np.inf]], np.float32), [0, 255, 255]),
        (np.array([[-5.0, -5.0]], np.float32), [0, 0]),
        (np.array([[np.nan, np.nan]], np.float32), [0, 0]),
    ],
)
def test_3_32_bit_grey_is_scaled_by_its_range(values: NDArray[Any], expected: list[int]) -> None:
    assert rgb(encoded(Image.fromarray(values), "TIFF"))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("deflate", [False, True])
@pytest.mark.parametrize(
    ("kind", "values", "more", "expected"),
    [
        ("<u2", [0, 257, 25_700, 65_535], {}, [0, 1, 100, 255]),
        (">u2", [0, 257, 25_700, 65_535], {}, [0, 1, 100, 255]),
        ("<u2", [0, 25_700, 65_535], {"colour": 0}, [255, 155, 0]),
        ("<u2", bytes([0x00, 0x08, 0x08, 0xFF, 0xF0, 0x10]), {"bits": 12}, [0, 128, 255, 1]),
        ("<i1", [-128, 0, 127], {}, [0, 128, 255]),
        (">i2", [-7, 93, 193], {}, [0, 128, 255]),
        (">i2", [0, 16_448, 32_767], {}, [0, 128, 255]),
        ("<u4", [0, 7, 255], {}, [0, 7, 255]),
        ("<u4", [0, 1 << 31, (1 << 32) - 1], {}, [0, 128, 255]),
        (">i4", [0, 25_700, 65_535], {}, [0, 100, 255]),
        (">f4", [0, 0.5, 1], {}, [0, 128, 255]),
        (">f4", [0, 7, 255], {"colour": 0}, [255, 248, 0]),
    ],
)
def test_4_grey_tiffs_of_every_type_and_byte_order(
    kind: str, values: Any, more: dict[str, int], expected: list[int], deflate: bool
) -> None:
    assert rgb(tiff(kind, values, **more, deflate=deflate))[0, :, 0].tolist() == expected


def test_4_a_tiff_that_cannot_be_read_is_named_by_its_kind() -> None:
    for kind, colour, named in (
        (">u2", 0, "big-endian TIFF of 16-bit unsigned white-is-zero grey"),
        ("<i4", 9, "little-endian TIFF of 32-bit signed pixels"),
        ("<f8", 1, "little-endian TIFF of 64-bit float grey"),
    ):
        with pytest.raises(BadImage, match=f"is a {named}, which cannot be read; save it with 8 bits"):
            rgb(tiff(kind, [0, 0, 0], colour=colour))


def test_5_cmyk_jpeg_is_not_inverted() -> None:
    data = encoded(cmyk(picture()), "JPEG", quality=100, subsampling=0)
    at = data.index(b"\xff\xee")  # the marker of Adobe, which some files lack
    bare = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]
    assert b"Adobe" not in bare
    assert max(far(rgb(data), picture()), far(rgb(bare), picture())) <= 8


def test_5_ycck_jpeg_is_not_inverted() -> None:
    """With transform 2 the first three planes are the YCbCr of the inks, and K is stored inverted."""
    inks = np.asarray(Image.fromarray(255 - picture()).convert("YCbCr"))
    planes = [255 - inks[..., i] for i in range(3)] + [np.zeros_like(inks[..., 0])]  # Pillow inverts all four
    image = Image.merge("CMYK", [Image.fromarray(plane) for plane in planes])
    data = encoded(image, "JPEG", quality=100, subsampling=0)
    at = data.index(b"Adobe") + 11
    assert data[at] == 0
    assert far(rgb(data[:at] + b"\x02" + data[at + 1 :]), picture()) <= 8


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png_header(80_000, 80_000), r"too many pixels; it must have at most 67,108,864"),
        (png_header(10_000, 10_000), r"10,000 x 10,000 pixels, 100,000,000 in all; .* at most 67,108,864"),
        (png_header(1, 70_000), r"1 x 70,000 pixels, .* and 65,535 on a side"),
        (b"\xff" * (MAX_BYTES + 1), r"has 33,554,433 bytes; it must have between 1 and 33,554,432"),
        (b"", r"has 0 bytes"),
    ],
)
def test_6_bytes_and_pixels_are_bounded(data: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: ImageFile.ImageFile) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(BadImage, match=message):
        run(data)


@pytest.mark.parametrize("comment", [b"x", b"xy"])  # so that scans begin at even and at odd places
def test_6_progressive_jpeg_of_many_scans_is_refused(comment: bytes) -> None:
    data = encoded(picture(), "JPEG", progressive=True, comment=comment)
    last = data.rindex(b"\xff\xda")
    with pytest.raises(BadImage, match=r"has 5\d\d scans; it must have at most 100"):
        run(data[:-2] + data[last:-2] * 500 + data[-2:])
    assert run(data + b"\xff\xda" * 500).any()  # what follows the image is not counted, such as a film


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_7_truncated_image_is_refused_at_once(format: str, share: float) -> None:
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    data = encoded(picture(300, 200), format)
    with pytest.raises(BadImage):
        run(data[: int(len(data) * share)])


def test_8_only_the_first_frame_of_an_animation_counts() -> None:
    frames = [Image.new("RGB", (12, 12), colour) for colour in ("red", "blue", "lime")]
    for format in ("GIF", "PNG", "WebP", "TIFF", "AVIF"):
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
        assert far(rgb(data), np.asarray(frames[0])) <= 8, format


@pytest.mark.parametrize("key", [b"", b"\x21\xf9\4\1\0\0\3\0"])
def test_8_around_a_first_frame_that_is_smaller_than_its_canvas_is_white(key: bytes) -> None:
    gif = encoded(Image.new("RGB", (2, 2), "red"), "GIF")
    frame, still = gif.index(b",\0\0\0\0"), encoded(Image.new("RGB", (2, 2), "red"), "WebP", lossless=True)
    gif = gif[:6] + b"\4\0\4\0" + gif[10:frame] + key + b",\2\0\2\0" + gif[frame + 5 :]
    head = b"VP8X\n\0\0\0\2\0\0\0\3\0\0\3\0\0" + b"ANIM\6\0\0\0\xff\0\0\xff\0\0"
    body = b"\1\0\0\1\0\0\1\0\0\1\0\0\x09\0\0\0" + still[12:]
    webp = b"WEBP" + head + (b"ANMF" + struct.pack("<I", len(body)) + body) * 2
    for data in (gif, b"RIFF" + struct.pack("<I", len(webp)) + webp):
        expected = np.full((4, 4, 3), 255, np.uint8)
        expected[2:, 2:, 1:] = 0
        np.testing.assert_array_equal(rgb(data), expected)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (2, 1), (1, 20_000), (20_000, 1), (1, 65_535)])
def test_9_extreme_shapes_work(width: int, height: int) -> None:
    assert (run(encoded(np.full((height, width, 3), 77, np.uint8))) == 77).all()
