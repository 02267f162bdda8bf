"""Indexing: every readable image lands under its key, the others are named, a second run changes nothing."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

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
)
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery
from serving.indexing.command import render
from serving.indexing.pipeline import index_rows
from serving.indexing.target import Target
from serving.model.encoder import Encoder
from tests.serving.indexed import MANUAL, fill, index, picture
from tests.tiny_model import write_tiny_model


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return fill(tmp_path / "data")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model.onnx")


def test_images_are_found_by_their_own_embedding(tmp_path: Path, model: Path, data: Path) -> None:
    result = index(model, data, tmp_path / "galleries" / "birds")
    assert (result["images"], result["stored"], result["items"], result["skipped"]) == (20, 20, 20, [])
    assert "stored 20 of 20 images" in render(result)
    encoder = Encoder(model)
    gallery = Gallery.open(tmp_path / "galleries" / "birds")
    gallery.check_model(encoder.spec)
    assert (gallery.info().index_items, gallery.info().fresh) == (20, 0)
    for row in read(data).rows:
        (vector,) = encoder.encode(encoder.preprocess(row.image.read_bytes())[None])
        ((hit,),) = gallery.search(vector[None], 1)
        assert (hit.key, hit.label, hit.uri) == (row.key, row.label, row.key)
        assert hit.score == pytest.approx(1, abs=1e-6)
    gallery.close()


def racing(monkeypatch: pytest.MonkeyPatch, *, fingerprint: str | None = None) -> None:
    """Let another run make the gallery just before this one does."""
    real = GalleryDirectory.create

    def create(directory: GalleryDirectory, name: str, **model: Any) -> Gallery:
        theirs = model | ({"fingerprint": fingerprint} if fingerprint else {})
        Gallery.create(directory.path / name, **theirs).close()
        return real(directory, name, **model)

    monkeypatch.setattr(GalleryDirectory, "create", create)


def test_the_loser_of_a_race_to_make_the_gallery_fills_the_winners(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    racing(monkeypatch)
    assert index(model, data, tmp_path / "galleries" / "birds")["items"] == 20


def test_a_gallery_that_another_run_made_for_another_model_is_refused(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    racing(monkeypatch, fingerprint="b" * 64)
    with pytest.raises(ModelMismatch):
        index(model, data, tmp_path / "galleries" / "birds")


def test_what_is_in_the_galleries_place_and_is_none_is_not_overwritten(
    tmp_path: Path, model: Path, data: Path
) -> None:
    (tmp_path / "galleries" / "birds").mkdir(parents=True)
    (tmp_path / "galleries" / "birds" / "diary.txt").write_text("dear")
    with pytest.raises(AlreadyExists):
        index(model, data, tmp_path / "galleries" / "birds")


def test_bad_images_are_skipped_and_named(tmp_path: Path, model: Path, data: Path) -> None:
    huge = bytearray(picture(0, "PNG"))
    huge[16:24] = (80_000).to_bytes(4) * 2
    bad = {
        "a/text.jpg": b"this is a text",
        "a/empty.jpg": b"",
        "a/truncated.jpg": picture(0)[:300],
        "a/huge.png": bytes(huge),
        f"a/{'d' * 200}/{'e' * 200}/{'f' * 200}/{'g' * 200}/{'h' * 240}.jpg": picture(1),  # longer than a key
    }
    for name, content in bad.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(content)
    (data / "a" / "gone.jpg").symlink_to("nowhere")
    (data / "b").mkdir()
    good = {"c/1x1.png": Image.new("RGB", (1, 1), "red"), "c/cmyk.jpg": Image.new("CMYK", (30, 30))}
    for name, image in good.items():
        (data / name).parent.mkdir(exist_ok=True)
        image.save(data / name)
    result = index(model, data, tmp_path / "galleries" / "birds")
    assert {each["key"] for each in result["skipped"]} == {*bad, "a/gone.jpg"}
    assert all(each["reason"] and "\n" not in each["reason"] for each in result["skipped"])
    assert (result["images"], result["stored"], result["items"]) == (28, 22, 22)
    assert result["empty"] == ["b"]
    text = render(result)
    assert "skipped: 6" in text
    assert "and 1 more (" in text
    assert "folders without an image: 1\n  b" in text


def test_nothing_readable_makes_no_gallery(tmp_path: Path, model: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jpg").write_bytes(b"text")
    with pytest.raises(BadData, match=r"none of the 1 images .*a\.jpg: "):
        index(model, tmp_path / "data", tmp_path / "galleries" / "birds")
    assert not (tmp_path / "galleries").exists()


def test_split_is_the_models_own(tmp_path: Path, model: Path, data: Path) -> None:
    for split, classes in (("test", {"class2", "class3"}), ("train", {"class0", "class1"})):
        index(model, data, tmp_path / "galleries" / split, split=split)
        gallery = Gallery.open(tmp_path / "galleries" / split)
        (hits,) = gallery.search(np.eye(1, 3, dtype=np.float32), 100)
        assert {hit.label for hit in hits} == classes
        gallery.close()


def test_each_side_of_the_split_counts_its_own_missing_and_leaves_out_what_is_of_no_class(
    tmp_path: Path, model: Path, data: Path
) -> None:
    (data / "class0" / "gone.jpg").symlink_to("nowhere")  # of the side that trains
    (data / "class3" / "lost.jpg").symlink_to("nowhere")
    (data / "stray.jpg").write_bytes(picture(50))
    result = index(model, data, tmp_path / "test", split="test")
    assert [each["key"] for each in result["skipped"]] == ["class3/lost.jpg"]
    assert (result["images"], result["stored"], result["unlabelled"]) == (11, 10, 1)
    assert "left out: 1 images of no class" in render(result)
    result = index(model, data, tmp_path / "all")
    assert [each["key"] for each in result["skipped"]] == ["class0/gone.jpg", "class3/lost.jpg"]
    assert (result["images"], result["stored"], result["unlabelled"]) == (23, 21, 0)
    assert "left out" not in render(result)


def test_items_say_nothing_of_the_machine_that_indexed_them(tmp_path: Path, model: Path, data: Path) -> None:
    wrapped = tmp_path / "alice" / "images"
    wrapped.parent.mkdir()
    data.rename(wrapped)
    (tmp_path / "alice" / "above.jpg").write_bytes(picture(50))
    (wrapped / "items.csv").write_text("path,label,key\nclass0/00.jpg,a,1\n")
    for root, uris in (
        (wrapped.parent, {"../above.jpg", *(f"class{seed % 4}/{seed:02}.jpg" for seed in range(20))}),
        (wrapped / "items.csv", {"class0/00.jpg"}),
    ):
        result = index(
            model, root, tmp_path / "galleries" / root.stem, format="csv" if root.suffix else "folder"
        )
        with GalleryDirectory(tmp_path / "galleries", policy=MANUAL) as directory:
            (hits,) = directory.get(root.stem).search(np.eye(1, 3, dtype=np.float32), 100)
        assert {hit.uri for hit in hits} == uris
        assert all((Path(result["root"]) / hit.uri).is_file() for hit in hits)
        assert b"alice" not in (tmp_path / "galleries" / root.stem / "gallery.sqlite").read_bytes()


def test_gallery_of_another_model_is_left_alone(tmp_path: Path, model: Path, data: Path) -> None:
    path = tmp_path / "galleries" / "birds"
    Gallery.create(path, model_name="other", fingerprint="0" * 64, dimension=3).close()
    with pytest.raises(ModelMismatch, match=r"birds.*other"):
        index(model, data, path)
    gallery = Gallery.open(path)
    assert gallery.info().items == 0
    gallery.close()


def test_wrong_arguments(tmp_path: Path, model: Path, data: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot name a gallery"):
        index(model, data, tmp_path / "Birds")
    with pytest.raises(BadSetting, match="a path"):
        index(model, data, tmp_path / "birds", galleries=tmp_path)
    with pytest.raises(BadData):
        index(model, tmp_path / "absent", tmp_path / "birds")
    with pytest.raises(NotFound):
        index(tmp_path / "absent.onnx", data, tmp_path / "birds")
    assert not (tmp_path / "birds").exists()


@dataclass(frozen=True)
class FakeSpec:
    name: str = "fake"
    fingerprint: str = "f" * 64
    fp32_fingerprint: str | None = None
    dimension: int = 4


class FakeEncoder:
    """Embeds the number that a file holds; decodes the first of them last."""

    spec = FakeSpec()

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.decoded = 0
        self.furthest = 0
        self.guard = threading.Lock()

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
        self.batches.append(len(images))
        angles = images[:, 0, 0, 0] / 100.0
        zero = np.zeros_like(angles)
        return np.stack([np.cos(angles), np.sin(angles), zero, zero], axis=1).astype(np.float32)


def test_order_is_kept_and_memory_is_bounded(tmp_path: Path) -> None:
    rows = []
    for number in range(100):
        path = tmp_path / f"{number:03}.jpg"
        path.write_bytes(str(number).encode())
        rows.append(Row(path.name, File(path), f"label {number}"))
    encoder, catalog = FakeEncoder(), Catalog(tmp_path, "folder", ())
    with GalleryDirectory(tmp_path / "galleries", policy=MANUAL) as directory:
        report = index_rows(encoder, catalog, rows, Target(directory, "a", encoder.spec), batch=8, threads=3)
        assert [each.key for each in report.skipped] == [f"{number:03}.jpg" for number in range(9, 100, 10)]
        assert report.stored == 90
        assert encoder.batches == [8] * 11 + [2]
        # Ahead of the encoder: two batches that wait, one that is put together, and the nines among them.
        assert encoder.furthest <= 3 * 8 + 10 + 1
        gallery = directory.get("a")
        for number in (0, 8, 50):
            angle = number / 100.0
            query = np.array([[np.cos(angle), np.sin(angle), 0, 0]], np.float32)
            assert gallery.search(query, 1)[0][0].label == f"label {number}"


def test_failure_while_storing_ends_the_run_and_keeps_what_was_stored(tmp_path: Path) -> None:
    class Failing(FakeEncoder):
        def encode(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
            if len(self.batches) == 3:
                raise ZeroDivisionError
            return super().encode(images)

    rows, encoder = [], Failing()
    for number in range(90):
        path = tmp_path / f"{number:03}.jpg"
        path.write_bytes(str(number // 10).encode())
        rows.append(Row(path.name, File(path), ""))
    with GalleryDirectory(tmp_path / "galleries", policy=MANUAL) as directory:
        with pytest.raises(ZeroDivisionError):
            index_rows(
                encoder,
                Catalog(tmp_path, "folder", ()),
                rows,
                Target(directory, "a", encoder.spec),
                batch=8,
                threads=2,
            )
        assert directory.get("a").info().items == 24
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]
