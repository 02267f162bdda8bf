"""Small pictures of every format and of its unusual kinds, and some that unpack to much; made in memory."""

import io
import struct
import zlib
from functools import cache
from typing import Any, Final

import numpy as np
from PIL import Image

__all__ = ["bombs", "known", "seeds"]

_SIDE: Final = 24
_ORIENTATION: Final = 0x0112


@cache
def seeds() -> list[bytes]:
    """Return encoded pictures, each of another kind."""
    rgb = _drawn("RGB")
    exif = Image.Exif()
    exif[_ORIENTATION] = 6
    deep = Image.fromarray(np.arange(_SIDE * _SIDE, dtype=np.uint16).reshape(_SIDE, _SIDE) * 100)
    frames: dict[str, Any] = {"save_all": True, "append_images": [_drawn("RGB", 1), _drawn("RGB", 2)]}
    kinds: list[tuple[Image.Image, str, dict[str, Any]]] = [
        (rgb, "JPEG", {"quality": 80}),
        (rgb, "JPEG", {"progressive": True, "exif": exif}),
        (rgb.convert("CMYK"), "JPEG", {}),
        (rgb.convert("L"), "JPEG", {"restart_marker_blocks": 1}),
        (rgb, "PNG", {}),
        (_drawn("RGBA"), "PNG", {}),
        (rgb.convert("P"), "PNG", {"transparency": 3}),
        (rgb.convert("1"), "PNG", {}),
        (deep, "PNG", {}),
        (rgb, "PNG", {"save_all": True, "append_images": [_drawn("RGB", 1)]}),
        (rgb, "WEBP", {"quality": 70}),
        (_drawn("RGBA"), "WEBP", {"lossless": True}),
        (rgb, "WEBP", frames),
        (rgb, "GIF", {}),
        (rgb, "GIF", frames),
        (rgb, "BMP", {}),
        (rgb.convert("1"), "BMP", {}),
        (rgb.convert("P"), "BMP", {}),
        (rgb, "TIFF", {}),
        (rgb, "TIFF", {"compression": "tiff_lzw"}),
        (rgb, "TIFF", {"compression": "tiff_deflate", "exif": exif}),
        (rgb, "TIFF", {"compression": "jpeg"}),
        (rgb.convert("1"), "TIFF", {"compression": "group4"}),
        (deep, "TIFF", {}),
        (rgb, "AVIF", {"speed": 10}),
        (_drawn("RGBA"), "AVIF", {"speed": 10}),
    ]
    return [_encoded(image, kind, **options) for image, kind, options in kinds]


def known() -> bytes:
    """Return a picture that is none of the seeds."""
    return _encoded(_drawn("RGB", 9), "PNG")


@cache
def bombs() -> list[bytes]:
    """Return small files that say to hold, or do hold, very many pixels."""
    wide = Image.new("1", (12_000, 12_000))  # more pixels than are read
    full = Image.new("1", (4_000, 4_000))  # fewer, so that they are unpacked
    return [
        _encoded(wide, "PNG"),
        _encoded(wide, "TIFF", compression="group4"),
        _encoded(full, "PNG"),
        _encoded(full.convert("L"), "JPEG"),
        _encoded(full.convert("P"), "GIF"),
        _claiming(1 << 31 - 1, 1 << 31 - 1),
        _claiming(65_535, 65_535),
        _claiming(1, 1 << 30),
    ]


def _drawn(mode: str, seed: int = 0) -> Image.Image:
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (4, 4, len(mode)), dtype=np.uint8)
    return Image.fromarray(coarse, mode if mode == "RGBA" else None).resize((_SIDE, _SIDE + 5))


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _claiming(width: int, height: int) -> bytes:
    """Return a PNG whose header tells of so many pixels and whose data are a few zeros."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
