"""Indexing: every readable image lands under its key, the others are named in a report, one index is made."""

import csv
import io
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from benchmarks import indexing
from serving.catalog.catalog import Catalog, Row, read
from serving.catalog.picture import File
from serving.errors import (
    AlreadyExists,
    BadData,
    BadImage,
    BadSetting,
    InvalidArgument,
    ModelMismatch,
    NotFound,
    ReadOnly,
)
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery
from serving.indexing.command import render
from serving.indexing.pipeline import Report, index_rows
from serving.indexing.target import Target
from serving.model.encoder import Encoder
from tests.pictures import encoded, png_header
from tests.serving.indexed import counts, fill, index, opened, picture
from tests.serving.vectors import MANUAL
from tests.tiny_model import tiny_graph, tiny_spec, write_tiny_model


def reported(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_images_are_found_by_their_own_embedding(tmp_path: Path, model: Path, data: Path) -> None:
    result = index(model, data, tmp_path / "galleries" / "birds")
    assert (result["images"], result["stored"], result["items"], result["skipped"]) == (20, 20, 20, [])
    assert "stored 20 of 20 images" in render(result)
    encoder = Encoder(model)
    with opened(tmp_path / "galleries" / "birds") as gallery:
        assert (gallery.info().index_items, gallery.info().fresh) == (20, 0)
        for row in read(data).rows:
            (vector,) = encoder.encode(encoder.preprocess(row.image.read_bytes())[None])
            ((hit,),) = gallery.search(vector[None], 1)
            assert (hit.key, hit.label, hit.uri) == (row.key, row.label, row.key)
            assert hit.score == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("fingerprint", [None, "b" * 64])
def test_the_loser_of_a_race_to_make_the_gallery_fills_the_winners_if_it_is_of_the_model(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, fingerprint: str | None
) -> None:
    real = GalleryDirectory.create

    def create(directory: GalleryDirectory, name: str, **more: Any) -> Gallery:
        theirs = more | ({"fingerprint": fingerprint} if fingerprint else {})
        Gallery.create(directory.path / name, **theirs).close()
        return real(directory, name, **more)

    monkeypatch.setattr(GalleryDirectory, "create", create)
    if fingerprint is None:
        assert index(model, data, tmp_path / "birds")["items"] == 20
    else:
        for _ in range(2):  # the second run finds it there
            with pytest.raises(ModelMismatch, match="birds"):
                index(model, data, tmp_path / "birds")


def test_what_cannot_be_indexed_into_is_left_alone(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary" / "diary.txt").write_text("dear")
    with pytest.raises(AlreadyExists):
        index(model, data, tmp_path / "diary")
    monkeypatch.setattr(File, "read_bytes", lambda _: pytest.fail("an image was read"))
    for gallery, more, kind, message in (
        (tmp_path / "Birds", {}, InvalidArgument, "cannot name a gallery"),
        ("galleries/birds", {"galleries": tmp_path}, BadSetting, "a path"),
        (tmp_path / "birds", {"data": tmp_path / "absent"}, BadData, "absent"),
        (tmp_path / "birds", {"model": tmp_path / "absent.onnx"}, NotFound, "absent"),
        (tmp_path / "birds", {"index": "Nonsense"}, InvalidArgument, "Nonsense"),
    ):
        with pytest.raises(kind, match=message):
            index(gallery=gallery, **({"model": model, "data": data} | more))
    assert {path.name for path in tmp_path.iterdir()} == {"data", "diary", "model.onnx"}


def test_what_is_not_read_is_told_and_a_bare_name_is_one_in_galleries(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("class0/a.CR2", "class0/b.cr2", "c.txt", "@eaDir/d.jpg"):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_bytes(b"x")
    result = index(model, data, "birds", exclude=["class3"])
    assert result["passed_over"] == {".cr2": 2, ".txt": 1}
    assert result["left_out"] == {"by --exclude": 1, "@eaDir": 1}
    assert "\npassed over: 2 .cr2, 1 .txt\nleft out: 1 " in render(result)
    assert (result["gallery"], result["items"]) == ("galleries/birds", 15)
    lines = ['class0/00.jpg,a,"9,99"', "class0/04.jpg,a,7"]
    (data / "items.csv").write_text("\n".join(["path,label,price", *lines]))
    told = "column price is text because of '9,99' in line 2; give --decimal ,"
    assert told in render(result := index(model, data, "priced"))
    assert result["passed_over"] == {".cr2": 2, ".jpg": 3}  # beside what the table names
    by_text = index(model, data, "texts", text=["price", "sku"])
    assert (by_text["notes"], by_text["items"]) == ([], 2)
    again = index(model, data, "priced", decimal=",")
    assert (again["updated"], again["notes"]) == (
        2,
        [
            "the gallery's field price held string values, and new ones are number:"
            " filters find only values of the kind that they name"
        ],
    )


def test_bad_images_are_skipped_and_named(tmp_path: Path, model: Path, data: Path) -> None:
    bad = {
        'a/te, "x"\nt.jpg': b"this is a text",
        "a/empty.jpg": b"",
        "a/truncated.jpg": picture(0)[:300],
        "a/huge.png": png_header(80_000, 80_000),
        f"a/{'d' * 200}/{'e' * 200}/{'f' * 200}/{'g' * 200}/{'h' * 240}.jpg": picture(1),  # longer than a key
    }
    for name, content in bad.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(content)
    (data / "b").mkdir()
    (data / "a" / "gone.jpg").symlink_to("nowhere")
    path = tmp_path / "galleries" / "birds"
    for stored in (20, 0):  # in every run
        result = index(model, data, path, sync=True)
        assert {each["key"] for each in result["skipped"]} == {*bad, "a/gone.jpg"}
        assert all(each["reason"] and "\n" not in each["reason"] for each in result["skipped"])
        assert (result["images"], result["stored"], result["items"]) == (26, stored, 20)
        assert result["report"] == str(path / "skipped.csv")
        assert reported(path / "skipped.csv") == result["skipped"]
    text = render(result)
    assert f"skipped, by {path / 'skipped.csv'}: 6\n" in text
    assert "and 1 more (--json lists all, too)" in text
    assert "folders without an image: 1\n  b" in text
    for name in (*bad, "a/gone.jpg"):
        (data / name).unlink()
    assert index(model, data, path)["report"] is None
    assert not list(path.glob("*skipped*"))


def test_nothing_readable_makes_no_gallery_but_the_report(tmp_path: Path, model: Path, data: Path) -> None:
    for path in data.rglob("*.jpg"):
        path.write_bytes(b"text")
    report = tmp_path / "bad.csv"
    with pytest.raises(BadData, match=r"none of the 20 images .*00\.jpg: "):
        index(model, data, tmp_path / "birds", report=report)
    assert len(reported(report)) == 20
    assert not (tmp_path / "birds").exists()
    (data / "class0/00.jpg").write_bytes(picture(0))
    assert index(model, data, tmp_path / "birds", report=report)["skipped"] == reported(report)
    assert not (tmp_path / "birds" / "skipped.csv").exists()


def test_a_report_takes_the_place_of_nothing_else_and_is_whole(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger, report = tmp_path / "items.csv", tmp_path / "bad.csv"
    stranger.write_text("path,label\nx,y\n")
    with pytest.raises(BadSetting, match="is no report of crossbatch index"):
        index(model, data, tmp_path / "birds", report=stranger)
    for path in (tmp_path / "absent" / "bad.csv", tmp_path):
        with pytest.raises(BadSetting, match="cannot be written"):
            index(model, data, tmp_path / "birds", report=path)
    report.touch()
    (data / "class0/00.jpg").write_bytes(b"text")
    index(model, data, tmp_path / "birds", report=report)
    before = [sorted(tmp_path.iterdir()), reported(report)]
    (data / "class0/04.jpg").write_bytes(b"text")
    monkeypatch.setattr(os, "replace", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(ReadOnly, match=r"the report .* cannot be written"):
        index(model, data, tmp_path / "birds", report=report)
    assert [sorted(tmp_path.iterdir()), reported(report)] == before


def test_each_side_of_the_split_counts_its_own_images_alone(tmp_path: Path, model: Path, data: Path) -> None:
    (data / "class0" / "gone.jpg").symlink_to("nowhere")  # of the side that trains
    (data / "class3" / "lost.jpg").symlink_to("nowhere")
    (data / "stray.jpg").write_bytes(picture(50))
    for split, lost, told in (
        ("test", ["class3/lost.jpg"], (11, 10, 1)),
        ("all", ["class0/gone.jpg", "class3/lost.jpg"], (23, 21, 0)),
    ):
        result = index(model, data, tmp_path / split, split=split)
        assert [each["key"] for each in result["skipped"]] == lost
        assert (result["images"], result["stored"], result["unlabelled"]) == told
        assert ("left out: 1 images of no class" in render(result)) == (split == "test")


def test_items_say_nothing_of_the_machine_that_indexed_them(tmp_path: Path, model: Path, data: Path) -> None:
    wrapped, path = tmp_path / "alice" / "images", tmp_path / "birds"
    wrapped.parent.mkdir()
    data.rename(wrapped)
    (tmp_path / "alice" / "above.jpg").write_bytes(picture(50))
    result = index(model, wrapped.parent, path)
    with opened(path) as gallery:
        (hits,) = gallery.search(np.eye(1, 3, dtype=np.float32), 100)
    uris = {hit.uri for hit in hits}
    assert uris == {"../above.jpg", *(f"class{seed % 4}/{seed:02}.jpg" for seed in range(20))}
    assert all((Path(result["root"]) / uri).is_file() for uri in uris)
    assert b"alice" not in (path / "gallery.sqlite").read_bytes()


def test_thumbnails_are_kept_by_a_gallery_that_was_made_so(tmp_path: Path, model: Path, data: Path) -> None:
    wide = encoded(Image.new("RGB", (600, 300), "green"), "JPEG")
    (data / "class0/00.jpg").write_bytes(wide)
    index(model, data, tmp_path / "with", thumbnails=True)
    (data / "class0/new.jpg").write_bytes(wide)
    assert counts(index(model, data, tmp_path / "with")) == {"stored": 1, "unchanged": 20}
    sizes = {"class0/00.jpg": (256, 128), "class0/new.jpg": (256, 128), "class1/01.jpg": (20, 24)}
    with opened(tmp_path / "with") as gallery:
        for key, size in sizes.items():
            assert Image.open(io.BytesIO(gallery.get([key], thumbnails=True)[0].thumbnail)).size == size
    index(model, data, tmp_path / "without")
    with pytest.raises(BadSetting, match="made without thumbnails"):
        index(model, data, tmp_path / "without", thumbnails=True)


def test_the_index_is_made_once_at_the_end_only_after_a_change_and_by_the_next_run_if_need_be(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = Gallery.rebuild

    def rebuild(gallery: Gallery, **wanted: Any) -> None:
        made.append(wanted["whole"])
        if len(made) == 1:
            raise KeyboardInterrupt
        real(gallery, **wanted)

    monkeypatch.setattr(Gallery, "rebuild", rebuild)
    path = tmp_path / "birds"
    with pytest.raises(KeyboardInterrupt):
        index(model, data, path)
    assert counts(index(model, data, path)) == {"unchanged": 20}
    index(model, data, path)
    (data / "class0/00.jpg").unlink()
    index(model, data, path)
    assert len(made) == 2
    index(model, data, path, sync=True)
    assert made == [False] * 3
    with opened(path) as gallery:
        assert (gallery.info().items, gallery.info().fresh) == (19, 0)


def test_type_and_recall_of_the_index_stay_until_others_are_wanted(
    tmp_path: Path, model: Path, data: Path
) -> None:
    automatic, ivf = ("auto", "exact", 0.99, 1), ("IVF2,Flat", "IVF2,Flat,RFlat", 0.5, 2)
    for given, expected in (
        ({}, automatic),
        ({"index": "IVF2,Flat", "recall": 0.5}, ivf),
        ({}, ivf),
        ({"index": "IVF2,Flat"}, ivf),
        ({"index": "exact"}, ("exact", "exact", 0.5, 3)),
    ):
        index(model, data, tmp_path / "birds", **given)
        with opened(tmp_path / "birds") as gallery:
            info = gallery.info()
            assert (info.wanted_index, info.index_type, info.wanted_recall, info.generation) == expected


def test_rows_that_no_item_can_be_of_are_told_by_key(tmp_path: Path, model: Path, data: Path) -> None:
    lines = [f"class0/00.jpg,{'l' * 2000},a", "class2/02.jpg,x,c", f"class3/03.jpg,x,{'k' * 2000}"]
    (data / "items.csv").write_text("\n".join(("path,label,key", *lines)))
    result = index(model, data / "items.csv", tmp_path / "birds")
    assert [each["key"][:9] for each in result["skipped"]] == ["a", "k" * 9]
    assert all("2000 bytes" in each["reason"] for each in result["skipped"])
    assert (result["stored"], result["items"]) == (1, 1)


class FakeEncoder:
    """Embeds the number that a file holds; decodes the first of them last."""

    spec = tiny_spec(tiny_graph())

    def __init__(self, *, fail_at: int = -1) -> None:
        self.batches: list[int] = []
        self.decoded = self.furthest = 0
        self.guard = threading.Lock()
        self.fail_at = fail_at

    def preprocess(self, data: bytes) -> NDArray[np.uint8]:
        number = int(data)
        time.sleep(0.02 if number % 8 == 0 else 0)
        with self.guard:
            self.decoded += 1
            self.furthest = max(self.furthest, self.decoded - sum(self.batches))
        if number % 10 == 9:
            raise BadImage("a nine")
        return np.full((2, 2, 3), number, np.uint8)

    def encode(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        if len(self.batches) == self.fail_at:
            raise ZeroDivisionError
        self.batches.append(len(images))
        angles = images[:, 0, 0, 0] / 100.0
        return np.stack([np.cos(angles), np.sin(angles), np.zeros_like(angles)], axis=1).astype(np.float32)


def index_numbers(folder: Path, directory: GalleryDirectory, encoder: FakeEncoder) -> Report:
    rows = []
    for number in range(100):
        path = folder / f"{number:03}.jpg"
        path.write_bytes(str(number).encode())
        rows.append(Row(path.name, File(path), f"label {number}"))
    target, catalog = Target(directory, "a", encoder.spec), Catalog(folder, "folder", ())
    return index_rows(cast("Encoder", encoder), catalog, rows, target, batch=8, threads=3)


def test_order_is_kept_and_memory_is_bounded(tmp_path: Path) -> None:
    encoder = FakeEncoder()
    with GalleryDirectory(tmp_path / "galleries", policy=MANUAL) as directory:
        report = index_numbers(tmp_path, directory, encoder)
        assert [each.key for each in report.skipped] == [f"{number:03}.jpg" for number in range(9, 100, 10)]
        assert report.stored == 90
        assert encoder.batches == [8] * 11 + [2]
        # Ahead of the encoder: two batches that wait, one that is put together, and the nines among them.
        assert encoder.furthest <= 3 * 8 + 10 + 1
        for number in (0, 8, 50):
            query = np.array([[np.cos(number / 100), np.sin(number / 100), 0]], np.float32)
            assert directory.get("a").search(query, 1)[0][0].label == f"label {number}"


def test_failure_while_encoding_ends_the_run_and_keeps_what_was_stored(tmp_path: Path) -> None:
    with GalleryDirectory(tmp_path / "galleries", policy=MANUAL) as directory:
        with pytest.raises(ZeroDivisionError):
            index_numbers(tmp_path, directory, FakeEncoder(fail_at=3))
        assert directory.get("a").info().items == 24
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]


def test_a_ratio_to_the_plain_loop_is_told_and_data_with_a_bad_image_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = write_tiny_model(tmp_path / "model.onnx"), fill(tmp_path / "data")
    monkeypatch.setattr(sys, "argv", ["", str(model), str(data), "--threads", "2", "--rounds", "2"])
    indexing.main()
    told = capsys.readouterr().out
    assert "tiny, 20 images, 2 threads, 2 rounds" in told
    assert len(re.findall(r"\d+\.\d images/s \(\d+\.\d to \d+\.\d\)", told)) == 3
    assert len(re.findall(r"ratio \d+\.\d{3} \(\d+\.\d{3} to \d+\.\d{3}\)", told)) == 2
    seconds = {indexing.PLAIN: [1.0, 2.0], indexing.STORED: [2.0, 2.5]}
    assert indexing.ratios(seconds, indexing.STORED) == [0.5, 0.8]
    (data / "class0/bad.jpg").write_bytes(b"text")
    with pytest.raises(SystemExit):
        indexing.main()
