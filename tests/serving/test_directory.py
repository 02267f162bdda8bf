"""A folder of galleries, and the command that looks after it."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from serving.errors import BadArtifact, InvalidArgument, NotFound, Unavailable
from serving.gallery.directory import GalleryDirectory, check_name
from serving.gallery.gallery import Gallery, GalleryItem
from tests.serving.vectors import AXES, MANUAL, MODEL, aged, open_files


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[GalleryDirectory]:
    with GalleryDirectory(tmp_path / "galleries") as opened:
        yield opened


BAD_NAMES = ["", ".", "..", "../a", "a/b", "a..b", "A", "é", "-a", ".a", "a" * 65, "a\0", "a\n", "a b", "/e"]


def test_good_names() -> None:
    for name in ("a", "0", "birds", "birds-2026.v1_x", "a" * 64, "a."):
        assert check_name(name) == name


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_reach_no_file(directory: GalleryDirectory, name: str) -> None:
    for action in (
        directory.get,
        directory.drop,
        directory.path_of,
        directory.rollback,
        lambda given: directory.create(given, **MODEL),
        lambda given: directory.switch(given, "a"),
        lambda given: directory.switch("a", given),
        lambda given: directory.using(given, Gallery.info),
    ):
        with pytest.raises(InvalidArgument, match="cannot name a gallery"):
            action(name)
    assert directory.names() == []
    assert not directory.path.exists()


def test_damaged_gallery_hurts_no_other(directory: GalleryDirectory) -> None:
    directory.create("a", **MODEL)
    directory.create("b", **MODEL)
    directory.close()
    (directory.path / "a" / "gallery.sqlite").write_bytes(b"x" * 5000)
    with GalleryDirectory(directory.path) as again:
        for _ in range(2):
            with pytest.raises(BadArtifact, match=r"a/gallery\.sqlite"):
                again.get("a")
        assert again.get("b").info().items == 0
        again.drop("a")
        assert again.names() == ["b"]


def test_most_galleries_rest_and_serve_their_holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.gallery.directory.MOST_OPEN", 3)
    names = [f"g{number}" for number in range(12)]
    with GalleryDirectory(tmp_path, policy=MANUAL) as directory:
        held = {name: directory.create(name, **MODEL) for name in names}
        for name, gallery in held.items():  # those at rest too
            gallery.upsert([GalleryItem(name, AXES[0])])
            gallery.rebuild()
        for name in names:
            assert directory.get(name).search(AXES[:1], 5)[0][0].key == name
        assert 1 <= open_files(tmp_path) <= 3 * 5
        last = directory.get("g9")
        directory.get("g0")
        assert directory.get("g9") is last  # asked for lately
        assert directory.get("g1") is not held["g1"]
        held["g1"].upsert([GalleryItem("more", AXES[1])])
        assert directory.get("g1").search(AXES[1:2], 1) == held["g1"].search(AXES[1:2], 1)
        for gallery in held.values():
            assert len(gallery.search(AXES[:1], 5)[0]) >= 1
        assert open_files(tmp_path) <= 3 * 5
        with pytest.raises(NotFound, match=r"it holds g0, g1, g10, .*, g7 and 2 more"):
            directory.get("none")
        directory.drop("g1")
        with pytest.raises(NotFound):
            held["g1"].info()
    for use in (held["g2"].info, partial(directory.get, "g2")):
        with pytest.raises(Unavailable, match="closed"):
            use()
    assert open_files(tmp_path) == 0


def test_what_a_crash_left_is_swept(tmp_path: Path) -> None:
    def leave() -> None:
        aged(tmp_path / ".a.dropped-0123abcd", 0)
        aged(tmp_path / ".a.b-c.new-0123abcd", 7200)

    snapshot = tmp_path / ".a.new-01234567"  # a file: of a snapshot that is written here
    snapshot.touch()
    os.utime(snapshot, (0, 0))
    kept = [
        aged(tmp_path / ".a.new-ffffffff", 30),  # somebody may be making it
        aged(tmp_path / ".git", 7200),
        aged(tmp_path / ".a.new-x", 7200),
        snapshot,
        aged(tmp_path / "a.new-0123abcd", 7200),  # a gallery of that name
    ]
    leave()
    with GalleryDirectory(tmp_path) as directory:
        assert sorted(tmp_path.iterdir()) == sorted(kept)
        leave()
        directory.create("b", **MODEL)
        assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "b"])
        leave()
        directory.drop("b")
        assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotFound, match="is a file"):
        GalleryDirectory(tmp_path / "file")
