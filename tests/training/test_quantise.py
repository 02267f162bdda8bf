"""A model file in int8 and fp16: near the fp32 file, measured against it, refused where it loses too much."""

import json
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from PIL import Image

from benchmarks import precision
from serving.catalog.catalog import read
from serving.errors import BadArtifact, BadData, BadSetting
from serving.model.encoder import Encoder, cpu_flags
from serving.model.spec import KEY, fingerprint, read_model, read_spec, write_spec
from tests.pictures import encoded
from tests.training.small import TINY, Train, read_table
from training import export, quantise
from training.data.partition import read_own
from training.evaluation import evaluate
from training.export import Settings, export_model, render, run
from training.loop.run import load_run
from training.network.embedder import build_embedder
from training.quantise import BACKBONE, lower_file, overflows, to_fp16, to_int8
from training.recipes.recipe import PoolingName, Recipe

SIZE = 32
FIELDS: dict[str, Any] = {"name": "small", "crop_fraction": 0.875, "resampling": "bicubic"}


def _photo(seed: int) -> bytes:
    """A pattern of two colours, finer with each seed."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (2, 3))[rng.integers(0, 2, (2 + seed, 2 + seed))].astype(np.uint8)
    return encoded(Image.fromarray(pixels).resize((SIZE, SIZE)), "PNG")


PHOTOS = [_photo(seed) for seed in range(12)]


class Lowered(NamedTuple):
    fp32: Path
    pixels: NDArray[np.uint8]
    int8: onnx.ModelProto
    fp16: onnx.ModelProto


POOLING: dict[str, PoolingName] = {"resnet20": "gap", "test_efficientnet": "gem", "test_vit": "gap_gmp"}
Lower = Callable[[str], Lowered]


@pytest.fixture(scope="module")
def lower(tmp_path_factory: pytest.TempPathFactory) -> Lower:
    """Give a backbone in each precision, exported once."""

    @cache
    def lower(backbone: str) -> Lowered:
        recipe = Recipe(
            backbone=backbone, image_size=SIZE, pooling=POOLING[backbone], dimension=8, prototypes=4
        )
        path = tmp_path_factory.mktemp(backbone) / "fp32.onnx"
        export_model(build_embedder(recipe), FIELDS, path, PHOTOS)
        encoder = Encoder(path, threads=1)
        pixels = np.stack([encoder.preprocess(photo) for photo in PHOTOS])
        return Lowered(path, pixels, to_int8(_load(path), pixels, reduce_range=False), to_fp16(_load(path)))

    return lower


@pytest.fixture(params=POOLING)
def lowered(request: pytest.FixtureRequest, lower: Lower) -> Lowered:
    return lower(request.param)


def _load(path: Path) -> onnx.ModelProto:
    return onnx.load_model_from_string(read_model(path)[0])


def _weights(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    return {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}


def _run(model: onnx.ModelProto, like: Path, pixels: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Each output alone, as a server asks for them."""
    spec = read_spec(like).model_copy(update={"fingerprint": fingerprint(model)})
    write_spec(model, spec)
    path = like.with_name("lowered.onnx")
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(model, full_check=True)
    encoder = Encoder(path, threads=1)
    outputs = ("embeddings", "histograms", "assignments")
    return {name: encoder.run(pixels, name)[name] for name in outputs}


@pytest.mark.parametrize(("precision", "far"), [("int8", 0.2), ("fp16", 0.005)])
def test_embeddings_are_near_those_of_fp32(precision: str, far: float, lowered: Lowered) -> None:
    wanted = Encoder(lowered.fp32, threads=1).run(lowered.pixels)
    spread = np.linalg.norm(wanted["embeddings"] - wanted["embeddings"].mean(axis=0), axis=1).mean()
    for batch in (lowered.pixels, lowered.pixels[:1]):
        found = _run(getattr(lowered, precision), lowered.fp32, batch)
        distances = np.linalg.norm(found["embeddings"] - wanted["embeddings"][: len(batch)], axis=1)
        assert 0 < distances.mean() < far * spread
        norms = np.linalg.norm(found["embeddings"], axis=1)
        np.testing.assert_allclose(norms, 1, atol=1e-6)  # not rounded after the normalisation
        assert np.abs(found["histograms"] - wanted["histograms"][: len(batch)]).mean() < far


def test_the_layers_of_the_backbone_are_lowered_and_no_other(lowered: Lowered) -> None:
    made = {name: node.op_type for node in lowered.int8.graph.node for name in node.output}
    weights, layers = _weights(lowered.fp16), 0
    for node in lowered.int8.graph.node:
        if node.op_type in ("Conv", "Gemm"):
            inside = node.name.startswith(BACKBONE)
            layers += inside
            assert (made.get(node.input[1]) == "DequantizeLinear") is inside
    assert layers > 0
    for node in lowered.fp16.graph.node:
        if node.op_type in ("Conv", "Gemm"):
            wanted = np.float16 if node.name.startswith(BACKBONE) else np.float32
            assert weights[node.input[1]].dtype == wanted
    assert sum(each.nbytes for each in weights.values()) < 0.6 * lowered.fp32.stat().st_size


def test_weights_have_a_scale_a_channel_and_seven_bits_where_sums_overflow(lower: Lower) -> None:
    fp32, pixels, int8, _ = lower("resnet20")
    reduced = to_int8(_load(fp32), pixels, reduce_range=True)
    for model, most in ((int8, 127), (reduced, 64)):
        found = {
            name: each for name, each in _weights(model).items() if each.dtype == np.int8 and each.ndim == 4
        }
        assert len(found) == 19
        for name, weights in found.items():
            largest = np.abs(weights.astype(int)).max(axis=(1, 2, 3))
            assert (np.abs(largest - most) <= 1).all(), name


@pytest.mark.parametrize(
    ("machine", "flags", "told"),
    [
        ("x86_64", ("avx2", "avx512f"), True),
        ("x86_64", ("avx2", "avx_vnni"), False),
        ("AMD64", ("avx2", "avx512f", "avx512_vnni"), False),
        ("AMD64", (), True),
        ("aarch64", (), False),
    ],
)
def test_sums_overflow_on_x86_without_vnni(
    machine: str, flags: tuple[str, ...], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(quantise, "cpu_flags", lambda: flags)
    assert overflows() is told


@pytest.fixture(scope="module")
def trained(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    train(folder, *TINY)
    return folder


@pytest.fixture(scope="module")
def fp32(trained: Path) -> Path:
    run(Settings(run_dir=trained, model=trained.parent / "fp32.onnx"))
    return trained.parent / "fp32.onnx"


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_command_measures_both_files_and_the_spec_says_so(
    precision: Any, trained: Path, fp32: Path, data: Path
) -> None:
    path = trained.parent / f"{precision}.onnx"
    result = run(Settings(run_dir=trained, model=path, precision=precision, max_loss=100))
    assert json.loads(json.dumps(result)) == result
    spec, before = read_spec(path), read_spec(fp32)
    assert (spec.precision, spec.fp32_fingerprint) == (precision, before.fingerprint)
    assert spec.cpu_flags == (cpu_flags() if precision == "int8" else None)
    assert (before.against_fp32, before.cpu_flags) == ({}, None)
    assert result["against_fp32"] == spec.against_fp32
    for name, target in (("fp32", fp32), ("own", path)):
        found = evaluate.run(evaluate.Settings(target=target, data=data))
        figures = {"recall_at_1": found["recall_at"]["1"], "map_at_r": found["map_at_r"]}
        assert spec.against_fp32[name] == figures
    assert (spec.against_fp32["images"], spec.against_fp32["data"]) == (found["images"], data.name)
    told = f"{precision} against fp32 ({before.fingerprint[:12]}): {quantise.tell_change(spec.against_fp32)}"
    assert f"\n{told}, on 12 test images." in render(result)
    assert [entry.key for entry in _load(path).metadata_props] == [KEY]


def test_what_a_file_no_longer_finds_is_measured(
    trained: Path, fp32: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(model: onnx.ModelProto) -> onnx.ModelProto:
        (head,) = [each for each in model.graph.initializer if each.name.endswith("head.weight")]
        weights = onnx.numpy_helper.to_array(head).copy()
        weights[1:] = 0  # one component, which at unit length is the same for most
        head.CopyFrom(onnx.numpy_helper.from_array(weights, head.name))
        return model

    monkeypatch.setattr(quantise, "to_fp16", spoil)
    settings = Settings(run_dir=trained, model=tmp_path / "m.onnx", precision="fp16", max_loss=100)
    with pytest.raises(BadArtifact, match="the fp16 file was not kept"):
        lower_file(fp32, settings.model, "fp16", (), read(data), max_loss=0.5)
    found = run(settings)["against_fp32"]
    own = evaluate.run(evaluate.Settings(target=settings.model, data=data))
    assert found["own"]["map_at_r"] == own["map_at_r"] < found["fp32"]["map_at_r"]


@pytest.mark.parametrize("figure", quantise.FIGURES)
def test_a_loss_above_the_one_allowed_leaves_no_file(
    figure: str, fp32: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"fp32": {"recall_at_1": 0.9, "map_at_r": 0.5}, "own": {"recall_at_1": 0.91, "map_at_r": 0.51}}
    found = {"images": 12, "queries": 12, "data": "data", **figures}
    figures["own"][figure] = figures["fp32"][figure] - 0.006
    monkeypatch.setattr(quantise, "compare", lambda *_: found)
    path = tmp_path / "m.onnx"
    with pytest.raises(BadArtifact, match=r"fp16 file was not kept: .* \(-0\.60\).* loss of 0\.5 points"):
        lower_file(fp32, path, "fp16", (), read(data), max_loss=0.5)
    assert list(tmp_path.iterdir()) == []
    lower_file(fp32, path, "fp16", (), read(data), max_loss=0.7)
    assert read_spec(path).against_fp32 == found


def test_ranges_are_those_of_the_images_given_or_of_those_that_trained(trained: Path, tmp_path: Path) -> None:
    found, settings = (
        load_run(trained),
        Settings(run_dir=trained, model=tmp_path / "m.onnx", precision="int8"),
    )
    catalog = read_own(found.record)
    classes = found.record["data"]["train_classes"]
    wanted = {row.image.read_bytes() for row in catalog.rows if row.label in classes}
    assert set(export._calibrating(settings, catalog, found)) == wanted
    for i, photo in enumerate(PHOTOS):
        (tmp_path / f"{i}.png").write_bytes(photo)
    given = settings.model_copy(update={"calibrate": tmp_path})
    assert set(export._calibrating(given, catalog, found)) == set(PHOTOS)


def test_what_cannot_be_calibrated_is_told(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no photograph")
    settings = Settings(run_dir=trained, model=tmp_path / "m.onnx", precision="int8", calibrate=tmp_path)
    with pytest.raises(BadData, match="image"):
        run(settings)
    (tmp_path / "0.jpg").write_bytes(PHOTOS[0])
    (tmp_path / "1.jpg").write_bytes(b"none")
    with pytest.raises(BadData, match=r"holds 1 images that can .* another folder by --calibrate"):
        run(settings)
    with pytest.raises(BadSetting, match=r"--calibrate is for --precision int8: give both, or neither"):
        run(settings.model_copy(update={"precision": "fp16"}))
    assert not settings.model.exists()


def test_the_benchmark_in_short(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "precision.csv"
    words = ["small=" + str(trained), "random=resnet20@16", "--csv", str(table)]
    short = ["--threads", "1", "--batches", "1", "2", "--turns", "2", "--seconds", "0.01"]
    assert precision.main(words + short) == 0
    rows = read_table(table)
    cases = [(name, batch, turn) for name in ("small", "random") for batch in "12" for turn in "01"]
    assert [(row["model"], row["batch"], row["turn"]) for row in rows] == cases
    for row in rows:
        rates = [float(row[name]) for name in ("fp32_images_s", "int8_images_s")]
        assert float(row["ratio"]) == pytest.approx(rates[1] / rates[0], rel=0.01)
        assert (row["recall_at_1_change"] == row["map_at_r_change"] == "") is (row["model"] == "random")
    told = capsys.readouterr().out
    assert told.count("random") == told.count("small") == 2
