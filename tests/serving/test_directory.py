"""A folder of galleries, and the command that looks after it."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.errors import AlreadyExists, BadArtifact, BadSetting, InvalidArgument, NotFound, Unavailable
from serving.gallery.command import Settings, render, run
from serving.gallery.directory import GalleryDirectory, check_name, split_path
from serving.gallery.gallery import Gallery, Item

MODEL: dict[str, Any] = {"model_name": "m", "fingerprint": "f" * 64, "dimension": 4}
AXES = np.eye(4, dtype=np.float32)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[GalleryDirectory]:
    with GalleryDirectory(tmp_path / "galleries") as opened:
        yield opened


@pytest.mark.parametrize("name", ["a", "0", "birds", "birds-2026.v1_x", "a" * 64, "a."])
def test_good_names(name: str) -> None:
    assert check_name(name) == name
    assert split_path(Path("x/y") / name) == (Path("x/y"), name)


BAD_NAMES = [
    "",
    ".",
    "..",
    "../a",
    "a/b",
    "a..b",
    "A",
    "é",
    "-a",
    ".a",
    "a" * 65,
    "a\0",
    "a\n",
    "a b",
    "/etc",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_reach_no_file(directory: GalleryDirectory, name: str) -> None:
    for action in (directory.get, directory.drop, lambda given: directory.create(given, **MODEL)):
        with pytest.raises(InvalidArgument, match="cannot name a gallery"):
            action(name)
    assert not directory.path.exists()


def test_create_get_names_drop(directory: GalleryDirectory) -> None:
    assert directory.names() == []
    with pytest.raises(NotFound, match=r"'a'.*none"):
        directory.get("a")
    made = directory.create("b", **MODEL)
    directory.create("a", **MODEL)
    assert directory.names() == ["a", "b"]
    assert directory.get("b") is made
    with pytest.raises(AlreadyExists):
        directory.create("b", **MODEL)
    made.upsert([Item("k", AXES[0])])
    directory.drop("b")
    assert directory.names() == ["a"]
    assert [path.name for path in directory.path.iterdir()] == ["a"]
    with pytest.raises(NotFound, match=r"'b'.*it holds a"):
        directory.get("b")
    with pytest.raises(NotFound):
        directory.drop("b")
    with pytest.raises(Unavailable, match="closed"):
        made.search(AXES[:1], 1)
    assert directory.create("b", **MODEL).info().items == 0


def test_what_others_do_to_the_folder_is_noticed(directory: GalleryDirectory) -> None:
    directory.create("a", **MODEL).upsert([Item("old", AXES[0])])
    with GalleryDirectory(directory.path) as other:
        other.drop("a")
        with pytest.raises(NotFound):
            directory.get("a")
        other.create("a", **MODEL).upsert([Item("new", AXES[0])])
        assert directory.get("a").search(AXES[:1], 5)[0][0].key == "new"
        other.drop("a")
        other.create("a", **MODEL)
        assert directory.get("a").info().items == 0


def test_half_made_folder_is_not_a_gallery(directory: GalleryDirectory) -> None:
    directory.create("a", **MODEL)
    (directory.path / "empty").mkdir()
    (directory.path / ".b.new-1234").mkdir()
    (directory.path / ".b.new-1234" / "gallery.sqlite").write_bytes(b"")
    (directory.path / "file").touch()
    assert directory.names() == ["a"]
    with pytest.raises(NotFound):
        directory.get("empty")
    directory.create("empty", **MODEL)  # an empty folder is in nobody's way


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


def test_gallery_is_opened_once_by_many_threads(directory: GalleryDirectory) -> None:
    directory.create("a", **MODEL)
    with GalleryDirectory(directory.path) as again:
        found: list[Gallery] = []
        threads = [threading.Thread(target=lambda: found.append(again.get("a"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len(set(map(id, found))) == 1


def test_closed_directory_says_so(directory: GalleryDirectory) -> None:
    directory.create("a", **MODEL)
    directory.close()
    with pytest.raises(Unavailable, match="closed"):
        directory.get("a")


def test_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotFound, match="is a file"):
        GalleryDirectory(tmp_path / "file")


def command(directory: GalleryDirectory, action: str, name: str | None = None, **more: Any) -> str:
    return render(
        run(Settings.model_validate({"action": action, "name": name, "galleries": directory.path} | more))
    )


def test_command(directory: GalleryDirectory) -> None:
    with pytest.raises(NotFound, match="no folder"):
        command(directory, "list")
    directory.create("a", **MODEL).upsert([Item("k", AXES[0])])
    (directory.path / "bad").mkdir()
    (directory.path / "bad" / "gallery.sqlite").write_bytes(b"x" * 5000)
    first, second = command(directory, "list").splitlines()
    assert first.startswith("a: 1 items of dimension 4, model m (ffffffffffff); exact index over 0, 1 newer")
    assert second.startswith("bad: the gallery file")
    assert "index rebuilt" in command(directory, "rebuild", "a")
    assert "exact index over 1, 0 newer" in command(directory, "info", "a")
    with pytest.raises(BadArtifact):
        command(directory, "info", "bad")
    with pytest.raises(BadSetting, match="removes 1 items for good; add --yes"):
        command(directory, "drop", "a")
    assert command(directory, "drop", "a", yes=True) == "dropped the gallery a"
    with pytest.raises(BadSetting, match="unknown number"):
        command(directory, "drop", "bad")
    assert command(directory, "drop", "bad", yes=True) == "dropped the gallery bad"
    assert command(directory, "list") == "no gallery"
    with pytest.raises(NotFound):
        command(directory, "drop", "a", yes=True)


@pytest.mark.parametrize(
    ("action", "name"), [("info", None), ("drop", None), ("rebuild", None), ("list", "a")]
)
def test_command_with_a_name_too_few_or_too_many(
    directory: GalleryDirectory, action: str, name: str | None
) -> None:
    with pytest.raises(BadSetting, match=f"crossbatch gallery {action}"):
        command(directory, action, name)
