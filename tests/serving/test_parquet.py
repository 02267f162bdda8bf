"""Parquet files: each kind of column, groups read in any order by many threads, and every damage."""

import datetime
import decimal
import json
import os
import pickle
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.catalog import parquet
from serving.catalog.catalog import Row, read
from serving.errors import BadData, BadImage, BadSetting


def make_parquet(file: Path, *, group: int = 100, names: Sequence[str] = (), **columns: Any) -> Path:
    """Write columns, as lists or arrow arrays; `names` are the classes', as the package datasets has them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if names:
        features = {"label": {"names": list(names), "_type": "ClassLabel"}, "image": {"_type": "Image"}}
        told = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": told})
    pq.write_table(table, file, row_group_size=group)
    return file


def contents(rows: Sequence[Row]) -> list[bytes]:
    return [row.image.read_bytes() for row in rows]


def test_files_as_the_package_datasets_writes_them(tmp_path: Path) -> None:
    for split, numbers in (("train", [0, 1, None]), ("test", [1, -1])):
        make_parquet(
            tmp_path / f"data/{split}-00000-of-00001.parquet",
            image=[{"bytes": f"{split} {i}".encode(), "path": "x.jpg"} for i in range(len(numbers))],
            label=numbers,
            names=["cat", "dog"],
        )
    catalog = read(tmp_path)
    path = tmp_path / "data/test-00000-of-00001.parquet"
    assert catalog.format == "parquet"
    assert [(row.label, row.split) for row in catalog.rows] == [
        ("dog", "test"), ("", "test"), ("cat", "train"), ("dog", "train"), ("", "train"),
    ]  # fmt: skip
    assert catalog.rows[1].key == "data/test-00000-of-00001.parquet/00000001"
    assert [catalog.path_of(row) for row in catalog.rows] == [row.key for row in catalog.rows]
    assert str(catalog.rows[1].image) == f"row 1 of {path}"
    assert catalog.rows[0].image.stamp() == (path.stat().st_size, path.stat().st_mtime_ns)
    copies = pickle.loads(pickle.dumps(catalog.rows))
    assert copies == catalog.rows
    assert contents(copies) == [b"test 0", b"test 1", b"train 0", b"train 1", b"train 2"]


def test_columns_of_ones_own(tmp_path: Path) -> None:
    path = make_parquet(
        tmp_path / "items.parquet",
        IMG=[b"one", b"two"],
        Class=pa.array(["shoe", None]).dictionary_encode(),
        Key=[12, 7],
        split=["Validation", "gallery"],
        price=[9.5, float("nan")],
        cost=[decimal.Decimal("1.25"), None],
        stock=pa.array([3, None], pa.int16()),
        ean=[1, 10**15],
        new=[True, None],
        day=[datetime.date(2024, 1, 31), None],
        at=pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns", "UTC")),
        time=pa.array([1, None], pa.time64("ns")),
        took=pa.array([1, None], pa.duration("s")),
        vector=[[1.0], [2.0]],
        gone=pa.nulls(2),
    )
    catalog = read(path)
    assert (catalog.root, catalog.table) == (tmp_path, path)
    twelve, seven = catalog.rows
    assert (twelve.key, twelve.label, twelve.split) == ("12", "shoe", "")
    assert (seven.key, seven.label, seven.split) == ("7", "", "gallery")
    assert seven.metadata == {"ean": str(10**15)}
    when = {"day": "2024-01-31", "at": "2023-11-14T22:13:20.123456+00:00", "time": "00:00:00"}
    assert twelve.metadata == {"price": 9.5, "cost": 1.25, "stock": 3, "ean": "1", "new": True} | when
    assert contents(catalog.rows) == [b"one", b"two"]
    assert read(tmp_path, "parquet", table=path) == catalog


def test_a_field_is_of_one_type_in_all_files(tmp_path: Path) -> None:
    make_parquet(tmp_path / "a.parquet", image=[b"x"], label=["a"], price=[1], size=[2.0], new=[True])
    make_parquet(tmp_path / "b.parquet", image=[b"x"], label=[1], price=[1.5], size=["L"], new=[0])
    catalog = read(tmp_path)
    first, second = catalog.rows
    why = {"size": "'L'", "new": "0"}
    assert catalog.texts == tuple(
        f"field {name} is text because of {value} in row 0 of {tmp_path / 'b.parquet'}"
        for name, value in why.items()
    )
    assert repr(first.metadata) == "{'price': 1.0, 'size': '2', 'new': 'true'}"
    assert repr(second.metadata) == "{'price': 1.5, 'size': 'L', 'new': '0'}"
    assert (first.label, second.label) == ("a", "1")
    assert [row.metadata["price"] for row in read(tmp_path, text=["price"]).rows] == ["1", "1.5"]


def test_paths_are_relative_to_the_file_and_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "a" / "photos").mkdir(parents=True)
    (tmp_path / "a" / "photos" / "1").write_bytes(b"one")
    path = make_parquet(tmp_path / "a/t.parquet", path=["photos/1", "../gone.jpg"], label=["x", "y"])
    catalog = read(tmp_path)
    (row,) = catalog.rows
    assert (row.key, catalog.path_of(row), row.label) == ("a/t.parquet/00000000", "a/photos/1", "x")
    assert contents([row]) == [b"one"]
    assert catalog.missing == ("gone.jpg",)
    with pytest.raises(BadData, match=r"row 1 of .* names the image '\.\./gone\.jpg', which is not below"):
        read(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": ["a"]}, r"has no columns of images: .* it has label \(string\)"),
        ({"image": [1], "x": [[1]]}, r"it has image \(int64\), x \(list<"),
        ({"image": pa.array([], pa.binary())}, "they have no rows"),
        ({"a": [b"x"], "b": [b"x"]}, "has several columns of images: .*; call one image; it has a"),
        ({"image": [b"x"], "label": [1.5]}, "column label of .* is of the type double; give text"),
        ({"image": [b"x"] * 2, "key": ["a", None]}, "row 1 of .* has an empty key"),
        ({"image": [b"x"] * 2, "key": ["a", "a"]}, "key 'a' is that of row 0 of .* and again of row 1 of"),
        ({"image": [b"x"] * 2, "split": ["test", "dev"]}, "row 1 of .* has the split 'dev'; give train"),
        (
            {"image": [b"x"], "label": [2], "names": ["cat", "dog"]},
            "row 0 of .* label 2, and there are 2",
        ),
        ({"path": ["a\0"]}, r"row 0 of .* names the image 'a\\x00', which is not below"),
        ({"path": ["gone.jpg"]}, r"none of their 1 images is there \(.*/gone\.jpg\)"),
        ({"path": ["/etc/hosts"]}, "names the image '/etc/hosts', which is not below"),
    ],
)
def test_what_does_not_hold_is_refused_by_name(tmp_path: Path, columns: Any, message: str) -> None:
    make_parquet(tmp_path / "a.parquet", **columns)
    with pytest.raises(BadData, match=message):
        read(tmp_path)


@pytest.mark.parametrize("struct", [True, False])
def test_cells_without_an_image_or_with_a_long_one_are_refused_by_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, struct: bool
) -> None:
    images = [b"x" * 10, None, None, b"", b"x" * 11]
    column = [None if row == 2 else {"bytes": it} for row, it in enumerate(images)] if struct else images
    monkeypatch.setattr("serving.catalog.picture.MAX_BYTES", 10)
    rows = read(make_parquet(tmp_path / "a.parquet", image=column, group=3)).rows
    assert rows[0].image.read_bytes() == b"x" * 10
    for row, what in ((1, "null"), (2, "null"), (3, "empty")):
        with pytest.raises(BadImage, match=rf"row {row} of .*a\.parquet holds no .* is {what}"):
            rows[row].image.read_bytes()
    with pytest.raises(BadImage, match="the file has 11 bytes; the limit is 10"):
        rows[4].image.read_bytes()


def test_a_file_that_has_changed_is_not_read(tmp_path: Path) -> None:
    path = make_parquet(tmp_path / "a.parquet", image=[b"x"])
    (row,) = read(path).rows
    make_parquet(path, image=[b"longer"])
    with pytest.raises(OSError, match=r"a\.parquet has changed since its rows were listed"):
        row.image.read_bytes()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        row.image.read_bytes()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=40),
    st.integers(1, 12),
    st.integers(1, 600),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_images_come_back_in_any_order(
    tmp_path: Path, images: list[bytes], group: int, run: int, struct: bool, chance: random.Random
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "RUN_BYTES", run)
        patch.setattr(parquet, "KEPT_BYTES", 2 * run)
        column = [{"bytes": data, "path": None} for data in images] if struct else images
        rows = read(make_parquet(tmp_path / f"{chance.random()}.parquet", image=column, group=group)).rows
        order = list(range(len(rows)))
        assert contents(rows) == images
        chance.shuffle(order)
        assert contents([rows[place] for place in order]) == [images[place] for place in order]


def test_threads_in_order_open_each_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = list[str](), pq.ParquetFile

    def open_counted(path: Path, **more: Any) -> Any:
        opened.append(path.name)
        return real(path, **more)

    monkeypatch.setattr(parquet, "RUN_BYTES", 40_000)
    monkeypatch.setattr(parquet, "KEPT_BYTES", 200_000)
    images = [bytes([i]) * 1000 for i in range(200)]
    for name in "abc":
        make_parquet(tmp_path / f"{name}.parquet", image=images, group=50)
    rows = read(tmp_path).rows
    monkeypatch.setattr(pq, "ParquetFile", open_counted)
    found = list[bytes]()
    with ThreadPoolExecutor(8) as pool:
        for start in range(0, len(rows), 60):  # they run ahead of each other, but not without end
            found += pool.map(lambda row: row.image.read_bytes(), rows[start : start + 60])
    assert found == images * 3
    assert sorted(opened) == [f"{name}.parquet" for name in "abc" for _ in range(4)]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_reads_cells_with_files_of_its_own(tmp_path: Path) -> None:
    rows = read(make_parquet(tmp_path / "a.parquet", image=[b"one", b"two"])).rows
    assert rows[0].image.read_bytes() == b"one"  # the parent's file is open when the child begins
    child = os.fork()
    if not child:
        os._exit(rows[1].image.read_bytes() != b"two")
    assert os.waitpid(child, 0)[1] == 0


def test_no_damage_gives_anything_but_rows_or_a_plain_error(tmp_path: Path) -> None:
    images = [{"bytes": bytes([i]) * 50, "path": None} for i in range(20)]
    columns = {"label": [i % 2 for i in range(20)], "note": [f"é {i}" for i in range(20)]}
    path = make_parquet(tmp_path / "a.parquet", image=images, group=7, names=["cat", "dog"], **columns)
    whole = path.read_bytes()
    chance, told = random.Random(0), list[str]()
    for number in range(100):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            # Half of them in the footer, which says what is where.
            least = 0 if number % 2 else len(data) - 2500
            data[chance.randrange(least, len(data))] = chance.randrange(256)
        if number % 20 == 0:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            contents(read(path).rows)
        except (BadData, OSError, BadImage) as error:
            told.append(str(error))
    assert 25 < len(told) < 100
    assert "\n" not in "".join(told)


def test_without_pyarrow_one_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_parquet(tmp_path / "a.parquet", image=[b"x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadSetting, match=r"pyarrow is not installed, .* install crossbatch\[parquet\]"):
        read(tmp_path)
