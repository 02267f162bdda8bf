"""The format `webdataset`: `.tar` files in which members of one name but for the ending are one sample."""

import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from serving.catalog.picture import Member
from serving.catalog.rows import Catalog, Plain, Row, path_text
from serving.catalog.table import make_one_type, plain_values, read_text
from serving.catalog.walk import SUFFIXES, Shard, find_shards
from serving.errors import BadData, cause_of

__all__ = ["ENDINGS", "read"]

ENDINGS: Final[tuple[str, ...]] = (  # all but the first are found so that they can be refused
    ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst",
)  # fmt: skip
_NAME: Final = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)", re.DOTALL)  # sample and field, as WebDataset has them
_META: Final = re.compile(r"__[^/]*__($|/)")
_TEXTS: Final = ("cls", "json", "label", "txt")  # each names the class where none before it does
_MOST_BYTES: Final = 1 << 20  # of such a field
_INTEGER: Final = re.compile(r"[+-]?\d{1,18}", re.ASCII)


def read(root: Path, only: Path | None, exclude: Sequence[str], text: Collection[str]) -> Catalog:
    """Return a row for each sample that has an image, in the tars below `root` or in `only` that one."""
    rows, absent, endings, dropped = list[Row](), list[Row](), set[str](), list[Member]()
    shards, listing = find_shards(root, only, ENDINGS, exclude)
    passed_over = Counter(listing.passed_over(ENDINGS))
    for shard in shards:
        images, links, texts = dict[str, Member](), set[str](), dict[str, dict[str, str]]()
        firsts = dict[str, Member]()
        for key, ending, member, is_file in _members(shard):
            endings.add(ending)
            firsts.setdefault(key, member)
            if ending in _TEXTS and is_file:
                texts.setdefault(key, {})[ending] = _text(member)
            elif "." + ending in SUFFIXES:
                if (first := images.setdefault(key, member)) is not member:
                    raise BadData(f"{member} and {first} are of one sample; each sample has one image")
                if not is_file:
                    links.add(key)
            else:
                passed_over["." + ending.rpartition(".")[2]] += 1
        dropped += [member for key, member in firsts.items() if key not in images]
        for key, image in images.items():
            label, metadata = _label_and_metadata(texts.get(key, {}), image)
            (absent if key in links else rows).append(Row(key, image, label, shard.split, metadata))
    if not rows:
        raise BadData(
            f"the tars of {only or root} hold no image: their members end in"
            f" {', '.join('.' + each for each in sorted(endings)[:10]) or 'nothing'}, none in .jpg or such"
            " from its first point on"
        )
    return Catalog(
        root, "webdataset", tuple(rows), table=only, absent=tuple(absent), passed_over=passed_over,
        left_out=listing.left_out, notes=_note(dropped), texts=make_one_type(rows, text),
    )  # fmt: skip


def _note(dropped: Sequence[Member]) -> tuple[str, ...]:
    """Tell of members whose samples have no image."""
    rule = "a name is the sample's up to its first point, and an image has nothing but its ending behind it"
    told = f"samples without an image were left out: {len(dropped)}, the first that of"
    return tuple(f"{told} {first}; {rule}" for first in dropped[:1])


def _label_and_metadata(texts: Mapping[str, str], image: Member) -> tuple[str, dict[str, Plain]]:
    """Return the class that the fields of a sample name, if one does, and the metadata."""
    try:
        given = json.loads(texts.get("json", "{}"))
    except (ValueError, RecursionError) as error:
        raise BadData(f"the .json of {image} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise BadData(f"the .json of {image} holds {given!r:.80}; give an object of names and values")
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
    metadata = plain_values(given)
    if "txt" in texts and (name or texts.keys() & {"cls", "label"}):
        metadata.setdefault("txt", texts["txt"])  # a caption, as the class is named elsewhere
    return label, metadata


def _text(member: Member) -> str:
    if member.size > _MOST_BYTES:
        raise BadData(f"{member} has {member.size} bytes; the limit for such a member is {_MOST_BYTES}")
    return read_text(member).strip()


def _members(shard: Shard) -> Iterator[tuple[str, str, Member, bool]]:
    """Yield sample, field (in lower case) and place of each member, and whether it is a file."""
    try:
        with open(shard.path, "rb") as file:
            changed, end = os.fstat(file.fileno()).st_mtime_ns, 0
            with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
                for info in tar:
                    if info.size < 0 or tar.offset <= end:  # it would never come to an end
                        raise tarfile.ReadError("the size of a member is below 0")
                    end = tar.offset
                    name = str(PurePosixPath(info.name))
                    if (match := _NAME.fullmatch(name)) and not info.isdir() and not _META.match(name):
                        parts = PurePosixPath(name).parts
                        if ".." in parts or parts[0] == "/" or info.issparse():
                            raise BadData(
                                f"the member {name!r} of {shard.path} is no plain path, or has holes (sparse)"
                            )
                        member = Member(shard.path, name, info.offset_data, info.size, changed)
                        yield path_text(match[1]), match[2].lower(), member, info.isreg()
                end = tar.offset
            # `tarfile` takes a damaged header for the end, and a file cut between members for a whole one.
            file.seek(end)
            blocks = [not block.strip(b"\0") for block in iter(lambda: file.read(1 << 20), b"")]
            if not blocks or not all(blocks):
                raise tarfile.ReadError(f"there is neither a header nor the end mark at byte {end}")
    except BadData:
        raise
    except Exception as error:  # headers may hold anything, and their reader may raise anything
        raise BadData(
            f"the tar {shard.path} cannot be read: {cause_of(error)}; it is damaged or cut off, or compressed"
            " (decompress it, so that an image in it can be read alone)"
        ) from error
