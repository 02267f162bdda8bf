"""A gallery takes another's name, or goes, while others use it."""

import errno
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from serving import errors
from serving.gallery.directory import GalleryDirectory
from serving.gallery.folder import exchange_names
from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.lock import alone, names_change, names_stay
from serving.gallery.store.store import Replaced
from tests.serving.vectors import AXES, MANUAL, MODEL


@pytest.fixture
def directory(memory: Path) -> Iterator[GalleryDirectory]:
    with GalleryDirectory(memory, policy=MANUAL) as opened:
        yield opened


def made(directory: GalleryDirectory, *names: str) -> None:
    """Each holds one item labelled by the name it is made under, and an index."""
    for name in names:
        gallery = directory.create(name, **MODEL)
        gallery.upsert([GalleryItem("k", AXES[0], name)])
        gallery.rebuild()


def content(directory: GalleryDirectory, name: str) -> str:
    return directory.using(name, lambda gallery: gallery.search(AXES[:1], 1))[0][0].label


def test_what_cannot_be_switched(directory: GalleryDirectory) -> None:
    made(directory, "birds", "new")
    with pytest.raises(errors.InvalidArgument, match="has that name"):
        directory.switch("birds", "birds")
    (directory.path / "taken" / "folder").mkdir(parents=True)
    with pytest.raises(errors.AlreadyExists, match="no gallery"):
        directory.switch("taken", "birds")
    for use in (lambda: directory.switch("birds", "none"), lambda: directory.rollback("none")):
        with pytest.raises(errors.NotFound, match=r"'none'.*birds, new"):
            use()
    with alone(directory.path / "new", 0.0), pytest.raises(errors.Overloaded, match="rebuild or switch"):
        directory.switch("birds", "new", timeout=0.1)
    directory.close()
    (directory.path / "new" / "gallery.sqlite").write_bytes(b"x" * 5000)
    with GalleryDirectory(directory.path) as again:
        with pytest.raises(errors.BadArtifact, match="new"):
            again.switch("birds", "new")
        assert content(again, "birds") == "birds"


def test_the_generation_before_is_known_by_its_id(directory: GalleryDirectory) -> None:
    made(directory, "birds", "new")
    directory.switch("birds", "new")
    directory.drop("new")
    with pytest.raises(errors.NotFound, match="is gone"):
        directory.rollback("birds")
    made(directory, "new")
    with pytest.raises(errors.Mismatch, match=r"is not the one that was birds before.*switch birds new"):
        directory.rollback("birds")


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.EINVAL, errors.Unavailable, "file system of .*birds cannot exchange two.*keep the galleries"),
        (errno.ENOSYS, errors.Unavailable, "cannot exchange"),
        (errno.ENOENT, errors.NotFound, "(birds or new|new or birds) is gone"),
        (errno.EACCES, errors.ReadOnly, "permission denied"),
        (errno.ENOSPC, errors.Overloaded, "full"),
        (errno.EIO, errors.Unavailable, "check permissions and disk"),
    ],
)
def test_a_switch_that_the_system_refuses_is_none(
    directory: GalleryDirectory,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[Exception],
    words: str,
) -> None:
    made(directory, "birds", "new")
    refused = Mock(side_effect=OSError(number, os.strerror(number)))
    with monkeypatch.context() as patched:
        patched.setattr("serving.gallery.folder.exchange_names", refused)
        with pytest.raises(kind, match=words) as caught:
            directory.switch("birds", "new")
    assert "\n" not in str(caught.value)
    for name in ("birds", "new"):
        assert content(directory, name) == name
        with pytest.raises(errors.NotFound, match="nothing to undo"):
            directory.rollback(name)
    directory.switch("birds", "new")
    assert directory.rollback("birds") == "new"


def test_no_write_lands_in_what_lost_the_name(directory: GalleryDirectory) -> None:
    made(directory, "birds", "new")
    held = directory.get("birds")
    assert held.search(AXES[:1], 1)[0][0].label == "birds"
    with GalleryDirectory(directory.path, policy=MANUAL) as other:
        other.switch("birds", "new")
        files = sorted(path.name for path in (directory.path / "birds").glob("index-*"))
        with pytest.raises(Replaced):
            held.upsert([GalleryItem("x", AXES[1])])
        with pytest.raises(Replaced):
            held.rebuild()
        assert sorted(path.name for path in (directory.path / "birds").glob("index-*")) == files
        assert held.search(AXES[:1], 1)[0][0].label == "birds"
        assert content(directory, "birds") == "new"
        directory.using("birds", lambda gallery: gallery.upsert([GalleryItem("x", AXES[1], "both")]))
        assert [item.label for item in other.get("birds").get(["x"])] == ["both"]
        assert other.get("new").info().items == 1


def test_no_call_fails_during_switches(directory: GalleryDirectory, caplog: pytest.LogCaptureFixture) -> None:
    made(directory, "birds", "new")
    for name in ("birds", "new"):
        directory.get(name).upsert([GalleryItem(f"{name}{i}", AXES[0], name) for i in range(20)])
    done, steps = threading.Event(), itertools.count()
    written: list[tuple[str, str]] = []
    searched: list[int] = []

    def write(gallery: Gallery) -> None:
        gallery.upsert([GalleryItem(key := f"{next(steps)}", AXES[1])])
        written.append((key, gallery.meta.id))

    def search(gallery: Gallery) -> None:
        (hits,) = gallery.search(AXES[:1], 21)
        assert len({hit.label for hit in hits}) == 1
        searched.append(len(hits))

    def rebuild(gallery: Gallery) -> None:
        gallery.rebuild()
        time.sleep(0.01)

    def go_on(work: Callable[[Gallery], None]) -> None:
        while not done.is_set():
            directory.using("birds", work)

    with ThreadPoolExecutor(6) as threads, GalleryDirectory(directory.path, policy=MANUAL) as other:
        running = [threads.submit(go_on, work) for work in (write, write, search, search, rebuild)]
        try:
            for _ in range(15):
                other.switch("birds", "new")
                time.sleep(0.005)
                other.rollback("birds")
                time.sleep(0.005)
        finally:
            done.set()
    assert [each.exception() for each in running] == [None] * 5
    assert len(written) > 20
    assert len(searched) > 20
    assert {*searched} == {21}
    assert caplog.text == ""  # no index was looked for in the other gallery, or removed there
    for name in ("birds", "new"):
        gallery = directory.get(name)
        keys = [key for key, there in written if there == gallery.meta.id]
        assert gallery.info().items == 21 + len(keys)
        gallery.get(keys)


def test_names_stay_while_a_gallery_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.gallery.lock._MOVE", 0.05)
    with names_stay(tmp_path), names_stay(tmp_path), pytest.raises(errors.Overloaded), names_change(tmp_path):
        pass
    with names_change(tmp_path):
        pass
    with names_change(tmp_path), pytest.raises(errors.Overloaded), names_stay(tmp_path):
        pass
    with names_stay(tmp_path / "gone"):
        pass
    with pytest.raises(FileNotFoundError), names_change(tmp_path / "gone"):
        pass


def test_a_lock_is_that_of_the_gallery_which_has_the_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    held = threading.Event()

    def work() -> None:
        with alone(tmp_path / "a", 10.0):
            held.set()

    thread = threading.Thread(target=work)
    with ExitStack() as locks:
        locks.enter_context(alone(tmp_path / "b", 0.0))
        with alone(tmp_path / "a", 0.0):
            thread.start()
            time.sleep(0.1)  # it waits for the lock of what has the name now
            exchange_names(tmp_path / "a", tmp_path / "b")
        assert not held.wait(0.2)  # what has the name by now is locked, too
    thread.join()
    assert held.is_set()


DESERVED = (errors.NotFound, errors.AlreadyExists, errors.Mismatch, errors.Overloaded, Replaced)
STEPS, THREADS = 120, 6
ITEMS = [GalleryItem("k", AXES[0])]
WORK: list[Callable[[GalleryDirectory, str, str], Any]] = [
    lambda directory, name, _: directory.create(name, **MODEL),
    lambda directory, name, _: directory.drop(name),
    lambda directory, name, other: directory.switch(name, other, timeout=1.0),
    lambda directory, name, _: directory.rollback(name, timeout=1.0),
    lambda directory, name, _: directory.using(name, partial(Gallery.upsert, items=ITEMS)),
    lambda directory, name, _: directory.using(name, lambda gallery: gallery.search(AXES[:1], 1)),
    lambda directory, name, _: directory.using(name, Gallery.rebuild),
]


def test_whoever_comes_too_late_is_told_so_and_not_that_the_disk_fails(memory: Path) -> None:
    ends: list[str] = []  # which threads append to

    def use(seed: int) -> None:
        chance = random.Random(seed)
        # Each thread as a process of its own, whose turns the others do not see.
        with GalleryDirectory(memory, policy=MANUAL) as directory:
            for _ in range(STEPS):
                try:
                    chance.choice(WORK)(directory, *chance.sample("abc", 2))
                    ends.append("well")
                except errors.CrossbatchError as error:
                    ends.append("late" if isinstance(error, DESERVED) else str(error))

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(use, range(THREADS)))
    assert set(ends) == {"well", "late"}
    assert ends.count("well") > STEPS


LATE: list[Callable[[GalleryDirectory], None]] = [
    lambda directory: directory.switch("a", "b"),
    lambda directory: directory.switch("free", "b"),
    lambda directory: directory.drop("b"),
]


@pytest.mark.parametrize("work", LATE)
def test_a_gallery_that_goes_before_its_name_changes_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[GalleryDirectory], None]
) -> None:
    before = names_change

    @contextmanager
    def too_late(path: Path) -> Iterator[None]:
        if (path / "b").exists():
            (path / "b").rename(path / ".b.dropped-00000000")  # by another process
        with before(path):
            yield

    with GalleryDirectory(tmp_path, policy=MANUAL) as directory:
        for name in "ab":
            directory.create(name, **MODEL)
        monkeypatch.setattr("serving.gallery.folder.names_change", too_late)
        with pytest.raises(errors.NotFound):
            work(directory)
        assert directory.names() == ["a"]
