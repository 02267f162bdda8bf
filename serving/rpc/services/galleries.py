"""GalleryService: makes and describes galleries; `Items` and `Generations` have its other calls."""

from collections.abc import Callable, Mapping
from typing import Any

from protos import gallery_service_pb2 as pb
from serving.errors import CrossbatchError, NotFound
from serving.rpc.boundary import deadline_of
from serving.rpc.services.arrivals import UnreadItems
from serving.rpc.services.bounds import page_size
from serving.rpc.services.description import described
from serving.rpc.services.generations import Generations
from serving.rpc.services.items import Items
from serving.rpc.status import to_status

__all__ = ["READERS", "Galleries"]

READERS: Mapping[str, Callable[[bytes], Any]] = {"GalleryService/UpsertItems": UnreadItems.FromString}
"""What unpacks the requests of the calls that do not take their own message class."""


class Galleries(Generations, Items):
    """Answers the calls that make and describe galleries, beside those on items and on generations."""

    async def CreateGallery(self, request: pb.CreateGalleryRequest, context: Any) -> pb.CreateGalleryResponse:  # noqa: N802
        """Make an empty gallery for a model that is served.

        Raises:
            InvalidArgument: if the name breaks the rule, or an option is out of range.
            AlreadyExists: if it is taken.
            NotFound: if there is no such model.
        """
        spec, deadline = self._fleet.get(request.model).spec, deadline_of(context)
        wanted: dict[str, Any] = {}  # what is not said is left to the gallery
        if request.index:
            wanted["index"] = request.index
        if request.HasField("recall"):
            wanted["recall"] = request.recall
        with self._admission.admit():
            await self._shelf.write(
                deadline,
                self._shelf.galleries.create,
                request.name,
                model_name=spec.name,
                fingerprint=spec.fingerprint,
                dimension=spec.dimension,
                thumbnail_side=request.thumbnail_side,
                **wanted,
            )
            made = await self._shelf.read(deadline, described, self._shelf, self._fleet, request.name)
        return pb.CreateGalleryResponse(gallery=made)

    async def GetGallery(self, request: pb.GetGalleryRequest, context: Any) -> pb.GetGalleryResponse:  # noqa: N802
        """Describe one gallery, with its problem if it has one.

        Raises:
            NotFound: if there is none of that name.
        """
        with self._admission.admit():
            found = await self._shelf.read(
                deadline_of(context), described, self._shelf, self._fleet, request.name
            )
        return pb.GetGalleryResponse(gallery=found)

    async def ListGalleries(self, request: pb.ListGalleriesRequest, context: Any) -> pb.ListGalleriesResponse:  # noqa: N802
        """Describe one page of galleries, and give the token of the next one.

        Raises:
            InvalidArgument: if the page is too large.
        """
        size = page_size(request.page_size)
        with self._admission.admit():
            return await self._shelf.read(deadline_of(context), self._page, size, request.page_token)

    def _page(self, size: int, after: str) -> pb.ListGalleriesResponse:
        names = sorted(name for name in self._shelf.galleries.names() if name > after)
        reply = pb.ListGalleriesResponse()
        for name in names[:size]:
            try:
                reply.galleries.append(described(self._shelf, self._fleet, name))
            except NotFound:  # dropped since the names were read
                continue
            except CrossbatchError as error:  # one that cannot be read now must not hide the others
                reply.galleries.append(pb.Gallery(name=name, problem=to_status(self._shelf.hide(error))))
            except Exception as error:  # nor a bug that one shows, which `to_status` logs
                reply.galleries.append(pb.Gallery(name=name, problem=to_status(error)))
        reply.next_page_token = names[size - 1] if len(names) > size else ""
        return reply
