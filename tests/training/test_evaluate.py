"""The evaluation command: the figures of a run, of its untrained backbone and of its ONNX file."""

from pathlib import Path

import numpy as np
import pytest
import torch

import training.evaluate
from serving.catalog import read, select
from serving.errors import BadData, BadSetting, CrossbatchError, NotFound
from serving.model.preprocess import preprocess
from tests.training.drawn import draw_folder
from training import train
from training.embedder import build_embedder
from training.evaluate import Settings, render, run
from training.export import Settings as ExportSettings
from training.export import run as export
from training.run import load_run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = draw_folder(tmp_path_factory.mktemp("data"), classes=6, images=4, size=18)
    (root / "class05" / "text.jpg").write_text("no image")
    return root


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.yaml").write_text(
        "image_size: 16\ndimension: 8\nprototypes: 4\nclasses_per_batch: 3\nimages_per_class: 2\nepochs: 1\n"
    )
    train.run(train.Settings(recipe=str(folder / "tiny.yaml"), data=data, out=folder / "run"))
    return folder / "run"


def _recall_by_hand(embeddings: torch.Tensor, labels: list[str]) -> float:
    hits = 0
    for i, own in enumerate(embeddings):
        scores = [float(torch.cosine_similarity(own, other, dim=0)) for other in embeddings]
        scores[i] = -2
        hits += labels[int(np.argmax(scores))] == labels[i]
    return hits / len(labels)


@torch.no_grad()
def test_figures_of_a_run_by_hand(trained: Path, data: Path) -> None:
    result = run(Settings(target=trained))
    loaded = load_run(trained)
    rows = [row for row in select(read(data), "test", loaded.recipe.split) if row.image.suffix == ".png"]
    pixels = [
        preprocess(row.image.read_bytes(), size=16, crop_fraction=1.0, resampling="bilinear") for row in rows
    ]
    images = loaded.embedder.normalise(torch.from_numpy(np.stack(pixels)))
    labels = [row.label for row in rows]
    assert result["recall_at"]["1"] == pytest.approx(
        _recall_by_hand(loaded.embedder(images).embeddings, labels)
    )
    assert result["dimension"] == 8
    assert (result["images"], result["classes"], result["queries"], result["excluded"]) == (12, 3, 12, 0)
    assert [bad["key"] for bad in result["unreadable"]] == ["class05/text.jpg"]

    untrained = run(Settings(target=trained, untrained=True))
    pooled = build_embedder(loaded.recipe).eval().pooled(images)
    assert untrained["recall_at"]["1"] == pytest.approx(_recall_by_hand(pooled, labels))
    assert untrained["dimension"] == 64


def test_splits_by_the_runs_own_rule(trained: Path) -> None:
    assert run(Settings(target=trained, split="train"))["images"] == 12
    assert run(Settings(target=trained, split="all"))["classes"] == 6


def test_a_model_file_measures_as_its_run(trained: Path, data: Path, tmp_path: Path) -> None:
    export(ExportSettings(run_dir=trained, model=tmp_path / "m.onnx"))
    ours, theirs = run(Settings(target=tmp_path / "m.onnx", data=data)), run(Settings(target=trained))
    for key in ("images", "queries", "dimension", "unreadable"):
        assert ours[key] == theirs[key]
    assert ours["map_at_r"] == pytest.approx(theirs["map_at_r"], abs=0.02)


def test_figures_of_a_run_are_noted_in_its_record(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(Settings(target=trained))
    run(Settings(target=trained, untrained=True, split="all"))
    metrics = load_run(trained).record["metrics"]
    assert metrics["test"]["map_at_r"] == result["map_at_r"]
    assert metrics["test"]["classes"] == 3
    assert metrics["epoch"] == 1

    def read_only(*_: object) -> None:
        raise CrossbatchError("read-only")

    monkeypatch.setattr(training.evaluate, "write_record", read_only)
    assert run(Settings(target=trained))["map_at_r"] == result["map_at_r"]


def test_rendered_in_percent(trained: Path) -> None:
    result = run(Settings(target=trained))
    text = render(result)
    assert f"{100 * result['map_at_r']:.2f} %" in text
    assert "skipped class05/text.jpg" in text
    assert "alone in their class" in render(result | {"excluded": 2})


def test_what_cannot_be_measured_is_told(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="neither a run folder nor a model"):
        run(Settings(target=tmp_path / "nothing"))
    with pytest.raises(NotFound, match="not a run folder"):
        run(Settings(target=tmp_path))
    (tmp_path / "m.onnx").touch()
    with pytest.raises(BadSetting, match="--data"):
        run(Settings(target=tmp_path / "m.onnx"))
    with pytest.raises(BadSetting, match="--untrained"):
        run(Settings(target=tmp_path / "m.onnx", untrained=True))
    singles = draw_folder(tmp_path / "singles", classes=4, images=1)
    with pytest.raises(BadData, match="none of the 2 queries"):
        run(Settings(target=trained, data=singles))
    with pytest.raises(BadData, match="nowhere"):
        run(Settings(target=trained, data=tmp_path / "nowhere"))
