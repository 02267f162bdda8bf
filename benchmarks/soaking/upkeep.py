"""What operators do all day: rebuilds, switches, new models, looks at lists, health and metrics."""

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.driving.overload import scrape
from benchmarks.driving.served import Served
from benchmarks.soaking.tally import Tally
from benchmarks.soaking.traffic import ITEMS, SEASON, Traffic
from protos import gallery_service_pb2 as gallery_pb
from protos import gallery_service_pb2_grpc, model_service_pb2_grpc
from protos import model_service_pb2 as model_pb

__all__ = ["Upkeep", "replace"]

_DEADLINE: Final = 120.0
_NEXT: Final = f"{SEASON}-next"


def replace(path: Path, content: Path) -> None:
    """Put another file in the place of one, in one step."""
    aside = path.with_name(f"{path.name}.new")
    shutil.copyfile(content, aside)
    os.replace(aside, path)


class Upkeep:
    """Does each kind of work again and again, with a pause between."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        served: Served,
        tally: Tally,
        traffic: Traffic,
        models: list[tuple[Path, list[Path]]],
        metrics: str,
    ) -> None:
        """Keep what is needed.

        Args:
            channel: To the server.
            served: Its process.
            tally: Counts.
            traffic: Stores items in new galleries.
            models: Files that are served, each with those that take turns in its place.
            metrics: Address of the server's metrics; empty where it has none.
        """
        self._galleries: Any = gallery_service_pb2_grpc.GalleryServiceStub(channel)
        self._models: Any = model_service_pb2_grpc.ModelServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self._served = served
        self._tally = tally
        self._traffic = traffic
        self._files = models
        self._metrics = metrics

    async def work(self, scale: float, done: asyncio.Event) -> None:
        """Do all of it until `done` is set.

        Args:
            scale: Of the pauses; 1 for a long run.
            done: Ends it after what is being done.
        """
        works: list[tuple[float, Callable[[int], Awaitable[None]]]] = [
            (1.0, self._look),
            (5.0, self._scrape),
            (10.0, self._rebuild),
            (12.0, self._switch),
            (10.0, self._reload),
        ]
        await asyncio.gather(*(self._again(work, pause * scale, done) for pause, work in works))

    async def _again(self, work: Callable[[int], Awaitable[None]], pause: float, done: asyncio.Event) -> None:
        for turn in count():
            try:
                await asyncio.wait_for(done.wait(), pause)
            except TimeoutError:
                await work(turn)
            else:
                return

    async def _look(self, turn: int) -> None:
        """List galleries and models, and ask for the health."""
        galleries = self._galleries.ListGalleries(gallery_pb.ListGalleriesRequest(), timeout=_DEADLINE)
        reply = await self._tally.take("list galleries", galleries)
        if reply is not None:
            problems = [each.name for each in reply.galleries if each.HasField("problem")]
            self._tally.expect("list galleries", not problems, f"galleries that cannot be used: {problems}")
        await self._tally.take(
            "list models", self._models.ListModels(model_pb.ListModelsRequest(), timeout=_DEADLINE)
        )
        health = await self._tally.take(
            "health", self._health.Check(health_pb2.HealthCheckRequest(), timeout=_DEADLINE)
        )
        serving = health is not None and health.status == health_pb2.HealthCheckResponse.SERVING
        self._tally.expect("health", serving, "the server says that it does not serve")

    async def _scrape(self, turn: int) -> None:
        if self._metrics:
            try:
                text = await asyncio.to_thread(scrape, self._metrics)
            except OSError as error:
                self._tally.expect("metrics", False, error)
            else:
                self._tally.codes["metrics OK"] += 1
                self._tally.expect("metrics", "crossbatch_" in text, "no figure of crossbatch in the metrics")

    async def _rebuild(self, turn: int) -> None:
        """Make an index anew and read how far it is."""
        request = gallery_pb.BuildIndexRequest(name=ITEMS)
        last = await self._tally.take(
            "rebuild", _last(self._galleries.BuildIndex(request, timeout=_DEADLINE))
        )
        if last is not None:
            self._tally.expect("rebuild", last.gallery.name == ITEMS, "the last message has no gallery")

    async def _switch(self, turn: int) -> None:
        """Fill a new gallery and give it the name; every third time, give the name back."""
        if turn % 3 == 2:
            request = gallery_pb.RollbackGalleryRequest(name=SEASON)
            await self._tally.take("rollback", self._galleries.RollbackGallery(request, timeout=_DEADLINE))
            return
        if turn:
            drop = gallery_pb.DeleteGalleryRequest(name=_NEXT)
            await self._tally.take("drop", self._galleries.DeleteGallery(drop, timeout=_DEADLINE))
        create = gallery_pb.CreateGalleryRequest(name=_NEXT)
        await self._tally.take("create", self._galleries.CreateGallery(create, timeout=_DEADLINE))
        await self._traffic.store(_NEXT)
        switch = gallery_pb.SwitchGalleryRequest(name=SEASON, other=_NEXT)
        await self._tally.take("switch", self._galleries.SwitchGallery(switch, timeout=_DEADLINE))

    async def _reload(self, turn: int) -> None:
        """Put other model files in place and have them loaded, by a call and by SIGHUP in turn."""
        for path, others in self._files:
            await asyncio.to_thread(replace, path, others[turn % len(others)])
        if turn % 2:
            self._served.signal(signal.SIGHUP)
            self._tally.codes["SIGHUP"] += 1
            return
        await self._tally.take(
            "reload", self._models.ReloadModels(model_pb.ReloadModelsRequest(), timeout=_DEADLINE)
        )


async def _last(call: Any) -> Any:
    """Return the last message of a stream."""
    return [message async for message in call][-1]
