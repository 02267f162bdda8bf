"""The commands over a Milvus: indexing again and again, and looking after what is there."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pymilvus.exceptions import MilvusException

from serving.client import Client
from serving.errors import BadData, BadSetting, NotFound, Unsupported
from serving.gallery.command import Settings, render, run
from serving.gallery.item import GalleryItem, ItemChange
from serving.gallery.milvus.gallery import MilvusGallery
from serving.gallery.place import galleries_at
from serving.indexing.command import render as told_of
from serving.model.encoder import Encoder
from tests.serving.indexed import counts, index, picture
from tests.serving.processes import command, launched
from tests.serving.rpc_fakes import until


@pytest.fixture
def birds(place: str) -> str:
    return f"{place}/birds"


def done(place: str, *words: str, **more: Any) -> str:
    given = dict(zip(("action", "name", "other"), words, strict=False))
    return render(run(Settings.model_validate({**given, "galleries": place, **more})))


def test_a_data_set_is_indexed_step_by_step(model: Path, data: Path, place: str, birds: str) -> None:
    result = index(model, data, birds)
    assert counts(result) == {"stored": 20}
    assert (result["gallery"], result["items"], result["report"]) == (birds, 20, None)
    assert counts(index(model, data, "birds", galleries=place)) == {"unchanged": 20}
    (data / "class0/00.jpg").write_bytes(picture(100))
    (data / "class1/01.jpg").unlink()
    (data / "class2/bad.jpg").write_bytes(b"no picture")
    result = index(model, data, birds)
    assert counts(result) == {"changed": 1, "gone": 1, "unchanged": 18, "skipped": 1}
    assert "skipped: 1\n  class2/bad.jpg: " in told_of(result)
    with galleries_at(place) as galleries:
        galleries.get("birds").update([ItemChange("class3/03.jpg", metadata={"price": 5})])
    result = index(model, data, birds, sync=True)
    assert counts(result) == {"stored": 1, "deleted": 1, "unchanged": 18, "skipped": 1}
    with galleries_at(place) as galleries:
        kept = galleries.get("birds").get(["class3/03.jpg"])[0]
    assert kept.metadata["price"] == 5


def test_more_items_than_are_counted_are_indexed_and_told(
    model: Path, data: Path, place: str, birds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.gallery.milvus.gallery.MOST_COUNTED", 5)
    assert counts(index(model, data, birds, index="auto", map="none")) == {"stored": 20}
    assert counts(index(model, data, birds)) == {"unchanged": 20}
    assert "items" in done(place, "info", "birds")


def test_a_flush_that_fails_or_lasts_fails_nothing(
    model: Path, data: Path, place: str, birds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = Mock(side_effect=MilvusException(1, "Retry timeout"))
    monkeypatch.setattr("pymilvus.MilvusClient.flush", flushed)
    assert counts(index(model, data, birds)) == {"stored": 20}
    assert flushed.call_count == 1
    assert counts(index(model, data, birds)) == {"unchanged": 20}
    assert flushed.call_count == 1  # as nothing was written
    done(place, "copy", "birds", "again")
    with galleries_at(place) as galleries:
        assert galleries.names() == ["again", "birds"]


def test_a_place_for_a_name_is_told(place: str, birds: str) -> None:
    with pytest.raises(BadSetting, match="is a place; give that of the galleries by --galleries"):
        done(place, "info", birds)


def test_an_item_that_a_client_wrote_meanwhile_is_left(
    model: Path, data: Path, place: str, birds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Encoder.encode

    def late(encoder: Encoder, images: Any, **more: Any) -> Any:
        vectors = encode(encoder, images, **more)
        with galleries_at(place) as galleries:
            if "birds" in galleries.names() and not galleries.get("birds").find(["class3/19.jpg"]):
                galleries.get("birds").upsert([GalleryItem("class3/19.jpg", vectors[0], "theirs")])
        return vectors

    monkeypatch.setattr(Encoder, "encode", late)
    assert counts(index(model, data, birds)) == {"stored": 19, "changed": 1}
    with galleries_at(place) as galleries:
        assert galleries.get("birds").get(["class3/19.jpg"])[0].label == "theirs"


def test_galleries_are_looked_after(model: Path, data: Path, place: str, birds: str, tmp_path: Path) -> None:
    index(model, data, birds)
    assert done(place, "list").startswith("birds: 20 items of dimension ")
    told = done(place, "info", "birds")
    assert f"  {birds}" in told
    file = str(tmp_path / "birds.parquet")
    assert done(place, "export", "birds", file).startswith("wrote the 20 items of the gallery birds to ")
    for _ in range(2):
        assert (
            done(place, "import", "again", file) == f"put 20 items of {file} into the gallery again, now 20"
        )
    assert done(place, "list").count("\n") == 1
    assert done(place, "switch", "birds", "again").startswith("the gallery again is now birds, and the one")
    assert (
        done(place, "rollback", "birds")
        == "the gallery birds is again the one before; the other is now again"
    )
    assert done(place, "drop", "again", yes=True) == "dropped the gallery again"
    with pytest.raises(NotFound, match=r"there is no gallery 'again' at milvus://.*; it holds birds"):
        done(place, "info", "again")
    assert done(place, "duplicates", "birds").startswith("190 pairs of the 20 items")


def test_a_file_that_is_damaged_leaves_no_half_gallery(
    model: Path, data: Path, place: str, birds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(model, data, birds)
    file = str(tmp_path / "birds.parquet")
    done(place, "export", "birds", file)

    def failing(*_: Any, **__: Any) -> list[int]:
        raise BadData("no")

    monkeypatch.setattr(MilvusGallery, "upsert", failing)
    with pytest.raises(BadData):
        done(place, "import", "again", file)
    with galleries_at(place) as galleries:
        assert galleries.names() == ["birds"]


def test_workers_share_a_milvus(model: Path, data: Path, place: str, birds: str) -> None:
    index(model, data, birds)
    with launched(model, place, "--workers", "2") as server, Client(server.address) as client:
        first, other = server.workers()
        os.kill(first, signal.SIGKILL)
        (found,) = client.search("birds", images=[(data / "class1/01.jpg").read_bytes()], k=1)
        assert found[0].key == "class1/01.jpg"
        until(lambda: len(server.said("serves", worker=1)) + len(server.said("serves", worker=2)) == 3, 20)
        assert other in server.workers()


def test_a_server_does_not_start_without_its_milvus(model: Path) -> None:
    words = command(model, "milvus://127.0.0.1:1")
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    told = "crossbatch serve: the Milvus server at milvus://127.0.0.1:1 cannot be reached ("
    assert ended.stderr.splitlines()[-1].startswith(told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("verify birds", "Milvus looks after its own files"),
        ("snapshot birds file", "back Milvus up by its own tools, or copy the gallery into a folder"),
        ("restore file birds", "restore it into a folder, and copy it from there"),
        ("map birds", "copy the gallery into a folder, make the map there, and copy it back"),
    ],
)
def test_what_is_for_folders_is_told(place: str, words: str, told: str) -> None:
    with pytest.raises(Unsupported) as error:
        done(place, *words.split())
    assert str(error.value) == f"{words.split()[0]} is for galleries in a folder; {told}"


def test_options_of_folders_are_told(model: Path, data: Path, place: str, birds: str) -> None:
    for given in ({"map": "pca"}, {"thumbnails": True}, {"index": "exact"}, {"recall": 0.9}):
        with pytest.raises(Unsupported, match=f"^--{next(iter(given))} is for galleries in a folder"):
            index(model, Path("none"), birds, **given)  # before anything is read
    index(model, data, birds)
    with pytest.raises(Unsupported, match="Milvus"):
        done(place, "rebuild", "birds")
