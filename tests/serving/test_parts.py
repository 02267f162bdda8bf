"""Messages that would take long to unpack: told by their parts, and kept off the event loop."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protos import gallery_service_pb2 as gallery_pb
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as pb
from serving.gallery.directory import GalleryDirectory
from serving.gallery.search.filter import MAX_FILTER_BYTES, MAX_LEVELS, AllOf, AnyOf, Equal, Filter, Not
from serving.rpc.filters import filter_message, filter_of
from serving.rpc.limits import MAX_FILTER_CONDITIONS
from serving.rpc.parts import LARGE, MAX_PARTS, check_parts, fields_of
from serving.rpc.services import asked
from serving.rpc.services.arrivals import MAX_METADATA_MESSAGE
from serving.rpc.services.asked import MAX_FILTER_MESSAGE, is_quickly_read, read_search, search_request
from serving.rpc.wire import bytes_of, struct_of
from tests.serving.rpc_fakes import FakeEncoder, serving, vector_for
from tests.serving.stubs import Stubs, connected, image, item, refused
from tests.serving.stubs import fields_of as refused_fields


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[Stubs]:
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as running, connected(running.address) as stubs:
        stubs.create("birds")
        stubs.upsert("birds", item("a", label="owl"), item("b", label="crow"))
        yield stubs


def vectors(*keys: str) -> list[pb.Query]:
    return [pb.Query(vector=bytes_of(vector_for(key.encode()))) for key in keys]


def call(stubs: Stubs, method: str, data: bytes) -> bytes:
    raw: Any = stubs.channel.unary_unary(f"/crossbatch.v1.{method}")
    reply: bytes = raw(data, timeout=20)
    return reply


def slowest_beside(stubs: Stubs, work: Callable[[], Any]) -> float:
    """The seconds that the slowest of many small calls takes while `work` runs."""
    running = threading.Thread(target=work)
    stubs.models.GetModel(model_pb.GetModelRequest())
    running.start()
    slowest = 0.0
    while running.is_alive():
        began = time.monotonic()
        stubs.models.GetModel(model_pb.GetModelRequest())
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.002)
    running.join()
    return slowest


def test_the_parts_of_a_message_are_its_fields() -> None:
    message = pb.SearchRequest(gallery="birds", queries=vectors("a", "b"), k=300, minimum_score=0.5)
    data = message.SerializeToString()
    parts = list(fields_of(memoryview(data)))
    assert sorted((number, wire) for number, wire, _, _ in parts) == [(1, 2), (2, 2), (2, 2), (3, 0), (4, 5)]
    assert b"".join(whole for _, _, _, whole in parts) == data
    assert next(bytes(value) for number, _, value, _ in parts if number == 1) == b"birds"
    number = pb.Filter.Value(number=1.5).SerializeToString()
    ((found, wire, value, whole),) = fields_of(memoryview(number))
    assert (found, wire, bytes(value), bytes(whole)) == (2, 1, number[1:], number)


@given(st.binary(max_size=40))
def test_any_bytes_have_parts_or_are_no_message(data: bytes) -> None:
    try:
        parts = [whole for _, _, _, whole in fields_of(memoryview(data))]
    except DecodeError:
        return
    assert b"".join(parts) == data


def test_so_many_parts_pass_as_the_largest_calls_have() -> None:
    keys = [f"{i:0>200}" for i in range(1_000)]
    request = gallery_pb.DeleteItemsRequest(gallery="birds", keys=keys)
    data = request.SerializeToString() + b"\x18\x01" * 1_000  # versions that are not packed
    assert len(data) > LARGE
    check_parts(data)
    check_parts(b"\x0a\x00" * (LARGE // 2))  # whatever is in a small one
    check_parts(b"\x0a\x10" + bytes(16) + (b"\x0a\x7f" + bytes(127)) * (MAX_PARTS - 1))


@pytest.mark.parametrize(
    "method",
    [
        "RetrievalService/Embed",
        "RetrievalService/Search",
        "RetrievalService/Explain",
        "GalleryService/UpsertItems",
        "GalleryService/DeleteItems",
        "GalleryService/GetItem",
    ],
)
def test_a_message_of_millions_of_parts_keeps_no_other_call_waiting(stubs: Stubs, method: str) -> None:
    failures: list[Any] = []

    def send() -> None:
        with pytest.raises(grpc.RpcError) as failure:
            call(stubs, method, b"\x12\x00" * 4_000_000)
        failures.append(failure)

    slowest = slowest_beside(stubs, send)
    assert "parts" in refused("INVALID_ARGUMENT", failures[0], "INVALID_ARGUMENT")
    assert slowest < 0.25


def test_a_large_filter_is_refused_by_its_bytes_and_keeps_no_other_call_waiting(stubs: Stubs) -> None:
    many = pb.Filter(among=pb.Filter.Among(field="$label", values=[pb.Filter.Value()] * 500_000))
    request = pb.SearchRequest(gallery="birds", queries=vectors("a"), filter=many).SerializeToString()
    failures: list[Any] = []

    def send() -> None:
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as failure:
                call(stubs, "RetrievalService/Search", request)
            failures.append(failure)

    slowest = slowest_beside(stubs, send)
    assert "bytes" in refused("INVALID_ARGUMENT", failures[0], "INVALID_ARGUMENT")  # not: conditions
    assert refused_fields(failures[0]) == ["filter"]
    assert slowest < 0.2


def test_metadata_of_millions_of_values_is_refused_before_it_is_unpacked(stubs: Stubs) -> None:
    struct = b"\x0a\x08\x0a\x01l\x12\x032\x01\x00" * (MAX_METADATA_MESSAGE // 10 + 1)
    size = len(struct)
    head = item("x").SerializeToString() + b"\x32"
    while size:
        head += bytes([size & 0x7F | (0x80 if size > 0x7F else 0)])
        size >>= 7
    request = gallery_pb.UpsertItemsRequest(gallery="birds").SerializeToString()
    data = head + struct
    body = request + b"\x12"
    size = len(data)
    while size:
        body += bytes([size & 0x7F | (0x80 if size > 0x7F else 0)])
        size >>= 7
    with pytest.raises(grpc.RpcError) as failure:
        call(stubs, "GalleryService/UpsertItems", body + data)
    assert "64 KiB" in refused("INVALID_ARGUMENT", failure, "INVALID_ARGUMENT")
    assert refused_fields(failure) == ["items[0]"]


def test_metadata_within_the_limit_of_json_is_never_too_large_to_travel(stubs: Stubs) -> None:
    nested: Any = 0
    for _ in range(28):
        nested = [nested]
    lists: list[Any] = [[0] * 32_000, [[]] * 21_000, [{}] * 21_000, [{"": 0}] * 9_000, [nested] * 1_100]
    for each in lists:
        struct = struct_of({"l": each})
        assert struct.ByteSize() < MAX_METADATA_MESSAGE
    with_much = item("x")
    with_much.metadata.CopyFrom(struct)
    assert stubs.upsert("birds", with_much).stored == 1


def test_a_large_search_is_read_in_a_thread_and_answered_like_a_small_one(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_by: list[str] = []

    def noted(message: pb.Filter) -> Filter:
        read_by.append(threading.current_thread().name)
        return filter_of(message)

    monkeypatch.setattr(asked, "filter_of", noted)
    wanted = filter_message(AnyOf((Equal("$label", "owl"), Equal("$label", "x" * 60_000))))
    small = stubs.search("birds", *vectors("a"), image(b"x"), filter=filter_message(Equal("$label", "owl")))
    padding = image(bytes(LARGE))
    large = stubs.search("birds", *vectors("a"), image(b"x"), padding, filter=wanted)
    assert [list(each.hits) for each in large.results[:2]] == [list(each.hits) for each in small.results]
    assert [hit.key for hit in large.results[0].hits] == ["a"]
    assert len(read_by) == 2
    assert all(name.startswith("gallery-read") for name in read_by)


def test_parts_that_are_no_messages_are_named(stubs: Stubs) -> None:
    good = vectors("a")[0].SerializeToString()
    for request, field in (
        (asked.UnreadSearch(gallery="birds", queries=[good, b"\x0a" + bytes(LARGE)]), "queries[1]"),
        (asked.UnreadSearch(gallery="birds", queries=[good, b"\x0a\x00" * LARGE]), "queries[1]"),
        (asked.UnreadSearch(gallery="birds", queries=[good], filter=b"\x0a" + bytes(LARGE)), "filter"),
    ):
        with pytest.raises(grpc.RpcError) as failure:
            call(stubs, "RetrievalService/Search", request.SerializeToString())
        assert refused_fields(failure) == [field]


def test_the_largest_filter_there_can_be_is_read() -> None:
    text = "x" * (MAX_FILTER_BYTES // MAX_FILTER_CONDITIONS - 1)
    deep: list[Filter] = []
    for _ in range(MAX_FILTER_CONDITIONS):
        each: Filter = Equal(text[:1], text[1:])
        for _ in range(MAX_LEVELS - 2):
            each = Not(each)
        deep.append(each)
    message = filter_message(AllOf(tuple(deep)))
    assert message.ByteSize() <= MAX_FILTER_MESSAGE
    request = pb.SearchRequest(gallery="birds", queries=vectors("a"), filter=message)
    read = search_request(request.SerializeToString())
    assert not is_quickly_read(read)
    assert read_search(read).options.filter is not None
