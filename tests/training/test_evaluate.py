"""The evaluation command: the figures of a run, of its untrained backbone and of its ONNX file."""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import training.evaluation.evaluate
import training.loop.run
from serving.catalog.catalog import Row, read, select
from serving.errors import BadData, BadSetting, CrossbatchError, NotFound
from tests import oracles
from tests.training.small import TINY, Train, draw_folder
from training import export
from training.data import pictures
from training.data.partition import read_own
from training.data.pictures import Stream, viewing_decoder
from training.evaluation.evaluate import Settings, render, run
from training.evaluation.metrics import sides_of
from training.loop.checkpoint import locked
from training.loop.run import load_run, read_record, write_record
from training.network.backbone import ResNet20
from training.network.embedder import build_embedder, embedder_function
from training.recipes.recipe import Recipe

AT = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = draw_folder(tmp_path_factory.mktemp("data"), classes=6, images=4, size=18)
    (root / "class05" / "text.jpg").write_text("no image")
    return root


@pytest.fixture(scope="module")
def trained(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "plain"
    train(out, *TINY, "classes_per_batch=3")
    return out


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    export.run(export.Settings(run_dir=trained, model=path))
    return path


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with three readings: by folder, by a.csv and by b.csv (4 classes each)."""
    root = draw_folder(tmp_path_factory.mktemp("tables") / "images", classes=6, images=4, size=18)
    images = sorted(root.rglob("*.png"))
    for name, classes in (("a", [i // 6 for i in range(24)]), ("b", [i % 4 for i in range(24)])):
        lines = [f"{path.relative_to(root)},{name}{i}" for path, i in zip(images, classes, strict=True)]
        (root / f"{name}.csv").write_text("\n".join(["path,label", *lines, f"{name}.png,", ""]))
        Image.new("RGB", (20, 20)).save(root / f"{name}.png")
    return root


@pytest.fixture(scope="module")
def of_b(train: Train, tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("of-b") / "run"
    train(out, *TINY, data=tables / "b.csv")
    return out


@pytest.fixture(scope="module")
def sided(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Images of six classes whose table tells sides and bursts, a run of the first three, one by sides."""
    root = draw_folder(tmp_path_factory.mktemp("sided"), classes=6, images=6, size=18)
    sides = ["query", "query", "gallery", "gallery", "gallery", "train"]
    bursts = ["a", "b", "a", "", "b", "a"]
    lines = [
        f"{path.relative_to(root)},{path.parent.name},{sides[i % 6]},{bursts[i % 6]}"
        for i, path in enumerate(sorted(root.rglob("*.png")))
    ]
    (root / "table.csv").write_text("\n".join(["path,label,split,burst", *lines, ""]))
    runs = tmp_path_factory.mktemp("of-sided")
    train(runs / "given", *TINY, "split_by=given", "images_per_class=1", data=root)
    train(runs / "by-class", *TINY, data=root)
    return root, runs / "by-class", runs / "given"


def _seen(recipe: Recipe, rows: Sequence[Row]) -> tuple[NDArray[np.uint8], oracles.Ints]:
    """Pixels and labels of the images that can be read."""
    stream = Stream(rows, viewing_decoder(recipe))
    pixels = np.stack(list(stream))
    return pixels, np.array([int(row.label[-2:]) for row in stream.rows])


def _embedded(trained: Path, rows: Sequence[Row]) -> tuple[oracles.Floats, oracles.Ints]:
    loaded = load_run(trained)
    pixels, labels = _seen(loaded.recipe, rows)
    return embedder_function(loaded.embedder)(pixels).astype(np.float64), labels


@torch.no_grad()
def _untrained(recipe: Recipe, rows: Sequence[Row]) -> oracles.Figures:
    pixels, labels = _seen(recipe, rows)
    start = build_embedder(recipe).eval()
    return oracles.retrieval(start.pooled(start.normalise(torch.from_numpy(pixels))).numpy(), labels, AT)


def _check_figures(result: dict[str, Any], expected: oracles.Figures) -> None:
    recall, average, precision, excluded = expected
    assert result["recall_at"] == pytest.approx({str(k): share for k, share in recall.items()})
    assert (result["map_at_r"], result["r_precision"]) == pytest.approx((average, precision))
    assert result["excluded"] == excluded


def test_figures_of_a_run_by_hand(trained: Path, data: Path) -> None:
    result, recipe = run(Settings(target=trained)), load_run(trained).recipe
    rows = select(read(data), "test", recipe.split)
    _check_figures(result, oracles.retrieval(*_embedded(trained, rows), AT))
    assert (result["dimension"], result["images"], result["classes"], result["queries"]) == (8, 12, 3, 12)
    assert [bad["key"] for bad in result["unreadable"]] == ["class05/text.jpg"]

    recall, average, _, _ = _untrained(recipe, rows)
    untrained = result["untrained"]
    assert untrained.keys() == {"recall_at", "map_at_r", "r_precision"}
    assert (untrained["recall_at"]["1"], untrained["map_at_r"]) == pytest.approx((recall[1], average))

    metrics = read_record(trained)["metrics"]
    assert (metrics["epoch"], metrics["test"]["classes"]) == (1, 3)
    assert (metrics["test"]["map_at_r"], metrics["test"]["untrained"]) == (result["map_at_r"], untrained)
    text, before, after = render(result), 100 * untrained["map_at_r"], 100 * result["map_at_r"]
    assert f"{after:6.2f} %   untrained {before:6.2f} %, {after - before:+.2f}" in text
    assert "skipped class05/text.jpg" in text
    assert "alone in their class" in render(result | {"excluded": 2})


@pytest.mark.parametrize("pooling", ["gap", "gem"])
def test_a_resting_backbone_runs_once_an_image(
    train: Train, data: Path, tmp_path: Path, pooling: str
) -> None:
    still, frozen = ("freeze=backbone", f"pooling={pooling}"), tmp_path / "run"
    train(frozen, *TINY, *still, cache=tmp_path / "cache")
    recipe = load_run(frozen).recipe
    expected = _untrained(recipe, select(read(data), "test", recipe.split))
    with patch.object(ResNet20, "forward", autospec=True, side_effect=ResNet20.forward) as forward:
        result = run(Settings(target=frozen))
    seen = [len(call.args[1]) for call in forward.call_args_list]
    assert sum(count for count in seen if count > 1) == result["images"]  # one black image tells the grid
    assert result["untrained"]["map_at_r"] == pytest.approx(expected[1])


def test_a_start_that_cannot_be_had_is_told_in_a_line(trained: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(trained, tmp_path / "run")
    text = (moved / "recipe.yaml").read_text().replace("weights: none", "weights: gone.safetensors")
    (moved / "recipe.yaml").write_text(text)
    write_record(moved, read_record(moved) | {"recipe_digest": hashlib.sha256(text.encode()).hexdigest()})
    result = run(Settings(target=moved))
    assert (result["untrained"], result["noted"]) == (None, True)
    assert result["map_at_r"] == run(Settings(target=trained))["map_at_r"]
    assert "the untrained backbone was not measured: " in render(result)
    assert "gone.safetensors" in result["no_untrained"]
    assert "untrained" not in read_record(moved)["metrics"]["test"]


@pytest.mark.parametrize("by_class", [False, True])
def test_queries_are_searched_in_their_gallery(sided: tuple[Path, Path, Path], by_class: bool) -> None:
    """By default for a run of the data set's own split, on wish where classes were cut by name."""
    root, of_classes, given = sided
    trained = of_classes if by_class else given
    before = read_record(trained)
    result = run(Settings(target=trained, protocol="query-gallery" if by_class else "auto"))
    assert (result["protocol"], result["noted"]) == ("query-gallery", not by_class)
    assert (result["queries"], result["gallery"]) == ((6, 9) if by_class else (12, 18))
    assert f"{result['queries']} queries were searched in a gallery of {result['gallery']}" in render(result)
    sides = [row for row in read(root).rows if row.split != "train"]
    rows = [row for row in sides if row.label >= ("class03" if by_class else "")]
    asked = np.array([row.split == "query" for row in rows])
    vectors, labels = _embedded(trained, rows)
    expected = oracles.retrieval(vectors[asked], labels[asked], AT, vectors[~asked], labels[~asked])
    _check_figures(result, expected)
    plain = run(Settings(target=trained, protocol="leave-one-out", at=[3]))
    assert (plain["protocol"], plain["gallery"], list(plain["recall_at"])) == ("leave-one-out", 0, ["3"])
    assert "in the run: it keeps those of --protocol auto without --exclude-same and --at" in render(plain)
    assert run(Settings(target=trained, split="all"))["gallery"] == 0
    assert ("test" in read_record(trained)["metrics"]) == (not by_class or "test" in before["metrics"])


def test_images_of_the_same_burst_are_as_if_they_were_not_there(sided: tuple[Path, Path, Path]) -> None:
    root, trained, _ = sided
    rows = [row for row in read(root).rows if row.label >= "class03"]
    bursts = [row.metadata.get("burst") for row in rows]
    groups = np.array([{"a": 0, "b": 1}.get(str(burst), 2 + i) for i, burst in enumerate(bursts)])
    vectors, labels = _embedded(trained, rows)
    result = run(Settings(target=trained, exclude_same="burst"))
    assert (result["exclude_same"], result["noted"]) == ("burst", False)
    _check_figures(result, oracles.retrieval(vectors, labels, AT, groups=groups))

    result = run(Settings(target=trained, protocol="query-gallery", exclude_same="burst"))
    assert (result["queries"], result["excluded"], result["gallery"]) == (6, 0, 9)
    for gallery, place in ((0, ""), (9, " in the gallery")):
        told = render(result | {"excluded": 2, "gallery": gallery})
        assert f"2 images have no match{place} outside their own burst and were not asked for" in told


def test_protocols_that_do_not_fit_are_refused_before_anything_is_embedded(
    sided: tuple[Path, Path, Path], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(training.evaluation.evaluate, "embed_pictures")
    with pytest.raises(BadSetting, match="18 images has the field 'brust': did you mean 'burst'"):
        run(Settings(target=sided[1], exclude_same="brust"))
    with pytest.raises(BadSetting, match="has the field 'burst': they have no metadata"):
        run(Settings(target=trained, exclude_same="burst"))
    with pytest.raises(BadData, match="calls none of the 13 images of the split test query"):
        run(Settings(target=trained, protocol="query-gallery"))
    with pytest.raises(BadData, match="12 images are queries and none is of a gallery"):
        sides_of(["query"] * 12, 12)


@torch.no_grad()
def test_clusters_and_fitted_prototypes_of_a_run_and_file(trained: Path, exported: Path, data: Path) -> None:
    result = run(Settings(target=trained, clusters=True, fitted=20, split="all"))
    assert load_run(trained).record["metrics"]["all"]["map_x"] == result["map_x"]
    assert (result["halvings"], 1 < result["distinct"] <= 20) == (20, True)
    loaded = load_run(trained)
    pixels, labels = _seen(loaded.recipe, read(data).rows)
    features = loaded.embedder.eval()(loaded.embedder.normalise(torch.from_numpy(pixels)))
    z, y = features.histograms.double().numpy(), features.embeddings.double().numpy()
    everyone = np.arange(len(labels))
    expected = oracles.map_at_r(oracles.expressed(z, y, everyone, everyone, 0.05), labels)
    assert result["map_c"] == pytest.approx(expected, abs=1e-3)
    text = render(result)
    for name in ("nmi", "ami", "map_c", "map_x"):
        assert f"{100 * result[name]:6.2f} %" in text
    assert f"MAP_x is over 20 halvings, of which {result['distinct']} differ" in text

    of_file = run(Settings(target=exported, data=data, clusters=True, fitted=20, split="all"))
    assert all(of_file[key] == result[key] for key in ("images", "queries", "dimension", "unreadable"))
    assert (of_file["classes"], of_file["untrained"], of_file["no_untrained"]) == (6, None, "")
    assert "untrained" not in render(of_file)
    for name in ("map_at_r", "nmi", "ami", "map_c", "map_x"):
        assert of_file[name] == pytest.approx(result[name], abs=0.05)


def test_a_run_is_measured_as_it_was_read(train: Train, tables: Path, of_b: Path, tmp_path: Path) -> None:
    by_default = run(Settings(target=of_b))
    assert (by_default["images"], by_default["classes"], by_default["noted"]) == (12, 2, True)
    assert read_own(read_record(of_b)).table == tables / "b.csv"
    for given in (tables, tables / "b.csv"):  # the same data set, however it is named
        again = run(Settings(target=of_b, data=given))
        assert (again["map_at_r"], again["noted"]) == (by_default["map_at_r"], True)
    with pytest.raises(BadData, match=r"holds other images than the run"):
        train(of_b, recipe=None, resume=True, data=tables / "a.csv")
    of_folders = tmp_path / "of-folders"
    train(of_folders, *TINY, data=tables, format="folder")  # while `auto` would take a table
    assert run(Settings(target=of_folders))["classes"] == 3
    assert run(Settings(target=of_folders, format="folder"))["noted"] is True


def test_figures_of_other_images_are_not_the_runs(tables: Path, of_b: Path, tmp_path: Path) -> None:
    run(Settings(target=of_b))
    before = read_record(of_b)
    others = shutil.copytree(tables, tmp_path / "copy")  # the same names, and any pixels
    (others / "a.csv").unlink()
    one = {"data": draw_folder(tmp_path / "one", classes=1), "split": "all"}  # which its rule cannot cut
    for given in ({"data": others}, {"table": tables / "a.csv"}, one):
        result = run(Settings(target=of_b, **given))
        assert result["noted"] is False
        assert "not noted in the run: its own images are those that" in render(result)
    gone = tables / "class05" / "0.png"
    gone.rename(tmp_path / "kept.png")
    assert run(Settings(target=of_b))["noted"] is False  # the data set has changed since
    (tmp_path / "kept.png").rename(gone)
    assert read_record(of_b) == before
    for file in others.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(BadData, match=r"none of the 12 images can be read \(first: class"):
        run(Settings(target=of_b, data=others))


def test_images_of_no_class_are_left_out_and_counted(of_b: Path, tmp_path: Path) -> None:
    about = read_record(of_b)["data"]
    assert (about["unlabelled"], about["train_classes"], about["train_images"]) == (1, ["b0", "b1"], 12)
    for split, images in (("test", 12), ("all", 24)):
        result = run(Settings(target=of_b, split=split))
        assert (result["images"], result["unlabelled"]) == (images, 1)
        assert "1 images are of no class and were left out" in render(result)
    Image.new("RGB", (20, 20)).save(tmp_path / "0.png")
    with pytest.raises(BadData, match=r"none of the 1 images of .* is of a class"):
        run(Settings(target=of_b, data=tmp_path, split="all"))


def test_what_cannot_be_measured_is_told(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="neither a run folder nor a model"):
        run(Settings(target=tmp_path / "nothing"))
    (tmp_path / "m.onnx").touch()
    with pytest.raises(BadSetting, match="--data"):
        run(Settings(target=tmp_path / "m.onnx"))
    singles = draw_folder(tmp_path / "singles", classes=4, images=1)
    with pytest.raises(BadData, match="none of the 2 queries"):
        run(Settings(target=trained, data=singles))


def test_figures_not_noted_are_told(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = shutil.copytree(trained, tmp_path / "run")
    inner = pictures.embed_pictures

    def embed_pictures(*arguments: Any, **options: Any) -> np.ndarray:
        record = read_record(run_folder)
        record["metrics"]["epoch"] = 99  # as a training that goes on would write
        write_record(run_folder, record)
        return inner(*arguments, **options)

    monkeypatch.setattr(training.evaluation.evaluate, "embed_pictures", embed_pictures)
    result = run(Settings(target=run_folder))
    assert not result["noted"]
    assert "by now the run keeps epoch 99" in result["not_noted"]
    monkeypatch.undo()
    with locked(run_folder):  # as a training has it, which would write over them
        assert run(Settings(target=run_folder))["not_noted"] == "it is being trained"
    monkeypatch.setattr(training.loop.run, "write_record", Mock(side_effect=CrossbatchError("read-only")))
    again = run(Settings(target=trained))
    assert (again["map_at_r"], again["noted"]) == (result["map_at_r"], False)
    assert "not noted in the run: read-only" in render(again)
