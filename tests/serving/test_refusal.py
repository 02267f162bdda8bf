"""The table from SQLite's result codes to our errors."""

import os
import resource
import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest

from serving.errors import BadArtifact, CrossbatchError, Overloaded, ReadOnly, Unavailable
from serving.gallery.store.store import Store, create_store, refusal

KINDS: dict[int | None, type[CrossbatchError]] = {
    sqlite3.SQLITE_ERROR: BadArtifact,
    sqlite3.SQLITE_PERM: ReadOnly,
    sqlite3.SQLITE_BUSY: Overloaded,
    sqlite3.SQLITE_LOCKED: Overloaded,
    sqlite3.SQLITE_READONLY: ReadOnly,
    sqlite3.SQLITE_IOERR: Unavailable,
    sqlite3.SQLITE_CORRUPT: BadArtifact,
    sqlite3.SQLITE_FULL: Overloaded,
    sqlite3.SQLITE_CANTOPEN: Unavailable,
    sqlite3.SQLITE_PROTOCOL: Overloaded,
    sqlite3.SQLITE_MISMATCH: BadArtifact,
    sqlite3.SQLITE_FORMAT: BadArtifact,
    sqlite3.SQLITE_NOTADB: BadArtifact,
    None: BadArtifact,
}


def failed(code: int | None) -> sqlite3.Error:
    error = sqlite3.OperationalError("what SQLite says")
    if code is not None:
        error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize("detail", [0, 7 << 8])
@pytest.mark.parametrize("code", KINDS)
def test_each_code_is_one_plain_sentence_about_the_file(
    tmp_path: Path, code: int | None, detail: int
) -> None:
    path = tmp_path / "gallery.sqlite"
    found = refusal(failed(None if code is None else code | detail), path)
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


def test_bug_of_ours_stays_what_it_is(tmp_path: Path) -> None:
    error = failed(sqlite3.SQLITE_CONSTRAINT_UNIQUE)
    assert refusal(error, tmp_path) is error
