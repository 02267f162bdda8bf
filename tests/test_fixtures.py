"""What version 0.1 wrote still opens and means the same: galleries, a model file and a run."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.gallery.directory import GalleryDirectory
from serving.gallery.item import ItemChange
from serving.gallery.verify import verify
from serving.model.encoder import Encoder
from training.loop.run import load_run
from training.network.embedder import embedder_function

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with zipfile.ZipFile(FIXTURES / "v0.1.zip") as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def expected(old: Path) -> Any:
    return json.loads((old / "expected.json").read_text())


@pytest.mark.parametrize("name", ["exact", "hnsw", "pq"])
def test_galleries_are_searched_by_the_index_that_they_have(old: Path, expected: Any, name: str) -> None:
    told = expected[name]
    assert verify(old / "galleries" / name).problems == []
    before = sorted((old / "galleries" / name).glob("index-*"))
    with GalleryDirectory(old / "galleries") as galleries:
        gallery = galleries.get(name)
        found = gallery.search(np.array(told["queries"], np.float32), 10)
        assert [[hit.key for hit in hits] for hits in found] == told["keys"]
        assert gallery.info().items == told["items"]
        assert gallery.get(["k001"])[0].metadata == {"price": 1, "tag": "b"}
        assert sorted((old / "galleries" / name).glob("index-*")) == before  # it was not made anew
        gallery.delete(["k001"])
        gallery.update([ItemChange("k002", {"price": 9})])
        assert gallery.get(["k002"])[0].metadata["price"] == 9
        assert "k001" not in [hit.key for hit in gallery.search(np.array(told["queries"]), 200)[0]]


def test_a_model_file_embeds_as_it_did(old: Path, expected: Any) -> None:
    images = np.array(expected["model"]["images"], np.uint8)
    found = Encoder(old / "model.onnx").encode(images)
    np.testing.assert_allclose(found, expected["model"]["embeddings"], atol=1e-6)


def test_a_run_embeds_as_it_did(old: Path, expected: Any) -> None:
    images = np.array(expected["run"]["images"], np.uint8)
    found = embedder_function(load_run(old / "run").embedder)(images)
    np.testing.assert_allclose(found, expected["run"]["embeddings"], atol=1e-4)
