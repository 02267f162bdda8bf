"""A line for each write: what is in it, and that it is whole and never lost without a word."""

import asyncio
import errno
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import gallery_service_pb2 as pb
from serving.errors import CrossbatchError
from serving.gallery.directory import GalleryDirectory
from serving.observability import audit
from serving.observability.audit import Audit
from serving.observability.lines import Lines
from serving.rpc.keys import add_key
from serving.rpc.register import Register
from tests.serving.boundary_fakes import Counted
from tests.serving.processes import launched
from tests.serving.rpc_fakes import FakeEncoder, serving, until
from tests.serving.stubs import Stubs, connected, item
from tests.tiny_model import write_tiny_model


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Caller(Stubs):
    """Makes writes under a key."""

    def __init__(self, channel: grpc.Channel, key: str) -> None:
        super().__init__(channel)
        self.metadata = (("x-api-key", key), ("x-request-id", "mine"), ("secret", "value of metadata"))

    def write(self, method: str, request: Any) -> str:
        """Make a call of GalleryService; return the name of its status."""
        try:
            getattr(self.galleries, method)(request, timeout=10, metadata=self.metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[Any]]]:
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)  # which does not silence the audit with the other logs
    yield lambda: [vars(each) for each in caplog.records if each.name == "crossbatch.audit"]
    root.setLevel(before)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def made(tmp_path: Path) -> dict[str, str]:
    return {role: add_key(tmp_path / "keys.json", f"key-{role}", role) for role in ("read", "write")}


@pytest.fixture
def address(tmp_path: Path, log: Path, made: dict[str, str]) -> Iterator[str]:
    settings = {"keys": tmp_path / "keys.json", "audit_log": log}
    with serving(FakeEncoder(), GalleryDirectory(tmp_path / "g"), **settings) as server:
        yield server.address


def test_each_write_has_its_line_by_the_time_it_is_answered(
    address: str, log: Path, made: dict[str, str], logged: Callable[[], list[Any]]
) -> None:
    with grpc.insecure_channel(address) as channel:
        shop, web = Caller(channel, made["write"]), Caller(channel, made["read"])
        birds, two = "birds", [item("a"), item("b")]
        create, upsert, delete = pb.CreateGalleryRequest, pb.UpsertItemsRequest, pb.DeleteItemsRequest
        nobody = Caller(channel, "cb_no")
        writes: list[tuple[Caller, str, Any, str, int | None]] = [
            (shop, "CreateGallery", create(name=birds), "OK", None),
            (shop, "CreateGallery", create(name=birds), "ALREADY_EXISTS", None),
            (shop, "UpsertItems", upsert(gallery=birds, items=two), "OK", 2),
            (shop, "DeleteItems", delete(gallery=birds, keys=["a"]), "OK", 1),
            (shop, "UpsertItems", upsert(gallery=birds), "INVALID_ARGUMENT", 0),
            (web, "DeleteItems", delete(gallery=birds, keys=["b"]), "PERMISSION_DENIED", None),
            (nobody, "CreateGallery", create(name=birds), "UNAUTHENTICATED", None),
        ]
        for i, (caller, method, request, code, count) in enumerate(writes):
            assert caller.write(method, request) == code
            line = lines_of(log)[i]  # without any waiting
            assert (line["rpc"], line["code"], line["count"]) == (f"GalleryService/{method}", code, count)
        shop.galleries.GetItem(pb.GetItemRequest(gallery="birds", key="b"), metadata=shop.metadata)
        shop.embed(b"x", metadata=shop.metadata)
    lines = lines_of(log)
    assert len(lines) == len(writes)
    assert [line["client"] for line in lines] == ["key-write"] * 5 + ["key-read", ""]
    # The message of a caller that is not let in is not read.
    assert [line["gallery"] for line in lines] == ["birds"] * 5 + [None, None]
    assert all(line["peer"].startswith("127.0.0.1:") and line["seconds"] > 0 for line in lines)
    assert {line["request_id"] for line in lines} == {"mine"}
    assert all(line["time"].endswith("Z") and line["time"][10] == "T" for line in lines)
    assert [each["code"] for each in logged()] == [line["code"] for line in lines]
    shown = log.read_text() + str(logged())
    assert not any(each in shown for each in (*made.values(), "cb_no", "value of metadata"))
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_without_a_file_the_line_is_in_the_log(tmp_path: Path, logged: Callable[[], list[Any]]) -> None:
    with (
        serving(FakeEncoder(), GalleryDirectory(tmp_path)) as server,
        connected(server.address) as stubs,
    ):
        stubs.create("birds")
    (line,) = logged()
    assert (line["client"], line["gallery"], line["code"]) == ("", "birds", "OK")


def test_the_line_is_in_the_log_whatever_its_level(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny.onnx")
    with (
        launched(tmp_path / "tiny.onnx", tmp_path / "g", "--log-level", "ERROR") as started,
        connected(started.address) as stubs,
    ):
        stubs.create("birds")
        until(started.records)
    assert [each["logger"] for each in started.records()] == ["crossbatch.audit"]


@pytest.mark.parametrize(
    ("peer", "told"),
    [
        ("ipv4:127.0.0.1:50412", "127.0.0.1:50412"),
        ("ipv6:%5B::1%5D:50412", "[::1]:50412"),
        ("ipv6:%5Bfe80::7%25eth0%5D:50412", "[fe80::7%eth0]:50412"),
        ("unix:/run/shop%5B.sock", "unix:/run/shop%5B.sock"),
        ("", ""),
    ],
)
def test_an_address_is_written_as_people_write_it(log: Path, peer: str, told: str) -> None:
    kept = Audit(log)
    kept.record("GalleryService/DeleteGallery", None, "OK", peer=peer)
    kept.close()
    assert lines_of(log)[0]["peer"] == told


def test_a_name_of_any_length_and_kind_makes_one_short_line(log: Path) -> None:
    kept = Audit(log)
    request = pb.SwitchGalleryRequest(name="x\n" * 1_000_000, other='"\u2028ä')
    written = kept.record("GalleryService/SwitchGallery", request, "NOT_FOUND", peer="p")
    assert written is not None
    written.result(5)
    kept.close()
    (line,) = lines_of(log)
    assert line["gallery"] == "x\n" * 100
    assert line["other"] == '"\u2028ä'
    assert log.read_bytes().isascii()


def test_a_disk_that_hangs_delays_a_write_by_a_second_at_most(
    address: str, made: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Audit, "LONGEST_WAIT", 0.2)
    freed = threading.Event()
    monkeypatch.setattr(Lines, "add", lambda self, line: freed.wait(20))
    try:
        with grpc.insecure_channel(address) as channel:
            shop = Caller(channel, made["write"])
            began = time.monotonic()
            assert shop.write("CreateGallery", pb.CreateGalleryRequest(name="a")) == "OK"
            assert time.monotonic() - began > 0.2
            with ThreadPoolExecutor(1) as pool:
                late = pool.submit(shop.write, "CreateGallery", pb.CreateGalleryRequest(name="b"))
                began = time.monotonic()
                shop.embed(b"x", metadata=shop.metadata)  # nobody else waits
                assert time.monotonic() - began < 0.15
                assert late.result(10) == "OK"
    finally:
        freed.set()


def test_lines_that_wait_for_a_disk_are_bounded(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit, "_MOST_WAITING", 3)
    freed = threading.Event()
    monkeypatch.setattr(Lines, "add", lambda self, line: freed.wait(20))
    kept = Audit(log)
    request = pb.CreateGalleryRequest(name="a")
    waiting = [kept.record("GalleryService/CreateGallery", request, "OK", peer="p") for _ in range(4)]
    assert [each is None for each in waiting] == [False, False, False, True]
    assert "3 lines wait" in caplog.text
    freed.set()
    kept.close()


def test_a_file_that_stalls_keeps_nobody_from_stopping_and_the_log_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Audit, "LONGEST_WAIT", 0.2)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # which never reads
    kept = Audit(path)
    request = pb.CreateGalleryRequest(name="x" * 200)
    for _ in range(500):  # a pipe holds 64 KiB
        last = kept.record("GalleryService/CreateGallery", request, "OK", peer="p")
    assert last is not None
    register = Register(kept, Counted())
    asyncio.run(register.until_noted(last))
    asyncio.run(register.until_noted(last))
    began = time.monotonic()
    kept.close()
    assert time.monotonic() - began < 2
    told = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert len(told) == 2
    assert "took more than 0.2 s" in told[0]
    found = re.search(r"it lacks the last (\d+)", told[1])
    assert found is not None
    taken = os.read(reader, 1 << 16).count(b"\n")
    os.close(reader)
    assert taken == 500 - int(found[1])
    assert 1 < int(found[1]) < 500


def test_a_full_disk_fails_no_call_and_is_logged_once(
    address: str,
    log: Path,
    made: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, room = os.write, [5]

    def write(descriptor: int, data: bytes) -> int:
        """Of the first line a part has room, then nothing."""
        if not data.lstrip().startswith(b'{"time"') or room[0] < 0:
            return real(descriptor, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written, room[0] = real(descriptor, data[: room[0]]), 0
        return written

    monkeypatch.setattr(os, "write", write)
    with grpc.insecure_channel(address) as channel:
        shop = Caller(channel, made["write"])
        for name in ("a", "b", "c"):
            assert shop.write("CreateGallery", pb.CreateGalleryRequest(name=name)) == "OK"
        room[0] = -1
        assert shop.write("CreateGallery", pb.CreateGalleryRequest(name="d")) == "OK"
    torn, whole = log.read_text().splitlines()
    assert torn == '{"tim'
    assert json.loads(whole)["gallery"] == "d"
    told = [each for each in caplog.records if each.name == "serving.observability.lines"]
    assert [each.levelname for each in told] == ["ERROR", "WARNING"]
    assert "lacks 3 lines" in told[1].getMessage()


def test_a_file_that_was_renamed_away_is_made_anew(log: Path) -> None:
    file = Lines(log)
    file.add("1")
    log.rename(log.with_suffix(".1"))
    file.add("2")
    log.unlink()
    file.add("3")
    file.close()
    assert log.with_suffix(".1").read_text() == "1\n"
    assert log.read_text() == "3\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_several_that_share_a_file_tear_no_line_of_one_another(log: Path) -> None:
    def add_many(letter: str) -> None:
        file = Lines(log)  # each has the file open for itself, as each worker process has
        for i in range(500):
            file.add(letter * (50 + i))
        file.close()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(add_many, "abc"))
    lines = log.read_text().splitlines()
    assert all(len(set(line)) == 1 for line in lines)
    assert sorted(map(len, lines)) == sorted([50 + i for i in range(500)] * 3)


def test_a_file_that_cannot_be_written_stops_the_start_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CrossbatchError, match=r"nowhere/audit.jsonl cannot be written"):
        Audit(tmp_path / "nowhere" / "audit.jsonl")


def test_a_pipe_that_nobody_reads_stops_the_start_with_one_sentence(log: Path) -> None:
    os.mkfifo(log)
    with pytest.raises(CrossbatchError, match=r"a pipe that nobody reads.*; start the reader"):
        Lines(log)


def test_a_pipe_that_is_read_gets_each_line_whole_however_slow_its_reader(log: Path) -> None:
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    lines = Lines(log)
    wanted = [f"{i:0>4000}" for i in range(50)]  # more than a pipe holds

    def add() -> None:
        for each in wanted:
            lines.add(each)

    adding = threading.Thread(target=add)
    adding.start()
    adding.join(0.2)
    os.set_blocking(reader, True)
    with open(reader) as file:
        assert [file.readline().strip() for _ in wanted] == wanted
    adding.join()
    lines.close()
