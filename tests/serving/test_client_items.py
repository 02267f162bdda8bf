"""What the Python client does with items: conditions, reading, paging, and what it dares to send again."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_status import rpc_status

from protos import gallery_service_pb2 as pb
from protos import gallery_service_pb2_grpc
from serving.client.client import Client, Item, StoredItem
from serving.errors import Conflict, InvalidArgument, NotFound, Overloaded, Unavailable
from serving.gallery.directory import GalleryDirectory
from serving.gallery.search.filter import AllOf, Equal, Range
from serving.rpc.status import to_status
from tests.serving.rpc_fakes import FakeEncoder, serving, vector_for


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as running, Client(running.address) as client:
        client.create("birds")
        yield client


class Scripted(gallery_service_pb2_grpc.GalleryServiceServicer):
    """Carries each write out, and fails as it is told instead of replying."""

    def __init__(self, failures: list[Any]) -> None:
        self.failures = failures
        self.tries = 0

    def UpsertItems(self, request: pb.UpsertItemsRequest, context: Any) -> pb.UpsertItemsResponse:  # noqa: N802
        self._fail(context)
        return pb.UpsertItemsResponse(stored=len(request.items), versions=range(1, len(request.items) + 1))

    def DeleteItems(self, request: pb.DeleteItemsRequest, context: Any) -> pb.DeleteItemsResponse:  # noqa: N802
        self._fail(context)
        return pb.DeleteItemsResponse(deleted=len(request.keys))

    def _fail(self, context: Any) -> None:
        self.tries += 1
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                context.abort_with_status(rpc_status.to_status(to_status(failure)))
            context.abort(failure, "the reply was lost")


@contextmanager
def scripted(*failures: Any) -> Iterator[tuple[Scripted, Client]]:
    script = Scripted(list(failures))
    server = grpc.server(ThreadPoolExecutor(2))
    gallery_service_pb2_grpc.add_GalleryServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Client(f"127.0.0.1:{port}") as client:
            yield script, client
    finally:
        server.stop(0).wait()


def bird(key: str, **fields: Any) -> Item:
    return Item(key, vector=vector_for(key.encode()), **fields)


def test_an_item_is_read_as_it_was_written(client: Client) -> None:
    (version,) = client.upsert("birds", [bird("a", label="A", uri="file:a", metadata={"price": 3})])
    found = client.get("birds", "a", thumbnail=True)
    assert isinstance(found, StoredItem)
    assert found.vector is not None
    np.testing.assert_allclose(found.vector, vector_for(b"a"), atol=1e-7)
    without = dataclasses.replace(found, vector=None)
    assert without == StoredItem("a", version, "A", "file:a", {"price": 3}, None, b"")
    assert client.search("birds", keys=["a"])[0][0].version == version
    with pytest.raises(NotFound, match="'b'"):
        client.get("birds", "b")


def test_read_change_write_loses_no_change(client: Client) -> None:
    client.upsert("birds", [bird("a", metadata={"stock": 3})])
    mine, theirs = client.get("birds", "a"), client.get("birds", "a")
    (version,) = client.upsert("birds", [bird("a", metadata={"stock": 2}, expected_version=mine.version)])
    with pytest.raises(Conflict, match="'a'") as failure:
        client.upsert("birds", [bird("a", metadata={"stock": 9}, expected_version=theirs.version)])
    conflict = failure.value
    assert (conflict.key, conflict.expected, conflict.found) == ("a", theirs.version, version)
    assert client.get("birds", "a").metadata == {"stock": 2}
    with pytest.raises(Conflict):
        client.upsert("birds", [bird("a", expected_version=0)])
    with pytest.raises(Conflict):
        client.delete("birds", ["a"], expected_versions=[theirs.version])
    assert client.delete("birds", iter(["a"]), expected_versions=iter([version])) == 1
    assert client.upsert("birds", [bird("a", expected_version=0)])[0] > version


def test_versions_come_in_the_order_of_the_items(client: Client) -> None:
    versions = client.upsert("birds", (bird(f"{i}") for i in range(600)))
    assert len(set(versions)) == len(versions) == 600
    found = {item.key: item.version for item in client.items("birds")}
    assert found == {f"{i}": version for i, version in enumerate(versions)}
    keys = [f"{i}" for i in range(600)] + [f"none {i}" for i in range(600)]
    assert client.delete("birds", keys, expected_versions=[*versions, *[0] * 600]) == 600
    assert client.upsert("birds", []) == []


def test_expected_versions_are_one_a_key(client: Client) -> None:
    given: list[Any] = [[1], [1, 2, 3], [], ["1", "2"], [1, -1], [1, None], "12", 5]
    for versions in given:
        with pytest.raises(InvalidArgument):
            client.delete("birds", ["a", "b"], expected_versions=versions)


def test_items_are_read_over_all_pages_as_they_are_needed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.client.items.MAX_PAGE", 7)
    client.upsert("birds", (bird(f"{kind}/{i:02}", label=kind) for kind in "ab" for i in range(25)))
    keys = [f"{kind}/{i:02}" for kind in "ab" for i in range(25)]
    assert [item.key for item in client.items("birds")] == keys
    assert [item.key for item in client.items("birds", prefix="b/")] == keys[25:]
    for item in client.items("birds", vectors=True):
        assert item.vector is not None
        np.testing.assert_allclose(item.vector, vector_for(item.key.encode()), atol=1e-7)
    reading = client.items("birds")
    assert next(reading).key == "a/00"
    client.delete("birds", keys[7:49])
    assert [item.key for item in reading] == [*keys[1:7], keys[49]]
    with pytest.raises(NotFound):
        next(client.items("nowhere"))


def test_a_search_takes_filters_of_either_form(client: Client) -> None:
    client.upsert(
        "birds",
        [bird(f"{i}", label="ab"[i % 2], metadata={"brand": "acme", "price": i}) for i in range(9)],
    )
    mapping = {"brand": "acme", "price": {"$gte": 2, "$lt": 6}}
    forms: list[Any] = [mapping, AllOf((Equal("brand", "acme"), Range("price", least=2, below=6)))]
    for demanded in forms:
        (hits,) = client.search("birds", keys=["0"], filter=demanded)
        assert {hit.key for hit in hits} == {"2", "3", "4", "5"}
    (hits,) = client.search("birds", keys=["0"], filter=mapping, group_by_label=True)
    assert {hit.label for hit in hits} == {"a", "b"}
    assert len(hits) == 2
    assert client.search("birds", keys=["0"], filter={"prize": 3}) == [[]]
    with pytest.raises(InvalidArgument, match="'price'"):
        client.search("birds", keys=["0"], filter={"price": "3"})


LOST = grpc.StatusCode.UNAVAILABLE


def test_a_write_without_condition_is_made_again_when_its_reply_was_lost() -> None:
    with scripted(LOST, LOST) as (script, client):
        assert client.upsert("birds", [bird("a")]) == [1]
        assert script.tries == 3
    with scripted(LOST) as (script, client):
        assert client.delete("birds", ["a"]) == 1
        assert script.tries == 2


def test_a_conditional_write_is_not_made_again_when_its_reply_was_lost() -> None:
    with scripted(LOST, Conflict("it found its own write")) as (script, client):
        with pytest.raises(Unavailable):
            client.upsert("birds", [bird("a", expected_version=0), bird("b")])
        assert script.tries == 1
    with scripted(LOST) as (script, client):
        with pytest.raises(Unavailable):
            client.delete("birds", ["a"], expected_versions=[1])
        assert script.tries == 1


def test_a_conditional_write_that_was_refused_for_want_of_room_is_made_again() -> None:
    with scripted(Overloaded("full")) as (script, client):
        assert client.upsert("birds", [bird("a", expected_version=0)]) == [1]
        assert script.tries == 2
