"""A gallery goes into one file and comes back from it, whole, or nothing is left of the attempt."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from serving.errors import AlreadyExists, BadArtifact, InvalidArgument, NotFound, Overloaded, ReadOnly
from serving.gallery import disk
from serving.gallery.archive import restore, snapshot
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery
from serving.gallery.verify import verify
from tests.serving.test_verify import COUNT, JPEG, items, made
from tests.serving.vectors import MANUAL, aged, flip, sql

no_link = Mock(side_effect=PermissionError(1, "Operation not permitted"))


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    with closing(made(tmp_path / "galleries" / "birds")) as gallery:
        gallery.upsert(items())
        gallery.rebuild()
        gallery.delete(["k1"])
        yield gallery


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def told(gallery: Gallery) -> list[str]:
    found = gallery.get([f"k{i}" for i in range(COUNT) if i != 1], thumbnails=True)
    return [f"{each} {each.source} {each.thumbnail!r} {each.vector.tolist()}" for each in found]


def test_there_and_back(gallery: Gallery, tmp_path: Path) -> None:
    file = tmp_path / "birds.snapshot"
    assert snapshot(gallery.path, file) == COUNT - 1
    assert names(tmp_path) == ["birds.snapshot", "galleries"]
    path = tmp_path / "galleries" / "again"
    stages: list[str] = []
    assert restore(file, path, advance=lambda stage, *_: stages.append(stage)) == COUNT - 1
    assert "verify" in stages
    assert names(path.parent) == ["again", "birds"]
    assert names(tmp_path) == ["birds.snapshot", "galleries"]
    found = verify(path)
    assert (found.problems, found.items, found.indexed) == ([], COUNT - 1, COUNT - 1)
    with closing(Gallery.open(path, policy=MANUAL)) as again:
        assert told(again) == told(gallery)
        queries = np.stack([item.vector for item in items()[:5]])
        assert again.search(queries, 9) == gallery.search(queries, 9)
        assert again.meta.id != gallery.meta.id  # it is a gallery of its own
        (version,) = again.upsert(items()[:1])
        assert version > max(each.version for each in again.get(["k2", "k59"]))


def test_nothing_is_written_over(gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(AlreadyExists, match=r"already something at .*file"):
        snapshot(gallery.path, file)
    monkeypatch.setattr(os.path, "lexists", lambda _: False)  # it comes while the snapshot is written
    for link in (os.link, no_link):
        monkeypatch.setattr(os, "link", link)
        with pytest.raises(AlreadyExists, match=r"already something at .*file"):
            snapshot(gallery.path, file)
    assert file.read_text() == "mine"
    assert names(tmp_path) == ["file", "galleries"]
    with pytest.raises(AlreadyExists, match="birds"):
        restore(file, gallery.path)


def test_file_system_without_links(gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", no_link)
    snapshot(gallery.path, tmp_path / "file")
    assert names(tmp_path) == ["file", "galleries"]
    assert verify(tmp_path / "file").items == COUNT - 1


def test_a_damaged_gallery_gives_no_snapshot(gallery: Gallery, tmp_path: Path) -> None:
    sql(gallery.path, "UPDATE items SET label = 'x' WHERE key = 'k5'")
    with pytest.raises(BadArtifact, match=r"birds is damaged, and no snapshot.*'k5'.*gallery verify birds"):
        snapshot(gallery.path, tmp_path / "file")
    assert names(tmp_path) == ["galleries"]
    with pytest.raises(NotFound, match="no folder"):
        snapshot(gallery.path, tmp_path / "none" / "file")


def newer(file: Path) -> None:
    sql(file, "UPDATE meta SET value = 99 WHERE name = 'format_version'")


def flipped(content: bytes) -> Callable[[Path], None]:
    return lambda file: flip(file, file.read_bytes().index(content) + 5)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda file: file.write_bytes(b"x" * 9000), BadArtifact, "file is not a database"),
        (flipped(JPEG), BadArtifact, r"the thumbnail \d+ has been altered"),
        (lambda file: file.write_bytes(file.read_bytes()[:-9000]), BadArtifact, "damaged"),
        (flipped(items()[9].vector.tobytes()), BadArtifact, "'k9': its checksum.*use another one"),
        (newer, BadArtifact, "format version 99.*upgrade crossbatch"),
        (lambda file: file.write_bytes(b""), BadArtifact, "not a gallery"),
        (lambda file: Path(f"{file}-wal").touch(), InvalidArgument, "a gallery in use"),
        (lambda file: file.unlink(), NotFound, "no snapshot"),
    ],
)
def test_what_cannot_be_restored(
    gallery: Gallery, tmp_path: Path, change: Callable[[Path], object], kind: type[Exception], words: str
) -> None:
    snapshot(gallery.path, file := tmp_path / "file")
    change(file)
    with pytest.raises(kind, match=words) as caught:
        restore(file, tmp_path / "galleries" / "again")
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
    assert names(tmp_path / "galleries") == ["birds"]


def test_breaking_off_leaves_nothing(
    gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot(gallery.path, tmp_path / "file")

    interrupted = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        snapshot(gallery.path, tmp_path / "second", advance=interrupted)
    with pytest.raises(KeyboardInterrupt):
        restore(tmp_path / "file", tmp_path / "galleries" / "again", advance=interrupted)
    assert names(tmp_path) == ["file", "galleries"]
    assert names(tmp_path / "galleries") == ["birds"]


def test_what_a_crash_left_is_swept(gallery: Gallery, tmp_path: Path) -> None:
    aged(tmp_path / ".file.new-0123abcd", 7200)
    kept = [".file.new-ffffffff", ".other.new-0123abcd", "file.new-0123abcd"]
    for name, age in zip(kept, (60, 7200, 7200), strict=True):  # somebody may be writing the first
        aged(tmp_path / name, age)
    snapshot(gallery.path, tmp_path / "file")
    assert names(tmp_path) == sorted([*kept, "file", "galleries"])


def test_a_gallery_that_takes_long_to_make_is_no_leftover(
    gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot(gallery.path, tmp_path / "file")
    monkeypatch.setattr("serving.gallery.folder._STALE", -60.0)

    def swept(*_: object) -> None:
        GalleryDirectory(tmp_path / "galleries").close()

    restore(tmp_path / "file", tmp_path / "galleries" / "again", advance=swept)
    assert verify(tmp_path / "galleries" / "again").problems == []


def test_a_full_disk_leaves_nothing(gallery: Gallery, tmp_path: Path, small_disk: Path) -> None:
    for start in range(0, 6000, 500):
        many = [type(item)(f"{start}/{item.key}", item.vector, "x" * 1000) for item in items(500)]
        gallery.upsert(many)
    for _ in range(2):
        with pytest.raises(Overloaded, match="full"):
            snapshot(gallery.path, small_disk / "file")
        assert names(small_disk) == []
    snapshot(gallery.path, tmp_path / "file")
    with pytest.raises(Overloaded, match="full"):
        restore(tmp_path / "file", small_disk / "again")
    assert names(small_disk) == []


def test_folder_that_is_read_only(gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_put", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(ReadOnly, match=r"second.*permission denied"):
        snapshot(gallery.path, tmp_path / "second")
    assert names(tmp_path) == ["galleries"]
