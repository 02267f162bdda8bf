"""Messages that are none, and those past the limits."""

from typing import Any

import grpc
import hypothesis
import pytest
from hypothesis import strategies as st

from protos import gallery_service_pb2 as gallery_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.gallery.search.filter import AnyOf, Equal, Exists, Not, Range
from serving.rpc.filters import filter_message
from tests.serving.stubs import Stubs, image, item, refusal_of


def test_bytes_that_are_no_message_are_a_bad_argument_and_not_our_bug(stubs: Stubs) -> None:
    for method in ("RetrievalService/Embed", "RetrievalService/Search", "GalleryService/UpsertItems"):
        raw: Any = stubs.channel.unary_unary(f"/crossbatch.v1.{method}")
        refusal_of(lambda raw=raw: raw(b"\xff\xff\xff\xff", timeout=10), "INVALID_ARGUMENT")  # type: ignore[misc]
    unknown: Any = stubs.channel.unary_unary("/crossbatch.v1.RetrievalService/Nothing")
    with pytest.raises(grpc.RpcError) as failure:
        unknown(b"", timeout=10)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_fuzzed_messages_never_show_a_bug_of_ours(stubs: Stubs) -> None:
    stubs.create("birds")
    stubs.upsert("birds", item("a", label="l"))
    search = retrieval_pb.SearchRequest(
        gallery="birds", queries=[retrieval_pb.Query(key="a"), image(b"x")], k=3
    )
    filtered = retrieval_pb.SearchRequest(
        gallery="birds",
        queries=[retrieval_pb.Query(key="a")],
        filter=filter_message(AnyOf((Exists("n"), Not(Equal("$label", "l")), Range("$label", "a")))),
        group_by_label=True,
    )
    listed = gallery_pb.ListItemsRequest(gallery="birds", page_token="a", key_prefix="b", with_vectors=True)
    deleted = gallery_pb.DeleteItemsRequest(gallery="birds", keys=["z"], expected_versions=[0])
    upsert = gallery_pb.UpsertItemsRequest(
        gallery="birds", items=[item("a", label="l"), item("b", image=b"x")]
    )
    upsert.items[0].metadata.update({"a": 1, "b": ["c", None]})
    calls: list[tuple[str, bytes]] = [
        ("RetrievalService/Embed", retrieval_pb.EmbedRequest(images=[b"x", b"bad"]).SerializeToString()),
        ("RetrievalService/Search", search.SerializeToString()),
        ("RetrievalService/Search", filtered.SerializeToString()),
        ("GalleryService/ListItems", listed.SerializeToString()),
        ("GalleryService/DeleteItems", deleted.SerializeToString()),
        ("GalleryService/GetItem", gallery_pb.GetItemRequest(gallery="birds", key="a").SerializeToString()),
        ("GalleryService/UpsertItems", upsert.SerializeToString()),
        ("GalleryService/GetGallery", gallery_pb.GetGalleryRequest(name="birds").SerializeToString()),
        ("GalleryService/ListGalleries", gallery_pb.ListGalleriesRequest(page_token="a").SerializeToString()),
    ]

    @hypothesis.settings(max_examples=150, deadline=None)
    @hypothesis.given(
        call=st.sampled_from(calls),
        edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4),
        tail=st.binary(max_size=8),
    )
    def fuzz(call: tuple[str, bytes], edits: list[tuple[int, int]], tail: bytes) -> None:
        method, valid = call
        message = bytearray(valid + tail)
        for place, value in edits:
            message[place % len(message)] = value
        send: Any = stubs.channel.unary_unary(f"/crossbatch.v1.{method}")
        try:
            send(bytes(message), timeout=10)
        except grpc.RpcError as failure:
            code: grpc.StatusCode = failure.code()
            assert code.name in {"INVALID_ARGUMENT", "NOT_FOUND", "ABORTED"}, (method, message)

    fuzz()
    assert stubs.embed(b"x").results[0].vector
