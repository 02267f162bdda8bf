"""Replies in pieces: the bytes of ordinary messages, joined beside the event loop where they are many."""

import asyncio
import threading
import time

import pytest
from google.protobuf import descriptor_pb2

from protos import gallery_service_pb2, retrieval_service_pb2
from serving.errors import InvalidArgument
from serving.rpc import pieces
from serving.rpc.pieces import LARGE, Pieces, framed, packed

FINGERPRINT = "f" * 64


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_joined_pieces_are_the_message(size: int) -> None:
    inner = retrieval_service_pb2.SearchResult(hits=[retrieval_service_pb2.Hit(key="k" * size)])
    whole = retrieval_service_pb2.SearchResponse(results=[inner, inner], model_fingerprint=FINGERPRINT)
    rest = retrieval_service_pb2.SearchResponse(model_fingerprint=FINGERPRINT).SerializeToString()
    parts = framed(retrieval_service_pb2.SearchResponse, "results", [inner.SerializeToString()] * 2)
    reply = Pieces([*parts, rest])
    assert reply.size == len(reply.join()) == whole.ByteSize()
    assert retrieval_service_pb2.SearchResponse.FromString(reply.join()) == whole


def test_a_field_of_a_high_number_is_framed_too() -> None:
    option = descriptor_pb2.UninterpretedOption(string_value=b"shoe")
    whole = descriptor_pb2.FieldOptions(uninterpreted_option=[option])  # the field 999
    parts = framed(descriptor_pb2.FieldOptions, "uninterpreted_option", [option.SerializeToString()])
    assert b"".join(parts) == whole.SerializeToString()


@pytest.mark.parametrize("size", [LARGE, LARGE + 1])
def test_large_replies_are_joined_in_a_thread_and_others_at_once(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def join(reply: Pieces) -> bytes:
        threads.append(threading.current_thread())
        return b""

    monkeypatch.setattr(Pieces, "join", join)
    asyncio.run(packed(Pieces([bytes(size)])))
    assert [each is threading.main_thread() for each in threads] == [size == LARGE]


def test_the_loop_goes_on_while_the_largest_reply_is_packed() -> None:
    """To pack it as a message lets no other thread run: the longest pause would be the whole of the time."""
    parts = framed(retrieval_service_pb2.SearchResponse, "results", [bytes(250_000)] * 250)

    async def longest_pause() -> tuple[float, float]:
        packing = asyncio.create_task(packed(Pieces(parts)))
        began = last = time.perf_counter()
        longest = 0.0
        while not packing.done():
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return longest, last - began

    for _ in range(20):  # another process may have had the cores meanwhile
        longest, whole = asyncio.run(longest_pause())
        if longest < whole / 2:
            return
    raise AssertionError(f"{longest:.3f} s of {whole:.3f} s")


def test_replies_of_both_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_MESSAGE_BYTES", 9)
    for reply in (Pieces([bytes(5)] * 2), gallery_service_pb2.Item(key="k" * 8)):
        with pytest.raises(InvalidArgument, match="10 bytes and at most 9"):
            asyncio.run(packed(reply))
    assert asyncio.run(packed(gallery_service_pb2.Item(key="k" * 7))) == b"\x0a\x07" + b"k" * 7
