"""Pictures as arrays and as files, for the tests of what reads them."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from serving.model.preprocess import open_rgb, preprocess

Pixels = NDArray[np.uint8]


def picture(width: int = 48, height: int = 32) -> Pixels:
    """A smooth picture whose four corners all differ: uint8 (H, W, 3)."""
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    return (np.stack([x, y, (x + 2 * y) / 3], axis=-1) * 255).astype(np.uint8)


def encoded(image: Image.Image | Pixels, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, format, **options)
    return buffer.getvalue()


def rgb(data: bytes) -> Pixels:
    image = open_rgb(data)
    assert image.mode == "RGB"
    return np.asarray(image)


def run(data: bytes, size: int = 16) -> Pixels:
    pixels = preprocess(data, size=size, crop_fraction=0.875, resampling="bicubic")
    assert pixels.shape == (size, size, 3)
    assert pixels.dtype == np.uint8
    return pixels


def far(one: Pixels, other: Pixels) -> int:
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_header(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 64))
        + chunk(b"IEND", b"")
    )


def png(width: int, depth: int, colour: int, row: bytes, key: bytes) -> bytes:
    """A PNG of one row, written by hand, with a transparent colour: Pillow writes few depths."""
    header = struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0)
    chunks = (b"IHDR", header), (b"tRNS", key), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, body) for kind, body in chunks)


def tiff(
    kind: str, values: list[Any] | bytes, *, bits: int = 0, colour: int = 1, deflate: bool = False
) -> bytes:
    """A TIFF of one row in one strip, written by hand: Pillow writes few kinds, in the machine's order.

    `kind` is a NumPy type with its byte order, such as ">i2"; packed values are given as bytes.
    """
    order, samples = kind[0], values if isinstance(values, bytes) else np.array(values, kind).tobytes()
    bits = bits or 8 * int(kind[2:])
    strip = zlib.compress(samples) if deflate else samples
    shorts = {256: 8 * len(samples) // bits, 257: 1, 258: bits, 259: 8 if deflate else 1, 262: colour, 278: 1}
    shorts[339] = "uif".index(kind[1]) + 1
    longs = {273: 8, 279: len(strip)}  # where the strip begins, and its length
    fields = [(tag, struct.pack(f"{order}HHIHH", tag, 3, 1, value, 0)) for tag, value in shorts.items()]
    fields += [(tag, struct.pack(f"{order}HHII", tag, 4, 1, value)) for tag, value in longs.items()]
    entries = struct.pack(f"{order}H", len(fields)) + b"".join(field for _, field in sorted(fields))
    start = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8 + len(strip))
    return start + strip + entries + b"\0" * 4


def cmyk(rgb: Pixels) -> Image.Image:
    return Image.fromarray(rgb).convert("CMYK")
