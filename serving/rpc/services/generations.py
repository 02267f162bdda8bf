"""The calls of GalleryService on a gallery as a whole: remove it, index it anew, switch it and back."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from protos import gallery_service_pb2 as pb
from protos import gallery_service_pb2_grpc
from serving.engine.fleet import Fleet
from serving.engine.shelf import Shelf
from serving.errors import Draining
from serving.rpc.admission import Admission
from serving.rpc.boundary import deadline_of
from serving.rpc.services.description import described

__all__ = ["Generations"]

PATIENCE = 10.0
"""Most seconds that a switch waits for whoever works on one of the galleries."""
OFTEN, SELDOM = 0.1, 1.0
"""Seconds between two messages of a rebuild: at least, and at most."""


class Generations(gallery_service_pb2_grpc.GalleryServiceServicer):
    """Answers DeleteGallery, BuildIndex, SwitchGallery and RollbackGallery.

    They hold no permit: they may take long, and need nothing of what permits stand for. `Shelf` bounds how
    many run or wait.
    """

    _fleet: Fleet
    _shelf: Shelf
    _admission: Admission

    async def DeleteGallery(self, request: pb.DeleteGalleryRequest, context: Any) -> pb.DeleteGalleryResponse:  # noqa: N802
        """Remove a gallery, a damaged one too; calls that are searching it still end well.

        Raises:
            InvalidArgument: if nothing can have that name.
            NotFound: if there is none.
        """
        await self._shelf.upkeep(deadline_of(context), self._shelf.galleries.drop, request.name)
        return pb.DeleteGalleryResponse()

    async def BuildIndex(  # noqa: N802
        self, request: pb.BuildIndexRequest, context: Any
    ) -> AsyncIterator[pb.BuildIndexResponse]:
        """Make the index of a gallery anew and tell how far it is.

        Yields:
            How far it is, when that changes but not too often, and once a second when it does not; then the
            gallery.

        Raises:
            InvalidArgument: if the type or the recall cannot be that of this gallery.
            NotFound: if there is no such gallery.
            Overloaded: if too many are being made, or another rebuild of this one did not end.
            DeadlineExceeded: if the time ran out; the index is what it was.
            Draining: if the server stops; the index is what it was.
        """
        deadline = deadline_of(context)
        index = request.index or None
        recall = request.recall if request.HasField("recall") else None
        async with self._shelf.building(deadline, request.name, index, recall) as (build, done):
            while not done.done():
                if self._admission.draining:
                    raise Draining("The server is stopping; the index is what it was. Ask another server.")
                build.changed.clear()
                stage, so_far, total = build.reached
                yield pb.BuildIndexResponse(stage=stage, done=so_far, total=total)
                await asyncio.wait([done], timeout=OFTEN)
                with suppress(TimeoutError):
                    await asyncio.wait_for(build.changed.wait(), SELDOM - OFTEN)
            done.result()
        found = await self._shelf.read(deadline, described, self._shelf, self._fleet, request.name)
        yield pb.BuildIndexResponse(gallery=found)

    async def SwitchGallery(self, request: pb.SwitchGalleryRequest, context: Any) -> pb.SwitchGalleryResponse:  # noqa: N802
        """Give the name of a gallery to another one.

        Raises:
            InvalidArgument: if nothing can have one of the names, or they are alike.
            NotFound: if there is no gallery `other`.
            AlreadyExists: if it has the name already; so the call does no harm when it is repeated.
            Overloaded: if somebody works on one of them for too long.
        """
        deadline = deadline_of(context)

        def switch() -> pb.Gallery:
            self._shelf.galleries.switch(request.name, request.other, timeout=_patience(deadline))
            return described(self._shelf, self._fleet, request.name)

        return pb.SwitchGalleryResponse(gallery=await self._shelf.upkeep(deadline, switch))

    async def RollbackGallery(  # noqa: N802
        self, request: pb.RollbackGalleryRequest, context: Any
    ) -> pb.RollbackGalleryResponse:
        """Undo the switch by which a gallery got its name; repeated, it would undo the one before.

        Raises:
            InvalidArgument: if nothing can have that name.
            NotFound: if there is none, it got its name by no switch, or the one before it was removed.
            Mismatch: if another gallery lies where that one was.
            Overloaded: if somebody works on one of them for too long.
        """
        deadline = deadline_of(context)

        def roll_back() -> pb.RollbackGalleryResponse:
            other = self._shelf.galleries.rollback(request.name, timeout=_patience(deadline))
            return pb.RollbackGalleryResponse(
                gallery=described(self._shelf, self._fleet, request.name), other=other
            )

        return await self._shelf.upkeep(deadline, roll_back)


def _patience(deadline: float | None) -> float:
    """Seconds that may be spent on waiting for a lock."""
    return PATIENCE if deadline is None else min(PATIENCE, max(0.0, deadline - time.monotonic()))
