"""GalleryService: makes and describes galleries, adds and removes items."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protos import gallery_service_pb2 as pb
from protos import gallery_service_pb2_grpc
from serving.errors import CrossbatchError, InvalidArgument, Mismatch, NotFound
from serving.gallery.item import Item, check_item, check_keys
from serving.rpc.admission import Admission
from serving.rpc.boundary import deadline_of
from serving.rpc.limits import MAX_DELETED_KEYS, MAX_INPUTS
from serving.rpc.loose import loosened
from serving.rpc.pipeline import Outcome, Pipeline, Stages, check_size
from serving.rpc.retrieval import check_count, timings_of
from serving.rpc.shelf import Shelf
from serving.rpc.status import Refusal, Violation, refusal, to_status
from serving.rpc.wire import metadata_of, vector_of
from serving.rpc.workers import check_time

__all__ = ["READERS", "Galleries", "UnreadItems", "read_items"]

DEFAULT_PAGE, MAX_PAGE = 100, 1_000

UnreadItems = loosened(pb.UpsertItemsRequest)
"""An UpsertItemsRequest whose `items` are bytes."""

READERS: Mapping[str, Callable[[bytes], Any]] = {"GalleryService/UpsertItems": UnreadItems.FromString}
"""What unpacks the requests of the calls that do not take their own message class."""


class Galleries(gallery_service_pb2_grpc.GalleryServiceServicer):
    """Answers the five calls on galleries."""

    def __init__(self, pipeline: Pipeline, shelf: Shelf, admission: Admission) -> None:
        """Keep what the calls pass through."""
        self._pipeline = pipeline
        self._shelf = shelf
        self._admission = admission

    async def CreateGallery(self, request: pb.CreateGalleryRequest, context: Any) -> pb.CreateGalleryResponse:  # noqa: N802
        """Make an empty gallery for the model that is served.

        Raises:
            InvalidArgument: if the name breaks the rule.
            AlreadyExists: if it is taken.
        """
        spec, deadline = self._shelf.spec, deadline_of(context)
        with self._admission.admit():
            await self._shelf.write(
                deadline,
                self._shelf.galleries.create,
                request.name,
                model_name=spec.name,
                fingerprint=spec.fingerprint,
                dimension=spec.dimension,
            )
            made = await self._shelf.read(deadline, _described, self._shelf, request.name)
        return pb.CreateGalleryResponse(gallery=made)

    async def GetGallery(self, request: pb.GetGalleryRequest, context: Any) -> pb.GetGalleryResponse:  # noqa: N802
        """Describe one gallery, with its problem if it has one.

        Raises:
            NotFound: if there is none of that name.
        """
        with self._admission.admit():
            found = await self._shelf.read(deadline_of(context), _described, self._shelf, request.name)
        return pb.GetGalleryResponse(gallery=found)

    async def ListGalleries(self, request: pb.ListGalleriesRequest, context: Any) -> pb.ListGalleriesResponse:  # noqa: N802
        """Describe one page of galleries, and give the token of the next one.

        Raises:
            InvalidArgument: if the page is too large.
        """
        if request.page_size > MAX_PAGE:
            raise refusal(
                "page_size", f"{request.page_size} were asked for; a page holds at most {MAX_PAGE:,}."
            )
        size = request.page_size or DEFAULT_PAGE
        with self._admission.admit():
            return await self._shelf.read(deadline_of(context), _page, self._shelf, size, request.page_token)

    async def UpsertItems(self, request: Any, context: Any) -> pb.UpsertItemsResponse:  # noqa: N802
        """Store all the items of the request, which is `UnreadItems`, or none.

        Returns:
            How many were stored, after they are on disk.

        Raises:
            InvalidArgument: if an item is bad; a `Refusal` names the field of each.
            NotFound: if there is no such gallery.
            Mismatch: if the gallery belongs to another model.
            DeadlineExceeded: if the time ran out before anything was written.
        """
        stages = Stages()
        deadline = deadline_of(context)
        check_count("items", len(request.items), MAX_INPUTS)
        with self._admission.admit(len(request.items)):
            gallery = await self._shelf.read(deadline, self._shelf.usable, request.gallery)
            # With the writers, so that it keeps no search waiting.
            items, images = await self._shelf.write(
                deadline, read_items, request.items, self._shelf.spec.dimension, deadline
            )
            embedded = await self._pipeline.embed(list(images.values()), deadline, stages)
            for i, vector in _vectors_of(dict(zip(images, embedded, strict=True))).items():
                items[i] = replace(items[i], vector=vector)
            began = time.monotonic()
            stored = await self._shelf.write(deadline, gallery.upsert, items)
        stages.gallery = time.monotonic() - began
        return pb.UpsertItemsResponse(stored=len(stored), timings=timings_of(stages))

    async def DeleteItems(self, request: pb.DeleteItemsRequest, context: Any) -> pb.DeleteItemsResponse:  # noqa: N802
        """Remove items by key.

        Returns:
            How many were there and are gone, after that is on disk.

        Raises:
            InvalidArgument: if there are no keys or too many.
            NotFound: if there is no such gallery.
            Mismatch: if the gallery belongs to another model.
        """
        deadline = deadline_of(context)
        check_count("keys", len(request.keys), MAX_DELETED_KEYS)
        with self._admission.admit():
            keys = check_keys(list(request.keys))
            gallery = await self._shelf.read(deadline, self._shelf.usable, request.gallery)
            deleted = await self._shelf.write(deadline, gallery.delete, keys)
        return pb.DeleteItemsResponse(deleted=deleted)


def _described(shelf: Shelf, name: str) -> pb.Gallery:
    """Describe a gallery, also one that is damaged or of another model."""
    described = pb.Gallery(name=name)
    try:
        gallery = shelf.galleries.get(name)
        info = gallery.info()
        described.model_name = info.model_name
        described.model_fingerprint = info.fingerprint
        described.dimension = info.dimension
        described.items = info.items
        gallery.check_model(shelf.spec)
    except Mismatch as error:
        described.problem.CopyFrom(to_status(shelf.hide(error)))
    return described


def _page(shelf: Shelf, size: int, after: str) -> pb.ListGalleriesResponse:
    names = sorted(name for name in shelf.galleries.names() if name > after)
    reply = pb.ListGalleriesResponse()
    for name in names[:size]:
        try:
            reply.galleries.append(_described(shelf, name))
        except NotFound:  # dropped since the names were read
            continue
        except CrossbatchError as error:  # one that cannot be read now must not hide the others
            reply.galleries.append(pb.Gallery(name=name, problem=to_status(shelf.hide(error))))
        except Exception as error:  # nor a bug that one shows, which `to_status` logs
            reply.galleries.append(pb.Gallery(name=name, problem=to_status(error)))
    reply.next_page_token = names[size - 1] if len(names) > size else ""
    return reply


def read_items(
    parts: Sequence[bytes], dimension: int, deadline: float | None
) -> tuple[list[Item], dict[int, bytes]]:
    """Unpack and check items, one after the other, each once; everything that needs no model.

    Args:
        parts: Messages of the type Item.
        dimension: Of the vectors.
        deadline: The `time.monotonic()` until which somebody waits.

    Returns:
        The items, those that come as images with a vector that only stands in; and the images by position.

    Raises:
        Refusal: if some are bad; names the field of each.
        DeadlineExceeded: if there was no time to look at all.
    """
    items: list[Item] = []
    images: dict[int, bytes] = {}
    violations: list[Violation] = []
    first: dict[str, int] = {}
    # `check_item` looks at the whole item.
    unit = np.eye(1, dimension, dtype=np.float32)[0]
    for i, part in enumerate(parts):
        check_time(deadline, "all items were checked")
        field = f"items[{i}]"
        try:
            message = _item_message(part)
            if (earlier := first.setdefault(message.key, i)) != i:
                same = f"The key {message.key!r} is also that of items[{earlier}]; send each key once."
                violations.append(Violation(f"{field}.key", InvalidArgument(same)))
            item = Item(message.key, unit, message.label, message.uri, metadata_of(message.metadata))
            check_item(item, dimension=dimension)
            match message.WhichOneof("content"):
                case "image":
                    field = f"{field}.image"
                    check_size(message.image)
                    images[i] = message.image
                case "vector":
                    field = f"{field}.vector"
                    item = replace(item, vector=vector_of(message.vector))
                    check_item(replace(item, metadata={}), dimension=dimension)  # its metadata has been
                case _:
                    raise InvalidArgument("The item is empty; give an image or a vector.")
            items.append(item)
        except CrossbatchError as error:
            violations.append(Violation(field, error))
    if violations:
        raise Refusal(violations)
    return items, images


def _item_message(part: bytes) -> pb.Item:
    try:
        return pb.Item.FromString(part)
    except (DecodeError, ValueError) as error:
        raise InvalidArgument(
            "The bytes are no Item, or its metadata is nested too deep; check the proto files."
        ) from error


def _vectors_of(outcomes: dict[int, Outcome]) -> dict[int, NDArray[np.float32]]:
    """Unit vectors (d,) of all images; an exception if some of them have none."""
    vectors: dict[int, NDArray[np.float32]] = {}
    violations: list[Violation] = []
    for i, outcome in outcomes.items():
        if isinstance(outcome, InvalidArgument):
            violations.append(Violation(f"items[{i}].image", outcome))
        elif isinstance(outcome, Exception):  # overload, lateness or a bug: not the fault of a field
            raise outcome
        else:
            vectors[i] = outcome
    if violations:
        raise Refusal(violations)
    return vectors
