"""A gallery copied, items with their vectors and sources: out of a folder into Milvus, back, or within one.

A copy that is new grows as `NAME.unfinished`, and gets its name when all that was stored has been read back
and is what it was. A run that is broken off leaves it there, and the next one goes on with it.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from serving.errors import InvalidArgument, Mismatch
from serving.gallery.directory import GalleryDirectory, check_name
from serving.gallery.gallery import Gallery
from serving.gallery.index.builder import Advance
from serving.gallery.item import GalleryItem
from serving.gallery.place import AnyGallery, Galleries
from serving.gallery.vectors import made_for, maker_of, pages, unfinished

__all__ = ["CopyReport", "copy_gallery"]

_NONE = ("", b"")


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What copying did."""

    items: int  # that both have now
    written: int  # of them: those that the copy had not, or otherwise
    deleted: int  # of the copy, which the gallery copied has not
    checksum: str  # SHA-256 over each item's key, label, URI, metadata and vector, by key; the same of both
    without_thumbnails: bool  # as the copy keeps none


def copy_gallery(
    source: AnyGallery,
    directory: Galleries,
    name: str,
    *,
    sync: bool = False,
    advance: Advance = lambda *_: None,
) -> CopyReport:
    """Let the gallery of a name hold what `source` does, and make it if it is not there; run again, go on.

    What is there alike is not written again; what the source has not is deleted with `sync`. ModelMismatch
    tells that the copy is of another model, Mismatch that both differ afterwards, and names the first key.
    """
    in_folder, info = isinstance(directory, GalleryDirectory), source.info()
    maker = maker_of(source, thumbnails=in_folder)
    is_new = check_name(name) not in (names := directory.names())
    working = unfinished(name) if is_new else name
    if is_begun := working in names:
        target = directory.get(working)
        sync = sync or is_new
    else:
        more: dict[str, Any] = {}
        if in_folder and isinstance(source, Gallery):  # or else one of them has no such index
            more = {"index": info.wanted_index, "recall": info.wanted_recall}
        target = directory.create(working, **made_for(maker), **more)
    if os.path.abspath(source.path) == os.path.abspath(target.path):
        raise InvalidArgument(f"the gallery {source.name} cannot be copied to {name}: it is what would grow")
    target.check_model(maker)
    pictures = maker.thumbnail_side > 0 and target.meta.thumbnail_side > 0
    total, done, written, deleted = info.items, 0, 0, 0
    for items in pages(source, thumbnails=pictures):
        there = target.find([item.key for item in items], thumbnails=pictures) if is_begun else {}
        lacking = [item for item in items if not _holds(there.get(item.key), item)]
        target.upsert(lacking)
        done, written = done + len(items), written + len(lacking)
        advance("copy", done, max(done, total))
    if sync:
        for items in pages(target):
            kept = source.find([item.key for item in items])
            deleted += target.delete([item.key for item in items if item.key not in kept])
    target.rebuild(whole=False, progress=advance)
    checksum = hashlib.sha256()
    verified = 0
    for mine, theirs in zip_longest(_digests(source), _digests(target), fillvalue=_NONE):
        if mine != theirs:
            raise _difference(mine, theirs)
        checksum.update(mine[1])
        verified += 1
        advance("verify", verified, max(verified, total))
    if is_new:
        directory.switch(name, working)
    lost = source.meta.thumbnail_side > 0 and not pictures
    return CopyReport(verified, written, deleted, checksum.hexdigest(), lost)


def _holds(there: GalleryItem | None, item: GalleryItem) -> bool:
    """Tell whether what is there, if anything, has all that an item has."""
    return (
        there is not None
        and _digest(there) == _digest(item)
        and item.source in (None, there.source)
        and item.thumbnail in (b"", there.thumbnail)
    )


def _digests(gallery: AnyGallery) -> Iterator[tuple[str, bytes]]:
    return ((item.key, _digest(item)) for items in pages(gallery) for item in items)


def _digest(item: GalleryItem) -> bytes:
    texts = json.dumps([item.key, item.label, item.uri, dict(item.metadata)], sort_keys=True).encode()
    return hashlib.sha256(b"%d:%b%b" % (len(texts), texts, item.vector.astype("<f4").tobytes())).digest()


def _difference(mine: tuple[str, bytes], theirs: tuple[str, bytes]) -> Mismatch:
    """Return what a user reads of the first item that is not the same in both."""
    if mine[0] == theirs[0]:
        told = f"the copy has another item {mine[0]!r} than the gallery copied"
    elif theirs == _NONE or (mine != _NONE and mine[0] < theirs[0]):
        told = f"the copy lacks the item {mine[0]!r} of the gallery copied"
    else:
        told = f"the copy has the item {theirs[0]!r}, which the gallery copied has not; --sync deletes such"
    return Mismatch(f"{told}; that is the first difference: if somebody wrote to one of them, copy again")
