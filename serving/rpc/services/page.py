"""Stored items as they travel: one with all that it has, or a page of them that fits a message."""

from typing import TYPE_CHECKING

from protos import gallery_service_pb2 as pb
from serving.engine.workers import check_time
from serving.errors import BadArtifact, InvalidArgument
from serving.gallery.item import Item
from serving.gallery.validation import MAX_METADATA_BYTES
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.wire import bytes_of, struct_of

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.gallery.gallery import Gallery

__all__ = ["item_of", "page_of"]

BYTES_AT_ONCE = 16 * 1024 * 1024
"""About the most bytes that are read from a gallery before those of a page are counted."""

_SPARE_BYTES = 65_536  # for the token and what stands around the items
_FRAME_BYTES = 12  # at most, around each item


def item_of(gallery: "Gallery", key: str, *, with_thumbnail: bool) -> pb.GetItemResponse:
    """Read one item; blocks.

    Raises:
        NotFound: if it is not there.
        BadArtifact: if it holds metadata that cannot be sent.
    """
    (item,) = gallery.get([key], thumbnails=with_thumbnail)
    return pb.GetItemResponse(item=_stored(item, with_vector=True), thumbnail=item.thumbnail)


def page_of(
    gallery: "Gallery", deadline: float | None, *, size: int, after: str, prefix: str, with_vectors: bool
) -> tuple[list[bytes], str]:
    """Read the items that follow a key; blocks.

    Args:
        gallery: Where to look.
        deadline: The `time.monotonic()` until which somebody waits.
        size: Most items.
        after: The key before the first; empty for the beginning.
        prefix: Begins the key of each.
        with_vectors: Whether to read the vectors, too.

    Returns:
        Messages of the type StoredItem, at least one unless nothing follows and as many as a message holds;
        and the key of the last if others may follow, else an empty one.

    Raises:
        DeadlineExceeded: if there was no time for all of them.
        BadArtifact: if an item holds metadata that cannot be sent.
    """
    room = MAX_MESSAGE_BYTES - _SPARE_BYTES
    step = max(1, BYTES_AT_ONCE // (4 * gallery.meta.dimension + MAX_METADATA_BYTES))
    parts: list[bytes] = []
    while len(parts) < size:
        wanted = min(step, size - len(parts))
        block = gallery.list(after=after, limit=wanted, prefix=prefix)
        for item in block:
            check_time(deadline, "all items were written")
            part = _stored(item, with_vector=with_vectors).SerializeToString()
            room -= len(part) + _FRAME_BYTES
            if room < 0 and parts:
                return parts, after
            parts.append(part)
            after = item.key
        if len(block) < wanted:
            return parts, ""
    return parts, after


def _stored(item: Item, *, with_vector: bool) -> pb.StoredItem:
    try:
        metadata = struct_of(item.metadata) if item.metadata else None
    except InvalidArgument as error:
        raise BadArtifact(f"The item {item.key!r} of the gallery cannot be sent: {error}") from error
    return pb.StoredItem(
        key=item.key,
        version=item.version,
        label=item.label,
        uri=item.uri,
        metadata=metadata,
        vector=bytes_of(item.vector) if with_vector else b"",
    )
