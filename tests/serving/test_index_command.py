"""What the index command takes and leaves besides items: names, thumbnails, the report of bad images."""

import csv
import io
from pathlib import Path

import pytest
from PIL import Image

from serving.catalog.picture import File
from serving.errors import BadData, BadSetting, InvalidArgument, ReadOnly
from serving.gallery.gallery import Gallery
from serving.indexing.command import render
from serving.indexing.report import Skipped, check_report, write_report
from tests.serving.indexed import counts, fill, index, opened, picture
from tests.tiny_model import write_tiny_model


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return fill(tmp_path / "data")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model.onnx")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_bare_name_is_refused_with_both_spellings(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadSetting, match=r"give \./birds, or birds and the folder .* --galleries"):
        index(model, data, "birds")
    assert not (tmp_path / "birds").exists()
    assert counts(index(model, data, "./birds")) == {"stored": 20}
    assert counts(index(model, data, "birds", galleries=tmp_path)) == {"unchanged": 20}
    with pytest.raises(BadSetting, match="a path"):
        index(model, data, "galleries/birds", galleries=tmp_path)


def test_bad_images_are_listed_in_a_report_that_goes_with_them(
    tmp_path: Path, model: Path, data: Path
) -> None:
    path = tmp_path / "galleries" / "birds"
    (data / 'class0/a, "b"\n.jpg').write_bytes(b"text")
    (data / "class1/gone.jpg").symlink_to("nowhere")
    result = index(model, data, path)
    assert result["report"] == str(path / "skipped.csv")
    assert rows(path / "skipped.csv") == result["skipped"]
    assert [each["path"] for each in result["skipped"]] == ['class0/a, "b"\n.jpg', "class1/gone.jpg"]
    (data / 'class0/a, "b"\n.jpg').unlink()
    (data / "class1/gone.jpg").unlink()
    result = index(model, data, path)
    assert result["report"] is None
    assert not (path / "skipped.csv").exists()
    assert not list(path.glob(".skipped*"))


def test_the_report_goes_where_it_is_wanted_also_where_no_image_is_good(
    tmp_path: Path, model: Path, data: Path
) -> None:
    for path in data.rglob("*.jpg"):
        path.write_bytes(b"text")
    report = tmp_path / "bad.csv"
    with pytest.raises(BadData):
        index(model, data, tmp_path / "birds", report=report)
    assert len(rows(report)) == 20
    assert not (tmp_path / "birds").exists()
    (data / "class0/00.jpg").write_bytes(picture(0))
    result = index(model, data, tmp_path / "birds", report=report)
    assert len(rows(report)) == len(result["skipped"]) == 19
    assert not (tmp_path / "birds" / "skipped.csv").exists()
    assert f"and 14 more ({report} and --json list all)" in render(result)


def test_a_report_takes_the_place_of_nothing_else(tmp_path: Path, model: Path, data: Path) -> None:
    stranger = tmp_path / "items.csv"
    stranger.write_text("path,label\nx,y\n")
    with pytest.raises(BadSetting, match="is no report of crossbatch index"):
        index(model, data, tmp_path / "birds", report=stranger)
    with pytest.raises(BadSetting, match="there is no folder"):
        check_report(tmp_path / "absent" / "bad.csv")
    with pytest.raises(BadSetting, match="cannot be written"):
        check_report(tmp_path)
    assert stranger.read_text() == "path,label\nx,y\n"
    (tmp_path / "empty.csv").touch()
    check_report(tmp_path / "empty.csv")


def test_a_report_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "skipped.csv"
    write_report(report, [Skipped("a", "a.jpg", "bad")])

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ReadOnly, match=r"the report .* cannot be written"):
        write_report(report, [Skipped("b", "b.jpg", "bad")])
    assert list(tmp_path.iterdir()) == [report]
    assert [each["key"] for each in rows(report)] == ["a"]


def test_thumbnails_are_kept_by_a_gallery_that_was_made_so(tmp_path: Path, model: Path, data: Path) -> None:
    (data / "class0/00.jpg").write_bytes(large())
    index(model, data, tmp_path / "with", thumbnails=True)
    (data / "class0/new.jpg").write_bytes(large())
    assert counts(index(model, data, tmp_path / "with")) == {"stored": 1, "unchanged": 20}
    with opened(tmp_path / "with") as gallery:
        for key, size in (
            ("class0/00.jpg", (256, 128)),
            ("class0/new.jpg", (256, 128)),
            ("class1/01.jpg", (20, 24)),
        ):
            assert Image.open(io.BytesIO(gallery.thumbnail(key))).size == size
    index(model, data, tmp_path / "without")
    with pytest.raises(BadSetting, match="made without thumbnails"):
        index(model, data, tmp_path / "without", thumbnails=True)


def large() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (600, 300), "green").save(file, "JPEG")
    return file.getvalue()


def test_the_index_is_made_once_at_the_end_and_only_after_a_change(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = Gallery.rebuild

    def rebuild(gallery: Gallery, **wanted: object) -> None:
        made.append({name: wanted[name] for name in ("index", "recall", "whole")})
        real(gallery, **wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(Gallery, "rebuild", rebuild)
    path = tmp_path / "birds"
    index(model, data, path)
    index(model, data, path)
    assert len(made) == 1
    (data / "class0/00.jpg").unlink()
    index(model, data, path)
    assert len(made) == 1
    index(model, data, path, sync=True)
    assert len(made) == 2
    with opened(path) as gallery:
        assert (gallery.info().items, gallery.info().fresh) == (19, 0)


def test_a_run_that_ended_before_its_index_was_made_is_completed_by_the_next(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Gallery, "rebuild", fail)
        with pytest.raises(KeyboardInterrupt):
            index(model, data, tmp_path / "birds")
    assert counts(index(model, data, tmp_path / "birds")) == {"unchanged": 20}
    with opened(tmp_path / "birds") as gallery:
        assert (gallery.info().index_items, gallery.info().fresh) == (20, 0)


def test_keys_that_no_item_can_have_are_skipped_in_every_run(tmp_path: Path, model: Path, data: Path) -> None:
    key = "k" * 2000
    (data / "items.csv").write_text(f"path,label,key\nclass0/00.jpg,a,{key}\nclass1/01.jpg,b,two\n")
    for found in ({"stored": 1, "skipped": 1}, {"unchanged": 1, "skipped": 1}):
        result = index(model, data, tmp_path / "birds", sync=True)
        assert counts(result) == found
        assert "2000 bytes" in result["skipped"][0]["reason"]


def test_the_type_of_index_and_its_recall_are_kept_until_others_are_wanted(
    tmp_path: Path, model: Path, data: Path
) -> None:
    path = tmp_path / "birds"

    def wanted() -> tuple[str, str, float, int]:
        with opened(path) as gallery:
            info = gallery.info()
            return info.wanted_index, info.index_type, info.wanted_recall, info.generation

    index(model, data, path)
    assert wanted() == ("auto", "exact", 0.99, 1)
    index(model, data, path, index="IVF2,Flat", recall=0.5)
    assert wanted() == ("IVF2,Flat", "IVF2,Flat,RFlat", 0.5, 2)
    for given in ({}, {"index": "IVF2,Flat"}, {"recall": 0.5}):
        index(model, data, path, **given)
    assert wanted() == ("IVF2,Flat", "IVF2,Flat,RFlat", 0.5, 2)
    index(model, data, path, index="exact")
    assert wanted() == ("exact", "exact", 0.5, 3)
    index(model, data, tmp_path / "other", index="IVF2,Flat", recall=0.7)
    path = tmp_path / "other"
    assert wanted() == ("IVF2,Flat", "IVF2,Flat,RFlat", 0.7, 1)


def test_an_index_that_cannot_be_is_refused_before_an_image_is_read(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(File, "read_bytes", lambda _: pytest.fail("an image was read"))
    with pytest.raises(InvalidArgument, match="Nonsense"):
        index(model, data, tmp_path / "birds", index="Nonsense")
    assert not (tmp_path / "birds").exists()


def test_skipped_images_are_told_by_key_wherever_they_were_found_out(
    tmp_path: Path, model: Path, data: Path
) -> None:
    (data / "class1/01.jpg").write_bytes(b"text")
    rows = (f"class0/00.jpg,{'l' * 2000},a", "class1/01.jpg,x,b", "class2/02.jpg,x,c")
    (data / "items.csv").write_text("\n".join(("path,label,key", *rows)))
    result = index(model, data / "items.csv", tmp_path / "birds")
    assert [each["key"] for each in result["skipped"]] == ["a", "b"]
    assert (result["stored"], result["items"]) == (1, 1)


def test_split_folders_are_no_part_of_a_label(tmp_path: Path, model: Path) -> None:
    for folder in ("train", "test", "val"):
        fill(tmp_path / "data" / folder)
    index(model, tmp_path / "data", tmp_path / "birds")
    with opened(tmp_path / "birds") as gallery:
        (item,) = gallery.get(["val/class1/01.jpg"])
        assert item.label == "class1"
