"""Indexing again: what is done is not done twice, and nothing is taken away that was not asked for."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import numpy as np
import pytest

from serving.catalog.parquet import Cell
from serving.catalog.picture import File, Member
from serving.errors import BadData
from serving.gallery.gallery import Gallery
from serving.gallery.item import GalleryItem, ItemChange
from serving.gallery.verify import verify
from serving.indexing.command import render
from serving.model.encoder import Encoder
from tests.pictures import encoded
from tests.serving.indexed import counts, index, opened, picture
from tests.serving.test_parquet import make_parquet
from tests.serving.test_webdataset import make_tar
from tests.serving.vectors import flip, sql

Again: TypeAlias = Callable[..., dict[str, int]]


@pytest.fixture
def birds(tmp_path: Path, model: Path, data: Path) -> Path:
    """A gallery of all pictures of `data`."""
    index(model, data, tmp_path / "galleries" / "birds")
    return tmp_path / "galleries" / "birds"


@pytest.fixture
def again(model: Path, data: Path, birds: Path) -> Again:
    """Index the pictures once more, or those of another folder; returns what that did."""
    return lambda source=data, **more: counts(index(model, source, birds, **more))


def refuse(*_: object) -> Any:
    raise AssertionError("this was not to be done again")


def online(path: Path, *keys: str) -> None:
    """Put items in as a client of the server does."""
    with opened(path) as gallery:
        gallery.upsert([GalleryItem(key, np.eye(3, dtype=np.float32)[0], "online") for key in keys])


def labels(path: Path) -> dict[str, str]:
    with opened(path) as gallery:
        return {item.key: item.label for item in gallery.list(limit=1000)}


def test_unchanged_files_are_not_read_and_nothing_is_written(
    model: Path, data: Path, birds: Path, again: Again, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(data / "class0/00.jpg", ns=(1, 1))  # is hashed once, and known by that
    monkeypatch.setattr(Encoder, "preprocess", refuse)
    monkeypatch.setattr(Gallery, "upsert", refuse)
    assert again() == {"unchanged": 20}
    monkeypatch.setattr(File, "read_bytes", refuse)
    for change in (Gallery.delete, Gallery.touch, Gallery.rebuild):
        monkeypatch.setattr(Gallery, change.__name__, refuse)
    result = index(model, data, birds)
    assert (counts(result), result["items"]) == ({"unchanged": 20}, 20)
    assert "unchanged: 20 images" in render(result)


def pack(file: Path, numbers: dict[str, int]) -> None:
    pictures = {name: picture(number) for name, number in numbers.items()}
    if file.suffix == ".tar":
        make_tar(file, {f"{name}.jpg": data for name, data in pictures.items()})
    else:
        make_parquet(file, key=list(pictures), image=list(pictures.values()))


@pytest.mark.parametrize("name", ["a.tar", "a.parquet"])
def test_a_packed_image_is_known_by_its_file_and_then_by_itself(
    tmp_path: Path, again: Again, name: str
) -> None:
    file = tmp_path / "packed" / name
    file.parent.mkdir()
    pack(file, {"one": 1, "two": 2})
    assert again(file.parent) == {"stored": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoder, "preprocess", refuse)
        patch.setattr(Member, "read_bytes", refuse)
        patch.setattr(Cell, "read_bytes", refuse)
        assert again(file.parent) == {"unchanged": 2}
    pack(file, {"one": 1, "two": 3, "three": 4})
    os.utime(file, ns=(1, 1))
    assert again(file.parent) == {"stored": 1, "unchanged": 1, "changed": 1}
    assert again(file.parent, sync=True) == {"stored": 1, "unchanged": 2}


def test_what_is_new_is_added_the_rest_by_sync(model: Path, data: Path, birds: Path, again: Again) -> None:
    (data / "class0/new.jpg").write_bytes(picture(99))
    (data / "class1/01.jpg").unlink()
    (data / "class2/02.jpg").write_bytes(picture(98, "PNG"))
    with opened(birds) as gallery:
        (before,) = gallery.get(["class2/02.jpg"])
    result = index(model, data, Path("birds"), galleries=birds.parent)
    assert counts(result) == {"stored": 1, "unchanged": 18, "changed": 1, "gone": 1}
    assert (result["gallery"], result["items"], result["images"]) == (str(birds), 21, 20)
    text = render(result)
    assert "changed: 1 images, whose items were left as they are; --sync updates them" in text
    assert "gone: 1 items that the data set has no more were left as they are; --sync deletes them" in text
    with opened(birds) as gallery:
        assert gallery.get(["class2/02.jpg"])[0].version == before.version
    assert again(sync=True) == {"stored": 1, "unchanged": 19, "deleted": 1}
    assert set(labels(birds)) == {path.relative_to(data).as_posix() for path in data.rglob("*.jpg")}
    with opened(birds) as gallery:
        assert not np.allclose(gallery.get(["class2/02.jpg"])[0].vector, before.vector)


def test_an_edited_table_decodes_nothing(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, path = data / "items.csv", tmp_path / "birds"
    table.write_text("path,label,key,price\nclass0/00.jpg,a,one,1\nclass1/01.jpg,b,two,2\n")
    index(model, table, path, thumbnails=True)
    with opened(path) as gallery:
        (before,) = gallery.get(["one"], thumbnails=True)
    table.write_text("path,label,key,price\nclass0/00.jpg,c,one,1\nclass1/01.jpg,b,two,2.0\n")
    monkeypatch.setattr(Encoder, "preprocess", refuse)
    monkeypatch.setattr(File, "read_bytes", refuse)
    assert counts(index(model, table, path)) == {"updated": 2}
    with opened(path) as gallery:
        (after,) = gallery.get(["one"])
        assert (after.label, after.source) == ("c", before.source)
        np.testing.assert_array_equal(after.vector, before.vector)
        assert gallery.get(["one"], thumbnails=True)[0].thumbnail == before.thumbnail
        assert str(gallery.get(["two"])[0].metadata["price"]) == "2.0"
    assert counts(index(model, table, path)) == {"unchanged": 2}


@pytest.fixture
def shop(tmp_path: Path, model: Path, data: Path) -> Callable[..., dict[str, Any]]:
    """Write the row of one item into a table, and bring the gallery in step with it."""

    def sync(row: str, picture_too: bytes = b"", **more: Any) -> dict[str, Any]:
        if picture_too:
            (data / "class0/00.jpg").write_bytes(picture_too)
        (data / "items.csv").write_text(f"path,label,key,price,note,stock\nclass0/00.jpg,{row}\n")
        return index(
            model, data / "items.csv", tmp_path / "shop", **({"thumbnails": True, "sync": True} | more)
        )

    sync("boot,one,60,new,2.0")
    return sync


def edit(path: Path, *, by: str, **change: Any) -> None:
    """Change the item `one` as clients do; of the metadata, what is not given stays."""
    with opened(path) as gallery:
        (stored,) = gallery.get(["one"])
        if by == "update":
            gallery.update([ItemChange("one", **change)])
        else:  # by upsert, with the vector that was read
            texts = {**change, "metadata": {**stored.metadata, "stock": 2, **change.get("metadata", {})}}
            gallery.upsert([replace(stored, source=None, **texts)])


def one(path: Path) -> tuple[str, dict[str, Any], bytes]:
    with opened(path) as gallery:
        (item,) = gallery.get(["one"], thumbnails=True)
    return item.label, dict(item.metadata), item.thumbnail


@pytest.mark.parametrize("by", ["update", "upsert"])
@pytest.mark.parametrize("file", ["new", "of 0.1"])
def test_sync_keeps_what_clients_changed(tmp_path: Path, shop: Any, by: str, file: str) -> None:
    path = tmp_path / "shop"
    before = one(path)[2]
    if file == "of 0.1":
        sql(path, "ALTER TABLE items DROP COLUMN given")
        assert counts(shop("boot,one,60,new,2.0")) == {"unchanged": 1}
    edit(path, by=by, metadata={"price": 50, "seen": True})
    assert counts(shop("boot,one,60,new,2.0")) == {"unchanged": 1}
    assert one(path) == ("boot", {"price": 50, "note": "new", "stock": 2, "seen": True}, before)
    edit(path, by=by, label="shoe", uri="https://shop/1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(File, "read_bytes", refuse)
        result = shop("boot,one,60,old,3.0")
    assert (counts(result), result["conflicts"]) == ({"updated": 1}, [])
    assert one(path) == ("shoe", {"price": 50, "note": "old", "stock": 3.0, "seen": True}, before)
    result = shop("boot,one,55,old,3.0", picture(9))  # both changed the price; and the photo is another
    assert (counts(result), result["conflicts"]) == ({"stored": 1}, ["one: price was 50"])
    assert "conflicts, settled as the data set has it: 1\n  one: price was 50" in render(result)
    label, metadata, picture_now = one(path)
    assert (label, metadata) == ("shoe", {"price": 55, "note": "old", "stock": 3.0, "seen": True})
    assert picture_now not in (b"", before)
    edit(path, by=by, label="boot", metadata={"price": 40})
    result = shop("boot,one,40,old,3.0", picture(9))  # both the same
    assert (counts(result), result["conflicts"]) == ({"updated": 1}, [])
    assert counts(shop("boot,one,40,old,3.0", picture(9))) == {"unchanged": 1}
    assert verify(path).problems == []


@pytest.mark.parametrize(("before", "after"), [("60", "60.0"), ("60", "n/a"), ("true", "yes")])
def test_an_edit_outlives_another_type_of_its_column(
    tmp_path: Path, shop: Any, before: str, after: str
) -> None:
    rows = (
        "boot,one,{},new,2.0\nclass0/04.jpg,boot,two,{},new,2.0\nclass0/08.jpg,boot,three,{},new,2.0".format
    )
    shop(rows(before, before, before))
    edit(tmp_path / "shop", by="update", metadata={"price": 50})
    result = shop(rows(before, before, after))
    assert (result["updated"], result["conflicts"]) == (3, [])
    with opened(tmp_path / "shop") as gallery:
        one, two = gallery.get(["one", "two"])
    assert (one.metadata["price"], str(two.metadata["price"]).lower()) == (
        50,
        before if after != "60.0" else after,
    )


def test_an_edit_while_a_new_photo_is_embedded_is_kept(tmp_path: Path, shop: Any, between: Any) -> None:
    between(lambda: edit(tmp_path / "shop", by="update", metadata={"price": 50}))
    assert counts(shop("boot,one,60,old,2.0", picture(9))) == {"stored": 1}
    assert one(tmp_path / "shop")[1] == {"price": 50, "note": "old", "stock": 2.0}


def test_texts_too_large_together_leave_the_item_as_it_is(tmp_path: Path, shop: Any) -> None:
    edit(tmp_path / "shop", by="update", metadata={"story": "x" * 60_000})
    before = one(tmp_path / "shop")
    result = shop(f"boot,one,60,{'y' * 10_000},2.0\nclass0/04.jpg,boot,two,60,new,2.0")
    assert counts(result) == {"stored": 1, "kept": 1, "skipped": 1}
    assert one(tmp_path / "shop") == before


def test_a_table_that_names_another_file_by_a_key_is_seen(tmp_path: Path, model: Path, data: Path) -> None:
    table, path = data / "items.csv", tmp_path / "birds"
    for name, number in (("a.bmp", 1), ("b.bmp", 2), ("c.bmp", 1)):  # of one size and time
        (data / name).write_bytes(picture(number, "BMP"))
        os.utime(data / name, ns=(1, 1))
    for name, found in (("a.bmp", {"stored": 1}), ("b.bmp", {"changed": 1}), ("c.bmp", {"updated": 1})):
        table.write_text(f"path,label,key\n{name},a,one\n")
        assert counts(index(model, table, path)) == found


def test_sync_spares_other_data_sets(tmp_path: Path, again: Again, data: Path, birds: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "x.jpg").write_bytes(picture(50))
    (other / "y.jpg").write_bytes(picture(51))
    online(birds, "put in")
    for name in "ab":  # two tables of one folder are two data sets
        (data / f"{name}.csv").write_text(f"path,label,key\nclass0/00.jpg,{name},{name}\n")
        assert again(data / f"{name}.csv", sync=True) == {"stored": 1}
    assert again(other, sync=True) == {"stored": 2}
    (other / "x.jpg").unlink()
    (data / "class1/01.jpg").unlink()
    assert again(other, sync=True) == {"unchanged": 1, "deleted": 1}
    assert again(format="folder", sync=True) == {"unchanged": 19, "deleted": 1}
    assert len(labels(birds)) == 19 + 1 + 2 + 1
    assert {"put in", "a", "b", "y.jpg"} < set(labels(birds))


def test_a_key_is_the_same_item_only_with_the_same_bytes(tmp_path: Path, again: Again, data: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)
    flip(copy / "class0/00.jpg", -20)
    shutil.copystat(data / "class0/00.jpg", copy / "class0/00.jpg")
    assert again(copy) == {"unchanged": 19, "changed": 1}
    assert again(copy, sync=True) == {"unchanged": 19, "stored": 1}
    (data / "class0/00.jpg").unlink()  # its item is the copy's now
    assert "deleted" not in again(sync=True)


def test_items_move_to_the_side_that_was_indexed_last(tmp_path: Path, model: Path, data: Path) -> None:
    path = tmp_path / "birds"
    assert counts(index(model, data, path, split="test")) == {"stored": 10}
    assert counts(index(model, data, path, split="all")) == {"stored": 10, "unchanged": 10}
    # All of them are of the side "all" now; a sync of one side takes its own along and leaves the rest.
    assert counts(index(model, data, path, split="train", sync=True)) == {"unchanged": 10}
    (data / "class2/02.jpg").unlink()
    (data / "class0/00.jpg").unlink()
    assert counts(index(model, data, path, split="test", sync=True)) == {"unchanged": 9}
    # Whoever indexes all sides of a data set sees what is gone from any of them.
    assert counts(index(model, data, path, split="all")) == {"unchanged": 18, "gone": 2}
    assert counts(index(model, data, path, split="all", sync=True)) == {"unchanged": 18, "deleted": 2}


def test_an_item_put_in_under_a_files_key_counts_as_changed(again: Again, data: Path, birds: Path) -> None:
    online(birds, "class0/00.jpg", "class1/new.jpg")
    (data / "class1/new.jpg").write_bytes(picture(60))
    assert again() == {"unchanged": 19, "changed": 2}
    assert labels(birds)["class0/00.jpg"] == labels(birds)["class1/new.jpg"] == "online"
    assert again(sync=True) == {"unchanged": 19, "stored": 2}
    assert "online" not in labels(birds).values()
    with opened(birds) as gallery:
        gallery.delete(["class1/new.jpg"])
    assert again() == {"unchanged": 20, "stored": 1}


def test_a_bad_one_keeps_its_item(tmp_path: Path, model: Path, again: Again, data: Path, birds: Path) -> None:
    (data / "class0/00.jpg").write_bytes(b"no image")
    result = index(model, data, birds)
    assert counts(result) == {"unchanged": 19, "skipped": 1, "kept": 1}
    assert "kept: items of an earlier run of 1 images that are skipped now" in render(result)
    other = tmp_path / "other"  # whose bad image does not take the item of this data set
    (other / "class0").mkdir(parents=True)
    (other / "class0/00.jpg").write_bytes(b"no image")
    (other / "good.jpg").write_bytes(picture(70))
    assert again(other, sync=True) == {"stored": 1, "skipped": 1, "kept": 1}
    assert again(sync=True) == {"unchanged": 19, "skipped": 1, "deleted": 1}


def test_an_unreadable_one_keeps_its_item(again: Again, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(data / "class0/00.jpg", ns=(1, 1))
    monkeypatch.setattr(File, "read_bytes", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert again(sync=True) == {"unchanged": 19, "skipped": 1, "kept": 1}


def test_sync_with_nothing_readable_deletes_nothing(model: Path, data: Path, birds: Path) -> None:
    for path in data.rglob("*.jpg"):
        path.write_bytes(b"no image")
    with pytest.raises(BadData, match="none of the 20 images"):
        index(model, data, birds, sync=True)
    assert len(labels(birds)) == 20


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets somebody write to the gallery just before indexing does, once."""

    def let(act: Callable[[], object], at: str = "upsert") -> None:
        real, left = getattr(Gallery, at), [1]

        def write(gallery: Gallery, *given: Any, **more: Any) -> Any:
            if left and "expected" in more:
                left.clear()
                act()
            return real(gallery, *given, **more)

        monkeypatch.setattr(Gallery, at, write)

    return let


CHANGED, STORED, SAME = {"unchanged": 20, "changed": 1}, {"unchanged": 20, "stored": 1}, {"unchanged": 21}


@pytest.mark.parametrize(
    ("others", "sync", "found"),
    [("online", False, CHANGED), ("online", True, STORED), ("index", False, SAME)],
)
def test_an_item_written_by_others_meanwhile_is_replaced_only_with_sync(
    again: Again, data: Path, birds: Path, between: Any, others: str, sync: bool, found: dict[str, int]
) -> None:
    (data / "class0/new.jpg").write_bytes(picture(99))
    between({"online": lambda: online(birds, "class0/new.jpg"), "index": again}[others])
    assert again(sync=sync) == found
    assert labels(birds)["class0/new.jpg"] == ("online" if found is CHANGED else "class0")


def test_a_vector_is_not_told_anew_over_a_newer(again: Again, data: Path, birds: Path, between: Any) -> None:
    table = data / "items.csv"
    table.write_text("path,label,key\nclass0/00.jpg,a,one\n")
    again(table)
    table.write_text("path,label,key\nclass0/00.jpg,b,one\n")
    between(lambda: online(birds, "one"))
    assert again(table, sync=True) == {"changed": 1}
    assert labels(birds)["one"] == "online"
    assert again(table, sync=True) == {"stored": 1}


def test_sync_spares_what_was_just_put_in(again: Again, data: Path, birds: Path, between: Any) -> None:
    (data / "class0/00.jpg").unlink()
    (data / "class1/01.jpg").unlink()
    between(lambda: online(birds, "class0/00.jpg"), at="delete")
    assert again(sync=True) == {"unchanged": 18, "deleted": 1}
    assert labels(birds)["class0/00.jpg"] == "online"


def test_a_source_is_of_what_was_embedded(again: Again, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes while it is read is found changed the next time."""
    file, real = data / "class0/00.jpg", File.read_bytes
    os.utime(file, ns=(1, 1))

    def read(image: File) -> bytes:
        found = real(image)
        if image.path == file:
            file.write_bytes(picture(77))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(File, "read_bytes", read)
        assert again() == {"unchanged": 20}
    assert again() == {"unchanged": 19, "changed": 1}


COUNT = 120


def stored(path: Path) -> int:
    with opened(path) as gallery:
        return gallery.info().items


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_run_broken_off_by_a_signal_at_any_moment_is_continued_by_the_next(
    tmp_path: Path, model: Path, number: signal.Signals, status: int
) -> None:
    data, path = tmp_path / "large", tmp_path / "birds"
    data.mkdir()
    noise = encoded(np.random.default_rng(0).integers(0, 256, (640, 640, 3), np.uint8), "JPEG")
    for place in range(COUNT):
        (data / f"{place:03}.jpg").write_bytes(noise)  # takes its time
    command = [sys.executable, "-m", "crossbatch", "index", "--model", str(model), "--data", str(data)]
    command += ["--batch", "2", "--threads", "1", str(path)]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    ends, before = [], 0
    for wanted in (1, COUNT // 2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while process.poll() is None:
            # Only once this run has stored something: a signal while Python itself starts is not ours.
            if (path / "gallery.sqlite").is_file() and stored(path) >= max(wanted, before + 1):
                process.send_signal(number)
                break
            time.sleep(0.01)
        _, errors = process.communicate(timeout=30)
        assert "Traceback" not in errors
        ends.append(process.returncode)
        assert stored(path) >= max(before, wanted)
        before = stored(path)
    assert status in ends
    expected = {"stored": COUNT - before, "unchanged": before}
    assert counts(index(model, data, path, batch=64)) == {name: n for name, n in expected.items() if n}
    assert stored(path) == COUNT
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(".")]
