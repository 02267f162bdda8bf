"""What users send all day: searches by image and by vector, writes, and some calls that must fail."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any, Final

import grpc.aio
import numpy as np

from benchmarks.soaking.tally import Tally
from protos import gallery_service_pb2 as gallery_pb
from protos import gallery_service_pb2_grpc, retrieval_service_pb2_grpc
from protos import retrieval_service_pb2 as pb
from serving.rpc.wire import bytes_of

__all__ = ["ITEMS", "OTHER_MODEL", "SEASON", "Traffic"]

ITEMS, SEASON = "items", "season"
"""Galleries: one is written to and rebuilt, the name of the other is given away and back."""
OTHER_MODEL: Final = "other"
KEYS: Final = 1000
"""Items of a gallery; keys are drawn from as many, so that it never grows."""
_DEADLINE: Final = 30.0
_INVALID: Final = grpc.StatusCode.INVALID_ARGUMENT.value[0]
_MOST_WAITING: Final = 5_000


class Traffic:
    """Sends a mixture of calls, each at random."""

    def __init__(
        self, channel: grpc.aio.Channel, tally: Tally, images: Sequence[bytes], dimension: int
    ) -> None:
        """Keep what is sent.

        Args:
            channel: To the server.
            tally: Counts.
            images: Encoded images.
            dimension: Of the model's vectors.
        """
        self._retrieval: Any = retrieval_service_pb2_grpc.RetrievalServiceStub(channel)
        self._galleries: Any = gallery_service_pb2_grpc.GalleryServiceStub(channel)
        self._tally = tally
        self._images = images
        self._dimension = dimension
        self._random = Random(0)
        self._mixture: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (0.40, self._search_by_image),
            (0.20, self._search_by_vector),
            (0.10, self._embed),
            (0.02, self._embed_by_the_other_model),
            (0.10, self._upsert),
            (0.05, self._upsert_vectors),
            (0.05, self._delete),
            (0.02, self._list_items),
            (0.02, self._unknown_gallery),
            (0.02, self._bad_image),
            (0.02, self._bad_image_among_good_ones),
        ]

    async def fill(self) -> None:
        """Make the galleries and store every key."""
        for name in (ITEMS, SEASON):
            await self._tally.take(
                "create",
                self._galleries.CreateGallery(gallery_pb.CreateGalleryRequest(name=name), timeout=_DEADLINE),
            )
            await self.store(name)

    async def store(self, name: str) -> None:
        """Store every key of a gallery, by vectors."""
        for start in range(0, KEYS, 200):
            items = [gallery_pb.Item(key=f"{i}", vector=self.vector()) for i in range(start, start + 200)]
            await self._tally.take("store", self._upserted(name, items))

    async def once(self) -> None:
        """Send one call of the mixture."""
        weights = [weight for weight, _ in self._mixture]
        ((_, work),) = self._random.choices(self._mixture, weights)
        await work()

    async def closed(self, in_flight: int, seconds: float) -> float:
        """Keep so many calls in flight; returns the calls a second."""
        done, began = 0, time.perf_counter()

        async def one() -> None:
            nonlocal done
            while time.perf_counter() < began + seconds:
                await self.once()
                done += 1

        await asyncio.gather(*(one() for _ in range(in_flight)))
        return done / (time.perf_counter() - began)

    async def open(self, rate: float, seconds: float) -> None:
        """Send so many calls a second at random times, whatever becomes of them."""
        waiting: set[asyncio.Task[None]] = set()
        due = time.perf_counter()
        until = due + seconds
        while (now := time.perf_counter()) < until:
            if now < due:
                await asyncio.sleep(due - now)
                continue
            due += self._random.expovariate(rate)
            if len(waiting) >= _MOST_WAITING:
                self._tally.expect("the open loop", False, f"{_MOST_WAITING} calls wait for the server")
                continue
            task = asyncio.create_task(self.once())
            waiting.add(task)
            task.add_done_callback(waiting.discard)
        while waiting:
            await asyncio.wait(set(waiting))

    def vector(self) -> bytes:
        """Return a unit vector drawn at random, as it travels."""
        drawn = np.random.default_rng(self._random.getrandbits(32)).normal(size=self._dimension)
        return bytes_of(drawn / np.linalg.norm(drawn))

    def _image(self) -> bytes:
        return self._random.choice(self._images)

    def _key(self) -> str:
        return str(self._random.randrange(KEYS))

    def _upserted(self, name: str, items: Sequence[gallery_pb.Item]) -> Awaitable[Any]:
        request = gallery_pb.UpsertItemsRequest(gallery=name, items=items)
        call: Awaitable[Any] = self._galleries.UpsertItems(request, timeout=_DEADLINE)
        return call

    def _searched(self, name: str, *queries: pb.Query) -> Awaitable[Any]:
        request = pb.SearchRequest(gallery=name, queries=queries, k=10)
        call: Awaitable[Any] = self._retrieval.Search(request, timeout=_DEADLINE)
        return call

    async def _search(self, work: str, query: pb.Query) -> None:
        reply = await self._tally.take(
            work, self._searched(self._random.choice((ITEMS, ITEMS, SEASON)), query)
        )
        if reply is not None:
            found = len(reply.results[0].hits)
            self._tally.expect(work, found == 10, f"{found} of 10 neighbours")

    async def _search_by_image(self) -> None:
        await self._search("search by image", pb.Query(image=self._image()))

    async def _search_by_vector(self) -> None:
        await self._search("search by vector", pb.Query(vector=self.vector()))

    async def _embed(self) -> None:
        request = pb.EmbedRequest(images=[self._image() for _ in range(self._random.choice((1, 1, 4)))])
        reply = await self._tally.take("embed", self._retrieval.Embed(request, timeout=_DEADLINE))
        if reply is not None:
            whole = all(len(each.vector) == 4 * self._dimension for each in reply.results)
            self._tally.expect("embed", whole, "a result without its vector")

    async def _embed_by_the_other_model(self) -> None:
        request = pb.EmbedRequest(images=[self._image()], model=OTHER_MODEL)
        await self._tally.take("embed by the other model", self._retrieval.Embed(request, timeout=_DEADLINE))

    async def _upsert(self) -> None:
        keys = {self._key() for _ in range(2)}
        await self._tally.take(
            "upsert images",
            self._upserted(ITEMS, [gallery_pb.Item(key=k, image=self._image()) for k in keys]),
        )

    async def _upsert_vectors(self) -> None:
        keys = {self._key() for _ in range(20)}
        await self._tally.take(
            "upsert vectors",
            self._upserted(ITEMS, [gallery_pb.Item(key=key, vector=self.vector()) for key in keys]),
        )

    async def _delete(self) -> None:
        request = gallery_pb.DeleteItemsRequest(gallery=ITEMS, keys=[self._key()])
        await self._tally.take("delete", self._galleries.DeleteItems(request, timeout=_DEADLINE))

    async def _list_items(self) -> None:
        request = gallery_pb.ListItemsRequest(gallery=ITEMS, page_size=50)
        reply = await self._tally.take("list items", self._galleries.ListItems(request, timeout=_DEADLINE))
        if reply is not None:
            self._tally.expect("list items", len(reply.items) == 50, f"{len(reply.items)} of 50 items")

    async def _unknown_gallery(self) -> None:
        call = self._searched("missing", pb.Query(vector=self.vector()))
        await self._tally.take("injected: unknown gallery", call, "NOT_FOUND")

    async def _bad_image(self) -> None:
        request = pb.EmbedRequest(images=[self._image()[:50]])
        call = self._retrieval.Embed(request, timeout=_DEADLINE)
        await self._tally.take("injected: bad image", call, "INVALID_ARGUMENT")

    async def _bad_image_among_good_ones(self) -> None:
        request = pb.EmbedRequest(images=[self._image(), b"text", self._image()])
        work = "injected: bad image among good ones"
        reply = await self._tally.take(work, self._retrieval.Embed(request, timeout=_DEADLINE))
        if reply is not None:
            codes = [each.error.code for each in reply.results]
            self._tally.expect(work, codes == [0, _INVALID, 0], f"statuses {codes}")
