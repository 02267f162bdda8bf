"""The Open Inference Protocol over real sockets, with a fake encoder; and fuzzed messages of any service."""

import os
import re
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from protos import gallery_service_pb2 as gallery_pb
from protos import open_inference_pb2 as pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.gallery.directory import GalleryDirectory
from serving.gallery.search.filter import AnyOf, Equal, Exists, Not, Range
from serving.rpc.filters import filter_message
from serving.server.server import Server
from tests.serving.rpc_fakes import (
    DIMENSION,
    SIZE,
    FakeEncoder,
    FakeSources,
    FakeSpec,
    explanation_for,
    serving,
    until,
    vector_for,
)
from tests.serving.stubs import Stubs, connected, image, item, refusal_of

PROTOTYPES = 5
GRID = (2, 3)


def pixels_of(encoder: FakeEncoder, *photos: bytes) -> NDArray[np.uint8]:
    return np.stack([encoder.preprocess(photo) for photo in photos])


def tensor(name: str, datatype: str, *shape: int, **contents: Any) -> pb.ModelInferRequest.InferInputTensor:
    made = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    if contents:
        made.contents.CopyFrom(pb.InferTensorContents(**contents))
    return made


def prefixed(*elements: bytes) -> bytes:
    return b"".join(len(each).to_bytes(4, "little") + each for each in elements)


def of_pixels(pixels: NDArray[np.uint8], **fields: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        inputs=[tensor("images", "UINT8", *pixels.shape)], raw_input_contents=[pixels.tobytes()], **fields
    )


def of_files(*photos: bytes, **fields: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        inputs=[tensor("encoded", "BYTES", len(photos))], raw_input_contents=[prefixed(*photos)], **fields
    )


def asking(*names: str) -> list[pb.ModelInferRequest.InferRequestedOutputTensor]:
    return [pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in names]


def infer(stubs: Stubs, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    reply: pb.ModelInferResponse = stubs.inference.ModelInfer(request, timeout=20)
    return reply


def arrays_in(reply: pb.ModelInferResponse) -> dict[str, NDArray[Any]]:
    types = {"FP32": "<f4", "UINT8": "u1"}
    return {
        output.name: np.frombuffer(raw, types[output.datatype]).reshape(output.shape)
        for output, raw in zip(reply.outputs, reply.raw_output_contents, strict=True)
    }


def expected(*photos: bytes) -> NDArray[np.float32]:
    return np.stack([vector_for(photo) for photo in photos])


def explained(photo: bytes) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    return explanation_for(zlib.crc32(photo), PROTOTYPES)


PHOTOS = [b"photo %d" % i for i in range(3)]
ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-tritonclient" / "bin" / "python"


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder(FakeSpec(prototypes=PROTOTYPES, grid=GRID))


@pytest.fixture
def running(encoder: FakeEncoder, tmp_path: Path) -> Iterator[Server]:
    plain = FakeEncoder(FakeSpec(name="plain", fingerprint="b" * 64))
    models = FakeSources({"": encoder, "plain": plain})
    with serving(models, GalleryDirectory(tmp_path), threads=1) as running:
        yield running


def test_pixels_and_files_give_the_same_embeddings(stubs: Stubs, encoder: FakeEncoder) -> None:
    column = tensor("encoded", "BYTES", 3, 1)
    for request in (
        of_pixels(pixels_of(encoder, *PHOTOS)),
        of_files(*PHOTOS),
        pb.ModelInferRequest(inputs=[column], raw_input_contents=[prefixed(*PHOTOS)]),
    ):
        found = arrays_in(infer(stubs, request))
        assert list(found) == ["embeddings"]
        np.testing.assert_array_equal(found["embeddings"], expected(*PHOTOS))
    assert (encoder.encoded, encoder.explained) == (9, 0)  # what is not asked for is not computed


def test_listed_elements_are_answered_by_listed_elements(stubs: Stubs, encoder: FakeEncoder) -> None:
    pixels = pixels_of(encoder, *PHOTOS)
    assert (pixels >= 128).any()  # those take two bytes on the wire
    for given in (
        tensor("images", "UINT8", *pixels.shape, uint_contents=pixels.ravel().tolist()),
        tensor("encoded", "BYTES", 3, bytes_contents=PHOTOS),
    ):
        request = pb.ModelInferRequest(inputs=[given], outputs=asking("embeddings", "assignments"))
        reply = infer(stubs, request)
        assert not reply.raw_output_contents
        embeddings, assignments = (output.contents for output in reply.outputs)
        np.testing.assert_array_equal(
            np.array(embeddings.fp32_contents, np.float32).reshape(3, DIMENSION), expected(*PHOTOS)
        )
        assert list(assignments.uint_contents[:6]) == explained(PHOTOS[0])[1].ravel().tolist()


@pytest.mark.parametrize("kind", ["pixels", "files"])
def test_outputs_come_as_they_were_asked_for(stubs: Stubs, encoder: FakeEncoder, kind: str) -> None:
    names = ("assignments", "embeddings", "histograms")
    outputs = asking(*names)
    if kind == "files":
        request = of_files(*PHOTOS, outputs=outputs)
    else:
        request = of_pixels(pixels_of(encoder, *PHOTOS), outputs=outputs)
    found = arrays_in(infer(stubs, request))
    assert tuple(found) == names
    np.testing.assert_array_equal(found["embeddings"], expected(*PHOTOS))
    for i, photo in enumerate(PHOTOS):
        histogram, assignments = explained(photo)
        np.testing.assert_array_equal(found["histograms"][i], histogram)
        np.testing.assert_array_equal(found["assignments"][i], assignments)


def test_the_reply_names_the_model_and_brings_back_the_id(stubs: Stubs) -> None:
    reply = infer(stubs, of_files(b"1", id="call 7", parameters={"mood": pb.InferParameter(bool_param=True)}))
    assert (reply.model_name, reply.model_version, reply.id) == ("fake", "a" * 12, "call 7")
    assert reply.parameters["fingerprint"].string_param == "a" * 64
    for version in ("1", "b" * 12):
        reply = infer(stubs, of_files(b"1", model_name="plain", model_version=version))
        assert (reply.model_name, reply.model_version, reply.id) == ("plain", version, "")
        assert reply.parameters["fingerprint"].string_param == "b" * 64


def test_metadata(stubs: Stubs) -> None:
    server = stubs.inference.ServerMetadata(pb.ServerMetadataRequest(), timeout=10)
    assert (server.name, server.version) == ("crossbatch", metadata.version("crossbatch"))
    model = stubs.inference.ModelMetadata(pb.ModelMetadataRequest(), timeout=10)
    assert (model.name, list(model.versions), model.platform) == ("fake", ["1", "a" * 12], "onnxruntime_onnx")
    assert [(each.name, each.datatype, list(each.shape)) for each in model.inputs] == [
        ("images", "UINT8", [-1, SIZE, SIZE, 3]),
        ("encoded", "BYTES", [-1]),
    ]
    assert [(each.name, each.datatype, list(each.shape)) for each in model.outputs] == [
        ("embeddings", "FP32", [-1, DIMENSION]),
        ("histograms", "FP32", [-1, PROTOTYPES]),
        ("assignments", "UINT8", [-1, *GRID]),
    ]
    plain = stubs.inference.ModelMetadata(pb.ModelMetadataRequest(name="plain", version="1"), timeout=10)
    assert [each.name for each in plain.outputs] == ["embeddings"]


def test_a_model_or_version_that_is_not_served_is_not_found(stubs: Stubs) -> None:
    calls: Any = stubs.inference
    for name, version in (("other", ""), ("fake", "2"), ("plain", "a" * 12)):
        asked = pb.ModelMetadataRequest(name=name, version=version)
        photo = of_files(b"1", model_name=name, model_version=version)
        refusal_of(partial(calls.ModelMetadata, asked, timeout=10), "NOT_FOUND")
        refusal_of(partial(infer, stubs, photo), "NOT_FOUND")
        ready = calls.ModelReady(pb.ModelReadyRequest(name=name, version=version), timeout=10)
        assert not ready.ready  # clients ask until it is
    for version in ("", "1", "a" * 12):
        assert calls.ModelReady(pb.ModelReadyRequest(name="fake", version=version), timeout=10).ready
    assert calls.ServerLive(pb.ServerLiveRequest(), timeout=10).live


def test_images_are_admitted_and_not_calls(encoder: FakeEncoder, tmp_path: Path) -> None:
    encoder.encode_gate.clear()
    galleries = GalleryDirectory(tmp_path)
    with serving(encoder, galleries, max_in_flight=256) as running, connected(running.address) as stubs:
        try:
            many = np.repeat(pixels_of(encoder, b"1"), 200, axis=0)
            pending = stubs.inference.ModelInfer.future(of_pixels(many), timeout=20)
            until(lambda: encoder.encoding)
            more = of_pixels(many[:57])
            said = refusal_of(lambda: infer(stubs, more), "RESOURCE_EXHAUSTED", reason="OVERLOADED")
            assert "200 of at most 256" in said
            # Whether it is ready is a question that a busy server answers.
            assert stubs.inference.ServerReady(pb.ServerReadyRequest(), timeout=10).ready
        finally:
            encoder.encode_gate.set()
        assert arrays_in(pending.result())["embeddings"].shape == (200, DIMENSION)


SHAPE = (1, SIZE, SIZE, 3)
ONE = bytes(SIZE * SIZE * 3)
LIST = [0] * len(ONE)


def sent(
    name: str, *shape: int, raw: Sequence[bytes] = (), datatype: str = "", **contents: Any
) -> pb.ModelInferRequest:
    datatype = datatype or {"images": "UINT8"}.get(name, "BYTES")
    return pb.ModelInferRequest(inputs=[tensor(name, datatype, *shape, **contents)], raw_input_contents=raw)


def pixels(*raw: bytes, **contents: Any) -> pb.ModelInferRequest:
    return sent("images", *SHAPE, raw=raw, **contents)


def two_files(raw: bytes) -> pb.ModelInferRequest:
    return sent("encoded", 2, raw=[raw])


def with_parameter(place: str, name: str) -> pb.ModelInferRequest:
    request = of_files(b"1", outputs=asking("embeddings"))
    getattr(request, place)[0].parameters[name].string_param = "x"
    return request


BAD: list[tuple[pb.ModelInferRequest, str, str]] = [
    (pb.ModelInferRequest(), "inputs", "0 tensors were sent; send one"),
    (pb.ModelInferRequest(inputs=[tensor("images", "UINT8")] * 2), "inputs", "2 tensors were sent"),
    (sent("pixels", 1), "inputs[0].name", "'pixels'"),
    (sent("images", *SHAPE, datatype="FP32"), "inputs[0].datatype", "images is UINT8"),
    (sent("images"), "inputs[0].shape", "images takes [B, 4, 4, 3]"),
    (sent("images", *range(1, 2_000)), "inputs[0].shape", "[1, 2, 3, 4, 5, ...]"),
    (sent("images", 0, *SHAPE[1:]), "inputs[0].shape", "images takes"),
    (sent("images", -1, *SHAPE[1:]), "inputs[0].shape", "images takes"),
    (sent("images", 257, *SHAPE[1:]), "inputs[0].shape", "B from 1 to 256"),
    (sent("encoded", 10**9), "inputs[0].shape", "encoded takes [B] or [B, 1]"),
    (sent("encoded", 1, 2), "inputs[0].shape", "encoded takes"),
    (pixels(), "inputs[0]", "images were sent 0 times"),
    (pixels(ONE, ONE), "inputs[0]", "images were sent 2 times"),
    (pixels(ONE, uint_contents=LIST), "inputs[0]", "images were sent 2 times"),
    (pixels(ONE[1:]), "raw_input_contents[0]", "has 48 elements, and 47 came"),
    (pixels(uint_contents=[]), "inputs[0].contents", "0 came"),
    (pixels(uint_contents=LIST[1:]), "inputs[0].contents", "47 came"),
    (pixels(uint_contents=[*LIST[1:], 256]), "inputs[0].contents", "images has an element above 255"),
    (pixels(int_contents=LIST), "inputs[0].contents", "uint_contents"),
    (pixels(uint_contents=LIST, fp32_contents=[0.0]), "inputs[0].contents", "uint_contents"),
    (sent("encoded", 1, uint_contents=[1]), "inputs[0].contents", "bytes_contents"),
    (two_files(prefixed(b"1")), "raw_input_contents[0]", "encoded of shape [2]"),
    (two_files(prefixed(b"1", b"2", b"3")), "raw_input_contents[0]", "has more than"),
    (two_files(prefixed(b"1") + b"\1\0"), "raw_input_contents[0]", "within element 1"),
    (two_files(b"\xff\xff\xff\xff1"), "raw_input_contents[0]", "element 0"),
    (two_files(b"\x89PNG\r\n\x1a\n"), "raw_input_contents[0]", "encoded ends within"),
    (of_files(b"1", outputs=asking("logits")), "outputs[0]", "'logits'"),
    (of_files(b"1", outputs=asking(*["embeddings"] * 2)), "outputs[1]", "is asked for"),
    (of_files(b"1", model_name="plain", outputs=asking("histograms")), "outputs[0]", "has embeddings"),
    (with_parameter("inputs", "shared_memory_region"), "inputs[0].parameters of encoded", "shared"),
    (with_parameter("outputs", "classification"), "outputs[0].parameters of embeddings", "classification"),
]


def test_a_tensor_not_as_the_metadata_says_is_refused_by_name(stubs: Stubs, encoder: FakeEncoder) -> None:
    for request, field, told in BAD:
        said = refusal_of(partial(infer, stubs, request), "INVALID_ARGUMENT", field)
        assert said.startswith(f"{field}: ")
        assert told in said
        assert len(said) < 300
    assert not encoder.encoded


@pytest.mark.parametrize("outputs", [(), ("histograms",)])
def test_one_bad_image_refuses_the_call_and_tells_its_place(stubs: Stubs, outputs: tuple[str, ...]) -> None:
    """A tensor has no place for an error."""
    request = of_files(b"1", b"bad", b"3", b"", outputs=asking(*outputs))
    fields = ["encoded[1]", "encoded[3]"]
    said = refusal_of(lambda: infer(stubs, request), "INVALID_ARGUMENT", *fields, reason="BAD_IMAGE")
    assert said.startswith("encoded[1]: ")
    assert "secret" not in refusal_of(lambda: infer(stubs, of_files(b"1", b"bug")), "INTERNAL")


def test_the_example_with_tritonclient_runs_and_is_what_the_pages_show(tmp_path: Path) -> None:
    """In an environment of its own: it wants an older protobuf and names its messages as ours are named."""
    if not PYTHON.exists():
        missing = "tritonclient is not there; scripts/tritonclient fetches it"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    paths = [tmp_path / f"{i}.jpg" for i in range(len(PHOTOS))]
    for path, photo in zip(paths, PHOTOS, strict=True):
        path.write_bytes(photo)
    example = ROOT / "examples" / "triton.py"
    with serving(FakeEncoder(), GalleryDirectory(tmp_path / "galleries")) as running:
        line = [*map(str, (PYTHON, "-I", example, running.address, *paths))]
        done = subprocess.run(line, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 0, done.stderr
    found = np.loadtxt(done.stdout.splitlines(), np.float32)
    np.testing.assert_allclose(found, expected(*PHOTOS), atol=1e-6)
    for page in sorted((ROOT / "docs").glob("*.md")):
        for block in re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            assert "tritonclient" not in block or block in example.read_text(), page


class Blind(FakeEncoder):
    """Takes any pixels."""

    def encode(self, images: NDArray[np.uint8], *, threads: int = 0) -> NDArray[np.float32]:
        return np.tile(np.eye(1, DIMENSION, dtype=np.float32), (len(images), 1))


@pytest.fixture
def blind(tmp_path: Path) -> Iterator[Stubs]:
    encoder = Blind(FakeSpec(prototypes=PROTOTYPES, grid=GRID))
    with serving(encoder, GalleryDirectory(tmp_path)) as running, connected(running.address) as stubs:
        yield stubs


def called(stubs: Stubs, method: str, message: bytes) -> bytes:
    package = "inference" if "Inference" in method else "crossbatch.v1"
    call: Any = stubs.channel.unary_unary(f"/{package}.{method}")
    reply: bytes = call(message, timeout=10)
    return reply


def valid_messages() -> Iterator[tuple[str, Any]]:
    queries = [retrieval_pb.Query(key="a"), image(b"x")]
    yield "RetrievalService/Embed", retrieval_pb.EmbedRequest(images=[b"x", b"bad"])
    yield "RetrievalService/Search", retrieval_pb.SearchRequest(gallery="birds", queries=queries, k=3)
    wanted = filter_message(AnyOf((Exists("n"), Not(Equal("$label", "l")), Range("$label", "a"))))
    search = retrieval_pb.SearchRequest(
        gallery="birds", queries=queries[:1], filter=wanted, group_by_label=True, exclude_same="n"
    )
    yield "RetrievalService/Search", search
    yield "GalleryService/CountItems", gallery_pb.CountItemsRequest(gallery="birds", filter=wanted)
    listed = gallery_pb.ListItemsRequest(gallery="birds", page_token="a", key_prefix="b", with_vectors=True)
    yield "GalleryService/ListItems", listed
    listed = gallery_pb.ListItemsRequest(gallery="birds", page_token="1", filter=wanted, with_thumbnails=True)
    yield "GalleryService/ListItems", listed
    sampled = gallery_pb.SampleItemsRequest(gallery="birds", size=2, filter=wanted, seed=3)
    yield "GalleryService/SampleItems", sampled
    yield "GalleryService/ListFields", gallery_pb.ListFieldsRequest(gallery="birds")
    valued = gallery_pb.ListValuesRequest(gallery="birds", field="b", prefix="c", page_size=2)
    yield "GalleryService/ListValues", valued
    alike = gallery_pb.ListDuplicatesRequest(gallery="birds", above=0.5, page_size=2, page_token="1")
    yield "GalleryService/ListDuplicates", alike
    deleted = gallery_pb.DeleteItemsRequest(gallery="birds", keys=["z"], expected_versions=[0])
    yield "GalleryService/DeleteItems", deleted
    yield "GalleryService/GetItem", gallery_pb.GetItemRequest(gallery="birds", key="a")
    items = [item("a", label="l"), item("b", image=b"x")]
    items[0].metadata.update({"a": 1, "b": ["c", None]})
    yield "GalleryService/UpsertItems", gallery_pb.UpsertItemsRequest(gallery="birds", items=items)
    update = gallery_pb.ItemUpdate(key="a", metadata=items[0].metadata, label="l", expected_version=1)
    yield "GalleryService/UpdateItems", gallery_pb.UpdateItemsRequest(gallery="birds", items=[update])
    yield "GalleryService/GetGallery", gallery_pb.GetGalleryRequest(name="birds")
    yield "GalleryService/ListGalleries", gallery_pb.ListGalleriesRequest(page_token="a")
    outputs = asking("embeddings", "histograms", "assignments")
    pixels = tensor("images", "UINT8", 1, SIZE, SIZE, 3, uint_contents=[200] * 48)
    files = tensor("encoded", "BYTES", 2, bytes_contents=[b"1", b"2"])
    for request in (
        of_files(b"1", b"bad", id="x", outputs=outputs),
        of_pixels(np.zeros((1, SIZE, SIZE, 3), np.uint8)),
        pb.ModelInferRequest(inputs=[pixels]),
        pb.ModelInferRequest(inputs=[files]),
    ):
        yield "GRPCInferenceService/ModelInfer", request


def test_fuzzed_messages_never_show_a_bug_of_ours(blind: Stubs) -> None:
    blind.create("birds")
    blind.upsert("birds", item("a", label="l"))

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
            called(blind, method, bytes(message))
        except grpc.RpcError as failure:
            code: grpc.StatusCode = failure.code()
            assert code.name in {"INVALID_ARGUMENT", "NOT_FOUND", "ABORTED"}, (method, message)

    fuzz()
    assert blind.embed(b"x").results[0].vector
