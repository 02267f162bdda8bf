"""Galleries that crossbatch wrote before its rooms were rebuilt (commit 1452fc5) are used as they are.

`birds` has 39 items; its index of type HNSW4,SQ8,RFlat holds 30, of which one is deleted since and two are
replaced; it was switched with `before`, which is alike.
"""

import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.gallery.directory import GalleryDirectory
from serving.gallery.item import Source
from serving.gallery.verify import verify
from tests.serving.vectors import MANUAL, normalized


def vectors() -> NDArray[np.float32]:
    """Those of its items k0 to k39."""
    number = np.arange(40)
    return normalized(np.stack([np.cos(number * k / 7.0 + k) for k in range(1, 9)], axis=1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with zipfile.ZipFile(Path(__file__).with_name("old_galleries.zip")) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def test_an_old_gallery_is_searched_by_its_old_index(folder: Path) -> None:
    before = sorted(path.name for path in (folder / "birds").glob("index-*"))
    assert verify(folder / "birds").problems == []
    rows = vectors()
    with GalleryDirectory(folder, policy=MANUAL) as directory:
        gallery = directory.get("birds")
        info = gallery.info()
        assert (info.items, info.index_items, info.fresh, info.deleted) == (39, 30, 12, 3)
        assert (info.index_type, info.previous_name) == ("HNSW4,SQ8,RFlat", "before")
        found = [hits[0].key for hits in gallery.search(rows, 1)]
        assert [key for key in range(40) if found[key] != f"k{key}"] == [3]  # which is deleted
        (item,) = gallery.get(["k14"])
        assert (item.label, item.uri, item.metadata) == ("label4", "uri", {"i": 14})
        assert item.source == Source("shop", 1, 2, b"d" * 32)
        assert gallery.thumbnail("k14") == b"\xff\xd8\xff\xd9"
        assert sorted(path.name for path in (folder / "birds").glob("index-*")) == before


@pytest.mark.parametrize("whole", [False, True])
def test_an_old_gallery_is_rebuilt_and_switched_back(folder: Path, whole: bool) -> None:
    with GalleryDirectory(folder, policy=MANUAL) as directory:
        directory.get("birds").rebuild(whole=whole)
        info = directory.get("birds").info()
        assert (info.items, info.fresh, info.index_items) == (39, 0, 39 if whole else 42)
        assert directory.get("birds").get(["k30"])[0].label == "before"
        assert directory.rollback("birds") == "before"
        assert directory.get("birds").get(["k30"])[0].label == "birds"
    assert verify(folder / "before").problems == []
