"""Clients that leave while their reply is on its way: cancelled, and never a fault of ours."""

import asyncio
import gc
import logging
import random
import socket
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from protos import gallery_service_pb2 as pb
from serving.observability.logs import _tells_something
from serving.rpc.departures import Departures
from serving.rpc.stays import Stays
from tests.serving.boundary_fakes import METHOD, Behind, running
from tests.serving.raw_http2 import ACK, DATA, END_STREAM, RST_STREAM, SETTINGS, Raw, begin, frame, message

BUILD = "/crossbatch.v1.GalleryService/BuildIndex"
SEED = 7


def leave(address: str, seed: int) -> None:
    """Make some calls, and end them one by one or with the connection, at any moment."""
    chance = random.Random(seed)
    request = message(pb.GetGalleryRequest(name="x").SerializeToString())
    with Raw(address) as raw:
        raw.send(frame(SETTINGS, ACK, 0))
        for each in range(1, 12, 2):
            path = chance.choice([BUILD, BUILD, METHOD.format("Whole"), METHOD.format("Both")])
            raw.send(begin(each, path), frame(DATA, END_STREAM, each, request))
        time.sleep(chance.random() * 0.02)
        if chance.random() < 0.5:
            for each in range(1, 12, 2):
                raw.send(frame(RST_STREAM, 0, each, struct.pack(">I", 8)))
                time.sleep(chance.random() * 0.002)
        elif chance.random() < 0.5:
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_who_leaves_at_any_moment_has_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def streamed(behind: Behind, request: Any, context: Any) -> AsyncIterator[pb.Gallery]:
        for each in range(40):
            yield pb.Gallery(name="x" * (1, 30_000)[each % 2])

    monkeypatch.setattr(Behind, "streamed", streamed)

    async def scenario() -> None:
        async with running() as it:
            it.behind.go_on.set()
            for turn in range(60):
                await asyncio.gather(
                    *(asyncio.to_thread(leave, it.address, SEED + 4 * turn + each) for each in range(4))
                )
            await it.boundary.wait_idle(5)
            assert "CANCELLED" in it.metrics.codes
            assert set(it.metrics.codes) <= {"CANCELLED", "OK", "RESOURCE_EXHAUSTED"}

    asyncio.run(scenario())
    gc.collect()  # of tasks whose exception nobody has asked for
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert [each.getMessage() for each in errors if _tells_something(each)] == []


def test_what_grpc_tells_of_a_client_who_left_cancels_and_what_we_did_wrong_does_not() -> None:
    async def scenario() -> None:
        departures = Departures(60.0, Stays())

        async def write(error: Exception) -> None:
            with departures.sending("ipv4:127.0.0.1:1"):
                raise error

        with pytest.raises(asyncio.CancelledError):
            await write(grpc.aio.InternalError('Failed "execute_batch": ()'))
        for error in (grpc.aio.UsageError("RPC already finished."), ValueError("x")):
            with pytest.raises(type(error)):
                await write(error)
        assert not departures._began

    asyncio.run(scenario())
