"""The Python client against real servers, and its retries against a scripted one."""

import io
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import status_pb2
from grpc_status import rpc_status

from protos import retrieval_service_pb2 as pb
from protos import retrieval_service_pb2_grpc
from serving.client import attempts, given, splitting
from serving.client.client import Client, Hit, Item
from serving.errors import (
    AlreadyExists,
    BadImage,
    CrossbatchError,
    DeadlineExceeded,
    Draining,
    InvalidArgument,
    ModelMismatch,
    NotFound,
    Overloaded,
    Unavailable,
)
from serving.gallery.directory import GalleryDirectory
from serving.gallery.search.filter import Equal, Exists
from serving.model import preprocess
from serving.rpc.status import to_status
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, serving, vector_for

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
def client(encoder: FakeEncoder, tmp_path: Path) -> Iterator[Client]:
    galleries = GalleryDirectory(tmp_path)
    galleries.create("theirs", model_name="other", fingerprint="b" * 64, dimension=DIMENSION)
    with serving(encoder, galleries) as running, Client(running.address) as client:
        yield client


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server that many tests ask for what it refuses; its gallery has one item."""
    galleries = GalleryDirectory(tmp_path_factory.mktemp("shared"))
    with serving(FakeEncoder(), galleries) as running, Client(running.address) as client:
        client.create("birds")
        client.upsert("birds", [Item("a", vector=vector_for(b"x"))])
        yield client


class Scripted(retrieval_service_pb2_grpc.RetrievalServiceServicer):
    """Fails as it is told, then answers; keeps the time of each try."""

    def __init__(self, failures: list[status_pb2.Status | grpc.StatusCode]) -> None:
        self.failures = failures
        self.tries: list[float] = []
        self.left: list[float] = []

    def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:  # noqa: N802
        self.tries.append(time.monotonic())
        self.left.append(context.time_remaining())
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, status_pb2.Status):
                context.abort_with_status(rpc_status.to_status(failure))
            context.abort(failure, "scripted")
        return pb.EmbedResponse(results=[pb.EmbedResult(vector=b"\0\0\0\0") for _ in request.images])


@contextmanager
def scripted(*failures: Any) -> Iterator[tuple[Scripted, str]]:
    script = Scripted(list(failures))
    server = grpc.server(ThreadPoolExecutor(2))
    retrieval_service_pb2_grpc.add_RetrievalServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield script, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def test_arrays_go_in_and_come_out(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(b"second")
    vectors = client.embed([b"first", path])
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, np.stack([vector_for(b"first"), vector_for(b"second")]))
    assert client.embed([]).shape == (0, DIMENSION)


def test_the_life_of_a_gallery(client: Client) -> None:
    assert client.create("birds").items == 0
    with pytest.raises(AlreadyExists):
        client.create("birds")
    items = [
        Item("a", image=b"a", label="A", uri="file:a", metadata={"price": 3, "tags": ["x", 1.5, None, True]}),
        Item("b", vector=vector_for(b"b")),
    ]
    assert len(client.upsert("birds", items)) == 2
    assert client.gallery("birds").items == 2
    (hits,) = client.search("birds", images=[b"a"], k=1)
    (hit,) = hits
    assert isinstance(hit, Hit)
    assert (hit.key, hit.label, hit.uri) == ("a", "A", "file:a")
    assert hit.metadata == {"price": 3, "tags": ["x", 1.5, None, True]}
    assert isinstance(hit.metadata["price"], int)
    assert hit.score == pytest.approx(1, abs=1e-6)
    by_vector = client.search("birds", vectors=[vector_for(b"a"), vector_for(b"b")], k=1)
    assert [[hit.key for hit in each] for each in by_vector] == [["a"], ["b"]]
    assert [hit.key for hit in client.search("birds", keys=["a"], exclude=["a"])[0]] == ["b"]
    assert client.search("birds", keys=["a"], exclude=["a"], minimum_score=1.0) == [[]]
    assert client.delete("birds", ["a", "nobody"]) == 1
    assert [(info.name, info.items, type(info.problem)) for info in client.galleries()] == [
        ("birds", 1, type(None)),
        ("theirs", 0, ModelMismatch),
    ]


def test_the_model_and_readiness(client: Client) -> None:
    model = client.model()
    assert (model.name, model.dimension, model.precision) == ("fake", DIMENSION, "fp32")
    assert client.ready()


def test_errors_are_of_our_own_tree(client: Client) -> None:
    for error, call in (
        (NotFound, lambda: client.search("nowhere", images=[b"x"])),
        (NotFound, lambda: client.gallery("nowhere")),
        (ModelMismatch, lambda: client.search("theirs", images=[b"x"])),
        (InvalidArgument, lambda: client.create("../up")),
        (InvalidArgument, lambda: client.search("theirs", images=[b"x"], keys=["x"])),
        (InvalidArgument, lambda: client.search("theirs")),
        (InvalidArgument, lambda: client.search("theirs", vectors=vector_for(b"x"))),
        (InvalidArgument, lambda: client.upsert("theirs", [Item("x")])),
        (
            InvalidArgument,
            lambda: client.upsert("theirs", [Item("x", vector=vector_for(b"x"), metadata={"x": {1}})]),
        ),
        (BadImage, lambda: client.embed([Path("/no/such/file.jpg")])),
        (BadImage, lambda: client.embed([bytes(preprocess.MAX_BYTES + 1)])),
    ):
        with pytest.raises(error) as failure:
            call()
        assert type(failure.value) is error


def test_bad_inputs_are_raised_or_returned_by_choice(client: Client) -> None:
    with pytest.raises(BadImage, match="input 1: These bytes hold no image"):
        client.embed([b"good", b"bad"])
    good, bad = client.embed([b"good", b"bad"], on_error="return")
    np.testing.assert_array_equal(good, vector_for(b"good"))
    assert isinstance(bad, BadImage)
    client.create("birds")
    client.upsert("birds", [Item("a", image=b"a")])
    missing, found = client.search("birds", keys=["nobody", "a"], on_error="return")
    assert isinstance(missing, NotFound)
    assert isinstance(found, list)


@pytest.mark.parametrize("count", [1, 3, 30])
def test_each_of_many_bad_inputs_is_told_its_own_error(client: Client, count: int) -> None:
    images = [b"bad" if i % 2 else b"" for i in range(count)]
    errors = client.embed(images, on_error="return")
    assert len(errors) == count
    for i, error in enumerate(errors):
        assert isinstance(error, BadImage)
        assert ("hold no image" if i % 2 else "is empty") in str(error)


def test_many_inputs_are_split_into_calls_under_the_limits(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [b"%d" % i for i in range(600)]
    np.testing.assert_array_equal(client.embed(iter(images)), np.stack([vector_for(each) for each in images]))
    client.create("birds")
    stored = client.upsert("birds", (Item(f"{i}", vector=vector_for(b"%d" % i)) for i in range(600)))
    assert len(stored) == 600
    vectors = np.stack([vector_for(each) for each in images])
    found = client.search(
        "birds", vectors=vectors[:70], k=1000
    )  # 70 x 1,000 hits are more than one reply holds
    assert [hits[0].key for hits in found] == [f"{i}" for i in range(70)]
    monkeypatch.setattr(splitting, "_CHUNK_BYTES", 1_000)
    assert client.embed([b"x" * 700] * 3).shape == (3, DIMENSION)
    assert client.delete("birds", (f"{i}" for i in range(2_000))) == 600


def test_a_split_holds_one_chunk_in_memory() -> None:
    made: list[int] = []

    def inputs() -> Iterator[bytes]:
        for i in range(1_000):
            made.append(i)
            yield b"x"

    for number, chunk in enumerate(splitting.chunks_of(inputs(), len, 100)):
        assert len(chunk) == 100
        assert len(made) <= (number + 1) * 100 + 1


def test_a_bad_item_of_a_later_call_is_named_by_its_own_place(client: Client) -> None:
    client.create("birds")
    items = [Item(f"{i}", vector=vector_for(b"%d" % i)) for i in range(300)]
    items[299] = Item("299", image=b"bad")
    with pytest.raises(BadImage, match=r"items\[299\].image: These bytes hold no image") as failure:
        client.upsert("birds", items)
    assert client.gallery("birds").items == failure.value.stored == 256


def test_no_server_is_one_sentence_soon() -> None:
    began = time.monotonic()
    with Client("127.0.0.1:1", timeout=20, retries=4) as client:
        assert not client.ready()
        with pytest.raises(Unavailable, match=r"No server answers at 127\.0\.0\.1:1 .*crossbatch serve"):
            client.embed([b"x"])
    assert time.monotonic() - began < 10


def test_a_call_ends_with_its_deadline(client: Client, encoder: FakeEncoder) -> None:
    encoder.encode_gate.clear()
    began = time.monotonic()
    with (
        Client(client.address, timeout=0.3) as hasty,
        pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"),
    ):
        hasty.embed([b"x"])
    assert time.monotonic() - began < 2
    encoder.encode_gate.set()


@pytest.mark.parametrize("failure", [Overloaded("full"), Draining("stopping"), grpc.StatusCode.UNAVAILABLE])
def test_passing_failures_are_tried_again(failure: Any) -> None:
    status = to_status(failure) if isinstance(failure, CrossbatchError) else failure
    with scripted(status, status) as (script, address), Client(address) as client:
        assert client.embed([b"x"]).shape == (1, 1)
        assert len(script.tries) == 3


def test_what_grpc_itself_finds_too_large_is_not_tried_again() -> None:
    """It names no time to come back at: it is as large then, as metadata above the limit."""
    with scripted(grpc.StatusCode.RESOURCE_EXHAUSTED) as (script, address), Client(address) as client:
        with pytest.raises(Overloaded):
            client.embed([b"x"])
        assert len(script.tries) == 1


def test_the_server_says_when_to_return() -> None:
    status = to_status(Overloaded("full", retry_after=0.4))
    with scripted(status) as (script, address), Client(address) as client:
        client.embed([b"x"])
        assert 0.4 <= script.tries[1] - script.tries[0] < 1.5


def test_tries_share_one_deadline_and_none_begins_past_it() -> None:
    full = to_status(Overloaded("full", retry_after=0.3))
    with scripted(*[full] * 9) as (script, address), Client(address, timeout=1.0, retries=9) as client:
        began = time.monotonic()
        with pytest.raises(Overloaded):
            client.embed([b"x"])
        assert time.monotonic() - began < 1.0
        assert 2 <= len(script.tries) <= 4
        assert script.left == sorted(script.left, reverse=True)


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN]
)
def test_lasting_failures_are_not_tried_again(code: grpc.StatusCode) -> None:
    with scripted(code) as (script, address), Client(address) as client:
        with pytest.raises(CrossbatchError):
            client.embed([b"x"])
        assert len(script.tries) == 1


def test_retries_are_counted() -> None:
    with (
        scripted(*[grpc.StatusCode.UNAVAILABLE] * 9) as (script, address),
        Client(address, retries=2) as client,
    ):
        with pytest.raises(Unavailable):
            client.embed([b"x"])
        assert len(script.tries) == 3


def test_a_restart_is_ridden_out() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = grpc.server(ThreadPoolExecutor(2))
    retrieval_service_pb2_grpc.add_RetrievalServiceServicer_to_server(Scripted([]), server)

    def start() -> None:
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()

    timer = threading.Timer(0.4, start)
    timer.start()
    try:
        with Client(f"127.0.0.1:{port}") as client:
            assert client.embed([b"x"]).shape == (1, 1)
    finally:
        timer.join()
        server.stop(0).wait()


def test_by_default_only_the_timeout_ends_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "LONGEST_PAUSE", 0.01)  # some dozens of tries
    began = time.monotonic()
    with Client("127.0.0.1:1", timeout=0.8) as client:
        with pytest.raises(Unavailable, match="No server answers"):
            client.model()
        assert 0.7 < time.monotonic() - began < 5


def test_long_work_is_not_begun_for_long_where_no_server_is() -> None:
    began = time.monotonic()
    with Client("127.0.0.1:1", timeout=0.3) as client:
        with pytest.raises(Unavailable):
            list(client.build_index("birds", timeout=4))
        with pytest.raises(Unavailable):
            client.reload(timeout=4)
    assert time.monotonic() - began < 2


def test_a_server_of_another_kind_is_named() -> None:
    began = time.monotonic()
    with (
        scripted() as (_, address),
        Client(address) as client,
        pytest.raises(Unavailable, match="no crossbatch server"),
    ):
        client.model()
    assert time.monotonic() - began < 1  # it is not asked again


def test_pauses_grow_have_jitter_and_an_end() -> None:
    pauses = [[attempts.pause_before(tries, Unavailable("x")) for _ in range(20)] for tries in range(10)]
    for tries, some in enumerate(pauses):
        most = min(attempts.LONGEST_PAUSE, attempts.FIRST_PAUSE * 2**tries)
        assert all(most / 2 <= pause <= most for pause in some)
        assert len(set(some)) > 1
    assert attempts.pause_before(5_000, Unavailable("x")) <= attempts.LONGEST_PAUSE


def test_limits_that_make_no_sense_are_refused() -> None:
    wrongs: list[dict[str, Any]] = [
        {"timeout": 0.0}, {"timeout": float("nan")}, {"timeout": float("inf")}, {"timeout": "10"},
        {"timeout": None}, {"retries": -1}, {"retries": 1.5}, {"retries": None},
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(InvalidArgument, match="cannot make a call"):
            Client("127.0.0.1:1", **wrong)
    for address in (5, None, b"127.0.0.1:1", "\udcff:1"):
        with pytest.raises(InvalidArgument, match="The address"):
            Client(address)  # type: ignore[arg-type]


def test_a_client_that_was_closed_says_so() -> None:
    client = Client("127.0.0.1:1")
    client.close()
    with pytest.raises(InvalidArgument, match="has been closed"):
        client.embed([b"x"])
    assert not client.ready()


CIRCLE: dict[str, Any] = {}
CIRCLE["self"] = CIRCLE
UNIT = vector_for(b"x")


WRONG_IMAGES = [b"one image", "one/path", Path("one"), 5, None, [5], [None], [[b"x"]], {"a": b"x"}]
WRONG_IMAGES += [io.BytesIO(b"one\nfile"), [io.StringIO("text")], np.zeros((2, 2, 3)), [np.zeros((2, 2, 3))]]


@pytest.mark.parametrize("images", WRONG_IMAGES)
def test_images_are_a_list_of_bytes_and_paths(shared: Client, images: Any) -> None:
    with pytest.raises(InvalidArgument) as failure:
        shared.embed(images)
    assert type(failure.value) is InvalidArgument
    if images is not None:
        with pytest.raises(InvalidArgument) as failure:
            shared.search("birds", images=images)
        assert type(failure.value) is InvalidArgument


@pytest.mark.parametrize(
    "query",
    [
        {"keys": "abc"}, {"keys": [5]}, {"keys": 5}, {"keys": ["\udcff"]}, {"keys": [b"a"]},
        {"vectors": "abc"}, {"vectors": [["a"]]}, {"vectors": [[1.0], [1.0, 2.0]]}, {"vectors": 5},
        {"vectors": [[10**400]]}, {"vectors": [[1j]]}, {"vectors": [[None]]}, {"vectors": object()},
        {"vectors": [[1e300] * DIMENSION]},
        {"k": -1}, {"k": 0}, {"k": 2**40}, {"k": 10**400}, {"k": "3"}, {"k": 1.5}, {"k": None}, {"k": True},
        {"minimum_score": "high"}, {"minimum_score": float("nan")}, {"minimum_score": 1e300},
        {"minimum_score": 10**400}, {"minimum_score": [0.5]}, {"minimum_score": 1.5}, {"minimum_score": -1.5},
        {"exclude": "abc"}, {"exclude": [5]}, {"exclude": 5}, {"exclude": None}, {"exclude": ["\udcff"]},
        {"exclude": ["x"] * 1_001}, {"filter": 5},
        {"filter": "brand"}, {"filter": {"a": None}}, {"filter": {"a": {"$lt": "9", "$gt": 1}}},
        {"filter": Equal("$label", 5)}, {"filter": Equal("a", float("nan"))}, {"filter": [Exists("a")]},
        {"group_by_label": 1}, {"group_by_label": None},
        {"on_error": "ignore"},
        {"gallery": 5}, {"gallery": None}, {"gallery": "\udcff"}, {"gallery": b"birds"},
    ],
)  # fmt: skip
def test_a_search_that_makes_no_sense_is_an_invalid_argument(shared: Client, query: dict[str, Any]) -> None:
    given = {"gallery": "birds"} | query
    if not {"keys", "vectors"} & set(query):
        given["keys"] = ["a"]
    with pytest.raises(InvalidArgument) as failure:
        shared.search(**given)
    assert not str(failure.value).startswith("The server failed")


@pytest.mark.parametrize(
    "fields",
    [
        {"key": 5}, {"key": None}, {"key": "\udcff"}, {"key": b"a"},
        {"label": 5}, {"label": None}, {"label": "\udcff"}, {"uri": 5}, {"uri": "\udcff"},
        {"metadata": "abc"}, {"metadata": 5}, {"metadata": [1]}, {"metadata": {1: 2}},
        {"metadata": {"x": {1}}},
        {"metadata": {"x": 10**400}}, {"metadata": {"x": "\udcff"}}, {"metadata": {"\udcff": 1}},
        {"metadata": CIRCLE}, {"metadata": {"x": float("nan")}},
        {"vector": "abc"}, {"vector": [None]}, {"vector": [[1.0]]}, {"vector": 5}, {"vector": [10**400]},
        {"expected_version": "1"}, {"expected_version": -1}, {"expected_version": 2**64},
        {"expected_version": 1.0}, {"expected_version": True},
        {"vector": None}, {"image": b"x"}, {"vector": None, "image": 5}, {"vector": None, "image": [b"x"]},
    ],
)  # fmt: skip
def test_an_item_that_makes_no_sense_is_an_invalid_argument(shared: Client, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        shared.upsert("birds", [Item(**({"key": "b", "vector": UNIT} | fields))])
    assert shared.gallery("birds").items == 1


def test_whatever_else_makes_no_sense_is_an_invalid_argument(client: Client) -> None:
    client.create("birds")
    calls: list[Callable[[Any], Any]] = [
        lambda wrong: client.upsert("birds", wrong),
        lambda wrong: client.upsert("birds", [wrong]),
        lambda wrong: client.upsert(wrong, [Item("a", vector=UNIT)]),
        lambda wrong: client.delete(wrong, ["a"]),
        lambda wrong: client.create(wrong),
        lambda wrong: client.gallery(wrong),
        lambda wrong: client.get(wrong, "a"),
        lambda wrong: client.get("birds", wrong),
        lambda wrong: client.items(wrong),
        lambda wrong: client.items("birds", prefix=wrong),
    ]
    for call in calls:
        for wrong in (5, None, {"key": "a"}, "\udcff", b"abc"):
            with pytest.raises(InvalidArgument):
                call(wrong)


@pytest.mark.parametrize(
    "options",
    [
        {"recall": "0.9"}, {"recall": 2}, {"recall": 0}, {"recall": True}, {"recall": float("nan")},
        {"thumbnail_side": 1.5}, {"thumbnail_side": -1}, {"thumbnail_side": 1_025}, {"thumbnail_side": None},
        {"index": 5}, {"index": None}, {"index": "Nonsense"},
    ],
)  # fmt: skip
def test_a_gallery_that_makes_no_sense_is_an_invalid_argument(
    shared: Client, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument):
        shared.create("more", **options)
    assert [info.name for info in shared.galleries()] == ["birds"]


def test_one_key_is_not_taken_for_its_letters(client: Client) -> None:
    client.create("birds")
    client.upsert("birds", [Item(key, vector=vector_for(key.encode())) for key in ("n", "e", "w", "new")])
    for keys in ("new", b"new", None, 5, [5], ["\udcff"]):
        with pytest.raises(InvalidArgument):
            client.delete("birds", keys)  # type: ignore[arg-type]
    assert client.gallery("birds").items == 4
    assert client.delete("birds", []) == 0


def test_an_image_is_bytes_or_a_path_of_either_kind(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(b"picture")
    images: list[Any] = [b"picture", path, str(path), bytearray(b"picture")]
    vectors = client.embed(images)
    np.testing.assert_array_equal(vectors, np.stack([vector_for(b"picture")] * 4))
    client.create("birds")
    assert len(client.upsert("birds", [Item("a", image=str(path))])) == 1
    assert client.search("birds", images=[str(path)])[0][0].key == "a"
    for wrong in ("no/such/file", Path("no/such/file"), "a\0b", "\udcff", str(tmp_path)):
        with pytest.raises(BadImage, match="cannot be read"):
            client.embed([wrong])


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(100 * 2**30)
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(BadImage, match=r"large' is larger than the [\d,]+ bytes"),
    ):
        client.embed([path])
    assert given._MOST_BYTES > preprocess.MAX_BYTES


def test_numpy_numbers_are_numbers(client: Client) -> None:
    client.create("birds")
    client.upsert("birds", [Item("a", vector=[float(each) for each in UNIT])])
    numbers: dict[str, Any] = {"k": np.int64(1), "minimum_score": np.float32(0.5)}
    (hits,) = client.search("birds", vectors=UNIT[None].tolist(), **numbers)
    assert hits[0].key == "a"


def test_the_client_needs_no_engine() -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnxruntime', 'faiss', 'PIL', 'sqlite3'): sys.modules[name] = None\n"
        "import serving.client.client, serving.search"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
