"""Vector files: what goes out comes in again, other programs' files too, and what is wrong is told."""

import json
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serving.errors import (
    AlreadyExists,
    BadData,
    BadSetting,
    InvalidArgument,
    ModelMismatch,
    NotFound,
)
from serving.gallery import vectors
from serving.gallery.command import Settings, render, run
from serving.gallery.directory import GalleryDirectory, check_name
from serving.gallery.item import JPEG, GalleryItem
from serving.indexing import embed
from tests.serving.indexed import index, opened
from tests.serving.vectors import MANUAL, MODEL, units
from tests.tiny_model import write_tiny_model


def done(folder: Path, *words: object, **more: Any) -> dict[str, Any]:
    given = dict(zip(("action", "name", "other"), map(str, words), strict=False))
    return run(Settings.model_validate({**given, "galleries": folder, **more}))


def contents(folder: Path, name: str) -> list[tuple[Any, ...]]:
    with opened(folder / name) as gallery:
        items = gallery.get([item.key for item in gallery.list(limit=99)], thumbnails=True)
    return [(it.key, it.label, it.uri, it.metadata, it.vector.tolist(), it.thumbnail) for it in items]


@pytest.mark.parametrize("thumbnails", [False, True])
def test_what_goes_out_of_a_gallery_comes_in_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thumbnails: bool
) -> None:
    monkeypatch.setattr(vectors, "_AT_ONCE", 3)
    monkeypatch.setattr(vectors, "_GROUP_ROWS", 2)
    with GalleryDirectory(tmp_path, policy=MANUAL) as directory:
        meta = [{"n": 2**52 + i, "at": [None, 0.5]} for i in range(7)]
        directory.create("birds", **MODEL, thumbnail_side=32).upsert(
            GalleryItem(f"k {i}", row, "ü", f"file:{i}", meta[i], None, JPEG + b"%d" % i)
            for i, row in enumerate(units(7, 4))
        )
    file = tmp_path / "items.parquet"
    told = render(done(tmp_path, "export", "birds", file, thumbnails=thumbnails))
    assert told.startswith(f"wrote the 7 items of the gallery birds to {file} (0.")
    table = pq.ParquetFile(file)
    types = {"key": "string", "label": "string", "uri": "string", "metadata": "string"}
    types["vector"] = "list<element: float>"
    types |= {"thumbnail": "binary"} if thumbnails else {}
    assert {field.name: str(field.type) for field in table.schema_arrow} == types
    assert (table.metadata.num_rows, table.metadata.num_row_groups) == (7, 4)
    assert json.loads(table.read()["metadata"][3].as_py()) == meta[3]
    for _ in range(2):  # into a new gallery, and over the same items
        told = render(done(tmp_path, "import", "again", file))
        assert told == f"put 7 items of {file} into the gallery again, now 7"
    expected = [each if thumbnails else (*each[:5], b"") for each in contents(tmp_path, "birds")]
    assert contents(tmp_path, "again") == expected
    with opened(tmp_path / "again") as gallery:
        assert (gallery.meta.model_name, gallery.meta.fingerprint) == ("m", "f" * 64)
        assert gallery.info().fresh == 0
    with pytest.raises(AlreadyExists, match="already something at"):
        done(tmp_path, "export", "birds", file)


def theirs(path: Path, maker: vectors.Maker | None = None, **columns: Any) -> Path:
    """A file as another program writes one; a column that is None is not there."""
    table = {"key": [7, 8], "Vector": np.eye(3)[:2].tolist()} | columns
    note = {"crossbatch": maker.model_dump_json()} if maker else None
    pq.write_table(pa.table({name: cells for name, cells in table.items() if cells}, metadata=note), path)
    return path


def test_names_that_begin_alike_grow_apart() -> None:
    short, one, other = "a" * 53, "a" * 60 + "b", "a" * 60 + "c"
    names = [check_name(vectors.unfinished(name)) for name in (short, one, other)]
    assert names[0] == f"{short}.unfinished"
    assert len({*names}) == 3


def test_a_file_of_others_needs_the_model_and_brings_its_columns(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m.onnx")
    rows = np.eye(3)[:2].tolist()
    more: dict[str, Any] = {
        "label": [None, "b"],
        "price": [1.5, None],
        "list": [[1], []],
        "thumbnail": ["not", "kept"],
    }
    file = theirs(tmp_path / "theirs.parquet", metadata=[{"brand": "x", "n": None}, None], **more)
    with pytest.raises(BadSetting, match="does not say which model made its vectors; give its file by"):
        done(tmp_path, "import", "new", file)
    done(tmp_path, "import", "new", file, model=model)
    assert contents(tmp_path, "new") == [
        ("7", "", "", {"price": 1.5, "brand": "x"}, rows[0], b""), ("8", "b", "", {}, rows[1], b""),
    ]  # fmt: skip
    done(tmp_path, "export", "new", tmp_path / "out.parquet")
    with GalleryDirectory(tmp_path, policy=MANUAL) as directory:
        directory.create("birds", **MODEL)
    with pytest.raises(ModelMismatch, match="gallery birds holds embeddings of the model m"):
        done(tmp_path, "import", "birds", tmp_path / "out.parquet")
    done(tmp_path, "export", "birds", tmp_path / "birds.parquet")
    with pytest.raises(ModelMismatch, match=r"vectors of the model m .* model given is tiny"):
        done(tmp_path, "import", "birds", tmp_path / "birds.parquet", model=model)


LARGE = {"id": Decimal("12345678901234567890"), "cost": Decimal("0.50")}
DATES = {"on": date(2024, 5, 1), "at": pa.scalar(1, pa.timestamp("ns")), "cost": Decimal("1.50")}


@pytest.mark.parametrize(
    ("cell", "metadata"),
    [
        ("", {}),
        (
            '{"id": 9007199254740993, "in": [-9007199254740991]}',
            {"id": "9007199254740993", "in": [1 - 2**53]},
        ),
        ({"id": 2**53 + 1, "in": [{"id": 2**60}]}, {"id": "9007199254740993", "in": [{"id": str(2**60)}]}),
        (LARGE, {"id": "12345678901234567890", "cost": 0.5}),
        (DATES, {"on": "2024-05-01", "at": "1970-01-01T00:00:00", "cost": 1.5}),
        ({"none": float("nan"), "on": [date(2024, 5, 1), None]}, {"on": ["2024-05-01", None]}),
    ],
)
def test_values_within_metadata_are_what_they_are_as_columns(
    tmp_path: Path, cell: Any, metadata: dict[str, Any]
) -> None:
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.eye(3)[:2])
    file = theirs(tmp_path / "theirs.parquet", metadata=[cell, None], Vector=tensor)
    done(tmp_path, "import", "new", file, model=write_tiny_model(tmp_path / "m.onnx"))
    assert [it[3] for it in contents(tmp_path, "new")] == [metadata, {}]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"key": None}, "lacks the column key; it has Vector: rename"),
        ({"KEY": ["a", "b"]}, "has a column twice, Key being key; it has "),
        ({"key": [b"a", b"b"]}, "column key of .*parquet is of the type binary; expected text or whole numb"),
        ({"key": [1.0, None]}, "column key of .* is of the type double; expected text or whole numbers"),
        ({"label": [b"a", b"b"]}, "column label of .* type binary; expected text or whole numbers"),
        ({"uri": [1, 2]}, "column uri of .* type int64; expected text"),
        ({"thumbnail": ["a", "b"]}, "column thumbnail of .* type string; expected bytes"),
        ({"thumbnail": [{"bytes": b""}] * 2}, "column thumbnail of .* type struct<.*>; expected bytes"),
        ({"Vector": ["[1, 0, 0]"] * 2}, "column Vector of .* type string; expected lists of floats"),
        ({"Vector": [[1.0, 0, 0], None]}, ": row 1: "),
        ({"Vector": [[1.0, 0, 0], [3.0, 0, 0]]}, ": row 1: the vector of '8' has norm 3"),
        ({"key": ["a", None]}, ": row 1 has an empty key; each row"),
        (
            {"key": [*range(1030), 7], "Vector": [[1.0, 0, 0]] * 1031},
            ": row 1030 has the key '7' again; each row",
        ),
        ({"metadata": ["{}", "[1]"]}, r": row 1: the metadata '\[1\]' is no JSON object"),
        ({"metadata": ["{}", "{"]}, ": row 1: the metadata '{' is no JSON object"),
        ({"metadata": ["{}", '{"a":' + "[" * 99999]}, ": row 1: the metadata .* is no JSON object"),
        ({"metadata": ["{}", '{"a": NaN}']}, ": row 1: metadata cannot be written as JSON"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_and_leaves_nothing(
    tmp_path: Path, columns: dict[str, Any], says: str
) -> None:
    maker = vectors.Maker(name="m", fingerprint="f", dimension=3, thumbnail_side=32)
    done(tmp_path, "import", "there", theirs(tmp_path / "theirs.parquet", maker))
    before = contents(tmp_path, "there")
    file = theirs(tmp_path / "theirs.parquet", maker, **columns)
    for name in ("new", "there"):
        with pytest.raises(InvalidArgument, match=f"theirs.parquet.*{says}" if says[0] == ":" else says):
            done(tmp_path, "import", name, file)
    assert {path.name for path in tmp_path.iterdir()} == {file.name, "there"}
    assert contents(tmp_path, "there") == before


def test_no_file_no_parquet_and_no_pyarrow_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="there is no file"):
        done(tmp_path, "import", "new", tmp_path / "nothing.parquet")
    file = tmp_path / "text.parquet"
    file.write_text("no parquet")
    with pytest.raises(BadData, match="cannot be read, or is damaged"):
        done(tmp_path, "import", "new", file)
    with GalleryDirectory(tmp_path, policy=MANUAL) as directory:
        directory.create("birds", **MODEL)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for words in (("import", "new", file), ("export", "birds", tmp_path / "x")):
        with pytest.raises(BadSetting, match=r"install crossbatch\[parquet\]"):
            done(tmp_path, *words)


def embedded(model: Path, data: Path, out: Path) -> dict[str, Any]:
    given = {"data": data, "model": model, "out": out, "batch": 3, "threads": 2}
    return embed.run(embed.Settings.model_validate(given))


def test_a_folder_is_embedded_into_a_file_that_makes_the_gallery_that_index_makes(
    tmp_path: Path, model: Path, data: Path
) -> None:
    (data / "class0" / "torn.jpg").write_bytes(b"x")
    (data / "notes.txt").touch()
    result = embedded(model, data, tmp_path / "vectors.parquet")
    assert (result["images"], result["stored"], result["model"]) == (21, 20, "tiny")
    assert result["provider"] == "cpu"
    (skipped,) = result["skipped"]
    assert skipped["key"] == "class0/torn.jpg"
    told = f"passed over: 1 .txt\nskipped: 1\n  class0/torn.jpg: {skipped['reason']}"
    assert told in embed.render(result)
    done(tmp_path, "import", "birds", tmp_path / "vectors.parquet")
    index(model, data, tmp_path / "indexed")
    assert contents(tmp_path, "birds") == contents(tmp_path, "indexed")
    with opened(tmp_path / "birds") as gallery, opened(tmp_path / "indexed") as other:
        assert gallery.meta.fingerprint == other.meta.fingerprint
    for path in data.rglob("*.jpg"):
        path.write_bytes(b"x")
    with pytest.raises(BadData, match=r"none of the 21 images .* the first, class0/00\.jpg: "):
        embedded(model, data, tmp_path / "again.parquet")
    assert not (tmp_path / "again.parquet").exists()
