"""Image bytes to the pixels a model reads; the one place where an image is decoded.

Training, evaluation, indexing and serving all come through here, so none of them sees other pixels. The
rules, in order:

1. The bytes are one of `FORMATS`, at most `MAX_BYTES` long; the header says at most `MAX_PIXELS` pixels and
   `MAX_SIDE` on a side. Of an animation, the first frame counts; outside it, its canvas is white.
2. A large JPEG is decoded at 1/2, 1/4 or 1/8 where no side falls below twice what is needed.
3. Grey of more than 8 bits is scaled to 8 by the range of its type, never clipped. A TIFF's header says
   the type and whether zero is white; one of a kind that cannot be read is refused by the name of its kind.
4. Transparent pixels are laid over white; then RGB (CMYK, palette, grey and 1-bit converted). A colour that
   a PNG names transparent is compared at the depth of the file.
5. The EXIF orientation is applied, no other; a value that is none of the eight counts as upright. The
   rotation that AVIF and HEIF files say themselves belongs to their decoding.
6. The centred square with `crop_fraction` of the shorter side is resampled to size x size, in one step.

Rule 6 is "shorter side to size / crop_fraction, then the centre crop of that size" without the rounding
to whole pixels in between. Colour profiles are not applied.
"""

import contextlib
import io
import re
import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError
from PIL.ExifTags import Base as Tag
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from serving.errors import BadImage, BadSetting, cause_of

try:
    import pillow_heif
except ImportError:
    _HEIF: tuple[str, ...] = ()
else:
    pillow_heif.register_heif_opener(thumbnails=False, decode_threads=1)  # callers decode many at once
    _HEIF = ("HEIF",)

__all__ = [
    "FORMATS", "MAX_BYTES", "MAX_PIXELS", "MAX_SIDE", "RESAMPLINGS", "open_rgb", "preprocess", "thumbnail",
]  # fmt: skip

FORMATS: Final = ("JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF", "AVIF", *_HEIF)
"""HEIF, which HEIC is one kind of, only where pillow-heif is installed."""
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
by 9 at worst; at twice the size by 0.8 and 3. Heads for birds of 227 px, trained at 112 and 75 px, lost 1.0
point of MAP@R where 1 was taken in its place, and 0.5 by 1.5."""
_NUMBERS: Final = {1: "unsigned", 2: "signed", 3: "float"}
"""What SampleFormat says of a TIFF, and below PhotometricInterpretation."""
_COLOURS: Final = {0: "white-is-zero grey", 1: "grey", 2: "RGB", 3: "palette", 5: "CMYK", 6: "YCbCr"}
_HEIF_FILE: Final = re.compile(rb"....ftyp(hei|hev|mif1|msf1)", re.DOTALL)
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
    if data[8:16] == b"WEBPVP8X" and len(data) > 20 and data[20] & 2:
        # Without its flag of transparency an animation is black outside its first frame.
        data = data[:20] + bytes([data[20] | 16]) + data[21:]
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise BadImage(_unidentified(data)) from error
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
            frame = image.tile[0].extents if image.format == "GIF" else None
            if image.format == "TIFF":
                _read_as_viewers_do(image)
            image.load()
            _check_size(image)  # what a decoder makes of it, whatever the header said
            rgb = _rgb(image, data)
            if frame not in (None, (0, 0, *image.size)):
                whole, rgb = rgb, Image.new("RGB", image.size, "white")
                rgb.paste(whole.crop(frame), frame)
            return _upright(rgb, image)
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


def _unidentified(data: bytes) -> str:
    """Say what Pillow found no reader for."""
    if _HEIF_FILE.match(data) and "HEIF" not in FORMATS:
        return "the image is HEIC or another HEIF, which needs pillow-heif; install crossbatch[heic]"
    with contextlib.suppress(Exception):  # no TIFF, or one whose header is damaged
        file, tags = io.BytesIO(data), ImageFileDirectory_v2(data[: 16 if data[2] == 43 else 8])
        file.seek(tags.next)
        tags.load(file)
        order, bits = "big" if tags.prefix == b"MM" else "little", _tag(tags, Tag.BitsPerSample)
        number = _NUMBERS.get(_tag(tags, Tag.SampleFormat), "untyped")
        colour = _COLOURS.get(_tag(tags, Tag.PhotometricInterpretation), "pixels")
        kind = f"a {order}-endian TIFF of {bits}-bit {number} {colour}"
        return f"the image is {kind}, which cannot be read; save it with 8 bits"
    return (
        f"the {len(data):,} bytes, beginning {data[:12]!r}, are no image that can be read; "
        f"give {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    )


def _read_as_viewers_do(tiff: ImageFile.ImageFile) -> None:
    """Keep Pillow from two of its ways with TIFFs, before it loads the pixels."""
    tiff.info.pop("xmp", None)  # it would turn them by the orientation in here
    tile = tiff.tile[0]
    if tile.codec_name == "libtiff" and isinstance(tile.args, tuple) and tiff.mode in ("I", "F"):
        # What libtiff has unpacked is in the machine's byte order (N), no longer in the file's (B).
        tiff.tile = [tile._replace(args=(tile.args[0].replace("B", "N"), *tile.args[1:]))]


def _tag(tags: Any, tag: Tag) -> int:
    """Return a number from a TIFF's header, the first where there is one a channel; 1 where there is none."""
    value = tags.get(tag, 1)
    return int(value[0] if isinstance(value, tuple) else value)


def _rgb(image: ImageFile.ImageFile, data: bytes) -> Image.Image:
    """Return any mode as RGB, transparent pixels over white."""
    tags = getattr(image, "tag_v2", {})
    if image.mode.startswith(("I", "F")) or (image.mode == "L" and _tag(tags, Tag.SampleFormat) == 2):
        return _grey(image, tags).convert("RGB")
    key = image.info.get("transparency")
    if key is not None and image.format == "PNG" and image.mode == "L":
        image.info["transparency"] = key * 255 // ((1 << data[24]) - 1)  # from the file's depth to 8 bits
    elif key is not None and image.format == "PNG" and image.mode == "RGB" and data[24] == 16:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as low:
            low.tile = [low.tile[0]._replace(args="RGB;16L")]  # its lower bytes, `image` has the upper ones
            same = np.asarray(image) == np.array(key) >> 8
            same &= np.asarray(low) == np.array(key) & 255  # (H, W, 3)
        image.paste("white", mask=Image.fromarray(same.all(axis=-1)))
        return image
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or key is not None:
        with_alpha = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(with_alpha, mask=with_alpha.getchannel("A"))
        return white
    return image.convert("RGB") if image.mode != "RGB" else image


def _grey(image: Image.Image, tags: Any) -> Image.Image:
    """Scale grey of more than 8 bits by its range; Pillow's own conversion clips at 255.

    Unsigned grey of 12 or 16 bits says its range. Others do not: they are taken to be of 8 or 16 bits (15 of
    them, if the 16th is a sign; a float, first, 0 to 1) where their values fit, and otherwise from their own
    least to their own largest. `tags` are a TIFF's.
    """
    grey, bits = np.asarray(image), _tag(tags, Tag.BitsPerSample) if tags else 16  # (H, W)
    if image.mode in ("I", "L"):  # where Pillow takes 32 bits for signed, and 8 for unsigned
        grey = grey.view(f"{'u' if _tag(tags, Tag.SampleFormat) == 1 else 'i'}{grey.itemsize}")
    tops = {"F": (1, 255, 65_535), "I": (255, 32_767 if bits == 16 else 65_535), "L": (255,)}
    low, high = _span(grey)
    fitting = (top for top in tops.get(image.mode, ((1 << bits) - 1,)) if low >= 0 and high <= top)
    top = next(fitting, None)
    if top and image.mode != "F":
        scaled = ((np.arange(top + 1) * 255 + top // 2) // top).astype(np.uint8)[grey]
    else:
        low, high = (0.0, float(top)) if top else (low, high)
        with np.errstate(all="ignore"):  # what overflows or is no number becomes black or white below
            half = np.float32(high / 2 - low / 2 or 0.5)  # the whole span may be more than a float32 holds
            share = (grey.astype(np.float32) / 2 - np.float32(low / 2)) / half
            scaled = (np.nan_to_num(share).clip(0, 1) * 255 + 0.5).astype(np.uint8)
    if _tag(tags, Tag.PhotometricInterpretation) == 0:
        scaled = 255 - scaled
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
    bare = Image.new("1", (1, 1))  # without XMP, where Pillow looks, too; a TIFF's it has applied
    bare.info = {key: image.info[key] for key in ("exif", "Raw profile type exif") if key in image.info}
    try:
        operation = _UPRIGHT.get(bare.getexif().get(Tag.Orientation, 1))
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
    # A pair of bytes that a thumbnail or a film behind it may hold; `data.count` takes ten times as long.
    pairs = (np.frombuffer(data, "<u2", (len(data) - start) // 2, start) for start in (0, 1))
    if sum(np.count_nonzero(each == 0xDAFF) for each in pairs) <= _MAX_SCANS:
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
