"""Sends what is nearly right to a server, many calls at once; notes every answer that no input deserves."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import grpc
import grpc.aio

from benchmarks.driving.messages import EMBED
from benchmarks.fuzzing import mutation, pictures
from benchmarks.fuzzing.requests import Method, methods, request
from protos import retrieval_service_pb2 as pb

__all__ = ["AT_ONCE", "FORBIDDEN", "Campaign", "Finding", "call"]

AT_ONCE: Final = 64
"""Images in one Embed call; each answers for itself."""
FORBIDDEN: Final = {"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED", "DATA_LOSS", "CANCELLED"}
_DEADLINE: Final = 60.0
_CALLS: Final = 24
_EMBEDS: Final = 4
_BOMBS: Final = 0.0005
_HUGE: Final = 100_000_000
_INVALID: Final = grpc.StatusCode.INVALID_ARGUMENT.value[0]


@dataclass(frozen=True)
class Finding:
    """An answer that no input deserves."""

    group: int
    path: str
    code: str
    text: str


@dataclass
class Campaign:
    """One seed's cases, in groups: a call with `AT_ONCE` images, or one message to any RPC.

    A group is made from the seed and its number alone, so that it can be sent again.
    """

    seed: int
    methods: Sequence[Method]
    vector: bytes
    model: str
    save: Path
    cases: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    """Statuses of messages by RPC, and of images."""
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seeds = pictures.seeds()
        self._bombs = pictures.bombs()
        self._embed = next(method for method in methods() if method.path == EMBED)
        self._weights = [method.weight for method in self.methods]
        self._limits = {True: asyncio.Semaphore(_EMBEDS), False: asyncio.Semaphore(_CALLS)}

    async def send(self, channel: grpc.aio.Channel, groups: Sequence[int]) -> None:
        """Send groups, many at once, and wait for all of them."""
        waiting: set[asyncio.Task[None]] = set()
        for group in groups:
            limit = self._limits[group % (AT_ONCE + 1) == 0]
            await limit.acquire()
            task = asyncio.create_task(self._group(channel, group))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
            task.add_done_callback(lambda _, limit=limit: limit.release())  # type: ignore[misc]
        while waiting:
            await asyncio.wait(set(waiting))

    async def oversized(self, channel: grpc.aio.Channel) -> None:
        """Send a message of 100 MB, which is more than a server takes."""
        code, text, _ = await call(channel, self._embed, bytes(_HUGE))
        self.note(-1, EMBED, code, text, b"")
        if code != "RESOURCE_EXHAUSTED":
            self.findings.append(Finding(-1, EMBED, code, "a message of 100 MB was not refused"))

    async def _group(self, channel: grpc.aio.Channel, group: int) -> None:
        random = Random(f"{self.seed}:{group}")
        if group % (AT_ONCE + 1) == 0:
            await self._images(channel, group, [self._image(random) for _ in range(AT_ONCE)])
            return
        (method,) = random.choices(self.methods, self._weights)
        parts = [request(random, method, self._seeds, self.vector, self.model) for _ in range(2)]
        data = mutation.message(random, parts[0], parts)
        self.cases += 1
        code, text, _ = await call(channel, method, data)
        self.note(group, method.path, code, text, data)

    def _image(self, random: Random) -> bytes:
        if random.random() < _BOMBS:
            return random.choice(self._bombs)
        return mutation.image(random, self._seeds)

    async def _images(self, channel: grpc.aio.Channel, group: int, images: Sequence[bytes]) -> None:
        self.cases += len(images)
        data = pb.EmbedRequest(images=images).SerializeToString()
        code, text, replies = await call(channel, self._embed, data)
        if code != "OK":
            self.note(group, EMBED, code, text, data)
            return
        results = pb.EmbedResponse.FromString(replies[0]).results
        if len(results) != len(images):
            self._found(Finding(group, EMBED, "OK", f"{len(results)} results"), data)
        for image, result in zip(images, results, strict=False):
            if result.HasField("error"):
                self.codes[f"image {result.error.code}"] += 1
                if result.error.code != _INVALID:
                    self._found(Finding(group, EMBED, str(result.error.code), result.error.message), image)
            else:
                self.codes["image OK"] += 1
                if len(result.vector) != len(self.vector):
                    self._found(Finding(group, EMBED, "OK", f"{len(result.vector)} bytes of vector"), image)

    def note(self, group: int, path: str, code: str, text: str, data: bytes) -> None:
        """Count how a call ended, and keep its message where no input deserves that."""
        self.codes[f"{path.rpartition('/')[2]} {code}"] += 1
        if code in FORBIDDEN:
            self._found(Finding(group, path, code, text), data)

    def _found(self, finding: Finding, data: bytes) -> None:
        """Keep what caused it, with the seed and the group that make it again."""
        self.findings.append(finding)
        self.save.mkdir(parents=True, exist_ok=True)
        stem = self.save / f"seed{self.seed}-group{finding.group}-{len(self.findings)}"
        stem.with_suffix(".bin").write_bytes(data)
        stem.with_suffix(".json").write_text(json.dumps(finding.__dict__, indent=1))


async def call(channel: grpc.aio.Channel, method: Method, data: bytes) -> tuple[str, str, list[bytes]]:
    """Make one call; returns the name of its status, its text and the replies."""
    replies: list[bytes] = []
    many: Any = channel.stream_stream if method.takes_stream else channel.unary_stream
    sent = iter([data]) if method.takes_stream else data
    try:
        # A single reply is a stream of one.
        replies.extend([reply async for reply in many(method.path)(sent, timeout=_DEADLINE)])
    except grpc.aio.AioRpcError as error:
        return error.code().name, (error.details() or "")[:300], replies
    return "OK", "", replies
