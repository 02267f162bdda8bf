"""Galleries are made, dropped, switched and written by many at once: nobody is told that a disk fails."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serving.errors import AlreadyExists, CrossbatchError, Mismatch, NotFound, Overloaded
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.lock import names_change
from serving.gallery.store.store import Replaced
from tests.serving.vectors import AXES, MANUAL, MODEL

DESERVED = (NotFound, AlreadyExists, Mismatch, Overloaded, Replaced)
STEPS, THREADS = 120, 6

WORK: list[Callable[[GalleryDirectory, str, str], Any]] = [
    lambda directory, name, _: directory.create(name, **MODEL),
    lambda directory, name, _: directory.drop(name),
    lambda directory, name, other: directory.switch(name, other, timeout=1.0),
    lambda directory, name, _: directory.rollback(name, timeout=1.0),
    lambda directory, name, _: directory.using(name, upsert),
    lambda directory, name, _: directory.using(name, lambda gallery: gallery.search(AXES[:1], 1)),
    lambda directory, name, _: directory.using(name, Gallery.rebuild),
]


def upsert(gallery: Gallery) -> None:
    gallery.upsert([GalleryItem("k", AXES[0])])


def test_whoever_comes_too_late_is_told_so_and_not_that_the_disk_fails(tmp_path: Path) -> None:
    done, failures = Counter[str](), list[CrossbatchError]()

    def use(seed: int) -> None:
        chance = random.Random(seed)
        # Each thread as a process of its own, whose turns the others do not see.
        with GalleryDirectory(tmp_path, policy=MANUAL) as directory:
            for _ in range(STEPS):
                try:
                    chance.choice(WORK)(directory, *chance.sample("abc", 2))
                    done["well"] += 1
                except DESERVED:
                    done["late"] += 1
                except CrossbatchError as error:
                    failures.append(error)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(use, range(THREADS)))
    assert failures == []
    assert done["well"] > STEPS
    assert done["well"] + done["late"] == STEPS * THREADS


@pytest.mark.parametrize(
    "work",
    [
        lambda directory: directory.switch("a", "b"),
        lambda directory: directory.switch("free", "b"),
        lambda directory: directory.drop("b"),
    ],
)
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
        with pytest.raises(NotFound):
            work(directory)
        assert directory.names() == ["a"]
