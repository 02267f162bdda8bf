"""A line for each write: what is in it, and that it is whole and never lost without a word."""

import json
import logging
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import gallery_service_pb2 as pb
from protos.gallery_service_pb2_grpc import GalleryServiceStub
from serving.errors import CrossbatchError
from serving.gallery.directory import GalleryDirectory
from serving.observability.access_log import AuditLog
from serving.observability.call import Call
from serving.rpc.keys import add_key
from tests.serving.rpc_fakes import FakeEncoder, serving
from tests.serving.stubs import item


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def code_of(channel: grpc.Channel, key: str, method: str, request: Any) -> str:
    """Make a call of GalleryService under a key; return the name of its status."""
    metadata = (("x-api-key", key), ("x-request-id", "mine"), ("secret", "value of metadata"))
    try:
        getattr(GalleryServiceStub(channel), method)(request, timeout=10, metadata=metadata)
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


def test_each_write_has_its_line_by_the_time_it_is_answered(
    tmp_path: Path, log: Path, logged: Callable[[], list[Any]]
) -> None:
    keys = tmp_path / "keys.json"
    made = {role: add_key(keys, f"key-{role}", role) for role in ("read", "write")}
    galleries = GalleryDirectory(tmp_path / "g")
    with (
        serving(FakeEncoder(), galleries, keys=keys, audit_log=log) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        shop, web, nobody = made["write"], made["read"], "cb_no"
        create = pb.CreateGalleryRequest(name="birds")
        upsert = pb.UpsertItemsRequest(gallery="birds", items=[item("a"), item("b")])
        delete = pb.DeleteItemsRequest(gallery="birds", keys=["a"])
        writes: list[tuple[str, str, Any, str, int | None]] = [
            (shop, "CreateGallery", create, "OK", None),
            (shop, "CreateGallery", create, "ALREADY_EXISTS", None),
            (shop, "UpsertItems", upsert, "OK", 2),
            (shop, "UpdateItems", pb.UpdateItemsRequest(gallery="birds", items=[{"key": "a"}]), "OK", 1),
            (shop, "DeleteItems", delete, "OK", 1),
            (shop, "UpsertItems", pb.UpsertItemsRequest(gallery="birds"), "INVALID_ARGUMENT", 0),
            (web, "DeleteItems", delete, "PERMISSION_DENIED", None),
            (nobody, "CreateGallery", create, "UNAUTHENTICATED", None),
        ]
        for i, (key, method, request, code, count) in enumerate(writes):
            assert code_of(channel, key, method, request) == code
            line = lines_of(log)[i]  # without any waiting
            assert (line["rpc"], line["code"], line["count"]) == (f"GalleryService/{method}", code, count)
        assert code_of(channel, shop, "GetItem", pb.GetItemRequest(gallery="birds", key="b")) == "OK"
    lines = lines_of(log)
    assert len(lines) == len(writes)
    assert [line["client"] for line in lines] == ["key-write"] * 6 + ["key-read", ""]
    # The message of a caller that is not let in is not read.
    assert [line["gallery"] for line in lines] == ["birds"] * 6 + [None, None]
    assert all(line["peer"].startswith("127.0.0.1:") and line["seconds"] > 0 for line in lines)
    assert {line["request_id"] for line in lines} == {"mine"}
    assert all(line["time"].endswith("Z") and line["time"][10] == "T" for line in lines)
    assert [each["code"] for each in logged()] == [line["code"] for line in lines]
    shown = log.read_text() + str(logged())
    assert not any(each in shown for each in (*made.values(), "cb_no", "value of metadata"))
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def write(audit: AuditLog, gallery: str = "birds", **more: str) -> None:
    request = pb.SwitchGalleryRequest(name=gallery, **more)
    audit.record(Call("GalleryService/SwitchGallery", writes=True, request=request), "OK", 0.1)


def test_a_name_of_any_length_and_kind_makes_one_short_line(log: Path) -> None:
    audit = AuditLog(log)
    write(audit, "x\n" * 1_000_000, other='"\u2028ä')
    (line,) = lines_of(log)
    assert line["gallery"] == "x\n" * 100
    assert line["other"] == '"\u2028ä'
    assert log.read_bytes().isascii()


def test_a_full_disk_fails_no_call_and_is_logged_once_and_a_file_renamed_away_is_made_anew(
    log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit = AuditLog(log)
    write(audit, "before")
    log.rename(log.with_suffix(".1"))
    assert [line["gallery"] for line in lines_of(log.with_suffix(".1"))] == ["before"]
    log.symlink_to("/dev/full")
    for _ in range(3):
        write(audit)
    log.unlink()
    write(audit, "after")
    assert json.loads(log.read_text())["gallery"] == "after"
    told = [each for each in caplog.records if "audit.jsonl" in each.getMessage()]
    assert [each.levelname for each in told] == ["ERROR", "WARNING"]
    assert "lacks 3 lines" in told[1].getMessage()


def test_several_that_share_a_file_tear_no_line_of_one_another(log: Path) -> None:
    def add_many(letter: str) -> None:
        audit = AuditLog(log)  # each has the file open for itself, as each worker process has
        for i in range(200):
            write(audit, letter * (1 + i))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(add_many, "abc"))
    names = [line["gallery"] for line in lines_of(log)]
    assert all(len(set(name)) == 1 for name in names)
    assert len(names) == 600


def test_a_file_that_cannot_be_written_stops_the_start_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CrossbatchError, match=r"nowhere/audit.jsonl cannot be written"):
        AuditLog(tmp_path / "nowhere" / "audit.jsonl")
