"""The store alone: one transaction is one state, every refusal is one sentence."""

import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serving.errors import BadArtifact, CrossbatchError, NotFound, Overloaded, ReadOnly, Unavailable
from serving.gallery.item import CheckedItem, GalleryItem, Source
from serving.gallery.lock import names_change
from serving.gallery.search.snapshot import RowCache
from serving.gallery.store.schema import FORMAT_VERSION
from serving.gallery.store.store import Store, create_store, refusal
from serving.gallery.store.transaction import State, Writer
from tests.serving.vectors import AXES, open_files, sql

SOURCE = Source("birds", 10, 1_700_000_000_000_000_000, b"\1" * 32)


def item(key: str, axis: int = 0, label: str = "", **more: Any) -> CheckedItem:
    return CheckedItem(GalleryItem(key, AXES[axis], label, **more), "{}")


def made(folder: Path) -> Path:
    path = folder / "gallery.sqlite"
    create_store(path, model_name="m", fingerprint="f" * 64, dimension=4)
    return path


def upsert(store: Store, *items: CheckedItem) -> list[int]:
    with store.write() as writer:
        return writer.upsert(items)


def seqs(store: Store, keys: str) -> dict[str, int]:
    with store.read() as reader:
        return reader.seqs(list(keys))


def state_of(store: Store) -> State:
    with store.read() as reader:
        return reader.state()


def published(writer: Writer, seen: State, file: str, covers_removal: int | None = None) -> bool:
    covered = seen.last_removal if covers_removal is None else covers_removal
    facts = f'{{"of": "{file}"}}'
    return writer.publish(seen, index_file=file, checksum=file, count=1, facts=facts, covers_removal=covered)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(made(tmp_path), busy_timeout=0.2)) as opened:
        yield opened


def test_replaced_item_gets_a_new_seq_and_leaves_a_removal(store: Store) -> None:
    assert upsert(store, item("a"), item("b", 1)) == [1, 2]
    assert upsert(store, item("a", 2, "new")) == [3]
    with store.read() as reader:
        assert reader.seqs(["a", "b", "c"]) == {"a": 3, "b": 2}
        assert reader.removals_since(0).tolist() == [1]
        found = reader.items(["a"])["a"]
        assert found.label == "new"
        assert np.array_equal(found.vector, AXES[2])
        (block,) = reader.blocks_since(1)
        assert block.seqs.tolist() == [2, 3]
        assert np.array_equal(block.vectors, AXES[[1, 2]])
        assert (block.labels, block.metadata) == (["", "new"], ["{}", "{}"])
    with store.write() as writer:
        assert writer.delete(["a", "b"]) == 2
    assert upsert(store, item("a")) == [4]  # no number comes twice


def test_thumbnails_go_with_their_items(store: Store) -> None:
    with store.write() as writer:
        writer.upsert([item("a", thumbnail=b"one"), item("b", thumbnail=b"two"), item("c")])
        thumbnail = writer.reader.thumbnail
        assert [thumbnail(key) for key in "abcd"] == [b"one", b"two", b"", b""]
        writer.upsert([item("a"), item("b", 1)])  # of the same image, and of another
        assert [thumbnail(key) for key in "ab"] == [b"one", b""]
        writer.upsert([item("a", thumbnail=b"new")])
        assert thumbnail("a") == b"new"
        writer.delete(["a"])
    with closing(sqlite3.connect(store.path)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM thumbnails").fetchone() == (0,)


def test_write_that_fails_is_undone_whole(store: Store) -> None:
    upsert(store, item("a"))
    with pytest.raises(sqlite3.IntegrityError):
        upsert(store, item("b"), item("a", 1), item("b", 2))
    assert seqs(store, "ab") == {"a": 1}
    assert state_of(store).change == 1


def test_each_connection_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, said = sqlite3.connect, list[list[str]]()

    def traced(*given: Any, **more: Any) -> sqlite3.Connection:
        said.append([])
        connection: sqlite3.Connection = connect(*given, **more)
        connection.set_trace_callback(said[-1].append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", traced)
    with closing(Store(made(tmp_path))) as store:
        upsert(store, item("a"))
        store.copy_to(tmp_path / "copy")
    assert len(said) == 3  # to make it, to use it, and to finish the copy
    assert all("PRAGMA synchronous=FULL" in statements for statements in said)


def test_only_the_first_of_two_publications_counts(store: Store) -> None:
    with store.write() as writer:
        writer.upsert([item("a"), item("b")])
        writer.delete(["a"])
    seen = state_of(store)
    with store.write() as writer:
        assert published(writer, seen, "one")
        assert not published(writer, seen, "two")
        assert writer.reader.removals_since(0).tolist() == [1]  # for those who still have the index before
    state = state_of(store)
    assert (state.index_file, state.generation, state.covers_seq) == ("one", 1, 2)
    with store.write() as writer:
        writer.delete(["b"])
        assert writer.reader.removals_since(state.covers_removal).tolist() == [2]
        assert published(writer, writer.reader.state(), "two")
        assert writer.reader.removals_since(0).tolist() == [2]


def test_publication_keeps_the_removals_that_either_file_needs(store: Store) -> None:
    """A file that was added to holds all that its base held: the removals since then stay."""
    with store.write() as writer:
        removals = writer.reader.removals_since
        writer.upsert([item(key) for key in "abcd"])
        first = writer.reader.state()
        assert published(writer, first, "base")
        for step, key in enumerate("abc"):
            writer.delete([key])
            assert published(writer, writer.reader.state(), f"more{step}", covers_removal=first.last_removal)
            assert removals(0).tolist() == [1, 2, 3][: step + 1]
        state = writer.reader.state()
        assert (state.covers_removal, state.last_removal, state.covers_seq) == (0, 3, 4)
        assert (state.index_file, state.index_facts) == ("more2", '{"of": "more2"}')
        assert published(writer, state, "whole")  # who has "more2" still follows by what is kept
        assert removals(0).tolist() == [1, 2, 3]
        assert published(writer, writer.reader.state(), "next")
        assert removals(0).tolist() == []


def test_copy_is_one_sound_file_of_one_state_without_an_index(store: Store, tmp_path: Path) -> None:
    with store.write() as writer:
        writer.upsert([item("a"), item("b", 1, source=SOURCE, thumbnail=b"jpeg"), item("c")])
        writer.delete(["a"])
        seen = writer.reader.state()
        assert published(writer, seen, "one")
    target = tmp_path / "copy"
    with store.write() as writer:  # which the copy does not wait for, and does not hold
        writer.upsert([item("late")])
        store.copy_to(target)
    assert [path.name for path in tmp_path.glob("copy*")] == ["copy"]
    with closing(Store(target)) as copy, copy.read() as reader:
        assert reader.seqs(["a", "b", "c", "late"]) == {"b": 2, "c": 3}
        assert reader.items(["b"])["b"].source == SOURCE
        assert reader.thumbnail("b") == b"jpeg"
        state = reader.state()
        assert (state.index_file, state.covers_seq, state.last_seq) == ("", 0, seen.last_seq)
        assert reader.removals_since(0).tolist() == []
        assert copy.check() == []
        assert replace(copy.meta, id="") == replace(store.meta, id="")
        assert copy.meta.id != store.meta.id
    with pytest.raises(Unavailable, match="nowhere"):
        store.copy_to(tmp_path / "nowhere" / "copy")


def test_another_writer_is_waited_for_with_a_limit(store: Store) -> None:
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Overloaded, match="another writer"), store.write():
            pass
        assert state_of(store).change == 0  # reading goes on
    upsert(store, item("a"))


def test_closed_store_says_so(store: Store) -> None:
    with store.read() as reader:
        store.close()
        assert reader.state().change == 0  # what has begun ends well
    for use in (store.read, store.write):
        with pytest.raises(Unavailable, match="closed"), use():
            pass


def test_no_file_is_closed_while_a_name_changes(store: Store) -> None:
    """SQLite would remove the files beside it by the name that is another gallery's by then."""
    with ThreadPoolExecutor(1) as threads:
        with names_change(store.path.parent.parent):
            closing = threads.submit(store.close)
            with pytest.raises(TimeoutError):
                closing.result(0.1)
        closing.result(10)


def test_retired_store_works_and_keeps_no_file_open(tmp_path: Path) -> None:
    with closing(Store(made(tmp_path))) as store:
        upsert(store, item("a"))
        with store.read() as reader, store.write() as writer:
            store.retire()
            assert set(reader.seqs(["a"])) == {"a"}
            writer.upsert([item("b")])
        assert open_files(tmp_path) == 0
        upsert(store, item("c"))
        assert set(seqs(store, "abc")) == {"a", "b", "c"}
        assert open_files(tmp_path) == 0


# Reads as a user who may not write. It must not import anything after it has become that user.
NOBODY = """
import os, sys
from pathlib import Path
from typing import Any
from serving.errors import CrossbatchError
from serving.gallery.store.store import Store

os.setgid(65534)
os.setuid(65534)
try:
    store = Store(Path(sys.argv[1]))
    for _ in sys.stdin:
        with store.read() as reader:
            print(*sorted(reader.seqs(["a", "b", "c"])), flush=True)
    with store.write():
        pass
except CrossbatchError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without rights")
def test_reader_without_rights_sees_every_write_or_is_refused() -> None:
    """SQLite's immutable mode would serve the first state for ever: also what has been deleted."""
    with tempfile.TemporaryDirectory() as name:  # which everybody may read; pytest's own are closed to others
        os.chmod(name, 0o755)
        store = Store(made(Path(name)))
        words = [sys.executable, "-c", NOBODY, str(store.path)]
        upsert(store, item("a"), item("b"))
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            found = []
            for changed, gone in (("c", "a"), ("", "c"), ("a", "b")):
                process.stdin.write("\n")
                process.stdin.flush()
                found.append(process.stdout.readline().split())
                with store.write() as writer:
                    writer.upsert([item(key) for key in changed])
                    writer.delete([gone])
            assert found == [["a", "b"], ["b", "c"], ["b"]]
            assert process.communicate()[0].startswith("ReadOnly: ")
        store.close()
        if not store.path.with_name(f"{store.path.name}-shm").exists():
            rest = subprocess.run(words, input="\n", capture_output=True, text=True, check=True).stdout
            assert rest.startswith("ReadOnly: the gallery file")
            assert "mount its folder read-only" in rest
            assert rest.count("\n") == 1


def test_each_read_of_a_file_that_nobody_can_write_is_of_the_file_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores take every folder for one on a read-only file system; SQLite beside them writes."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    monkeypatch.setattr("serving.gallery.store.store.is_writable", lambda _: False)
    path = made(tmp_path)
    for key in "ab":
        columns = "(key, label, uri, metadata, checksum, vector)"
        sql(path, f"INSERT INTO items {columns} VALUES ('{key}', '', '', '{{}}', 0, zeroblob(16))")
    with closing(Store(path)) as store:
        assert not path.with_name(f"{path.name}-shm").exists()  # nobody has it open who may write
        assert set(seqs(store, "ab")) == {"a", "b"}
        store.copy_to(tmp_path / "copy")
        assert store.meta.id.encode() not in (tmp_path / "copy").read_bytes()
        with pytest.raises(ReadOnly, match="read-only"), store.write():
            pass
        sql(path, "DELETE FROM items WHERE key = 'a'")
        assert set(seqs(store, "ab")) == {"b"}
        with closing(sqlite3.connect(path, isolation_level=None)) as writer:  # one that stays
            writer.execute("DELETE FROM items WHERE key = 'b'")
            assert seqs(store, "ab") == {}


def test_file_that_is_no_gallery_is_refused_by_path(tmp_path: Path) -> None:
    path = tmp_path / "gallery.sqlite"
    with pytest.raises(NotFound, match="there is no gallery file"):
        Store(path)
    assert list(tmp_path.iterdir()) == []
    for content in (b"", b"not a database, " * 500):
        path.write_bytes(content)
        with pytest.raises(BadArtifact, match=str(path)):
            Store(path)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (FORMAT_VERSION + 1, f"up to version {FORMAT_VERSION}; upgrade"),
        (1, f"reads version {FORMAT_VERSION}; drop"),
    ],
)
def test_another_format_is_refused_by_name(tmp_path: Path, version: int, words: str) -> None:
    path = made(tmp_path)
    sql(path, f"UPDATE meta SET value = {version} WHERE name = 'format_version'")
    with pytest.raises(BadArtifact, match=f"version {version}.*{words}"):
        Store(path)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("index_file", "'index-1'"),
        ("index_checksum", "'0'"),
        ("index_count", "index_count + 1"),
        ("covers_seq", "covers_seq + 64"),
        ("covers_removal", "covers_removal + 1"),
        ("index_facts", """'{"of":1}'"""),
        ("published_checksum", "published_checksum + 1"),
    ],
)
def test_what_is_published_and_was_altered_is_told_as_damage(store: Store, column: str, value: str) -> None:
    with store.write() as writer:
        writer.upsert([item("a"), item("b")])
        writer.delete(["a"])
        assert published(writer, writer.reader.state(), "one")
    assert state_of(store).index_file == "one"
    sql(store.path, f"UPDATE state SET {column} = {value}")
    with pytest.raises(BadArtifact, match=r"what its state tells of the index .* restore it"):
        state_of(store)


DAMAGE = {
    "no dimension": "DELETE FROM meta WHERE name = 'dimension'",
    "dimension of another kind": "UPDATE meta SET value = 'x' WHERE name = 'dimension'",
    "meta is no text": "UPDATE meta SET value = CAST(x'ff' AS TEXT) WHERE name = 'model_name'",
    "no state": "DELETE FROM state",
    "state of another kind": "UPDATE state SET change = 'x'",
    "key is no text": "UPDATE items SET key = CAST(x'ff' AS TEXT)",
    "label is no text": "UPDATE items SET label = CAST(x'ff' AS TEXT)",
    "metadata is no JSON": "UPDATE items SET metadata = '{'",
    "metadata is too deep": "UPDATE items SET metadata = '" + "[" * 20_000 + "'",
    "metadata is a blob": "UPDATE items SET metadata = x'ff'",
    "vector of another length": "UPDATE items SET vector = x'0000803f'",
    "vector is a number": "UPDATE items SET vector = 5",
    "removal of another kind": "INSERT INTO removals (seq) VALUES ('x')",
    "no items": "DELETE FROM items",
    "vector is not there": "PRAGMA writable_schema=ON; UPDATE sqlite_schema SET sql = replace(sql, "
    "'vector BLOB NOT NULL', 'vector BLOB'); PRAGMA writable_schema=RESET; UPDATE items SET vector = NULL",
    "dimension of nothing": "UPDATE meta SET value = 0 WHERE name = 'dimension'",
    "key is a blob": "UPDATE items SET key = x'ff'",
    "metadata is no object": "UPDATE items SET metadata = '[]'",
    "vector is text": "UPDATE items SET vector = '0123456789abcdef'",
    "a schema of a newer SQLite": None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_that_sqlite_does_not_see_is_told_as_damage(tmp_path: Path, damage: str) -> None:
    path = made(tmp_path)
    with closing(Store(path)) as store:
        upsert(store, item("a"))
    if statements := DAMAGE[damage]:
        sql(path, *statements.split("; "))
    else:
        with path.open("r+b") as file:
            file.seek(44)  # the number of the schema's format; SQLite knows up to 4
            file.write((9).to_bytes(4, "big"))

    def use() -> None:
        with closing(Store(path)) as opened:
            with opened.read() as reader:
                reader.state()
                reader.removals_since(0)
                RowCache().find({1}, reader)
                reader.items(["a"])
                list(reader.blocks_since(0))
            upsert(opened, item("a"))

    with pytest.raises(BadArtifact, match=r"damaged .*restore it from a backup") as caught:
        use()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


KINDS: dict[type[CrossbatchError], str] = {
    BadArtifact: "ERROR CORRUPT MISMATCH FORMAT NOTADB",
    Overloaded: "BUSY LOCKED FULL PROTOCOL",
    ReadOnly: "PERM READONLY",
    Unavailable: "IOERR CANTOPEN",
}


def failed(name: str) -> sqlite3.Error:
    error = sqlite3.OperationalError("what SQLite says")
    error.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{name}")
    return error


def test_each_code_is_one_plain_sentence_about_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gallery.sqlite"
    assert type(refusal(sqlite3.OperationalError("no code"), path)) is BadArtifact
    for kind, names in KINDS.items():
        for error in map(failed, names.split()):
            error.sqlite_errorcode |= 7 << 8  # one of the finer codes of its kind
            found = refusal(error, path)
            assert type(found) is kind
            assert str(path) in str(found)
            assert "\n" not in str(found)
    bug = failed("CONSTRAINT_UNIQUE")
    assert refusal(bug, path) is bug


def test_descriptors_that_are_out_are_named(tmp_path: Path) -> None:
    path = tmp_path / "gallery.sqlite"
    create_store(path, model_name="m", fingerprint="f", dimension=4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = max(map(int, os.listdir("/proc/self/fd"))) + 1
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 8, hard))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(3):  # with none left, and with fewer than SQLite needs
            with pytest.raises(Unavailable, match=r"as many files open as it may.*ulimit -n"):
                Store(path)
            os.close(held.pop())
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    Store(path).close()
