"""Galleries on Milvus where things go wrong, or are more than Milvus returns at once."""

import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pymilvus
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymilvus.exceptions import ConnectError, MilvusException, ParamError

from serving import errors
from serving.errors import BadArtifact, BadSetting, CrossbatchError, InvalidArgument, NotFound, Unsupported
from serving.gallery.directory import check_name
from serving.gallery.item import GalleryItem, Source
from serving.gallery.milvus import gallery, reader
from serving.gallery.milvus.differences import DIFFERENCES
from serving.gallery.milvus.directory import MilvusDirectory
from serving.gallery.milvus.meta import FORMAT, alias_of, name_of, with_previous
from serving.gallery.milvus.rows import LOTS
from serving.gallery.milvus.server import Server
from serving.gallery.place import galleries_at
from serving.gallery.search.filter import LABEL, Exists, Not, Range
from tests.serving.milvus_server import TOKEN, MilvusServer, milvus_lite
from tests.serving.vectors import units

MADE_FOR: dict[str, Any] = {"model_name": "m", "fingerprint": "f" * 64, "dimension": 8}
VECTORS = units(40, 8)
DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with milvus_lite(tmp_path_factory.mktemp("milvus") / "lite") as address:
        yield address


@pytest.fixture
def galleries(address: str) -> Iterator[MilvusDirectory]:
    with MilvusDirectory(address) as opened:
        for name in opened.names():
            opened.drop(name)
        yield opened


@pytest.fixture
def server(address: str) -> Iterator[Server]:
    """The same server without the galleries around it."""
    opened = Server(address, timeout=10.0)
    yield opened
    opened.close()


@given(st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,63}", fullmatch=True).filter(lambda name: ".." not in name))
def test_a_name_stands_as_an_alias_and_no_two_as_one(name: str) -> None:
    alias = alias_of(check_name(name))
    assert alias.replace("_", "").isalnum()
    assert name_of(alias) == name
    assert name_of(alias.removeprefix("crossbatch_gallery")) == ""
    assert name_of(f"{alias}_") == ""
    assert name_of(f"{alias}-") == ""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("milvus://root:secret@host:19530", "has a password in it"),
        ("milvus://token@host", "CROSSBATCH_MILVUS_TOKEN"),
        ("milvus://", "is no place of galleries"),
        ("milvus:///folder", "is no place of galleries"),
        ("milvus://host:port", "give a folder, or a Milvus as milvus://HOST:19530"),
        ("milvus://host:99999", "is no place of galleries"),
        ("milvus://host?secure=1", "is no place of galleries"),
    ],
)
def test_what_is_no_address_is_refused_without_its_password(given: str, told: str) -> None:
    with pytest.raises(BadSetting, match=told) as failure:
        galleries_at(given)
    assert "secret" not in str(failure.value)


def test_an_address_is_written_with_its_port_and_leads_to_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Mock()
    monkeypatch.setattr(pymilvus, "MilvusClient", client)
    assert galleries_at("milvuss://host/shop").path == "milvuss://host:19530/shop"
    assert client.call_args.args == ("https://host:19530/shop",)
    assert galleries_at("milvus://10.0.0.1:5").path == "milvus://10.0.0.1:5"
    assert client.call_args.args == ("http://10.0.0.1:5",)


def test_without_pymilvus_it_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(BadSetting, match=r"pip install 'crossbatch\[milvus\]'"):
        galleries_at("milvus://host")


class Status(grpc.RpcError):
    """What gRPC raises."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__()
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "some detail"


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (Status(grpc.StatusCode.UNAUTHENTICATED), errors.Unauthenticated),
        (Status(grpc.StatusCode.PERMISSION_DENIED), errors.PermissionDenied),
        (Status(grpc.StatusCode.DEADLINE_EXCEEDED), errors.DeadlineExceeded),
        (Status(grpc.StatusCode.RESOURCE_EXHAUSTED), errors.Overloaded),
        (Status(grpc.StatusCode.UNAVAILABLE), errors.Unavailable),
        (Status(grpc.StatusCode.INTERNAL), errors.Unavailable),
        (MilvusException(grpc.StatusCode.UNAVAILABLE, "Retry timeout"), errors.Unavailable),
        (caused(ConnectError(2, "no"), Status(grpc.StatusCode.UNAUTHENTICATED)), errors.Unauthenticated),
        (MilvusException(100, "no collection"), errors.NotFound),
        (MilvusException(101, "not loaded"), errors.Unavailable),
        (MilvusException(1602, "alias exists"), errors.AlreadyExists),
        (MilvusException(1401, "not permitted"), errors.PermissionDenied),
        (MilvusException(8, "rate"), errors.Overloaded),
        (MilvusException(65535, "something else"), errors.Unavailable),
        (ParamError(message="a parameter"), errors.Unavailable),
        (ValueError("what Python raises"), errors.Unavailable),
        (TypeError(), errors.Unavailable),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, Exception) else it.__name__,
)
def test_whatever_pymilvus_raises_is_an_error_of_ours(
    raised: Exception, kind: type[CrossbatchError], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Mock()
    monkeypatch.setattr(pymilvus, "MilvusClient", Mock(return_value=client))
    opened = Server("milvus://host", timeout=0.2)
    for name in (
        "query", "search", "upsert", "delete", "describe_collection", "create_collection", "list_aliases",
        "alter_alias", "create_alias", "drop_alias", "drop_collection", "alter_collection_properties",
        "load_collection", "close",
    ):  # fmt: skip
        getattr(client, name).side_effect = raised
    calls: dict[str, tuple[Any, ...]] = {
        "rows": ("c", "", ["key"]), "first": ("c", "", ["key"], 1), "nearest": ("c", VECTORS, 1, "", []),
        "put": ("c", []), "remove": ("c", ""), "describe": ("c",), "create": ("c", 8, {}), "aliases": (),
        "repoint": ("a", "c"), "point": ("a", "c"), "unpoint": ("a",), "drop": ("c",), "note": ("c", {}),
        "count": ("c", ""), "close": (),
    }  # fmt: skip
    for name, arguments in calls.items():
        with pytest.raises(kind, match="the Milvus server at milvus://host:19530 ") as failure:
            getattr(opened, name)(*arguments)
        assert failure.value.__cause__ is not None
        assert "\n" not in str(failure.value)


def test_a_server_that_is_not_there_or_does_not_answer_is_told_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"milvus://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(errors.Unavailable, match="cannot be reached"):
            MilvusDirectory(address, timeout=1.0)
        silent.listen()
        with pytest.raises((errors.Unavailable, errors.DeadlineExceeded), match="the Milvus server at"):
            MilvusDirectory(address, timeout=1.0)
        assert time.monotonic() - began < 8


def test_what_fails_for_a_moment_is_done_again_and_an_unloaded_collection_loaded(
    server: Server, galleries: MilvusDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = galleries.create("g", **MADE_FOR)
    raised: list[Any] = [MilvusException(101, "not loaded"), MilvusException(503, "no channel"), 7]
    method, load = Mock(side_effect=raised), Mock()
    monkeypatch.setattr(pymilvus.MilvusClient, "load_collection", load)
    monkeypatch.setattr(pymilvus.MilvusClient, "query", method)
    with pytest.raises(TypeError, match="not iterable"):  # the answer 7 came through
        server.rows(made.collection, "", ["key"])
    first, _, third = (call.kwargs["timeout"] for call in method.call_args_list)
    assert third < first - 0.1  # the pauses are of the time that all tries have together
    assert load.call_args.args == (made.collection,)


@pytest.mark.timeout(func_only=True)
def test_credentials_are_of_the_environment(milvus: MilvusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with galleries_at(milvus.address) as opened:
        assert isinstance(opened.names(), list)
    monkeypatch.setenv("CROSSBATCH_MILVUS_TOKEN", "root:secret")
    with pytest.raises(
        errors.Unauthenticated, match="does not accept what is in CROSSBATCH_MILVUS_TOKEN"
    ) as failure:
        galleries_at(milvus.address)
    assert "secret" not in str(failure.value)
    monkeypatch.delenv("CROSSBATCH_MILVUS_TOKEN")
    with pytest.raises(errors.Unauthenticated, match="set it to USER:PASSWORD"):
        galleries_at(milvus.address)


@pytest.mark.parametrize(
    ("properties", "told"),
    [
        ({}, "was not made by crossbatch; give the gallery another name"),
        ({"crossbatch.format": "1.0"}, "was not made by crossbatch"),
        ({"crossbatch.format": f"{FORMAT + 1}"}, f"is of format {FORMAT + 1}, and this crossbatch reads"),
        ({"crossbatch.format": f"{FORMAT}"}, "were altered \\(KeyError"),
        (
            {f"crossbatch.{name}": f"{value}" for name, value in {
                "format": FORMAT, "id": "1", "model_name": "m", "fingerprint": "f", "dimension": 9,
                "thumbnail_side": 0, "created": "",
            }.items()},
            "holds vectors of dimension 8, and the gallery other is for 9",
        ),
    ],
)  # fmt: skip
def test_a_collection_that_is_not_ours_is_named_and_left_alone(
    galleries: MilvusDirectory, server: Server, properties: dict[str, str], told: str
) -> None:
    server.create("somebodys", 8, properties)
    server.point(alias_of("other"), "somebodys")
    try:
        for call in (galleries.get, galleries.drop):
            with pytest.raises(BadArtifact, match=f"somebodys.*{told}"):
                call("other")
        galleries.create("ours", **MADE_FOR)
        with pytest.raises(BadArtifact, match="somebodys"):
            galleries.switch("ours", "other")
        assert galleries.names() == ["other", "ours"]
    finally:
        server.unpoint(alias_of("other"))
        server.drop("somebodys")


def test_a_switch_that_broke_off_is_finished_or_undone(galleries: MilvusDirectory, server: Server) -> None:
    first, second = (galleries.create(name, **MADE_FOR).collection for name in ("now", "next"))

    def broken_off() -> None:
        server.note(second, with_previous("next", first))
        server.repoint(alias_of("now"), second)

    def lying() -> tuple[str, str]:
        return galleries.get("now").collection, galleries.get("next").collection

    broken_off()
    galleries.switch("now", "next")
    assert lying() == (second, first)
    server.repoint(alias_of("next"), second)  # half of a rollback
    assert galleries.rollback("now") == "next"
    assert lying() == (first, second)
    broken_off()
    assert galleries.rollback("now") == "next"
    assert lying() == (first, second)
    broken_off()
    galleries.drop("next")  # its collection is served under the other name
    assert galleries.names() == ["now"]
    assert galleries.get("now").count() == 0
    with pytest.raises(NotFound, match="was called next, and is gone"):
        galleries.rollback("now")
    server.point(alias_of("now2"), second)
    with pytest.raises(InvalidArgument, match="are of the same gallery"):
        galleries.switch("now", "now2")
    server.drop(first)


def test_work_is_begun_anew_where_its_collection_is_gone(galleries: MilvusDirectory, server: Server) -> None:
    old = galleries.create("g", **MADE_FOR)
    seen = []

    def work(made: gallery.MilvusGallery) -> int:
        seen.append(made.collection)
        if len(seen) == 1:  # another process replaces it in this moment
            galleries.drop("g")
            galleries.create("g", **MADE_FOR)
        return made.count()

    assert galleries.using("g", work) == 0
    assert seen[0] == old.collection != seen[1]
    galleries.drop("g")
    with pytest.raises(NotFound, match="there is no gallery 'g' at milvus://"):
        galleries.using("g", work)
    galleries.close()
    with pytest.raises(errors.Unavailable, match="have been closed"):
        galleries.get("g")


def test_a_gallery_that_cannot_be_named_leaves_nothing(
    galleries: MilvusDirectory, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = Mock(wraps=server.drop)
    monkeypatch.setattr(Server, "drop", dropped)
    monkeypatch.setattr(Server, "point", Mock(side_effect=errors.Overloaded("full")))
    with pytest.raises(errors.Overloaded, match="full"):
        galleries.create("g", **MADE_FOR)
    assert dropped.call_count == 1
    assert galleries.names() == []


def test_what_milvus_cannot_do_is_told(galleries: MilvusDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    made = galleries.create("g", **MADE_FOR, index="auto")
    for options in ({"thumbnail_side": 64}, {"index": "exact"}, {"recall": 0.9}):
        with pytest.raises(Unsupported):
            galleries.create("other", **MADE_FOR, **options)
    made.rebuild(whole=False)
    calls: list[Callable[[], Any]] = [made.rebuild, made.reading, lambda: made.rebuild("exact", whole=False)]
    for call in calls:
        with pytest.raises(Unsupported, match="the gallery g is on Milvus"):
            call()
    monkeypatch.setattr(gallery, "MOST_COUNTED", 1)
    made.upsert([GalleryItem(f"{n}", VECTORS[n]) for n in range(2)])
    with pytest.raises(Unsupported, match="has 2 items"):
        made.fields()
    with pytest.raises(InvalidArgument, match="the item 'x' has a thumbnail"):
        made.upsert([GalleryItem("x", VECTORS[0], thumbnail=b"\xff\xd8\xff")])
    with pytest.raises(InvalidArgument, match="'x' cannot be stored: its fields have 5002 different values"):
        made.upsert([GalleryItem("x", VECTORS[0], metadata={"l": [*range(5000)]})])
    for whole in (1 << 64, -(1 << 63) - 1, 10**29):
        with pytest.raises(InvalidArgument, match=f"has {whole}, which Milvus would round; make it text"):
            made.upsert([GalleryItem("x", VECTORS[0], metadata={"deep": {"n": [whole]}})])
    exact = {"n": [(1 << 64) - 1, -(1 << 63), 1e30]}
    made.upsert([GalleryItem("y", VECTORS[0], metadata=exact)])
    assert made.find(["y"])["y"].metadata == exact
    source = Source("o", 1, 1, b"", given="x" * 70_000)
    with pytest.raises(InvalidArgument, match="what is known of its file comes to 70"):
        made.upsert([GalleryItem("x", VECTORS[0], source=source)])
    assert made.find(["x"]) == {}


def test_more_than_milvus_returns_at_once_is_read_in_parts(
    galleries: MilvusDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = galleries.create("g", **MADE_FOR)
    items = [
        GalleryItem(f"{n:02}", vector, "ab"[n == 39], metadata={"n": n}) for n, vector in enumerate(VECTORS)
    ]
    put = Mock(side_effect=Server.put, autospec=True)
    monkeypatch.setattr(Server, "put", lambda *given: put(*given))
    monkeypatch.setattr("serving.gallery.milvus.rows._PART_BYTES", 1)
    lots = iter(range(0, LOTS, LOTS // len(items)))
    monkeypatch.setattr("secrets.randbelow", lambda _: next(lots))  # as they would lie among many items
    versions = made.upsert(items[::-1])[::-1]  # Milvus' own order is that of the keys
    assert put.call_count == 40
    for module, name, value in (
        (reader, "WINDOW", 8), (gallery, "WINDOW", 8), (reader, "PAGE", 3), (gallery, "PAGE", 3),
        (reader, "_SPARE", 0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    assert [item.key for item in made.matching(Range("n", least=3))] == [item.key for item in items[:2:-1]]
    rest = made.matching(Not(Exists("x")), after=versions[4])
    assert [item.key for item in rest] == ["03", "02", "01", "00"]
    assert [item.key for item in made.by_key(after="30")] == [f"{n}" for n in range(31, 40)]
    assert len(made.keys_of("o")) == 0
    drawn = [item.key for item in made.sample(2, seed=1)]
    assert len({*drawn}) == 2
    assert drawn == [item.key for item in made.sample(2, seed=1)]
    assert len({item.key for seed in range(1, 40) for item in made.sample(2, seed=seed)}) > 25
    assert made.duplicates_page(0.99, limit=5).compared == 5
    monkeypatch.setattr(reader, "WINDOW", 40)
    near = sorted(items, key=lambda item: -float(item.vector @ VECTORS[0]))
    (hits,) = made.search([VECTORS[0]], 2, group_by_label=True)
    assert [hit.key for hit in hits] == [near[0].key, "39"]
    (hits,) = made.search([VECTORS[0]], 10, exclude=["00"])
    assert [hit.key for hit in hits] == [item.key for item in near[1:11]]


@pytest.mark.timeout(func_only=True)
def test_what_lies_in_several_segments_is_read_whole(
    milvus: MilvusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with galleries_at(milvus.address) as galleries:
        made = galleries.create("segments", **MADE_FOR)
        assert isinstance(made, gallery.MilvusGallery)
        client = pymilvus.MilvusClient(milvus.address.replace("milvus", "http"), token=TOKEN)
        items = [GalleryItem(f"{n:02}", VECTORS[n], source=Source("o", 1, 1, b"")) for n in range(25)]
        made.upsert(items[:13])
        made.rebuild(whole=False)  # the segment is closed
        assert client.get_collection_stats(made.collection)["row_count"] == 13
        client.close()
        made.upsert(items[13:])  # these lie in another
        made.upsert(items[8:12])
        keys = [item.key for item in items]
        for page in (1, 4, 7, 100):
            monkeypatch.setattr(gallery, "PAGE", page)
            monkeypatch.setattr(reader, "PAGE", page)
            assert [item.key for item in made.by_key()] == keys
            assert made.find(["0", *keys[::-1], "30"]).keys() == {*keys}
        assert made.keys_of("o") == keys
        assert made.count() == 25
        assert {item.key for item in made.matching(Exists(LABEL))} == set()
        monkeypatch.setattr(reader, "WINDOW", 8)  # rows come by key, and are wanted by version
        assert [item.key for item in made.matching(Not(Exists(LABEL)))] == [
            *keys[:8],
            *keys[12:],
            *keys[8:12],
        ]
        monkeypatch.undo()
        assert {hit.key for hit in made.search(VECTORS[:1], 25)[0]} == {*keys}
        galleries.drop("segments")


def test_versions_grow_though_a_clock_is_behind(
    galleries: MilvusDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = galleries.create("g", **MADE_FOR)
    (first,) = made.upsert([GalleryItem("a", VECTORS[0])])
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    monkeypatch.setattr(gallery, "_last_version", 0)  # as in another process
    (second,) = made.upsert([GalleryItem("a", VECTORS[1])])
    assert second == first + 1
    assert made.upsert([GalleryItem("b", VECTORS[1])]) == [second + 1]


def test_the_docs_print_every_difference() -> None:
    table = "\n".join(f"| {name} | {told} |" for name, told in DIFFERENCES.items())
    assert table in (DOCS / "milvus.md").read_text()
