"""Who may do what: keys and roles, by themselves and before a real server."""

import importlib
import logging
import pkgutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import crossbatch
import protos
from protos import gallery_service_pb2 as gallery_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.errors import BadSetting, NotFound, PermissionDenied, Unauthenticated
from serving.gallery.directory import GalleryDirectory
from serving.rpc import auth, keys
from serving.rpc.auth import ANYBODY, ROLES, Authenticator, Identity
from serving.rpc.keys import add_key, revoke_key
from serving.server import command
from serving.server.server import Server
from tests.serving.rpc_fakes import FakeEncoder, serving, until
from tests.serving.stubs import Stubs, connected, refused

SEARCH = "/crossbatch.v1.RetrievalService/Search"
UPSERT = "/crossbatch.v1.GalleryService/UpsertItems"


def services_of(file: FileDescriptor) -> set[str]:
    return {
        f"/{service.full_name}/{method.name}"
        for service in file.services_by_name.values()
        for method in service.methods
    }


def bearer(key: str) -> tuple[tuple[str, str | bytes], ...]:
    return (("authorization", f"Bearer {key}"),)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the file all the time."""
    monkeypatch.setattr(auth, "LOOK_SECONDS", 0.01)


def test_every_call_of_ours_has_its_role_and_the_table_knows_no_other() -> None:
    ours = set()
    for module in pkgutil.iter_modules(protos.__path__):
        if module.name.endswith("_pb2"):
            ours |= services_of(importlib.import_module(f"protos.{module.name}").DESCRIPTOR)
    assert ours <= set(ROLES)
    assert {method for method in ROLES if method.startswith("/crossbatch.")} <= ours
    assert services_of(health_pb2.DESCRIPTOR) | services_of(reflection_pb2.DESCRIPTOR) <= set(ROLES)


@pytest.mark.parametrize("method", [method for method in ROLES if method.startswith("/crossbatch.")])
def test_a_call_that_changes_something_needs_the_role_write(method: str) -> None:
    reads = ("Embed", "Search", "Explain", "Get", "List")
    assert (ROLES[method] == "read") == method.rpartition("/")[2].startswith(reads)


def test_without_keys_everybody_may_do_everything() -> None:
    for method in (*ROLES, "/crossbatch.v1.GalleryService/Unknown"):
        assert Authenticator().identify(method, ()) == ANYBODY


def test_each_way_to_send_a_key(file: Path) -> None:
    key = add_key(file, "shop", "write")
    gate = Authenticator(file)
    ways: list[tuple[tuple[str, str | bytes], ...]] = [
        bearer(key),
        (("authorization", f"bearer  {key} "),),
        (("x-api-key", key),),
        (("x-api-key", key), *bearer(key)),
        (("authorization", "Basic of a proxy"), ("x-api-key", key)),
        (("odd-bin", b"\xff"), *bearer(key)),
    ]
    for sent in ways:
        assert gate.identify(UPSERT, sent) == Identity("shop", "write")


def test_a_key_that_is_none_is_refused_in_the_same_words(file: Path) -> None:
    key = add_key(file, "shop", "write")
    gone = add_key(file, "gone", "write")
    revoke_key(file, "gone")
    kept = keys.read_keys(file)[0].sha256
    gate = Authenticator(file)
    told = set()
    ways: list[tuple[tuple[str, str | bytes], ...]] = [
        (),
        bearer(""),
        bearer("cb_unknown"),
        bearer(gone),
        bearer(kept),  # the hash is not the key
        bearer(key[:-1]),
        bearer(key + "x"),
        bearer(key.upper()),
        bearer("ä€😀"),
        bearer("\udcff"),
        bearer("x" * 1_000_000),
        (("authorization", key),),
        (("authorization", "Bearer"),),
        (("authorization", f"Basic {key}"),),
        (("x-api-key", f"Bearer {key}"),),
        (("x-api-key-bin", key.encode()),),
        (("x-api-key", key), *bearer("cb_unknown")),
        (*bearer("cb_unknown"), *bearer(key)),
    ]
    for sent in ways:
        with pytest.raises(Unauthenticated) as failure:
            gate.identify(SEARCH, sent)
        told.add(str(failure.value))
    (words,) = told
    assert not any(each in words for each in (key, gone, "shop", "gone"))


def test_the_role_that_is_needed_is_named(file: Path) -> None:
    key = add_key(file, "web", "read")
    gate = Authenticator(file)
    assert gate.identify(SEARCH, bearer(key)) == Identity("web", "read")
    with pytest.raises(PermissionDenied, match="web has the role read and GalleryService/UpsertItems needs"):
        gate.allow(UPSERT, gate.identify(UPSERT, bearer(key)))
    with pytest.raises(PermissionDenied):  # what the table does not know needs the most
        gate.allow("/crossbatch.v1.GalleryService/Unknown", gate.identify(SEARCH, bearer(key)))


def test_a_server_does_not_start_with_keys_that_let_nobody_in(file: Path) -> None:
    with pytest.raises(NotFound, match="crossbatch keys add"):
        Authenticator(file)
    add_key(file, "a", "read")
    revoke_key(file, "a")
    with pytest.raises(BadSetting, match="no key that may be used"):
        Authenticator(file)


def test_a_start_with_such_keys_ends_with_one_sentence(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "configure_logs", lambda *_, **__: None)  # those of the tests stay
    words = ["serve", "--model", "model.onnx", "--galleries", str(file.parent), "--port", "0"]
    assert crossbatch.main([*words, "--keys", str(file)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith(f"crossbatch serve: there is no key file {file}; ")


def test_a_changed_file_is_read_again(file: Path, quick: None) -> None:
    first = add_key(file, "first", "read")
    gate = Authenticator(file)
    second = add_key(file, "second", "read")
    revoke_key(file, "first")
    until(lambda: known(gate, second))
    until(lambda: not known(gate, first))
    gate.close()


def known(gate: Authenticator, key: str) -> bool:
    try:
        return bool(gate.identify(SEARCH, bearer(key)).name)
    except Unauthenticated:
        return False


@pytest.mark.parametrize(
    "spoil", [lambda file: file.write_text("{"), lambda file: file.unlink()], ids=["cut", "gone"]
)
def test_a_damaged_file_leaves_the_keys_as_they_were_and_is_logged_once(
    file: Path, quick: None, caplog: pytest.LogCaptureFixture, spoil: Any
) -> None:
    key = add_key(file, "a", "read")
    whole = file.read_text()
    gate = Authenticator(file)
    spoil(file)
    until(lambda: caplog.records)
    time.sleep(0.05)
    assert known(gate, key)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "stay in force" in caplog.text
    file.write_text(whole)
    other = add_key(file, "b", "read")
    until(lambda: known(gate, other))
    gate.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str], FakeEncoder]]:
    """A server with a key of each role."""
    folder, encoder = tmp_path_factory.mktemp("guarded"), FakeEncoder()
    file = folder / "keys.json"
    made = {"shop": add_key(file, "shop", "write"), "web": add_key(file, "web", "read")}
    with serving(encoder, GalleryDirectory(folder / "g"), keys=file) as server:
        yield server, made, encoder


@pytest.fixture
def stubs(guarded: tuple[Server, dict[str, str], FakeEncoder]) -> Iterator[Stubs]:
    with connected(guarded[0].address) as stubs:
        yield stubs


@pytest.fixture
def made(guarded: tuple[Server, dict[str, str], FakeEncoder]) -> dict[str, str]:
    return guarded[1]


def test_a_server_asks_for_keys_and_roles(stubs: Stubs, made: dict[str, str]) -> None:
    assert stubs.embed(b"x", metadata=bearer(made["web"])).results[0].vector
    create = gallery_pb.CreateGalleryRequest(name="birds")
    with pytest.raises(grpc.RpcError) as failure:
        stubs.embed(b"x")
    refused("UNAUTHENTICATED", failure, "UNAUTHENTICATED")
    with pytest.raises(grpc.RpcError) as failure:
        stubs.galleries.CreateGallery(create, metadata=bearer(made["web"]))
    assert "needs the role write" in refused("PERMISSION_DENIED", failure, "PERMISSION_DENIED")
    assert stubs.galleries.CreateGallery(create, metadata=bearer(made["shop"])).gallery.name == "birds"


def test_health_is_open_and_reflection_is_not(stubs: Stubs, made: dict[str, str]) -> None:
    assert stubs.health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1
    stub = reflection_pb2_grpc.ServerReflectionStub(stubs.channel)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as failure:
        next(stub.ServerReflectionInfo(iter([question]), timeout=5))
    refused("UNAUTHENTICATED", failure, "UNAUTHENTICATED")
    reply = next(stub.ServerReflectionInfo(iter([question]), timeout=5, metadata=bearer(made["web"])))
    assert reply.list_services_response.service


def test_a_flood_of_wrong_keys_is_answered_at_once_before_a_message_is_received(
    stubs: Stubs, guarded: tuple[Server, dict[str, str], FakeEncoder]
) -> None:
    before = list(guarded[2].decoded)
    # The server would have to wait for a message that never comes.
    silent: Any = stubs.channel.stream_unary("/crossbatch.v1.RetrievalService/Embed")
    answered = threading.Event()
    never = iter(lambda: answered.wait(20) and b"", b"")
    with pytest.raises(grpc.RpcError) as failure:
        silent(never, timeout=5, metadata=bearer("cb_wrong"))
    answered.set()
    refused("UNAUTHENTICATED", failure, "UNAUTHENTICATED")
    large = retrieval_pb.EmbedRequest(images=[bytes(8_000_000)] * 4)
    took = []
    for request in [retrieval_pb.EmbedRequest(images=[b"x"])] * 100 + [large]:
        began = time.perf_counter()
        with pytest.raises(grpc.RpcError) as failure:
            stubs.retrieval.Embed(request, timeout=5, metadata=bearer("cb_wrong"))
        took.append(time.perf_counter() - began)
        assert failure.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert sorted(took)[50] < 0.05
    assert guarded[2].decoded == before


def test_hostile_metadata_is_refused_as_any_other(stubs: Stubs) -> None:
    for metadata in (
        (("authorization", "Bearer " + "x" * 4_000),),
        (("x-api-key", "%00%ff\x7e"), ("x-api-key", "second")),
        (("authorization-bin", bytes(range(256))), ("x-request-id-bin", b"\xff")),
    ):
        with pytest.raises(grpc.RpcError) as failure:
            stubs.embed(b"x", metadata=metadata)
        refused("UNAUTHENTICATED", failure, "UNAUTHENTICATED")


def test_no_key_shows_in_a_log_or_an_error(
    stubs: Stubs, made: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    told = []
    with caplog.at_level(logging.DEBUG):
        for key in (made["web"], "cb_wrongkey", made["web"] + "x"):
            for name in ("authorization", "x-api-key"):
                sent = f"Bearer {key}" if name == "authorization" else key
                with pytest.raises(grpc.RpcError) as failure:
                    stubs.galleries.CreateGallery(
                        gallery_pb.CreateGalleryRequest(name="x"), metadata=((name, sent),), timeout=5
                    )
                told.append(f"{failure.value.details()} {failure.value.trailing_metadata()}")
    seen = "\n".join([*told, *(str(vars(record)) for record in caplog.records)])
    assert "PERMISSION_DENIED" in seen
    assert made["web"][3:] not in seen
    assert "wrongkey" not in seen


def test_a_revoked_key_is_refused_within_two_seconds(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key, other = add_key(file, "a", "read"), add_key(file, "b", "read")
    with (
        serving(FakeEncoder(), GalleryDirectory(tmp_path / "g"), keys=file) as server,
        connected(server.address) as stubs,
    ):
        stubs.embed(b"x", metadata=bearer(key))
        revoke_key(file, "a")
        deadline = time.monotonic() + 2

        def embed_until_refused() -> None:
            while time.monotonic() < deadline:
                stubs.embed(b"x", metadata=bearer(key))
                time.sleep(0.05)

        with pytest.raises(grpc.RpcError) as failure:
            embed_until_refused()
        refused("UNAUTHENTICATED", failure, "UNAUTHENTICATED")
        stubs.embed(b"x", metadata=bearer(other))
