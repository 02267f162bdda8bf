"""What the calls reply that read many items, or count or compare them: as much as a message holds."""

from collections.abc import Generator
from contextlib import closing

from protos import gallery_service_pb2 as pb
from serving.gallery.item import GalleryItem
from serving.gallery.place import AnyGallery
from serving.gallery.search.filter import Filter
from serving.observability.call import Call
from serving.rpc.filters import value_message
from serving.rpc.limits import MAX_FIELDS, MAX_MESSAGE_BYTES
from serving.rpc.services import convert

__all__ = ["duplicates", "fields", "page", "sample", "values"]

_SPARE_BYTES = 65_536  # for the token and what stands around the items


def page(
    gallery: AnyGallery,
    request: pb.ListItemsRequest,
    size: int,
    filter: Filter | None,
    after: int,
    call: Call,
) -> pb.ListItemsResponse:
    """Read the items that follow the token: by key, or with a filter by version, those above `after`."""
    reply, pictures = pb.ListItemsResponse(), request.with_thumbnails
    if filter is None:
        found = gallery.by_key(after=request.page_token, prefix=request.key_prefix, thumbnails=pictures)
    else:
        found = gallery.matching(filter, after=after, thumbnails=pictures)
    last = _written(reply, found, size, call, with_vectors=request.with_vectors)
    if last is not None:
        reply.next_page_token = last.key if filter is None else str(last.version)
    return reply


def sample(
    gallery: AnyGallery, request: pb.SampleItemsRequest, size: int, filter: Filter | None, call: Call
) -> pb.SampleItemsResponse:
    """Draw items."""
    reply = pb.SampleItemsResponse()
    drawn = gallery.sample(size, filter=filter, seed=request.seed, thumbnails=request.with_thumbnails)
    _written(reply, drawn, size, call)
    return reply


def fields(gallery: AnyGallery) -> pb.ListFieldsResponse:
    """Count the items of each field."""
    reply, room = pb.ListFieldsResponse(), MAX_MESSAGE_BYTES - _SPARE_BYTES
    for it in gallery.fields(MAX_FIELDS):
        added = pb.Field(name=it.name, kinds=it.kinds, items=it.items, least=it.least, most=it.most)
        room -= added.ByteSize() + convert.FRAME_BYTES
        if room < 0:
            break
        reply.fields.append(added)
    return reply


def values(gallery: AnyGallery, request: pb.ListValuesRequest, size: int) -> pb.ListValuesResponse:
    """Count the items of each value of a field."""
    counts, distinct = gallery.values(request.field, prefix=request.prefix, limit=size)
    reply, room = pb.ListValuesResponse(distinct=distinct), MAX_MESSAGE_BYTES - _SPARE_BYTES
    for it in counts:
        added = pb.ListValuesResponse.Count(value=value_message(it.value), items=it.items)
        room -= added.ByteSize() + convert.FRAME_BYTES
        if room < 0:
            break
        reply.values.append(added)
    return reply


def duplicates(
    gallery: AnyGallery, request: pb.ListDuplicatesRequest, size: int, after: int, call: Call
) -> pb.ListDuplicatesResponse:
    """Compare the items that follow the token: fewer where their pairs would outgrow a message."""
    while True:
        found = gallery.duplicates_page(
            request.above, after=after, limit=size, progress=lambda *_: call.check()
        )
        reply = pb.ListDuplicatesResponse(
            pairs=[pb.ListDuplicatesResponse.Pair(key=it[0], other=it[1], score=it[2]) for it in found.pairs],
            compared=found.compared,
            items=found.items,
            next_page_token=str(found.last or ""),
        )
        if reply.ByteSize() <= MAX_MESSAGE_BYTES:
            return reply
        size //= 2  # of one item the pairs are few enough


def _written(
    reply: pb.ListItemsResponse | pb.SampleItemsResponse,
    found: Generator[GalleryItem],
    size: int,
    call: Call,
    *,
    with_vectors: bool = False,
) -> GalleryItem | None:
    """Add up to `size` items to a reply, one at least if there is any; return the last if some are left."""
    room, last = MAX_MESSAGE_BYTES - _SPARE_BYTES, None
    with closing(found):
        for item in found:
            call.check()
            if len(reply.items) == size:
                return last
            convert.write_item(added := reply.items.add(), item, with_vector=with_vectors)
            added.thumbnail = item.thumbnail
            room -= added.ByteSize() + convert.FRAME_BYTES
            if room < 0 and len(reply.items) > 1:
                del reply.items[-1]
                return last
            last = item
    return None
