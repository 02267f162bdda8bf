"""GalleryService: makes and describes galleries, adds and removes items."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from protos import gallery_service_pb2 as pb
from protos import gallery_service_pb2_grpc
from serving.errors import CrossbatchError, DeadlineExceeded, InvalidArgument, Mismatch, NotFound
from serving.gallery.item import Item, check_item, check_keys
from serving.rpc.admission import Admission
from serving.rpc.boundary import deadline_of
from serving.rpc.limits import MAX_DELETED_KEYS, MAX_INPUTS
from serving.rpc.pipeline import Outcome, Pipeline, Stages, check_size
from serving.rpc.retrieval import check_count, refusal, timings_of
from serving.rpc.shelf import GalleryLike, Shelf
from serving.rpc.status import Refusal, Violation, to_status
from serving.rpc.wire import metadata_of, vector_of

__all__ = ["Galleries"]

DEFAULT_PAGE, MAX_PAGE = 100, 1_000


class Galleries(gallery_service_pb2_grpc.GalleryServiceServicer):
    """Answers the five calls on galleries."""

    def __init__(self, pipeline: Pipeline, shelf: Shelf, admission: Admission) -> None:
        """Keep what the calls pass through."""
        self._pipeline = pipeline
        self._shelf = shelf
        self._admission = admission

    async def CreateGallery(self, request: pb.CreateGalleryRequest, context: Any) -> pb.CreateGalleryResponse:  # noqa: N802
        """Make an empty gallery for the model that is served.

        Returns:
            The gallery.

        Raises:
            InvalidArgument: if the name breaks the rule.
            AlreadyExists: if it is taken.
        """
        spec = self._shelf.spec
        await self._shelf.write(
            self._shelf.galleries.create,
            request.name,
            model_name=spec.name,
            fingerprint=spec.fingerprint,
            dimension=spec.dimension,
        )
        return pb.CreateGalleryResponse(gallery=await self._shelf.read(_described, self._shelf, request.name))

    async def GetGallery(self, request: pb.GetGalleryRequest, context: Any) -> pb.GetGalleryResponse:  # noqa: N802
        """Describe one gallery.

        Returns:
            The gallery, with its problem if it has one.

        Raises:
            NotFound: if there is none of that name.
        """
        return pb.GetGalleryResponse(gallery=await self._shelf.read(_described, self._shelf, request.name))

    async def ListGalleries(self, request: pb.ListGalleriesRequest, context: Any) -> pb.ListGalleriesResponse:  # noqa: N802
        """Describe one page of galleries.

        Returns:
            The page and the token of the next one.

        Raises:
            InvalidArgument: if the page is too large.
        """
        if request.page_size > MAX_PAGE:
            raise refusal(
                "page_size", f"{request.page_size} were asked for; a page holds at most {MAX_PAGE:,}."
            )
        size = request.page_size or DEFAULT_PAGE
        return await self._shelf.read(_page, self._shelf, size, request.page_token)

    async def UpsertItems(self, request: pb.UpsertItemsRequest, context: Any) -> pb.UpsertItemsResponse:  # noqa: N802
        """Store all the items of the request, or none.

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
        _check_unembedded(request.items, self._shelf.spec.dimension)
        with self._admission.admit(len(request.items)):
            gallery = await self._shelf.read(self._shelf.usable, request.gallery)
            images = {
                i: item.image for i, item in enumerate(request.items) if item.WhichOneof("content") == "image"
            }
            embedded = await self._pipeline.embed(list(images.values()), deadline, stages)
            _refuse_failed(dict(zip(images, embedded, strict=True)))
            vectors = dict(zip(images, embedded, strict=True))
            items = [_item(item, vectors.get(i)) for i, item in enumerate(request.items)]
            began = time.monotonic()
            stored = await self._shelf.write(_upsert, gallery, items, deadline)
        stages.gallery = time.monotonic() - began
        return pb.UpsertItemsResponse(stored=stored, timings=timings_of(stages))

    async def DeleteItems(self, request: pb.DeleteItemsRequest, context: Any) -> pb.DeleteItemsResponse:  # noqa: N802
        """Remove items by key.

        Returns:
            How many were there and are gone, after that is on disk.

        Raises:
            InvalidArgument: if there are no keys or too many.
            NotFound: if there is no such gallery.
            Mismatch: if the gallery belongs to another model.
        """
        check_count("keys", len(request.keys), MAX_DELETED_KEYS)
        keys = check_keys(list(request.keys))
        gallery = await self._shelf.read(self._shelf.usable, request.gallery)
        return pb.DeleteItemsResponse(deleted=await self._shelf.write(gallery.delete, keys))


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
        described.problem.CopyFrom(to_status(error))
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
            reply.galleries.append(pb.Gallery(name=name, problem=to_status(error)))
    reply.next_page_token = names[size - 1] if len(names) > size else ""
    return reply


def _check_unembedded(items: Sequence[pb.Item], dimension: int) -> None:
    """Check everything about items that needs no model, and name each bad field."""
    violations: list[Violation] = []
    first: dict[str, int] = {}
    # Stands in for a vector that is not known yet, as `check_item` looks at the whole item.
    unit = np.eye(1, dimension, dtype=np.float32)[0]
    for i, item in enumerate(items):
        content = item.WhichOneof("content")
        field = f"items[{i}].{content}" if content else f"items[{i}]"
        try:
            if content == "image":
                check_size(item.image)
            elif content is None:
                raise InvalidArgument("The item is empty; give an image or a vector.")
            vector = vector_of(item.vector) if content == "vector" else unit
            given = Item(item.key, unit, item.label, item.uri, metadata_of(item.metadata))
            field = f"items[{i}]"
            check_item(given, dimension=dimension)
            field = f"items[{i}].{content}"
            check_item(replace(given, vector=vector), dimension=dimension)
        except CrossbatchError as error:
            violations.append(Violation(field, error))
        if (earlier := first.setdefault(item.key, i)) != i:
            same = InvalidArgument(
                f"The key {item.key!r} is also that of items[{earlier}]; send each key once."
            )
            violations.append(Violation(f"items[{i}].key", same))
    if violations:
        raise Refusal(violations)


def _refuse_failed(outcomes: dict[int, Outcome]) -> None:
    failed = {i: each for i, each in outcomes.items() if isinstance(each, Exception)}
    for error in failed.values():
        if not isinstance(error, InvalidArgument):  # overload, lateness or a bug: not the fault of a field
            raise error
    violations = [
        Violation(f"items[{i}].image", each)
        for i, each in failed.items()
        if isinstance(each, CrossbatchError)
    ]
    if violations:
        raise Refusal(violations)


def _item(item: pb.Item, embedded: Outcome | None) -> Item:
    vector = vector_of(item.vector) if embedded is None or isinstance(embedded, Exception) else embedded
    return Item(item.key, vector, item.label, item.uri, metadata_of(item.metadata))


def _upsert(gallery: GalleryLike, items: list[Item], deadline: float | None) -> int:
    if deadline is not None and time.monotonic() >= deadline:
        raise DeadlineExceeded("The deadline passed before the items were written; nothing was stored.")
    return gallery.upsert(items)
