"""Who may do what: the file of keys and its command, and roles, before a real server, too."""

import hashlib
import importlib
import json
import logging
import pkgutil
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import crossbatch
import protos
from protos import gallery_service_pb2 as gallery_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.errors import (
    AlreadyExists,
    BadArtifact,
    BadSetting,
    CrossbatchError,
    InvalidArgument,
    NotFound,
    Unauthenticated,
)
from serving.gallery.directory import GalleryDirectory
from serving.observability.call import Call
from serving.rpc import keys
from serving.rpc.auth import ROLES, Authenticator, role_of
from serving.rpc.keys import add_key, read_keys, revoke_key
from tests.serving.rpc_fakes import FakeEncoder, serving, until
from tests.serving.stubs import Stubs, connected, refusal_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_the_file_holds_the_hash_of_a_key_for_its_owner_alone(file: Path) -> None:
    key = add_key(file, "shop", "write")
    assert key.startswith("cb_")
    assert len(key) == 3 + 43  # 32 bytes in base64
    (kept,) = read_keys(file)
    assert (kept.name, kept.role, kept.revoked) == ("shop", "write", None)
    assert kept.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert add_key(file, "other", "read") != key


def test_keys_added_at_once_are_all_kept(file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: add_key(file, f"k{i}", "read"), range(16)))
    assert {key.name for key in read_keys(file)} == {f"k{i}" for i in range(16)}


def test_a_revoked_key_keeps_its_date_and_its_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_key(file, "shop", "read")
    monkeypatch.setattr(keys, "_now", lambda: "2026-01-01T00:00:00Z")
    assert revoke_key(file, "shop").revoked == "2026-01-01T00:00:00Z"
    monkeypatch.setattr(keys, "_now", lambda: "2027-01-01T00:00:00Z")
    assert revoke_key(file, "shop").revoked == "2026-01-01T00:00:00Z"
    with pytest.raises(AlreadyExists, match="revoked 2026"):
        add_key(file, "shop", "read")
    with pytest.raises(NotFound, match="'shup'"):
        revoke_key(file, "shup")


def test_a_link_to_the_file_stays_one(file: Path) -> None:
    real = file.with_name("real.json")
    add_key(real, "a", "read")
    file.symlink_to(real)
    add_key(file, "b", "read")
    assert file.is_symlink()
    assert [key.name for key in read_keys(real)] == ["a", "b"]


@pytest.mark.parametrize("name", ["", "a b", "-a", "x" * 65, "ä", "a\n", "../a"])
def test_a_name_that_would_not_be_told_apart_in_a_log_is_refused(file: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be a key's name"):
        add_key(file, name, "read")
    assert not file.exists()


KEY = {"name": "a", "role": "read", "sha256": "0" * 64, "created": "2026-01-01T00:00:00Z", "revoked": None}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "the whole is not"),
        ('{"format": 2}', "format 2 and this crossbatch reads format 1"),
        ('{"keys": []}', None),
        ({"format": 1, "keys": [KEY | {"role": "admin"}]}, "keys.0.role"),
        ({"format": 1, "keys": [KEY | {"sha256": "0" * 63}]}, "keys.0.sha256"),
        ({"format": 1, "keys": [KEY | {"more": 1}]}, "keys.0.more"),
        ({"format": 1, "keys": [KEY, KEY]}, "a name is in it twice"),
        ({"format": 1, "keys": [KEY, KEY | {"name": "b"}]}, "a sha256 is in it twice"),
        ("\xff\xfe", "it is no JSON"),
    ],
)
def test_a_file_that_is_damaged_or_of_a_newer_format_is_refused_and_left_as_it_is(
    file: Path, content: Any, told: str | None
) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    file.write_bytes(text.encode("latin-1"))
    if told is None:
        assert read_keys(file) == []
        return
    for use in (lambda: read_keys(file), lambda: add_key(file, "new", "read")):
        with pytest.raises(BadArtifact, match=told) as failure:
            use()
        assert str(file) in str(failure.value)
    assert file.read_bytes() == text.encode("latin-1")


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CrossbatchError, match="cannot be written"):
        add_key(tmp_path / "nowhere" / "keys.json", "a", "read")
    with pytest.raises(BadArtifact, match="cannot be read"):
        read_keys(tmp_path)


def keys_command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = crossbatch.main(["keys", *words])
    return status, *capsys.readouterr()


def test_the_command_adds_lists_and_revokes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--file", str(file))
    status, out, told = keys_command(capsys, "add", "shop", "--role", "write", *where)
    key = out.removesuffix("\n")  # nothing else, so that `> key` makes a file that can be used
    assert status == 0
    assert "the key of shop, of the role write; it is shown this once" in told
    assert key not in told
    assert read_keys(file)[0].sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert json.loads(keys_command(capsys, "add", "web", "--json", *where)[1])["name"] == "web"
    assert json.loads(keys_command(capsys, "revoke", "web", "--json", *where)[1])["role"] == "read"
    head, shop, web = keys_command(capsys, "list", *where)[1].splitlines()
    assert head.split() == ["name", "role", "created", "revoked"]
    assert shop.split()[::3] == ["shop", "-"]
    assert web.split()[3].endswith("Z")
    listed = keys_command(capsys, "list", "--json", *where)[1]
    assert [entry["name"] for entry in json.loads(listed)["keys"]] == ["shop", "web"]
    assert key not in listed
    assert "sha256" not in listed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["add"], "add needs one word"),
        (["revoke"], "revoke needs one word"),
        (["list", "shop"], "list needs no word"),
        (["list"], "there is no key file"),
        (["revoke", "shop"], "there is no key file"),
        (["add", "shop", "--role", "admin"], "--role"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_sentence(
    file: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    status, out, error = keys_command(capsys, *words, "--file", str(file))
    assert (status, out) == (2, "")
    assert told in error
    assert error.count("\n") == 1
    assert not list(file.parent.iterdir())


Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


def services_of(file: FileDescriptor) -> set[str]:
    services = file.services_by_name.values()
    return {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}


def bearer(key: str) -> Metadata:
    return (("authorization", f"Bearer {key}"),)


def caller(gate: Authenticator, metadata: Metadata, needed: Any = "read") -> str:
    """The name of the key that a call brings, once it is let in."""
    call = Call("GalleryService/UpsertItems", metadata=metadata)
    gate.authorize(call, needed)
    return call.client


def known(gate: Authenticator, key: str) -> bool:
    try:
        return bool(caller(gate, bearer(key)))
    except Unauthenticated:
        return False


def test_every_call_of_ours_has_its_role_and_the_table_knows_no_other() -> None:
    ours = set()
    for module in pkgutil.iter_modules(protos.__path__):
        if module.name.endswith("_pb2"):
            ours |= services_of(importlib.import_module(f"protos.{module.name}").DESCRIPTOR)
    assert ours <= set(ROLES)
    assert {method for method in ROLES if method.startswith("/crossbatch.")} <= ours
    assert services_of(health_pb2.DESCRIPTOR) | services_of(reflection_pb2.DESCRIPTOR) <= set(ROLES)
    reads = ("Embed", "Search", "Explain", "Get", "List", "Count", "Sample")
    for method in ROLES:
        if method.startswith("/crossbatch."):  # what changes something needs the role write
            assert (ROLES[method] == "read") == method.rpartition("/")[2].startswith(reads)
    assert role_of("/crossbatch.v1.GalleryService/Unknown") == "write"  # which needs the most
    assert not Authenticator().asks


def test_each_way_to_send_a_key(file: Path) -> None:
    key = add_key(file, "shop", "write")
    gate = Authenticator(file)
    ways: list[Metadata] = [
        bearer(key),
        (("authorization", f"bearer  {key} "),),
        (("x-api-key", key),),
        (("x-api-key", key), *bearer(key)),
        (("authorization", "Basic of a proxy"), ("x-api-key", key)),
        (("odd-bin", b"\xff"), *bearer(key)),
    ]
    assert {caller(gate, sent, "write") for sent in ways} == {"shop"}


def test_a_key_that_is_none_is_refused_in_the_same_words(file: Path) -> None:
    key, gone = add_key(file, "shop", "write"), add_key(file, "gone", "write")
    revoke_key(file, "gone")
    gate = Authenticator(file)
    told = set()
    hashed = keys.read_keys(file)[0].sha256  # is not the key
    wrong = ["", "cb_unknown", gone, hashed, key[:-1], f"{key}x", key.upper(), "ä€😀", "\udcff", "x" * 10**6]
    ways: list[Metadata] = [
        (),
        *map(bearer, wrong),
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
            caller(gate, sent)
        told.add(str(failure.value))
    (words,) = told
    assert not any(each in words for each in (key, gone, "shop", "gone"))


def test_a_server_does_not_start_with_keys_that_let_nobody_in(file: Path) -> None:
    with pytest.raises(NotFound, match="crossbatch keys add"):
        Authenticator(file)
    add_key(file, "a", "read")
    revoke_key(file, "a")
    with pytest.raises(BadSetting, match="no key that may be used"):
        Authenticator(file)


def test_keys_are_read_again_and_a_damaged_file_leaves_them_as_they_were(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert keys.LOOK_SECONDS < 2  # within which docs/security.md says that a revoked key is refused
    monkeypatch.setattr(keys, "LOOK_SECONDS", 0.01)
    key = add_key(file, "a", "read")
    gate = Authenticator(file)
    for spoil in (lambda: file.write_text("{"), file.unlink):
        whole = file.read_text()
        caplog.clear()
        spoil()
        until(lambda: caplog.records)
        time.sleep(0.05)
        assert known(gate, key)
        assert [record.levelname for record in caplog.records] == ["ERROR"]  # once
        assert "stay in force" in caplog.text
        file.write_text(whole)
    other = add_key(file, "b", "read")
    until(lambda: known(gate, other))
    revoke_key(file, "a")
    until(lambda: not known(gate, key))
    gate.close()


@dataclass
class Guarded:
    """A server with a key of each role, and its encoder."""

    address: str
    shop: Metadata
    web: Metadata
    encoder: FakeEncoder


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder, encoder = tmp_path_factory.mktemp("guarded"), FakeEncoder()
    file = folder / "keys.json"
    shop, web = add_key(file, "shop", "write"), add_key(file, "web", "read")
    with serving(encoder, GalleryDirectory(folder / "g"), keys=file) as server:
        yield Guarded(server.address, bearer(shop), bearer(web), encoder)


@pytest.fixture
def stubs(guarded: Guarded) -> Iterator[Stubs]:
    with connected(guarded.address) as stubs:
        yield stubs


def test_a_server_asks_for_keys_and_roles(stubs: Stubs, guarded: Guarded) -> None:
    assert stubs.embed(b"x", metadata=guarded.web).results[0].vector
    create: Any = stubs.galleries.CreateGallery
    request = gallery_pb.CreateGalleryRequest(name="birds")
    refusal_of(lambda: stubs.embed(b"x"), "UNAUTHENTICATED")
    said = refusal_of(lambda: create(request, metadata=guarded.web), "PERMISSION_DENIED")
    assert "needs the role write" in said
    assert create(request, metadata=guarded.shop).gallery.name == "birds"


def test_health_is_open_and_reflection_is_not(stubs: Stubs, guarded: Guarded) -> None:
    assert stubs.health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1
    ask = reflection_pb2_grpc.ServerReflectionStub(stubs.channel).ServerReflectionInfo
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    refusal_of(lambda: next(ask(iter([question]), timeout=5)), "UNAUTHENTICATED")
    reply = next(ask(iter([question]), timeout=5, metadata=guarded.web))
    assert reply.list_services_response.service


def test_a_wrong_key_is_answered_before_a_message_is_received(stubs: Stubs, guarded: Guarded) -> None:
    before = list(guarded.encoder.decoded)
    # The server would have to wait for a message that never comes.
    silent: Any = stubs.channel.stream_unary("/crossbatch.v1.RetrievalService/Embed")
    answered = threading.Event()
    never = iter(lambda: answered.wait(20) and b"", b"")
    refusal_of(lambda: silent(never, timeout=5, metadata=bearer("cb_wrong")), "UNAUTHENTICATED")
    answered.set()
    large = retrieval_pb.EmbedRequest(images=[bytes(8_000_000)] * 4)
    call: Any = stubs.retrieval.Embed
    refusal_of(lambda: call(large, timeout=5, metadata=bearer("cb_wrong")), "UNAUTHENTICATED")
    assert guarded.encoder.decoded == before


def test_no_key_is_logged_or_told(stubs: Stubs, guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    told = []
    web = str(guarded.web[0][1]).removeprefix("Bearer ")
    with caplog.at_level(logging.DEBUG):
        for key in (web, "cb_wrongkey", f"{web}x"):
            for metadata in (bearer(key), (("x-api-key", key),)):
                request = gallery_pb.CreateGalleryRequest(name="x")
                with pytest.raises(grpc.RpcError) as failure:
                    stubs.galleries.CreateGallery(request, metadata=metadata, timeout=5)
                told.append(f"{failure.value.details()} {failure.value.trailing_metadata()}")
    seen = "\n".join([*told, *(str(vars(record)) for record in caplog.records)])
    assert "PERMISSION_DENIED" in seen
    assert web[3:] not in seen
    assert "wrongkey" not in seen
