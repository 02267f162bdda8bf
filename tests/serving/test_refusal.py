"""The table from SQLite's result codes to our errors."""

import os
import resource
import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest

from serving.errors import BadArtifact, CrossbatchError, Overloaded, ReadOnly, Unavailable
from serving.gallery.store.refusal import Code, code_of, refusal
from serving.gallery.store.store import Store, create_store

KINDS: dict[Code | None, type[CrossbatchError]] = {
    Code.ERROR: BadArtifact,
    Code.PERM: ReadOnly,
    Code.BUSY: Overloaded,
    Code.LOCKED: Overloaded,
    Code.READONLY: ReadOnly,
    Code.IOERR: Unavailable,
    Code.CORRUPT: BadArtifact,
    Code.FULL: Overloaded,
    Code.CANTOPEN: Unavailable,
    Code.PROTOCOL: Overloaded,
    Code.MISMATCH: BadArtifact,
    Code.FORMAT: BadArtifact,
    Code.NOTADB: BadArtifact,
    None: BadArtifact,
}


def failed(code: int | None) -> sqlite3.Error:
    error = sqlite3.OperationalError("what SQLite says")
    if code is not None:
        error.sqlite_errorcode = code
    return error


def test_codes_are_those_of_sqlite() -> None:
    assert {code.name: getattr(sqlite3, f"SQLITE_{code.name}") for code in Code} == dict(Code.__members__)


@pytest.mark.parametrize("detail", [0, 7 << 8])
@pytest.mark.parametrize("code", [*Code, None])
def test_each_code_is_one_plain_sentence_about_the_file(
    tmp_path: Path, code: Code | None, detail: int
) -> None:
    path = tmp_path / "gallery.sqlite"
    found = refusal(failed(None if code is None else code | detail), path, None)
    assert type(found) is KINDS[code]
    assert str(path) in str(found)
    assert "\n" not in str(found)


def test_descriptors_that_are_out_are_named(tmp_path: Path) -> None:
    path = tmp_path / "gallery.sqlite"
    create_store(path, model_name="m", fingerprint="f", dimension=4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = max(map(int, os.listdir("/proc/self/fd"))) + 1
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 1, hard))
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


def test_writer_that_waited_in_vain_says_so_in_its_own_words(tmp_path: Path) -> None:
    busy = Overloaded("another writer")
    assert refusal(failed(sqlite3.SQLITE_BUSY_SNAPSHOT), tmp_path, lambda: busy) is busy


def test_bug_of_ours_stays_what_it_is(tmp_path: Path) -> None:
    error = failed(sqlite3.SQLITE_CONSTRAINT_UNIQUE)
    assert code_of(error) == sqlite3.SQLITE_CONSTRAINT
    assert refusal(error, tmp_path, None) is error
