"""Nine faults that people have complained of in other image services, by number; none of them is ours."""

import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFile

from serving.errors import BadImage
from serving.model.preprocess import MAX_BYTES
from tests.pictures import cmyk, encoded, far, picture, png_header, rgb, run


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WebP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_1_exif_orientation_is_applied(format: str, orientation: int) -> None:
    upright = picture()
    flips = [upright, upright[:, ::-1], upright[::-1, ::-1], upright[::-1]]
    flipped = flips[(orientation - 1) % 4]
    stored = flipped.transpose(1, 0, 2) if orientation > 4 else flipped
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if format == "WebP" else {} if format == "TIFF" else {"quality": 100}
    data = encoded(np.ascontiguousarray(stored), format, exif=exif, **options)
    assert far(rgb(data), upright) <= 8


@pytest.mark.parametrize("value", [0, 9, 65_535])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])
def test_2_invalid_exif_orientation_counts_as_upright(value: int, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    assert rgb(encoded(picture(), format, exif=exif)).shape == (32, 48, 3)


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


@pytest.mark.parametrize("order", ["<", ">"])
def test_4_both_byte_orders_of_16_bit_grey(order: str) -> None:
    """A TIFF of one 4 x 1 strip, written by hand: Pillow writes the order of the machine only."""
    mark = b"II" if order == "<" else b"MM"
    shorts = {256: 4, 257: 1, 258: 16, 259: 1, 262: 1, 278: 1}  # width, height, bits, and so on
    longs = {273: 8, 279: 8}  # where the strip begins, and its length
    fields = [(tag, struct.pack(f"{order}HHIHH", tag, 3, 1, value, 0)) for tag, value in shorts.items()]
    fields += [(tag, struct.pack(f"{order}HHII", tag, 4, 1, value)) for tag, value in longs.items()]
    strip = np.array([0, 257, 25_700, 65_535], f"{order}u2").tobytes()
    entries = struct.pack(f"{order}H", len(fields)) + b"".join(field for _, field in sorted(fields))
    data = mark + struct.pack(f"{order}HI", 42, 16) + strip + entries + b"\0" * 4
    assert rgb(data)[0, :, 0].tolist() == [0, 1, 100, 255]


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


def test_6_progressive_jpeg_of_many_scans_is_refused() -> None:
    data = encoded(picture(), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    with pytest.raises(BadImage, match=r"has 5\d\d scans; it must have at most 100"):
        run(data[:-2] + data[last:-2] * 500 + data[-2:])
    assert run(data + b"\xff\xda" * 500).any()  # what follows the image is not counted, such as a film


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WebP", "AVIF"])
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


@pytest.mark.parametrize(("width", "height"), [(1, 1), (2, 1), (1, 20_000), (20_000, 1), (1, 65_535)])
def test_9_extreme_shapes_work(width: int, height: int) -> None:
    assert (run(encoded(np.full((height, width, 3), 77, np.uint8))) == 77).all()
