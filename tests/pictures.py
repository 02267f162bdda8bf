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
    return png(width, height, 8, 2, bytes(63))


def png(width: int, height: int, depth: int, colour: int, row: bytes, key: bytes = b"") -> bytes:
    """A PNG with a transparent colour, written by hand: Pillow writes few depths."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = (b"IHDR", header), (b"tRNS", key), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*named) for named in chunks if named != (b"tRNS", b""))


def tiff(kind: str, values: Any, *, bits: int = 0, colour: int = 1, deflate: bool = False) -> bytes:
    """A TIFF of one row, written by hand: `kind` is a NumPy type such as ">i2"; packed values are bytes."""
    samples, bits = np.array(values, kind).tobytes() if bits == 0 else values, bits or 8 * int(kind[2:])
    strip = zlib.compress(samples) if deflate else samples
    tags = {256: 8 * len(samples) // bits, 257: 1, 258: bits, 259: 8 if deflate else 1, 262: colour}
    tags |= {273: 8, 278: 1, 279: len(strip), 339: "uif".index(kind[1]) + 1}  # the strip begins at 8
    start = {"<": b"II*\0", ">": b"MM\0*"}[kind[0]] + struct.pack(f"{kind[0]}I", 8 + len(strip))
    fields = [struct.pack(f"{kind[0]}HHII", tag, 4, 1, value) for tag, value in tags.items()]
    return start + strip + struct.pack(f"{kind[0]}H", len(fields)) + b"".join(fields) + b"\0" * 4


def cmyk(rgb: Pixels) -> Image.Image:
    return Image.fromarray(rgb).convert("CMYK")
