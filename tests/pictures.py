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


def cmyk(rgb: Pixels) -> Image.Image:
    return Image.fromarray(rgb).convert("CMYK")
