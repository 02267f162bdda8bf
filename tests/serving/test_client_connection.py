"""How the client reaches a server: addresses, TLS, keys, proxies, retries, options; what errors tell."""

import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import gallery_service_pb2 as gallery_pb
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving import errors
from serving.client import Client, Item
from serving.errors import BadImage, Conflict, InvalidArgument, NotFound, Overloaded, Unavailable
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.status import to_status
from tests.serving.authority import Authority, encrypted
from tests.serving.scripts import Script, scripted
from tests.serving.test_client_uploads import embedded

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
CONDITIONAL = Item("a", vector=[1.0], expected_version=0)
BIRDS = gallery_pb.Gallery(name="birds")
ANSWERS: dict[str, Any] = {
    "Embed": embedded,
    "GetModel": lambda _: model_pb.GetModelResponse(model=model_pb.Model(name="m")),
    "UpsertItems": lambda request: gallery_pb.UpsertItemsResponse(versions=[1] * len(request.items)),
    "DeleteItems": lambda request: gallery_pb.DeleteItemsResponse(deleted=len(request.keys)),
    "CreateGallery": lambda _: gallery_pb.CreateGalleryResponse(gallery=BIRDS),
    "DeleteGallery": lambda _: gallery_pb.DeleteGalleryResponse(),
    "SwitchGallery": lambda _: gallery_pb.SwitchGalleryResponse(gallery=BIRDS),
    "RollbackGallery": lambda _: gallery_pb.RollbackGalleryResponse(gallery=BIRDS),
}


def failing(*failures: Any, last: bool = False) -> dict[str, Any]:
    """Answers whose first calls end with these failures, and all others with the last one if that is said."""
    left = list(failures)

    def answer(method: str, request: Any) -> Any:
        if not left:
            return ANSWERS[method](request)
        failure = left[0] if last and len(left) == 1 else left.pop(0)
        if isinstance(failure, Exception):
            raise failure
        return failure

    return {method: lambda request, method=method: answer(method, request) for method in ANSWERS}


def ids(script: Script) -> list[str]:
    return [each["x-request-id"] for each in script.metadata]


def told(error: errors.CrossbatchError) -> tuple[str, str, str]:
    return error.code, error.reason, error.request_id


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_an_address_is_host_and_port_or_a_target_of_grpc() -> None:
    wrongs: list[Any] = ["", "127.0.0.1", "localhost:", "127.0.0.1:port", "http://127.0.0.1:50051", "a b:1"]
    for wrong in [*wrongs, "::1:50051", "user@shop.example:1", "127.0.0.1:50051/", 5, None]:
        with pytest.raises(InvalidArgument, match=r"is not HOST:PORT; write it as 127\.0\.0\.1:50051"):
            Client(wrong)
    for address in ("127.0.0.1:1", "[::1]:1", "shop-1.example:443", "dns:///shop:1", "unix:/tmp/x"):
        with Client(address) as client:
            assert repr(client) == f"Client('{address}')"


def test_an_api_key_comes_with_every_call_and_is_never_shown(authority: Authority) -> None:
    with scripted(ANSWERS) as script:
        for key in ("s3cret", None):
            with Client(script.address, api_key=key) as client:
                client.model()
                assert "s3cret" not in f"{client!r}"
    assert [each.get("authorization") for each in script.metadata] == ["Bearer s3cret", None]
    safely: list[dict[str, Any]] = [{"insecure": True}, {"tls": True}, {"ca": authority.certificate}]
    for address in ("shop.example:1", "10.0.0.1:1", "[2001:db8::1]:1", "dns:///shop:1", "localhost.evil:1"):
        with pytest.raises(InvalidArgument, match="plain text") as failure:
            Client(address, api_key="s3cret")
        assert "s3cret" not in str(failure.value)
        for safe in safely:
            Client(address, api_key="s3cret", **safe).close()
    for address in ("127.9.9.9:1", "localhost:1", "[::1]:1", "unix:/tmp/socket", "ipv6:[::1]:1"):
        Client(address, api_key="s3cret").close()
    keys: list[Any] = ["", "two words", "line\n", "clé", 5, b"bytes"]
    for wrong in keys:
        with pytest.raises(InvalidArgument, match="API key must be") as failure:
            Client("127.0.0.1:1", api_key=wrong)
        assert not str(wrong).strip() or str(wrong) not in str(failure.value)


def test_a_fault_of_tls_is_told_in_a_sentence(authority: Authority) -> None:
    own, other = authority.sign("server"), authority.sign("server", address="192.0.2.1")
    trusted: dict[str, Any] = {"ca": authority.certificate}
    locked = {"certificate": own.certificate, "private_key": encrypted(own).key}
    wrongs: list[tuple[Any, dict[str, Any], str]] = [
        (own, {"ca": Authority().certificate}, r"untrusted certificate; give its authority by ca=\.\.\."),
        (own, {"tls": True}, "untrusted"),
        (own, {}, r"and ca=\.\.\. or tls=True if it speaks TLS"),
        (other, trusted, "for another host name; call it by"),
        (None, trusted, r"speaks no TLS; leave out tls=True, ca=\.\.\."),
        (own, trusted | locked, "security handshaker"),
    ]
    for pair, wrong, says in wrongs:
        credentials: Any = pair and grpc.ssl_server_credentials([(pair.key, pair.certificate)])
        with scripted(ANSWERS, credentials=credentials) as script:
            client = Client(script.address, timeout=5, retries=0, **wrong)
            with client, pytest.raises(Unavailable, match=says):
                client.model()


def test_mutual_tls_trusts_an_authority_and_shows_a_certificate(authority: Authority, tmp_path: Path) -> None:
    own, mine, ca = authority.sign("server"), authority.sign("client"), tmp_path / "ca.pem"
    ca.write_bytes(authority.certificate)
    pair: Any = {"certificate": mine.certificate, "private_key": mine.key}
    keys = [(own.key, own.certificate)]
    credentials = grpc.ssl_server_credentials(keys, authority.certificate, require_client_auth=True)
    with scripted(ANSWERS, credentials=credentials) as script:
        for form in (authority.certificate, ca, str(ca)):
            with Client(script.address, ca=form, api_key="s3cret", **pair) as client:
                assert client.model().name == "m"


def test_what_tls_is_given_is_read_at_once() -> None:
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"certificate": b""}, "belong together"),
        ({"private_key": b""}, "belong together"),
        ({"ca": "no/nothing.pem"}, r"ca=\.\.\. cannot be read from 'no/nothing\.pem' \(No such file"),
        ({"ca": "a\0b"}, "cannot be read"),
        ({"ca": 5}, "cannot be read"),
        ({"private_key": b"secret", "certificate": b"-----BEGIN"}, "private_key=.* is no PEM"),
    ]
    for wrong, says in wrongs:
        with pytest.raises(InvalidArgument, match=says):
            Client("127.0.0.1:1", **wrong)


def test_a_proxy_of_the_environment_does_not_catch_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with scripted(ANSWERS) as script, Client(script.address, retries=0) as client:
        assert client.model().name == "m"


def test_no_server_is_one_sentence_soon() -> None:
    with Client("127.0.0.1:1", timeout=0.3) as client:
        assert not client.ready(wait=0.1)
        for call in (client.model, client.reload, lambda: list(client.build_index("birds"))):
            with pytest.raises(Unavailable, match=r"No server answers at 127\.0\.0\.1:1 .*crossbatch serve"):
                call()


@pytest.mark.parametrize("failure", [Overloaded("full"), errors.Draining("stopping"), UNAVAILABLE])
def test_passing_failures_are_tried_again_as_often_as_is_said(failure: Any) -> None:
    with scripted(failing(failure, failure)) as script, Client(script.address, timeout=2.0) as client:
        assert client.embed([bytes(2**21)]).shape == (1, 1)
        assert len(script.requests) == 3
        assert len(set(ids(script))) == 1
    with scripted(failing(failure, last=True)) as script, Client(script.address, timeout=1.0) as client:
        for retries in (2, 0, 100):
            with pytest.raises(type(failure) if isinstance(failure, Exception) else Unavailable):
                client.with_options(retries=retries).model()
    assert len(script.requests) == 3 + 1 + 5


@pytest.mark.parametrize("name", ["INVALID_ARGUMENT", "INTERNAL", "UNIMPLEMENTED"])
def test_lasting_failures_are_not_tried_again(name: str) -> None:
    with scripted(failing(grpc.StatusCode[name])) as script, Client(script.address) as client:
        with pytest.raises(errors.CrossbatchError):
            client.embed([b"x"])
        assert len(script.requests) == 1


@pytest.mark.parametrize(
    ("call", "repeated"),
    [
        (lambda client: client.upsert("birds", [Item("a", vector=[1.0])]), True),
        (lambda client: client.delete("birds", ["a"]), True),
        (lambda client: client.upsert("birds", [Item("b", vector=[1.0]), CONDITIONAL]), False),
        (lambda client: client.delete("birds", ["a"], expected_versions=[1]), False),
        (lambda client: client.create("birds"), False),
        (lambda client: client.switch("birds", "next"), False),
        (lambda client: client.rollback("birds"), False),
        (lambda client: client.delete_gallery("birds"), False),
    ],
)
def test_only_what_does_no_harm_is_made_again(call: Callable[[Client], Any], repeated: bool) -> None:
    # A call that was refused was not carried out; what came of one whose reply was lost, nobody knows.
    failures = failing(Overloaded("full"), UNAVAILABLE)
    with scripted(failures) as script, Client(script.address, timeout=1) as client:
        with nullcontext() if repeated else pytest.raises(Unavailable):
            call(client)
        assert len(script.requests) == 2 + repeated


def test_a_restart_is_ridden_out() -> None:
    with scripted(ANSWERS) as first:
        client = Client(first.address)
        client.model()
    port = int(first.address.rpartition(":")[2])
    with client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.model)
        time.sleep(0.5)
        with scripted(ANSWERS, port=port):
            assert answer.result(20).name == "m"


def test_a_client_that_was_closed_or_forked_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("127.0.0.1:1")
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    with pytest.raises(InvalidArgument, match="make a client in each"):
        client.model()
    monkeypatch.undo()
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(client)
    client.close()
    with pytest.raises(InvalidArgument, match="has been closed"):
        client.embed([b"x"])
    assert not client.ready()


def test_closing_a_client_ends_its_calls() -> None:
    gate = threading.Event()
    with scripted({"GetModel": lambda _: gate.wait(10)}) as script:
        client = Client(script.address)
        threading.Timer(0.3, client.close).start()
        with pytest.raises(InvalidArgument, match="has been closed"):
            client.model()
        gate.set()


def test_what_no_server_of_ours_takes_is_told() -> None:
    with scripted({}) as script, Client(script.address) as client:
        with pytest.raises(InvalidArgument, match=r"larger than [\d,]+ bytes; split the call"):
            client.delete("birds", ["x" * (MAX_MESSAGE_BYTES // 2)] * 2)
        with pytest.raises(Unavailable, match="no crossbatch server"):
            client.model()


def test_options_add_up_and_leave_the_client_as_it_was() -> None:
    with scripted(ANSWERS) as script:
        with Client(script.address, metadata={"x-shop": "a", "x-page": "1"}, api_key="s3cret") as client:
            changed = client.with_options(metadata={"x-page": "2"}).with_options(request_id="r-1", timeout=3)
            with changed:
                changed.model()
            client.model()
        first, second = script.metadata
        with pytest.raises(InvalidArgument, match="has been closed"):
            changed.model()
    assert (first["x-shop"], first["x-page"], first["x-request-id"]) == ("a", "2", "r-1")
    assert (second["x-shop"], second["x-page"], len(second["x-request-id"])) == ("a", "1", 16)
    assert first["authorization"] == second["authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0.0}, {"timeout": "2"}, {"timeout": float("nan")}, {"retries": -1}, {"retries": 1.5},
        {"request_id": "two words"}, {"request_id": 5}, {"request_id": "x" * 65}, {"metadata": [("a", "b")]},
        {"metadata": {"X-Shop": "a"}}, {"metadata": {"": "a"}}, {"metadata": {"a": 5}}, {"metadata": {5: ""}},
        {"metadata": {"a": "s3crét"}}, {"metadata": {"a": "line\n"}}, {"metadata": {"authorization": "x"}},
        {"metadata": {"grpc-a": "1S"}}, {"metadata": {"a-bin": "x"}}, {"metadata": {"te": "x"}},
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused_at_once(options: dict[str, Any]) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgument) as failure:
        client.with_options(**options)
    assert "s3cr" not in str(failure.value)


def test_an_error_tells_its_code_its_reason_and_the_request_id() -> None:
    with scripted(failing(NotFound("no such model"))) as script, Client(script.address) as client:
        with pytest.raises(NotFound) as failure:
            client.model()
        error = failure.value
        assert told(error) == ("NOT_FOUND", "NOT_FOUND", ids(script)[0])
        shown = "".join(traceback.format_exception(error))
        assert f"request id {error.request_id}, NOT_FOUND" in shown
        assert error.request_id not in str(error)
    with Client("127.0.0.1:1", retries=0).with_options(request_id="r-9") as client:
        with pytest.raises(Unavailable) as unreached:
            client.model()
        with pytest.raises(InvalidArgument) as unsent:
            client.embed([5])  # type: ignore[list-item]
    assert told(unreached.value) == ("UNAVAILABLE", "", "r-9")
    assert told(unsent.value) == ("", "", "")


def test_an_error_of_one_input_tells_them_too() -> None:
    bad = retrieval_pb.EmbedResult(error=to_status(BadImage("no image")))
    reply = retrieval_pb.EmbedResponse(results=[retrieval_pb.EmbedResult(vector=bytes(4)), bad])
    with scripted({"Embed": lambda _: reply}) as script, Client(script.address) as client:
        _, error = client.embed([b"x", b"bad"], on_error="return")
        with pytest.raises(BadImage, match="input 1: no image") as failure:
            client.embed([b"x", b"bad"])
        for each, request_id in zip((error, failure.value), ids(script), strict=True):
            assert isinstance(each, BadImage)
            assert told(each) == ("INVALID_ARGUMENT", "BAD_IMAGE", request_id)


def test_an_error_is_the_same_on_the_other_side_of_a_process() -> None:
    error = Conflict("m", key="a", expected=1, found=2)
    error.request_id, error.stored = "r-1", 3
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
    said = error.saying("items[3]: m")
    assert (str(said), str(error), said.key, said.request_id) == ("items[3]: m", "m", "a", "r-1")
