"""Messages that are none: fuzzed ones of every service are the caller's fault and no bug of ours."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from protos import gallery_service_pb2 as gallery_pb
from protos import open_inference_pb2 as inference_pb
from protos import retrieval_service_pb2 as pb
from serving.gallery.directory import GalleryDirectory
from serving.gallery.search.filter import AnyOf, Equal, Exists, Not, Range
from serving.rpc.filters import filter_message
from tests.serving.inference_calls import GRID, PROTOTYPES, asking, of_files, of_pixels, tensor
from tests.serving.rpc_fakes import DIMENSION, SIZE, FakeEncoder, FakeSpec, serving
from tests.serving.stubs import Stubs, connected, image, item


class Blind(FakeEncoder):
    """Takes any pixels."""

    def encode(self, images: NDArray[np.uint8], *, threads: int = 0) -> NDArray[np.float32]:
        return np.tile(np.eye(1, DIMENSION, dtype=np.float32), (len(images), 1))


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[Stubs]:
    encoder = Blind(FakeSpec(prototypes=PROTOTYPES, grid=GRID))
    with serving(encoder, GalleryDirectory(tmp_path)) as running, connected(running.address) as stubs:
        yield stubs


def sent(stubs: Stubs, method: str, message: bytes) -> bytes:
    package = "inference" if "Inference" in method else "crossbatch.v1"
    call: Any = stubs.channel.unary_unary(f"/{package}.{method}")
    reply: bytes = call(message, timeout=10)
    return reply


def valid_messages() -> Iterator[tuple[str, Any]]:
    queries = [pb.Query(key="a"), image(b"x")]
    yield "RetrievalService/Embed", pb.EmbedRequest(images=[b"x", b"bad"])
    yield "RetrievalService/Search", pb.SearchRequest(gallery="birds", queries=queries, k=3)
    wanted = filter_message(AnyOf((Exists("n"), Not(Equal("$label", "l")), Range("$label", "a"))))
    search = pb.SearchRequest(gallery="birds", queries=queries[:1], filter=wanted, group_by_label=True)
    yield "RetrievalService/Search", search
    listed = gallery_pb.ListItemsRequest(gallery="birds", page_token="a", key_prefix="b", with_vectors=True)
    yield "GalleryService/ListItems", listed
    deleted = gallery_pb.DeleteItemsRequest(gallery="birds", keys=["z"], expected_versions=[0])
    yield "GalleryService/DeleteItems", deleted
    yield "GalleryService/GetItem", gallery_pb.GetItemRequest(gallery="birds", key="a")
    items = [item("a", label="l"), item("b", image=b"x")]
    items[0].metadata.update({"a": 1, "b": ["c", None]})
    yield "GalleryService/UpsertItems", gallery_pb.UpsertItemsRequest(gallery="birds", items=items)
    yield "GalleryService/GetGallery", gallery_pb.GetGalleryRequest(name="birds")
    yield "GalleryService/ListGalleries", gallery_pb.ListGalleriesRequest(page_token="a")
    outputs = asking("embeddings", "histograms", "assignments")
    pixels = tensor("images", "UINT8", 1, SIZE, SIZE, 3, uint_contents=[200] * 48)
    files = tensor("encoded", "BYTES", 2, bytes_contents=[b"1", b"2"])
    for request in (
        of_files(b"1", b"bad", id="x", outputs=outputs),
        of_pixels(np.zeros((1, SIZE, SIZE, 3), np.uint8)),
        inference_pb.ModelInferRequest(inputs=[pixels]),
        inference_pb.ModelInferRequest(inputs=[files]),
    ):
        yield "GRPCInferenceService/ModelInfer", request


def test_fuzzed_messages_never_show_a_bug_of_ours(stubs: Stubs) -> None:
    stubs.create("birds")
    stubs.upsert("birds", item("a", label="l"))

    @hypothesis.settings(max_examples=300, deadline=None)
    @hypothesis.given(
        call=st.sampled_from([(method, each.SerializeToString()) for method, each in valid_messages()]),
        edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4),
        tail=st.binary(max_size=8),
    )
    def fuzz(call: tuple[str, bytes], edits: list[tuple[int, int]], tail: bytes) -> None:
        method, valid = call
        message = bytearray(valid + tail)
        for place, value in edits:
            message[place % len(message)] = value
        try:
            sent(stubs, method, bytes(message))
        except grpc.RpcError as failure:
            code: grpc.StatusCode = failure.code()
            assert code.name in {"INVALID_ARGUMENT", "NOT_FOUND", "ABORTED"}, (method, message)

    fuzz()
    assert stubs.embed(b"x").results[0].vector
