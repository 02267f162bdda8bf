"""The four calls of GalleryService on items: store, remove and read them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from protos import gallery_service_pb2 as pb
from protos import gallery_service_pb2_grpc
from serving.engine.fitted import on_gallery_of, with_fitting_model
from serving.engine.fleet import Fleet
from serving.engine.pipeline import Pipeline
from serving.engine.shelf import Shelf
from serving.errors import InvalidArgument
from serving.gallery.item import check_key, check_keys
from serving.observability.call import Stages
from serving.rpc.admission import Admission
from serving.rpc.boundary import deadline_of
from serving.rpc.limits import MAX_DELETED_KEYS, MAX_INPUTS
from serving.rpc.pieces import Pieces, framed
from serving.rpc.services.arrivals import Arrivals, made_of, read_items
from serving.rpc.services.bounds import check_count, page_size
from serving.rpc.services.page import item_of, page_of
from serving.rpc.services.timings import timings_of
from serving.rpc.status import refusal

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.gallery.gallery import Gallery
    from serving.gallery.store.schema import Meta

__all__ = ["Items"]


class Items(gallery_service_pb2_grpc.GalleryServiceServicer):
    """Answers UpsertItems, DeleteItems, GetItem and ListItems."""

    def __init__(self, fleet: Fleet, shelf: Shelf, admission: Admission) -> None:
        """Keep what the calls pass through."""
        self._fleet = fleet
        self._shelf = shelf
        self._admission = admission

    async def UpsertItems(self, request: Any, context: Any) -> pb.UpsertItemsResponse:  # noqa: N802
        """Store all the items of the request, which is `UnreadItems`, or none.

        Returns:
            How many were stored, and their versions, after they are on disk.

        Raises:
            InvalidArgument: if an item is bad; a `Refusal` names the field of each.
            NotFound: if there is no such gallery.
            Mismatch: if the gallery belongs to another model.
            Conflict: if an item is not of the version that was expected.
            DeadlineExceeded: if the time ran out before anything was written.
        """
        stages = Stages()
        deadline = deadline_of(context)
        check_count("items", len(request.items), MAX_INPUTS)

        async def complete_and_store(meta: "Meta", pipeline: Pipeline) -> list[int]:
            # With the writers, so that it keeps no search waiting.
            arrived = await self._shelf.write(deadline, read_items, request.items, meta.dimension, deadline)
            await _complete(arrived, pipeline, meta.thumbnail_side, deadline, stages)
            began = time.monotonic()
            store = partial(_stored, arrived)
            versions = await self._shelf.write(
                deadline, on_gallery_of, self._shelf, request.gallery, pipeline, store
            )
            stages.spent("gallery", began, time.monotonic() - began)
            return versions

        with self._admission.admit(len(request.items)):
            # The model is asked for before anything is spent on the items.
            versions = await with_fitting_model(
                self._shelf, self._fleet, deadline, request.gallery, complete_and_store
            )
        return pb.UpsertItemsResponse(stored=len(versions), versions=versions, timings=timings_of(stages))

    async def DeleteItems(self, request: pb.DeleteItemsRequest, context: Any) -> pb.DeleteItemsResponse:  # noqa: N802
        """Remove items by key.

        Returns:
            How many were there and are gone, after that is on disk.

        Raises:
            InvalidArgument: if there are no keys or too many, or the versions are not one a key.
            NotFound: if there is no such gallery.
            Mismatch: if the gallery belongs to another model.
            Conflict: if an item is not of the version that was expected.
        """
        deadline = deadline_of(context)
        check_count("keys", len(request.keys), MAX_DELETED_KEYS)
        with self._admission.admit():
            keys = check_keys(list(request.keys))
            expected = _expected(keys, request)
            deleted = await self._shelf.write(
                deadline,
                self._shelf.using,
                request.gallery,
                lambda gallery, _: gallery.delete(keys, expected=expected),
            )
        return pb.DeleteItemsResponse(deleted=deleted)

    async def GetItem(self, request: pb.GetItemRequest, context: Any) -> pb.GetItemResponse:  # noqa: N802
        """Read one item whole.

        Raises:
            InvalidArgument: if the key cannot be one.
            NotFound: if there is no such gallery or item.
            Mismatch: if the gallery belongs to another model.
        """
        _check_key("key", request.key)
        with self._admission.admit():
            return await self._shelf.read(
                deadline_of(context),
                self._shelf.using,
                request.gallery,
                lambda gallery, _: item_of(gallery, request.key, with_thumbnail=request.with_thumbnail),
            )

    async def ListItems(self, request: pb.ListItemsRequest, context: Any) -> Any:  # noqa: N802
        """Read one page of items, and give the token of the next one: the last key of this one.

        Returns:
            A ListItemsResponse in pieces.

        Raises:
            InvalidArgument: if the page is too large, or the token or the prefix can be no part of a key.
            NotFound: if there is no such gallery.
            Mismatch: if the gallery belongs to another model.
        """
        size = page_size(request.page_size)
        if request.page_token:
            _check_key("page_token", request.page_token)
        if request.key_prefix:
            _check_key("key_prefix", request.key_prefix)
        deadline = deadline_of(context)
        with self._admission.admit():
            parts, token = await self._shelf.read(
                deadline,
                self._shelf.using,
                request.gallery,
                lambda gallery, _: page_of(
                    gallery,
                    deadline,
                    size=size,
                    after=request.page_token,
                    prefix=request.key_prefix,
                    with_vectors=request.with_vectors,
                ),
            )
        rest = pb.ListItemsResponse(next_page_token=token)
        return Pieces([*framed(pb.ListItemsResponse, "items", parts), rest.SerializeToString()])


async def _complete(
    arrived: Arrivals, pipeline: Pipeline, side: int, deadline: float | None, stages: Stages
) -> None:
    """Give the items that came as images their vectors and, with a `side`, their thumbnails."""
    places, images = list(arrived.images), list(arrived.images.values())
    embedded = await pipeline.embed(images, deadline, stages)
    for i, vector in made_of(dict(zip(places, embedded, strict=True))).items():
        arrived.items[i] = replace(arrived.items[i], vector=vector)
    if side:
        pictures = await pipeline.thumbnails(images, side, deadline)
        for i, picture in made_of(dict(zip(places, pictures, strict=True))).items():
            arrived.items[i] = replace(arrived.items[i], thumbnail=picture)


def _stored(arrived: Arrivals, gallery: "Gallery", _: Pipeline) -> list[int]:
    """Store what arrived; return the versions."""
    items = arrived.items
    if not gallery.meta.thumbnail_side:  # that of a gallery which had the name before may have been asked for
        items = [replace(item, thumbnail=b"") for item in items]
    return gallery.upsert(items, expected=arrived.expected)


def _expected(keys: Sequence[str], request: pb.DeleteItemsRequest) -> Mapping[str, int]:
    """The version that each item must have now, by key; of none where the request expects nothing."""
    versions = request.expected_versions
    if not versions:
        return {}
    if len(versions) != len(request.keys):
        raise refusal(
            "expected_versions",
            f"{len(versions)} versions were sent for {len(request.keys)} keys; send one a key, or none.",
        )
    if len(keys) < len(request.keys):
        raise refusal("keys", "A key comes twice; with expected_versions, send each key once.")
    return dict(zip(keys, versions, strict=True))


def _check_key(field: str, key: str) -> None:
    try:
        check_key(key)
    except InvalidArgument as error:
        raise refusal(field, str(error)) from error
