"""The format `webdataset`: `.tar` files in which members of one name but for the ending are one sample.

Nothing is unpacked: the headers are gone through once, and an image is read where it lies in the tar.
"""

import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from serving.catalog.picture import Member
from serving.catalog.rows import Catalog, Row, make_catalog, path_text
from serving.catalog.table import plain_value, with_one_type
from serving.catalog.walk import SUFFIXES, Shard, find_shards
from serving.errors import BadData

__all__ = ["ENDINGS", "read"]

_COMPRESSED: Final = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
ENDINGS: Final[tuple[str, ...]] = (".tar", *_COMPRESSED)  # the latter are found so that they can be refused
_MAGIC: Final = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_NAME: Final = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)", re.DOTALL)  # sample and field, as WebDataset has them
_META: Final = re.compile(r"__[^/]*__($|/)")
_TEXTS: Final = ("cls", "json", "label", "txt")
"""Fields that are read at once; each names the class where none before it does."""
_MOST_BYTES: Final = 1 << 20  # of such a field
_INTEGER: Final = re.compile(r"[+-]?\d{1,18}", re.ASCII)


@dataclass(slots=True)
class _Sample:
    """The members of one name but for the ending."""

    image: Member | None = None
    is_absent: bool = False
    """Whether the image is a link, which is not followed."""
    texts: dict[str, str] = field(default_factory=dict)


def read(root: Path, only: Path | None = None) -> Catalog:
    """Return a row for each sample that has an image, in the tars below `root` or in `only` that one."""
    rows, absent, endings = list[Row](), list[Row](), set[str]()
    for shard in find_shards(root, only, ENDINGS):
        samples = dict[str, _Sample]()
        for key, ending, member, info in _members(shard):
            endings.add(ending)
            if "." + ending in SUFFIXES or ending in _TEXTS:
                _add(samples.setdefault(key, _Sample()), ending, member, info)
        for key, sample in samples.items():
            if sample.image is not None:
                label, metadata = _label_and_metadata(sample.texts, sample.image)
                row = Row(key, sample.image, label, shard.split, metadata)
                (absent if sample.is_absent else rows).append(row)
    if not rows:
        raise BadData(
            f"the tars of {only or root} hold no image: their members end in"
            f" {', '.join('.' + each for each in sorted(endings)[:10]) or 'nothing'}, none in .jpg or such"
        )
    return make_catalog(root, "webdataset", with_one_type(rows), absent=absent, table=only)


def _add(sample: _Sample, ending: str, member: Member, info: tarfile.TarInfo) -> None:
    """Add a member to its sample; what is no file, such as a link, is not followed."""
    parts = PurePosixPath(member.name).parts
    if ".." in parts or parts[0] == "/" or info.issparse():
        raise BadData(
            f"the member {member.name!r} of {member.archive} is no plain path, or has holes (sparse)"
        )
    if ending not in _TEXTS:
        if sample.image is not None:
            raise BadData(f"{member} and {sample.image} are of one sample; each sample has one image")
        sample.image, sample.is_absent = member, not info.isreg()
    elif info.isreg():
        if ending in sample.texts:
            raise BadData(f"{member} is there twice; each member may be there once")
        sample.texts[ending] = _text(member)


def _label_and_metadata(
    texts: Mapping[str, str], image: Member
) -> tuple[str, dict[str, str | int | float | bool]]:
    """Return the class that the fields of a sample name, if one does, and the metadata."""
    try:
        given = json.loads(texts.get("json", "{}"))
    except (ValueError, RecursionError) as error:
        raise BadData(f"the .json of {image} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise BadData(
            f"the .json of {image} holds {texts['json'][:80]!r}; give an object of names and values"
        )
    name = next((name for name in ("label", "class") if given.get(name) is not None), "")
    if "cls" in texts:
        if not _INTEGER.fullmatch(texts["cls"]):
            raise BadData(f"the sample of {image} has the .cls {texts['cls'][:80]!r}; give a whole number")
        label = str(int(texts["cls"]))
    elif name:
        value = given.pop(name)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise BadData(f"the .json of {image} has the {name} {value!r:.80}; give a text or a whole number")
        label = str(value)
    else:
        label = texts.get("label", texts.get("txt", ""))
    metadata = {name: plain for name, value in given.items() if (plain := plain_value(value)) is not None}
    if "txt" in texts and (name or texts.keys() & {"cls", "label"}):
        metadata.setdefault("txt", texts["txt"])  # a caption, as the class is named elsewhere
    return label, metadata


def _text(member: Member) -> str:
    """Read a field that is text."""
    if member.size > _MOST_BYTES:
        raise BadData(f"{member} has {member.size} bytes; the limit for such a member is {_MOST_BYTES}")
    try:
        return member.read_bytes().decode("utf-8-sig").strip()
    except OSError as error:
        raise BadData(f"{member} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadData(f"{member} is not UTF-8 text at byte {error.start}; save it as UTF-8") from error


def _members(shard: Shard) -> Iterator[tuple[str, str, Member, tarfile.TarInfo]]:
    """Yield sample, field (in lower case), place and header of each member whose name has both."""
    try:
        with open(shard.path, "rb") as file:
            changed = os.fstat(file.fileno()).st_mtime_ns
            beginning = file.read(8)
            if packed := [name for magic, name in _MAGIC.items() if beginning.startswith(magic)]:
                raise BadData(
                    f"the tar {shard.path} is compressed ({packed[0]}), so that no image in it can be read"
                    " alone; decompress it to a .tar, or unpack it"
                )
            file.seek(0)
            tar = tarfile.open(  # noqa: SIM115  # has nothing to close but the file
                fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape"
            )
            end = 0
            while (info := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                if info.size < 0 or tar.offset <= end:  # it would never come to an end
                    raise tarfile.ReadError("the size of a member is below 0")
                end = tar.offset
                name = path_text(PurePosixPath(info.name))
                if (match := _NAME.fullmatch(name)) and not info.isdir() and not _META.match(name):
                    member = Member(shard.path, name, info.offset_data, info.size, changed)
                    yield match[1], match[2].lower(), member, info
            _check_end(file, tar.offset)
    except BadData:
        raise
    except Exception as error:  # headers may hold anything, and their reader may raise anything
        told = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BadData(f"the tar {shard.path} cannot be read, or is damaged or cut off: {told}") from error


def _check_end(file: BinaryIO, at: int) -> None:
    """Check that the last header was followed by the end mark, and that by nothing.

    `tarfile` takes a damaged header for the end, and a file that was cut between two members for a whole one.
    """
    file.seek(at)
    if not (rest := file.read(tarfile.BLOCKSIZE)):
        raise tarfile.ReadError(f"its end mark is missing at byte {at}")
    while rest:
        if rest.strip(b"\0"):
            raise tarfile.ReadError(f"there is no header and no end at byte {at}")
        rest = file.read(1 << 20)
