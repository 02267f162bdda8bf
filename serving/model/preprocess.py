"""Image bytes to the pixels a model reads; the one place where an image is decoded.

Training, evaluation, indexing and serving all come through here, so none of them sees other pixels. The
rules, in order:

1. The bytes are one of `FORMATS`, at most `MAX_BYTES` long; the header says at most `MAX_PIXELS` pixels and
   `MAX_SIDE` on a side. Of an animation, the first frame counts.
2. A large JPEG is decoded at 1/2, 1/4 or 1/8 where no side falls below twice what is needed.
3. Grey of more than 8 bits is scaled to 8 by the range of its type, never clipped.
4. Transparent pixels are laid over white; then RGB (CMYK, palette, grey and 1-bit converted).
5. The EXIF orientation is applied; a value that is none of the eight counts as upright.
6. The centred square with `crop_fraction` of the shorter side is resampled to size x size, in one step.

Rule 6 is "shorter side to size / crop_fraction, then the centre crop of that size" without the rounding
to whole pixels in between. Colour profiles are not applied.
"""

import io
import re
import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from serving.errors import BadImage, BadSetting, cause_of

__all__ = [
    "FORMATS", "MAX_BYTES", "MAX_PIXELS", "MAX_SIDE", "RESAMPLINGS", "open_rgb", "preprocess", "thumbnail",
]  # fmt: skip

FORMATS: Final = ("JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF", "AVIF")
RESAMPLINGS: Final = ("bilinear", "bicubic", "lanczos", "box", "hamming", "nearest")
MAX_BYTES: Final = 32 << 20
"""A 64-megapixel phone photo has about 25 MiB."""
MAX_PIXELS: Final = 1 << 26
"""67 million: decoded, 200 MB of RGB."""
MAX_SIDE: Final = 65_535
"""What JPEG, GIF and most others can say at most; PNG and TIFF could say more."""
_QUALITIES: Final = (85, 60, 30, 10, 1)
"""Of a thumbnail, the first at which it is small enough. 256 x 256 pixels of noise take 61 KiB at 85."""
_MAX_SCANS: Final = 100
"""A progressive JPEG has about ten; each one more costs a pass over all pixels for a few bytes."""
_ORIENTATION: Final = 0x0112
_UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_MARGIN: Final = 2
"""Photos of 400 px decoded at just the needed size differ from the whole ones by 1 to 3 levels on average and
by 9 at worst; at twice the size by 0.8 and 3."""
_FROM_16_BIT: Final = ((np.arange(1 << 16) * 255 + 32_767) // 65_535).astype(np.uint8)
_PILLOW: Final = re.compile(r"PIL\.")
_Box = tuple[float, float, float, float]
_MARKER: Final = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")


def preprocess(data: bytes, *, size: int, crop_fraction: float, resampling: str) -> NDArray[np.uint8]:
    """Decode an image and cut out the square that a model reads: uint8 (S, S, 3), RGB.

    `crop_fraction` is the side of the centred square over the shorter side of the image, in (0, 1].

    Raises:
        BadImage: The bytes hold no image within the limits.
        BadSetting: One of the other arguments is out of range.
    """
    if size < 1 or not 0 < crop_fraction <= 1 or resampling not in RESAMPLINGS:
        raise BadSetting(
            f"size {size}, crop_fraction {crop_fraction} and resampling {resampling!r} cannot be; give at "
            f"least 1, a number in (0, 1], and one of {', '.join(RESAMPLINGS)}"
        )
    image = open_rgb(data, least=int(np.ceil(size / crop_fraction)))
    side = min(image.size) * crop_fraction
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return np.asarray(_resized(image, (size, size), resampling, box), dtype=np.uint8)


def thumbnail(data: bytes, *, side: int, most_bytes: int) -> bytes:
    """Decode an image and make a small JPEG file of the whole of it, upright, without metadata.

    Its longer side has at most `side` pixels (no image is made larger), and its quality is lowered until it
    fits into `most_bytes`. Raises BadImage as `preprocess` does, and where it cannot be made so small.
    """
    if side < 1:
        raise BadSetting(f"the side of a thumbnail is {side} pixels; give at least 1")
    image = open_rgb(data, least=side)
    scale = min(1.0, side / max(image.size))
    width, height = (max(1, round(length * scale)) for length in image.size)
    small = _resized(image, (width, height), "bicubic")
    small.info.clear()  # a comment of the original would be written, too
    for quality in _QUALITIES:
        file = io.BytesIO()
        small.save(file, "JPEG", quality=quality)
        if file.tell() <= most_bytes:
            return file.getvalue()
    raise BadImage(f"no thumbnail of {_size(small)} fits into {most_bytes:,} bytes")


def open_rgb(data: bytes, *, least: int | None = None) -> Image.Image:
    """Decode an image file as an upright, loaded image of mode RGB, 1 x 1 or larger.

    `least` is the shorter side that the caller needs: a larger JPEG may come out smaller than it is, but not
    below this. Raises BadImage where the bytes hold no image within the limits, and says what was found.
    """
    if not 0 < len(data) <= MAX_BYTES:
        raise BadImage(f"the image has {len(data):,} bytes; it must have between 1 and {MAX_BYTES:,}")
    _mute_pillow()
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise BadImage(
            f"the {len(data):,} bytes, beginning {data[:12]!r}, are no image that can be read; "
            f"give {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        ) from error
    except Image.DecompressionBombError as error:
        raise BadImage(f"the image has too many pixels; it must have at most {MAX_PIXELS:,}") from error
    except Exception as error:  # a decoder may raise anything on bytes that it did not expect
        raise BadImage(f"the header of the image cannot be read: {cause_of(error)}") from error
    with image:
        _check_size(image)
        if image.format in ("JPEG", "MPO"):
            _check_scans(data)
        try:
            if least is not None:
                image.draft(None, (_MARGIN * least, _MARGIN * least))
            image.load()
            _check_size(image)  # what a decoder makes of it, whatever the header said
            return _upright(_rgb(image), image)
        except BadImage:
            raise
        except Exception as error:
            raise BadImage(f"the {image.format} image cannot be decoded: {cause_of(error)}") from error


def _resized(
    image: Image.Image, size: tuple[int, int], resampling: str, box: _Box | None = None
) -> Image.Image:
    try:
        return image.resize(size, Image.Resampling[resampling.upper()], box=box)
    except (MemoryError, ValueError) as error:
        raise BadImage(f"the image, {_size(image)}, cannot be resized: {cause_of(error)}") from error


def _rgb(image: Image.Image) -> Image.Image:
    """Return any mode as RGB, transparent pixels over white."""
    if image.mode.startswith(("I", "F")):
        return _grey(image).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(with_alpha, mask=with_alpha.getchannel("A"))
        return white
    return image.convert("RGB") if image.mode != "RGB" else image


def _grey(image: Image.Image) -> Image.Image:
    """Scale grey of more than 8 bits by its range; Pillow's own conversion clips at 255.

    A 16-bit file says its range, 0 to 65,535. A 32-bit one does not: it is taken to be 16-bit where its
    values fit (a float 0 to 1, 0 to 255, or 16-bit), and otherwise from its own least to its own largest.
    """
    grey = np.asarray(image)  # (H, W)
    low, high = _span(grey)
    if image.mode != "F" and low >= 0 and high < len(_FROM_16_BIT):
        scaled = _FROM_16_BIT[grey]
    else:
        tops = (1.0, 255.0, 65_535.0) if image.mode == "F" else ()
        low, high = next(((0.0, top) for top in tops if low >= 0 and high <= top), (low, high))
        with np.errstate(all="ignore"):  # what overflows or is no number becomes black or white below
            half = np.float32(high / 2 - low / 2 or 0.5)  # the whole span may be more than a float32 holds
            share = (grey.astype(np.float32) / 2 - np.float32(low / 2)) / half
            scaled = (np.nan_to_num(share).clip(0, 1) * 255 + 0.5).astype(np.uint8)
    transparent = image.info.get("transparency")
    return Image.fromarray(
        scaled if transparent is None else np.where(grey == transparent, np.uint8(255), scaled)
    )


def _span(grey: NDArray[Any]) -> tuple[float, float]:
    """Return the least and the largest finite value."""
    finite = grey[np.isfinite(grey)] if grey.dtype.kind == "f" else grey
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _upright(rgb: Image.Image, image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation of `image` to its pixels `rgb`; what cannot be read counts as upright."""
    try:
        operation = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF, of which there is every kind, says nothing against the pixels
        return rgb
    return rgb if operation is None else rgb.transpose(operation)


def _check_size(image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS or max(image.size) > MAX_SIDE:
        raise BadImage(
            f"the image is {_size(image)}, {image.width * image.height:,} in all; it must have at most "
            f"{MAX_PIXELS:,} pixels and {MAX_SIDE:,} on a side"
        )
    if min(image.size) < 1:
        raise BadImage(f"the image is {_size(image)}; it must have at least one pixel")


def _check_scans(data: bytes) -> None:
    """Refuse a JPEG whose few bytes ask for hundreds of passes over its pixels."""
    if data.count(b"\xff\xda") <= _MAX_SCANS:  # a pair of bytes that a thumbnail or a film behind it may hold
        return
    scans, at = 0, 2
    while marker := _MARKER.search(data, at):
        code, at = marker[1][0], marker.end()
        if code == 0xD9:  # end of image
            break
        scans += code == 0xDA
        if code not in (0x01, 0xD8):  # the two others that have no length
            at += int.from_bytes(data[at : at + 2], "big")
    if scans > _MAX_SCANS:
        raise BadImage(f"the JPEG image has {scans} scans; it must have at most {_MAX_SCANS}")


def _mute_pillow() -> None:
    """Keep Pillow from warning about odd metadata; the filters are all threads', so one goes in for good."""
    rules: Sequence[tuple[Any, ...]] = warnings.filters
    if not rules or rules[0][3] != _PILLOW:
        warnings.filterwarnings("ignore", module=_PILLOW.pattern)


def _size(image: Image.Image) -> str:
    return f"{image.width:,} x {image.height:,} pixels"
