"""MATLAB files: what SciPy reads from a sound one is read here, and no damage does more than raise."""

import contextlib
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import loadmat, savemat

from serving.catalog import matlab
from serving.catalog.matlab import read_arrays
from serving.errors import BadData
from tests.serving.published import save_annotations


def _plain(value: Any) -> Any:
    """What SciPy gives, in the form in which it is read here."""
    if isinstance(value, np.ndarray) and value.dtype.names:
        return [{name: _plain(each[name]) for name in value.dtype.names} for each in value.ravel("F")]
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [_plain(each) for each in value.ravel("F")]
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        return value.item() if value.size else ""
    return value.ravel("F").tolist()


def _cells(*values: object) -> np.ndarray:
    cells = np.empty((1, len(values)), object)
    for place, value in enumerate(values):
        cells[0, place] = value
    return cells


@pytest.mark.parametrize("packed", [False, True])
def test_what_scipy_writes_is_read_as_scipy_reads_it(tmp_path: Path, packed: bool) -> None:
    pairs = np.empty((2, 2), [("name", "O"), ("box", "O"), ("a_rather_long_name_of_a_field", "O")])
    for place in np.ndindex(2, 2):
        pairs[place] = (f"é{place}", np.arange(place[0] * 3, dtype=np.int16), place[1] + 0.5)
    content = {
        "pairs": pairs,
        "cells": _cells("one", "", _cells(1, "two"), np.zeros((0, 0))),
        "text": "Škoda 1–2",
        **{f"of_{kind}": np.array([[0, 1, 100], [3, 4, 5]], kind) for kind in "bBhHiIqQfd"},
    }
    savemat(tmp_path / "a.mat", content, do_compression=packed)
    expected = loadmat(tmp_path / "a.mat")
    assert read_arrays(tmp_path / "a.mat", content) == {name: _plain(expected[name]) for name in content}
    assert list(read_arrays(tmp_path / "a.mat", ["text"])) == ["text"]


def _element(order: str, kind: int, content: bytes, *, small: bool = False) -> bytes:
    if small:
        return struct.pack(f"{order}I", len(content) << 16 | kind) + content.ljust(4, b"\0")
    return struct.pack(f"{order}II", kind, len(content)) + content + bytes(-len(content) % 8)


def _file(order: str, name: bytes, kind: int, body: bytes, *, shape: tuple[int, ...] = (1, 3)) -> bytes:
    head = b"MATLAB 5.0".ljust(124) + struct.pack(f"{order}H", 0x0100) + (b"IM" if order == "<" else b"MI")
    flags = _element(order, 6, struct.pack(f"{order}II", kind, 0))
    dimensions = _element(order, 5, struct.pack(f"{order}{len(shape)}I", *shape))
    return head + _element(order, 14, flags + dimensions + _element(order, 1, name, small=True) + body)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("small", [False, True])
def test_either_order_of_bytes_and_small_elements_are_read(tmp_path: Path, order: str, small: bool) -> None:
    path = tmp_path / "a.mat"
    path.write_bytes(_file(order, b"n", 6, _element(order, 2, b"\1\2\3", small=small)))
    assert read_arrays(path, ["n"]) == {"n": [1, 2, 3]} == {"n": _plain(loadmat(path)["n"])}
    letters = "ab".encode("utf-16-le" if order == "<" else "utf-16-be")
    path.write_bytes(_file(order, b"t", 4, _element(order, 4, letters, small=small), shape=(1, 2)))
    assert read_arrays(path, ["t"]) == {"t": "ab"} == {"t": _plain(loadmat(path)["t"])}
    path.write_bytes(_file(order, b"d", 6, _element(order, 9, struct.pack(f"{order}3d", 1.5, 2, -3))))
    assert read_arrays(path, ["d"]) == {"d": [1.5, 2, -3]}


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (_element("<", 99, b"\1\2\3"), 6, "numbers are of the type 99"),
        (_element("<", 9, b"\1\2\3"), 4, "characters are of the type 9"),
        (_element("<", 2, b"\1\2\3"), 5, "an array is of the class 5"),
        (_element("<", 2, b"\1\2\3"), 1, "it has 3 elements, for which it has no room|is no array"),
        (_element("<", 2, bytes(400)), 1, "an element of an array is of the type 2, which is no array"),
        (struct.pack("<II", 2, 400), 6, "an element at byte 40 is longer than what it is in"),
        (struct.pack("<I", 9 << 16 | 2) + bytes(4), 6, "is longer than what it is in"),
        (
            _element("<", 5, struct.pack("<I", 3), small=True) + _element("<", 1, b"abcd"),
            2,
            "fields are cut off",
        ),
        (b"", 6, r"is damaged or no \.mat file; take the published file$"),
        (_element("<", 16, b"\xff"), 4, r"is damaged or no \.mat file; take the published file$"),
    ],
)
def test_array_that_is_none_is_refused(tmp_path: Path, body: bytes, kind: int, message: str) -> None:
    path = tmp_path / "a.mat"
    path.write_bytes(_file("<", b"n", kind, body))
    with pytest.raises(BadData, match=message):
        read_arrays(path, ["n"])


def test_sizes_that_would_fill_the_memory_are_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.mat"
    path.write_bytes(_file("<", b"n", 1, _element("<", 14, b""), shape=(1 << 31, 1 << 31)))
    with pytest.raises(BadData, match="for which it has no room"):
        read_arrays(path, ["n"])
    head = _file("<", b"n", 6, b"")[:128]
    path.write_bytes(head + _element("<", 15, zlib.compress(bytes((1 << 20) + 1))))
    monkeypatch.setattr(matlab, "_MOST_UNPACKED", 1 << 20)
    with pytest.raises(BadData, match="an array is cut off, or larger than 1 MiB"):
        read_arrays(path, ["n"])
    with open(path, "wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(BadData, match="larger than 64 MiB; take the published file"):
        read_arrays(path, ["n"])


def test_arrays_too_deep_within_each_other_are_refused(tmp_path: Path) -> None:
    value: object = "deep"
    for _ in range(10):
        value = _cells(value)
    savemat(tmp_path / "a.mat", {"n": value})
    with pytest.raises(BadData, match="more than 8 deep"):
        read_arrays(tmp_path / "a.mat", ["n"])


def test_version_that_is_another_format_is_told(tmp_path: Path) -> None:
    head = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM"
    (tmp_path / "a.mat").write_bytes(head + bytes(512))
    with pytest.raises(BadData, match=r"is a \.mat file of version 7\.3, which cannot be read"):
        read_arrays(tmp_path / "a.mat", ["n"])


@pytest.mark.parametrize("data", [b"", b"<html>not found</html>", bytes(4096), b"IM" * 64])
def test_what_is_no_mat_file_is_told(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.mat").write_bytes(data)
    with pytest.raises(BadData, match=r"is damaged or no \.mat file|has no n;"):
        read_arrays(tmp_path / "a.mat", ["n"])


def test_file_that_is_not_there_or_lacks_an_array_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"a\.mat cannot be read: no such file"):
        read_arrays(tmp_path / "a.mat", ["n"])
    savemat(tmp_path / "a.mat", {"m": 1})
    with pytest.raises(BadData, match=r"a\.mat has no n and no o; take"):
        read_arrays(tmp_path / "a.mat", ["n", "o"])


def _sound() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cars_annos.mat"
        save_annotations(path, "relative_im_path", [("a.jpg", 1), ("b.jpg", 2)])
        plain = path.read_bytes()
        content = {name: loadmat(path)[name] for name in ("annotations", "class_names")}
        savemat(path, content, do_compression=True)
        return [plain, path.read_bytes()]


SOUND = _sound()


@settings(max_examples=200)
@given(
    st.sampled_from(SOUND), st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=8), st.data()
)
def test_damage_of_any_kind_raises_one_error_or_none(
    tmp_path_factory: pytest.TempPathFactory,
    sound: bytes,
    changes: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    spoiled = bytearray(sound)
    for place, value in changes:
        spoiled[place % len(spoiled)] = value
    path = tmp_path_factory.getbasetemp() / "spoiled.mat"
    path.write_bytes(bytes(spoiled[: data.draw(st.integers(0, len(spoiled)))]))
    with contextlib.suppress(BadData):
        assert set(read_arrays(path, ["annotations", "class_names"])) == {"annotations", "class_names"}
