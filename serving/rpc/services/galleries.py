"""GalleryService: makes, describes, indexes, switches and removes galleries; stores and reads their items."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from protos import gallery_service_pb2 as pb
from protos import gallery_service_pb2_grpc
from serving.engine.galleries import GalleryExecutor
from serving.engine.instances import ModelInstances
from serving.engine.models import ModelRegistry
from serving.errors import Draining, Mismatch, NotFound
from serving.gallery.item import CheckedItem, check_cosine, check_key, unit_vector
from serving.gallery.place import AnyGallery
from serving.gallery.search.filter import LABEL
from serving.gallery.store.schema import Meta
from serving.observability.call import Call
from serving.rpc.admission import Admission
from serving.rpc.limits import MAX_DELETED_KEYS, MAX_INPUTS, MAX_PREFIX
from serving.rpc.services import convert, items
from serving.rpc.services.tiles import tile_reply
from serving.rpc.status import refusal, to_status

__all__ = ["GalleryCalls"]

PATIENCE = 10.0
"""Most seconds that a switch waits for whoever works on one of the galleries."""


class GalleryCalls(gallery_service_pb2_grpc.GalleryServiceServicer):
    """Answers every call on galleries and their items.

    Those that may wait for a lock (a rebuild, a switch, a removal) hold no permit; the executor bounds them.
    """

    def __init__(self, models: ModelRegistry, galleries: GalleryExecutor, admission: Admission) -> None:
        self._models = models
        self._galleries = galleries
        self._admission = admission

    def CreateGallery(self, request: pb.CreateGalleryRequest, call: Call) -> pb.CreateGalleryResponse:  # noqa: N802
        """Make an empty gallery for a model that is served."""
        spec = self._models.get(request.model).spec
        recall = {"recall": request.recall} if request.HasField("recall") else {}
        self._admission.admit(call)
        with self._galleries.naming_no_path():
            self._galleries.directory.create(
                request.name,
                model_name=spec.name,
                fingerprint=spec.fingerprint,
                dimension=spec.dimension,
                thumbnail_side=request.thumbnail_side,
                index=request.index or "auto",
                **recall,
            )
            return pb.CreateGalleryResponse(gallery=self._described(request.name))

    def GetGallery(self, request: pb.GetGalleryRequest, call: Call) -> pb.GetGalleryResponse:  # noqa: N802
        """Describe one gallery, with its problem if it has one."""
        self._admission.admit(call)
        return pb.GetGalleryResponse(gallery=self._described(request.name))

    def ListGalleries(self, request: pb.ListGalleriesRequest, call: Call) -> pb.ListGalleriesResponse:  # noqa: N802
        """Describe one page of galleries; the token of the next one is the last name of this one."""
        size = convert.page_size(request.page_size)
        reply = pb.ListGalleriesResponse()
        self._admission.admit(call)
        with self._galleries.naming_no_path():
            names = [name for name in self._galleries.directory.names() if name > request.page_token]
            for name in names[:size]:
                call.check()
                try:
                    reply.galleries.append(self._described(name))
                except NotFound:  # dropped since the names were read
                    continue
                except Exception as error:  # one that cannot be read now must not hide the others
                    reply.galleries.add(name=name, problem=to_status(error))
        reply.next_page_token = names[size - 1] if len(names) > size else ""
        return reply

    def DeleteGallery(self, request: pb.DeleteGalleryRequest, call: Call) -> pb.DeleteGalleryResponse:  # noqa: N802
        """Remove a gallery, a damaged one too; calls that are searching it still end well."""
        self._galleries.upkeep(lambda: self._galleries.directory.drop(request.name))
        return pb.DeleteGalleryResponse()

    def SwitchGallery(self, request: pb.SwitchGalleryRequest, call: Call) -> pb.SwitchGalleryResponse:  # noqa: N802
        """Give the name of a gallery to another one."""
        patience, directory = call.remaining(PATIENCE), self._galleries.directory
        self._galleries.upkeep(lambda: directory.switch(request.name, request.other, timeout=patience))
        return pb.SwitchGalleryResponse(gallery=self._described(request.name))

    def RollbackGallery(self, request: pb.RollbackGalleryRequest, call: Call) -> pb.RollbackGalleryResponse:  # noqa: N802
        """Undo the switch by which a gallery got its name; repeated, it would undo the one before."""
        patience, directory = call.remaining(PATIENCE), self._galleries.directory
        other = self._galleries.upkeep(lambda: directory.rollback(request.name, timeout=patience))
        return pb.RollbackGalleryResponse(gallery=self._described(request.name), other=other)

    def BuildIndex(self, request: pb.BuildIndexRequest, call: Call) -> Iterator[pb.BuildIndexResponse]:  # noqa: N802
        """Make the index of a gallery anew and tell how far it is, at last with the gallery."""
        recall = request.recall if request.HasField("recall") else None
        steps = self._galleries.building(request.name, request.index or None, recall, call)
        for stage, done, total in steps:  # leaving the loop breaks the work off
            if self._admission.draining:
                raise Draining("The server is stopping; the index is what it was. Ask another server.")
            yield pb.BuildIndexResponse(stage=stage, done=done, total=total)
        yield pb.BuildIndexResponse(gallery=self._described(request.name))

    def UpsertItems(self, request: pb.UpsertItemsRequest, call: Call) -> pb.UpsertItemsResponse:  # noqa: N802
        """Store all the items of the request or none; the reply follows when they are on disk."""
        convert.check_count("items", len(request.items), MAX_INPUTS)

        def complete_and_store(meta: Meta, model: ModelInstances) -> list[int]:
            upsert = convert.read_items(request.items, meta.dimension, call)
            _complete(upsert, model, meta.thumbnail_side, call)
            began = time.monotonic()
            versions = self._galleries.using(
                request.gallery, lambda gallery, _: _stored(gallery, upsert), call, model=model, writes=True
            )
            call.stages.spent("gallery", began, time.monotonic() - began)
            return versions

        self._admission.admit(call, len(request.items))
        # The model is looked up before anything is spent on the items.
        versions = self._galleries.with_model(request.gallery, complete_and_store)
        return pb.UpsertItemsResponse(
            stored=len(versions), versions=versions, timings=convert.timings_of(call)
        )

    def UpdateItems(self, request: pb.UpdateItemsRequest, call: Call) -> pb.UpdateItemsResponse:  # noqa: N802
        """Change texts of all the items of the request or none; the reply follows when that is on disk."""
        convert.check_count("items", len(request.items), MAX_INPUTS)
        changes = convert.read_changes(request.items)
        expected = {it.key: it.expected_version for it in request.items if it.HasField("expected_version")}
        self._admission.admit(call, len(changes))
        versions = self._galleries.using(
            request.gallery, lambda gallery, _: gallery.update(changes, expected=expected), call, writes=True
        )
        return pb.UpdateItemsResponse(updated=len(versions), versions=versions)

    def DeleteItems(self, request: pb.DeleteItemsRequest, call: Call) -> pb.DeleteItemsResponse:  # noqa: N802
        """Remove items by key; the reply follows when that is on disk."""
        keys, versions = list(request.keys), list(request.expected_versions)
        convert.check_count("keys", len(keys), MAX_DELETED_KEYS)
        if versions and len(versions) != len(keys):
            raise refusal(
                "expected_versions",
                f"{len(versions)} versions were sent for {len(keys)} keys; send one a key, or none.",
            )
        if versions and len(set(keys)) < len(keys):
            raise refusal("keys", "A key comes twice; with expected_versions, send each key once.")
        expected = dict(zip(keys, versions, strict=False))
        self._admission.admit(call)
        deleted = self._galleries.using(
            request.gallery, lambda gallery, _: gallery.delete(keys, expected=expected), call, writes=True
        )
        return pb.DeleteItemsResponse(deleted=deleted)

    def GetItem(self, request: pb.GetItemRequest, call: Call) -> pb.GetItemResponse:  # noqa: N802
        """Read one item whole."""
        key = convert.checked("key", check_key, request.key)

        def read(gallery: AnyGallery, _: ModelInstances) -> pb.GetItemResponse:
            (item,) = gallery.get([key], thumbnails=request.with_thumbnail)
            reply = pb.GetItemResponse(thumbnail=item.thumbnail)
            convert.write_item(reply.item, item, with_vector=True)
            return reply

        self._admission.admit(call)
        return self._galleries.using(request.gallery, read, call)

    def ListItems(self, request: pb.ListItemsRequest, call: Call) -> pb.ListItemsResponse:  # noqa: N802
        """Read one page of items; the token of the next one is the last key, or version, of this one."""
        size, wanted, after = convert.page_size(request.page_size), convert.filter_in(request), 0
        if wanted is not None:
            after = convert.page_version(request.page_token)
            if request.key_prefix:
                raise refusal("key_prefix", "It was sent with a filter; send one of the two.")
        else:
            for field in ("page_token", "key_prefix"):
                if text := getattr(request, field):
                    convert.checked(field, check_key, text)
        self._admission.admit(call)

        def read(gallery: AnyGallery) -> pb.ListItemsResponse:
            return items.page(gallery, request, size, wanted, after, call)

        return self._galleries.using(
            request.gallery, lambda gallery, _: convert.checked("filter", read, gallery), call
        )

    def SampleItems(self, request: pb.SampleItemsRequest, call: Call) -> pb.SampleItemsResponse:  # noqa: N802
        """Read items drawn at random."""
        size, wanted = convert.page_size(request.size, field="size"), convert.filter_in(request)
        self._admission.admit(call)

        def draw(gallery: AnyGallery) -> pb.SampleItemsResponse:
            return items.sample(gallery, request, size, wanted, call)

        return self._galleries.using(
            request.gallery, lambda gallery, _: convert.checked("filter", draw, gallery), call
        )

    def ListFields(self, request: pb.ListFieldsRequest, call: Call) -> pb.ListFieldsResponse:  # noqa: N802
        """Tell the fields of the metadata."""
        self._admission.admit(call)
        return self._galleries.using(request.gallery, lambda gallery, _: items.fields(gallery), call)

    def ListValues(self, request: pb.ListValuesRequest, call: Call) -> pb.ListValuesResponse:  # noqa: N802
        """Tell the most frequent values of a field."""
        size = convert.page_size(request.page_size)
        if not request.field:
            raise refusal("field", f"It is empty; give the name of a field, or {LABEL} for the label.")
        if (length := len(request.prefix.encode())) > MAX_PREFIX:
            raise refusal("prefix", f"It is {length:,} bytes of UTF-8; give at most {MAX_PREFIX:,}.")
        self._admission.admit(call)
        return self._galleries.using(
            request.gallery, lambda gallery, _: items.values(gallery, request, size), call
        )

    def ListDuplicates(  # noqa: N802
        self, request: pb.ListDuplicatesRequest, call: Call
    ) -> pb.ListDuplicatesResponse:
        """Compare one page of items; the token of the next one is the last version of this one."""
        size, after = convert.page_size(request.page_size), convert.page_version(request.page_token)
        convert.checked("above", partial(check_cosine, "above"), request.above)
        self._admission.admit(call)
        return self._galleries.using(
            request.gallery, lambda gallery, _: items.duplicates(gallery, request, size, after, call), call
        )

    def CountItems(self, request: pb.CountItemsRequest, call: Call) -> pb.CountItemsResponse:  # noqa: N802
        """Count the items that fulfil a filter."""
        wanted = convert.filter_in(request)

        def count(gallery: AnyGallery, _: ModelInstances) -> pb.CountItemsResponse:
            number = convert.checked("filter", gallery.count, wanted)
            unknown = () if wanted is None else gallery.unknown_fields(wanted)
            return pb.CountItemsResponse(items=number, unknown_fields=unknown)

        self._admission.admit(call)
        return self._galleries.using(request.gallery, count, call)

    def GetMapTile(self, request: pb.GetMapTileRequest, call: Call) -> pb.GetMapTileResponse:  # noqa: N802
        """Show the points of a square of the gallery's map."""
        self._admission.admit(call)
        return self._galleries.using(request.gallery, lambda gallery, _: tile_reply(gallery, request), call)

    def _described(self, name: str) -> pb.Gallery:
        """Describe a gallery, also one that is damaged or of a model that is not served."""
        told = pb.Gallery(name=name)

        def describe(gallery: AnyGallery) -> None:
            convert.write_info(told, gallery.info(), gallery.meta.thumbnail_side)
            self._models.fitting(gallery)

        try:
            with self._galleries.naming_no_path():
                self._galleries.directory.using(name, describe)
        except Mismatch as error:
            told.problem.CopyFrom(to_status(error))
        return told


def _complete(upsert: convert.Upsert, model: ModelInstances, thumbnail_side: int, call: Call) -> None:
    """Give the items that came as images their vectors and, with a side, their thumbnails."""
    places, images = list(upsert.images), list(upsert.images.values())
    vectors = convert.good_or_refused(model.embed(images, call), lambda at: f"items[{places[at]}].image")
    pictures = [b""] * len(images)
    if thumbnail_side:
        made = model.thumbnails(images, thumbnail_side, call)
        pictures = convert.good_or_refused(made, lambda at: f"items[{places[at]}].image")
    for place, vector, picture in zip(places, vectors, pictures, strict=True):
        item, metadata = upsert.items[place]
        unit = unit_vector(vector, f"the vector of {item.key!r}", dimension=model.spec.dimension)
        upsert.items[place] = CheckedItem(replace(item, vector=unit, thumbnail=picture), metadata)


def _stored(gallery: AnyGallery, upsert: convert.Upsert) -> list[int]:
    """Store items; return their versions."""
    stored = upsert.items
    if not gallery.meta.thumbnail_side:  # that of a gallery which had the name before may have been asked for
        stored = [CheckedItem(replace(item, thumbnail=b""), metadata) for item, metadata in stored]
    return gallery.upsert_checked(stored, expected=upsert.expected)
