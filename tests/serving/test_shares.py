"""What one key or address may have of the calls and of the bytes of replies, and what is said past that."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import retrieval_service_pb2 as retrieval_pb
from serving.errors import Overloaded
from serving.gallery.directory import GalleryDirectory
from serving.rpc import admission
from serving.rpc.admission import Admission
from serving.rpc.fuse import Fuse
from serving.server.server import Server
from tests.serving.boundary_fakes import running
from tests.serving.rpc_fakes import FakeEncoder, serving, until
from tests.serving.stubs import connected, refused

MEGABYTE = 1 << 20
PERMITS = 512


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
def server(tmp_path: Path, encoder: FakeEncoder) -> Iterator[Server]:
    with serving(encoder, GalleryDirectory(tmp_path)) as server:
        yield server


def test_one_back_end_without_a_key_has_all_images_in_flight_and_is_told_when_to_come_back(
    server: Server, encoder: FakeEncoder
) -> None:
    assert server._admission.most_inputs == PERMITS
    encoder.encode_gate.clear()
    with connected(server.address) as stubs:
        request = retrieval_pb.EmbedRequest(images=[b"x"])
        calls = [stubs.retrieval.Embed.future(request) for _ in range(PERMITS)]
        until(lambda: server._admission.inputs == PERMITS)
        for _ in range(100):
            with pytest.raises(grpc.RpcError) as failure:
                stubs.embed(b"x")
            said = refused("RESOURCE_EXHAUSTED", failure, "OVERLOADED")
            assert "512 of at most 512 inputs" in said
            assert retry_after(failure.value) > 0
        encoder.encode_gate.set()
        assert all(call.result(20).results[0].vector for call in calls)


def retry_after(error: BaseException) -> float:
    for detail in rpc_status.from_call(error).details:
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return float(info.retry_delay.seconds + info.retry_delay.nanos / 1e9)
    return 0.0


def test_who_has_his_share_is_refused_like_all_others() -> None:
    async def scenario() -> None:
        async with running() as it:
            waiting = [it.whole() for _ in range(24)]  # of 32
            await it.metrics.are_in_flight(24)
            mine = (("x-request-id", "mine"),)
            for refusal in (it.whole(metadata=mine), it.streamed(metadata=mine).read()):
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await refusal
                said = refused("RESOURCE_EXHAUSTED", failure, "OVERLOADED")
                assert said == "24 calls of ipv4:127.0.0.1 are open, his share; try again later."
                assert retry_after(failure.value) == 1.0
                assert ("x-request-id", "mine") in list(failure.value.trailing_metadata())
            it.behind.go_on.set()
            await asyncio.gather(*waiting)
            assert (await it.whole()) is not None

    asyncio.run(scenario())


def test_one_key_has_three_quarters_of_the_calls_until_they_are_gone() -> None:
    async def scenario() -> None:
        fuse = Fuse(4)
        go_on = asyncio.Event()

        async def call(holder: str) -> None:
            task = asyncio.current_task()
            assert task is not None
            fuse.hold("calls", task)
            fuse.claim("calls", holder)
            await go_on.wait()

        held = [asyncio.create_task(call(each)) for each in ("a", "a", "a", "b")]
        await asyncio.sleep(0)
        for check in (fuse.check, fuse.claim):
            with pytest.raises(Overloaded, match="3 calls of a are open"):
                check("calls", "a")
        with pytest.raises(Overloaded, match="4 calls are open"):
            fuse.check("calls", "b")
        fuse.stays.keep(held[0])
        go_on.set()
        await asyncio.gather(*held)
        await asyncio.sleep(0)
        assert fuse.count() == 1
        fuse.stays.let_go(held[0])
        assert fuse.count() == 0
        assert not fuse._held
        assert not fuse.stays._due

    asyncio.run(scenario())


def test_bytes_of_replies_are_bounded_and_each_has_half() -> None:
    bound = Admission(10, 256 * MEGABYTE)
    gone = [bound.send(60 * MEGABYTE, "a"), bound.send(60 * MEGABYTE, "a")]
    with pytest.raises(Overloaded, match="of replies to a"):
        bound.send(60 * MEGABYTE, "a")
    gone += [bound.send(60 * MEGABYTE, "b"), bound.send(60 * MEGABYTE, "b")]
    with pytest.raises(Overloaded, match="251,658,240 of at most 268,435,456 bytes of replies") as failure:
        bound.send(60 * MEGABYTE, "c")
    assert failure.value.retry_after
    gone.append(bound.send(60 * MEGABYTE, "c", must=True))
    gone.append(bound.send(admission.SMALL_REPLY, "c"))
    with bound.receive(60 * MEGABYTE):  # which has its own room
        pass
    for each in gone:
        each()
    assert bound.reply_bytes == 0
    assert not bound._replies_of


def test_empty_replies_of_one_holder_end_beside_others() -> None:
    bound = Admission(10)
    for sizes in ((0, 0), (5, 0), (0, 5)):
        for gone in [bound.send(size, "a") for size in sizes]:
            gone()
    assert bound.reply_bytes == 0
    assert not bound._replies_of
