"""A network as a model file: the same numbers, nothing of this machine in it, and no wrong file left."""

import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import training.network.backbone
from serving.errors import BadArtifact, BadData, BadSetting
from serving.model.encoder import Encoder
from serving.model.spec import KEY, ModelSpec, fingerprint, read_spec
from tests.pictures import encoded
from tests.training.small import Train
from training import export as module
from training.evaluation import evaluate
from training.export import Settings, export_model, render, run
from training.loop.run import Run
from training.network.backbone import BLOCKS, Backbone
from training.network.embedder import Embedder, build_embedder
from training.recipes.recipe import PoolingName, Recipe

SIZE = 16
FIELDS: dict[str, Any] = {"name": "tiny", "crop_fraction": 0.875, "resampling": "bicubic"}


class _Body(nn.Module):
    """A backbone of two layers, with a fault that can be switched on."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 6, 3, stride=2, padding=1),
        )
        self.fault = fault

    def forward(self, images: Tensor) -> Tensor:
        if self.fault == "unexportable":
            images = images if images.sum() > 0 else -images  # a choice by the pixels is no graph
        maps = cast(Tensor, self.layers(images))
        if self.fault == "other numbers" and torch.onnx.is_in_onnx_export():
            return maps + 0.01 * maps.square()
        return maps * (0 if self.fault == "zero" else 1)


def _embedder(fault: str = "") -> Embedder:
    torch.manual_seed(0)
    backbone = Backbone(_Body(fault), 6, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    embedder = Embedder(backbone, Recipe(image_size=SIZE, dimension=5, prototypes=4, assignment_scale=10.0))
    for layer in embedder.modules():
        if isinstance(layer, nn.BatchNorm2d):  # statistics that evaluation mode shows
            layer.running_mean = torch.randn(8)
    return embedder.train()


def _image(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels).resize((40, 30 + seed)), "JPEG")


IMAGES = [_image(seed) for seed in range(9)]
Exported = tuple[Embedder, Path, ModelSpec, float]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    embedder, path = _embedder(), tmp_path_factory.mktemp("export") / "tiny.onnx"
    spec, difference = export_model(embedder, FIELDS, path, IMAGES)
    return embedder, path, spec, difference


def _check_file(path: Path, embedder: Embedder, batch: int) -> None:
    """Compare what the file gives for a batch with what torch does."""
    encoder = Encoder(path, threads=1)
    pixels = np.stack([encoder.preprocess(data) for data in IMAGES[:batch]])
    with torch.no_grad():
        features = embedder.eval()(embedder.normalise(torch.from_numpy(pixels)))
    found, raw = encoder.run(pixels), features.embeddings.numpy()
    unit = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    np.testing.assert_allclose(found["embeddings"], unit, atol=1e-4)
    assert batch == 1 or np.ptp(unit, axis=0).max() > 1e-3  # images differ, so that the comparison can fail
    np.testing.assert_allclose(found["histograms"], features.histograms.numpy(), atol=1e-4)
    assigned = embedder.assignments(features.locations).reshape(batch, *embedder.grid)
    assert (found["assignments"] == assigned.numpy()).mean() > 0.98
    assert found["assignments"].dtype == np.uint8


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_file_computes_what_torch_does(batch: int, exported: Exported) -> None:
    assert 0 <= exported[3] <= 1e-5
    _check_file(exported[1], exported[0], batch)


def test_ports_are_those_of_the_contract_and_the_spec_says_what_the_network_is(exported: Exported) -> None:
    _, path, spec, _ = exported
    model = onnx.load_model_from_string(path.read_bytes())
    onnx.checker.check_model(model, full_check=True)
    shapes = {
        port.name: [dim.dim_param or dim.dim_value for dim in port.type.tensor_type.shape.dim]
        for port in (*model.graph.input, *model.graph.output)
    }
    assert shapes == {
        "images": ["batch", SIZE, SIZE, 3], "embeddings": ["batch", 5], "histograms": ["batch", 4],
        "assignments": ["batch", 4, 4],
    }  # fmt: skip
    assert read_spec(path) == spec
    found = (spec.image_size, spec.dimension, spec.prototypes, spec.grid, spec.pooling, spec.precision)
    assert found == (SIZE, 5, 4, (4, 4), "gap", "fp32")
    assert {name: getattr(spec, name) for name in FIELDS} == FIELDS


def test_a_run_without_xml_is_exported_without_prototypes(train: Train, data: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", "xml_weight=0", "epochs=1", "ema_decay=0")
    run(Settings(run_dir=tmp_path / "run", model=tmp_path / "plain.onnx"))
    assert read_spec(tmp_path / "plain.onnx").prototypes == 0
    for target in ("plain.onnx", "run"):
        with pytest.raises(BadSetting, match=rf"--fitted needs prototypes, .* {tmp_path / target}: leave it"):
            evaluate.run(evaluate.Settings(target=tmp_path / target, data=data, fitted=2))


def test_nothing_of_this_machine_is_in_the_file(exported: Exported) -> None:
    data = exported[1].read_bytes()
    model = onnx.load_model_from_string(data)
    assert [entry.key for entry in model.metadata_props] == [KEY]
    assert not any(node.metadata_props or node.doc_string for node in model.graph.node)
    here = str(Path(__file__).parents[2]).encode()
    for trace in (b"stack_trace", b".py", here, b"site-packages", b"pytorch"):
        assert trace not in data, trace


def test_embedding_of_zero_is_no_nan(tmp_path: Path) -> None:
    export_model(_embedder("zero"), FIELDS, tmp_path / "zero.onnx", IMAGES)
    found = Encoder(tmp_path / "zero.onnx", threads=1).run(np.zeros((2, SIZE, SIZE, 3), np.uint8))
    assert (found["embeddings"] == 0).all()
    np.testing.assert_allclose(found["histograms"], 0.25, atol=1e-6)


@pytest.mark.parametrize(("backbone", "pooling"), [("bn_inception", "gem"), ("test_vit", "gap_gmp")])
def test_every_form_of_backbone_and_pooling_is_exported_for_any_batch(
    backbone: str, pooling: PoolingName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [block for block in BLOCKS if block.name in ("3a", "3c", "5b")]  # a block of each kind
    monkeypatch.setattr(training.network.backbone, "BLOCKS", some)
    recipe = Recipe(backbone=backbone, image_size=32, pooling=pooling, dimension=5, prototypes=4)
    embedder, path = build_embedder(recipe), tmp_path / "m.onnx"
    spec, _ = export_model(embedder, FIELDS, path, IMAGES)
    assert spec.grid == (2, 2)
    assert read_spec(path).pooling == spec.pooling == pooling
    _check_file(path, embedder, 7)


def test_file_of_other_numbers_is_not_left_and_the_previous_one_survives(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"the model in use")
    with pytest.raises(BadArtifact, match=r"was not kept: its \w+ .* from torch's .* 0\.0001 is allowed"):
        export_model(_embedder("other numbers"), FIELDS, path, IMAGES)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"the model in use", [path])


def test_network_that_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadArtifact, match=r"cannot be written as ONNX: .*; choose another backbone"):
        export_model(_embedder("unexportable"), FIELDS, tmp_path / "m.onnx", IMAGES)
    monkeypatch.setattr(module, "MAX_MODEL_BYTES", 1000)
    with pytest.raises(BadArtifact, match=r"[\d,]+ bytes of weights, and one ONNX file holds 1,000"):
        export_model(_embedder(), FIELDS, tmp_path / "m.onnx", IMAGES)


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    for place, told in (("none/m.onnx", "there is no folder .*none; give a file"), ("", "it is a folder")):
        with pytest.raises(BadSetting, match=f"cannot be written: {told}"):
            export_model(_embedder(), FIELDS, tmp_path / place, IMAGES)


@pytest.mark.parametrize(
    ("output", "factor", "told"),
    [(0, 1.01, "embeddings"), (1, 1.01, "histograms"), (2, 2, "assignments"), (0, math.nan, "nan")],
)
def test_parity_sees_each_output_differ(output: int, factor: float, told: str, exported: Exported) -> None:
    graph, encoder = module.OnnxGraph(exported[0], explains=True).eval(), Encoder(exported[1], threads=1)

    def network(images: Tensor) -> list[Tensor]:
        outputs = list(graph(images))
        outputs[output] = (outputs[output] + output // 2) * factor
        return outputs

    with pytest.raises(BadArtifact, match=told):
        module.check_parity(encoder, network, IMAGES)


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose images lie in `data`, some of which are none."""
    root = tmp_path / "data"
    for i, data in enumerate([*IMAGES, b"a text file", b""]):
        (root / f"class{i % 3}").mkdir(parents=True, exist_ok=True)
        (root / f"class{i % 3}/{i}.jpg").write_bytes(data)
    own = {"root": str(root), "format": "folder", "table": None, "train_classes": [*"ab"], "train_images": 7}
    record = {"name": "tiny-contrastive", "versions": {"torch": "2"}, "seed": 3, "data": own}
    record["metrics"] = {"epoch": 2, "validation": {"map_at_r": 0.5}}
    recipe = Recipe(image_size=SIZE, dimension=5, prototypes=4, weights="/home/someone/weights.pth")
    found = Run(tmp_path / "run", recipe, _embedder(), 1, record)
    monkeypatch.setattr(module, "load_run", lambda path: found)
    return found


def test_command_records_the_training_and_no_path(
    trained: Run, exported: Exported, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.onnx"
    result = run(Settings(run_dir=trained.path, model=path))
    spec = read_spec(path)
    assert (json.loads(json.dumps(result)), result["images"]) == (result, len(IMAGES))
    assert result["fingerprint"] == spec.fingerprint == exported[2].fingerprint  # of the same network
    assert spec.fingerprint == fingerprint(onnx.load_model_from_string(path.read_bytes()))
    found = (spec.name, spec.data, spec.classes, spec.images, spec.seed, spec.backbone, spec.split)
    assert found == ("tiny-contrastive", "data", 2, 7, 3, "resnet20", trained.recipe.split)
    told = {"weights": "weights.pth", "backbone": "resnet20", "image_size": SIZE}
    assert told.items() <= spec.recipe.items()
    assert spec.accuracy == {"epoch": 2, "validation": {"map_at_r": 0.5}}
    assert spec.versions == {"torch": "2", "onnx": onnx.__version__}
    assert str(tmp_path).encode() not in path.read_bytes()
    assert "2 images cannot be read and were passed over (first: class" in caplog.text
    for words in (f"Wrote {path}: tiny-contrastive", "On 9 images it differs from torch by at most"):
        assert words in render(result)


def test_command_without_images_says_so(trained: Run, tmp_path: Path) -> None:
    settings = Settings(run_dir=trained.path, model=tmp_path / "m.onnx")
    gone = (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(BadData, match=r"no longer at .*data: give their folder by --data"):
        run(settings)
    for image in sorted(gone.rglob("*.jpg"))[:7]:
        image.unlink()
    with pytest.raises(BadData, match=r"holds . images that can be read and . that cannot; .* at least 6"):
        run(settings.model_copy(update={"data": gone}))
    assert not settings.model.exists()
