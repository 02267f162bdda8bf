"""The export command: a run's network as one ONNX file, left only if it does on real images what torch does.

Everything numeric goes into the graph, from uint8 pixels to unit embeddings; the rest goes into its
`ModelSpec`. The check runs the written file as the server will: `serving.model.preprocess` and `Encoder`.
An int8 or fp16 file is made of that, and left if it finds about as much of unseen classes.
"""

import itertools
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Final, Literal

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional

from serving.catalog.catalog import Catalog, Format, Row, read, select
from serving.errors import BadArtifact, BadData, BadImage, BadSetting, cause_of
from serving.model.encoder import Encoder
from serving.model.preprocess import open_rgb
from serving.model.spec import MAX_MODEL_BYTES, ModelSpec, bare, fingerprint, write_spec
from training.data.partition import Table, read_own
from training.loop.checkpoint import replacing
from training.loop.run import Run, load_run
from training.network.embedder import Embedder
from training.quantise import BACKBONE, lower_file, tell_change

__all__ = ["OUTPUTS", "TOLERANCE", "OnnxGraph", "Settings", "check_parity", "export_model", "render", "run"]

OUTPUTS: Final = ("embeddings", "histograms", "assignments")
TOLERANCE: Final = 1e-4  # largest difference allowed in any component of an embedding or a histogram, in fp32
_LEAST_IMAGES: Final = 6  # for batches of one, of two and of three
_BATCH: Final = 15
_CALIBRATING: Final = 64  # images; four times as many change MAP@R on CUB-100 by 0.01 points
_SCOPES: Final = "pkg.torch.onnx.name_scopes"  # the modules that a node comes from

_log = logging.getLogger(__name__)


class Settings(BaseModel):
    """Write a run's best weights as one ONNX file that needs no torch."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    run_dir: Path = Field(json_schema_extra={"positional": True, "metavar": "RUN"})
    """folder of the run"""
    model: Path = Field(json_schema_extra={"positional": True, "metavar": "MODEL.onnx"})
    """file to write; one that is there is replaced"""
    data: Path | None = None
    """images to check the file on; those of the run's own data set when not given"""
    format: Format = "auto"
    """layout of the images; auto is the run's own, or finds out elsewhere"""
    table: Table = None
    images: int = Field(32, ge=_LEAST_IMAGES, le=10_000)
    """how many images to check it on"""
    name: str | None = Field(None, min_length=1, max_length=200)
    """what to call the model; the recipe's name"""
    precision: Literal["fp32", "int8", "fp16"] = "fp32"
    """int8 for CPUs, fp16 for GPUs; either is measured against fp32 on the unseen classes of the images"""
    calibrate: Path | None = None
    """photographs like those that will be asked for, from which int8 takes its ranges; those that trained
    when not given"""
    max_loss: float = Field(0.5, ge=0, le=100)
    """most points of R@1 or of MAP@R that int8 or fp16 may lose; above it no file is left"""


def run(settings: Settings) -> dict[str, Any]:
    """Export a run and check the file.

    Gives `model` (its path), `name`, `fingerprint`, `dimension` and `image_size` as its `ModelSpec` has them,
    `bytes`, `images` (how many it was checked on), `difference` (of the largest component) and `seconds`.
    """
    started = time.monotonic()
    if settings.calibrate and settings.precision != "int8":
        raise BadSetting("--calibrate is for --precision int8: give both, or neither")
    _check_place(settings.model)
    trained = load_run(settings.run_dir)
    catalog = read_own(trained.record, data=settings.data, format=settings.format, table=settings.table)
    images = _sample(catalog, catalog.rows, settings.images, "--data")
    fields = _fields(trained, settings.name)
    explains = trained.recipe.learns_prototypes
    if settings.precision == "fp32":
        spec, difference = export_model(trained.embedder, fields, settings.model, images, explains=explains)
    else:
        photos = _calibrating(settings, catalog, trained) if settings.precision == "int8" else ()
        with tempfile.TemporaryDirectory() as folder:
            fp32 = Path(folder, "fp32.onnx")
            _, difference = export_model(trained.embedder, fields, fp32, images, explains=explains)
            spec = lower_file(
                fp32, settings.model, settings.precision, photos, catalog, max_loss=settings.max_loss
            )
    told = {"name", "fingerprint", "dimension", "image_size", "precision", "fp32_fingerprint", "against_fp32"}
    return {
        "model": str(settings.model),
        **spec.model_dump(include=told),
        "bytes": settings.model.stat().st_size,
        "images": len(images),
        "difference": difference,
        "seconds": round(time.monotonic() - started, 1),
    }


def render(result: dict[str, Any]) -> str:
    """Tell what was written and how it was checked."""
    lowered = result["against_fp32"]
    told = (
        f"Wrote {result['model']}: {result['name']}, {result['bytes'] / 1e6:.1f} MB, images of "
        f"{result['image_size']} px to {result['dimension']} dimensions, fingerprint "
        f"{result['fingerprint'][:12]}.\nOn {result['images']} images {'its fp32 form' if lowered else 'it'} "
        f"differs from torch by at most {result['difference']:.1e} in any component."
    )
    if lowered:
        told += f"\n{result['precision']} against fp32 ({result['fp32_fingerprint'][:12]}): "
        told += f"{tell_change(lowered)}, on {lowered['images']} test images."
    return told


def export_model(
    embedder: Embedder,
    fields: Mapping[str, Any],
    path: Path,
    images: Sequence[bytes],
    *,
    explains: bool = True,
) -> tuple[ModelSpec, float]:
    """Write an embedder, on the CPU, as a model file; `BadArtifact` if that does not compute what torch does.

    A file that is there is replaced in one step. The `fields` of `ModelSpec` are those that the network does
    not know, `images` are files to check it on, and `explains` says whether it has histograms and
    assignments. Gives the spec, and the largest difference found in any component.
    """
    _check_place(path)
    graph = OnnxGraph(embedder, explains=explains).eval()
    model = _to_onnx(graph, embedder.image_size)
    spec = ModelSpec(
        fingerprint=fingerprint(model),
        image_size=embedder.image_size,
        dimension=embedder.dimension,
        prototypes=embedder.codebook.shape[0] if explains else 0,
        grid=embedder.grid if explains else None,
        pooling=embedder.pooling,
        **fields,
    )
    write_spec(model, spec)
    with replacing(path) as aside:
        aside.write_bytes(model.SerializeToString())
        difference = check_parity(Encoder(aside), graph, images)
    return spec, difference


class OnnxGraph(nn.Module):
    """What goes into the file: pixels to unit embeddings, histograms and dominant prototypes if asked."""

    def __init__(self, embedder: Embedder, *, explains: bool) -> None:
        super().__init__()
        self.embedder = embedder
        self.outputs = OUTPUTS if explains else OUTPUTS[:1]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Run uint8 (B, S, S, 3) to float32 (B, d) of unit rows, and float32 (B, m) and uint8 (B, h, w)."""
        embedder = self.embedder
        maps = embedder.backbone(embedder.normalise(images))
        features = embedder(maps, mapped=True)
        # The head behind the pooling, which commute: at 7 x 7 locations it takes 6 % of EfficientNet-Lite0.
        pooled = embedder.head(embedder.pool(maps)[:, :, None, None]).flatten(1)  # (B, d)
        # An embedding of zero stays zero: the norm is at least epsilon.
        embeddings = functional.normalize(pooled, dim=1, eps=1e-12)
        if len(self.outputs) == 1:
            return (embeddings,)
        assignments = embedder.assignments(features.locations).reshape(-1, *embedder.grid)
        return embeddings, features.histograms, assignments


def _to_onnx(graph: OnnxGraph, size: int) -> onnx.ModelProto:
    """Export with a free batch, without the names, paths and stack traces of this machine."""
    weights = sum(tensor.nbytes for tensor in graph.state_dict().values())
    if weights > MAX_MODEL_BYTES:
        raise BadArtifact(
            f"the network has {weights:,} bytes of weights, and one ONNX file holds {MAX_MODEL_BYTES:,}"
        )
    # A batch of one would be taken for a constant (pytorch#157621).
    example = torch.zeros(2, size, size, 3, dtype=torch.uint8)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # What the exporter's own modules say of themselves is no concern of whoever exports.
            warnings.filterwarnings("ignore", module=r"(torch|onnxscript|onnx_ir|onnx|copyreg)(\.|$)")
            program: Any = torch.onnx.export(
                graph,
                (example,),
                input_names=["images"],
                output_names=graph.outputs,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # the exporter raises whatever an operator of the backbone makes it raise
        reason = f"cannot be written as ONNX: {cause_of(error)}; choose another backbone"
        raise BadArtifact(f"the network {reason}") from error
    found = program.model_proto
    for node in found.graph.node:  # which is left in the file, for what lowers the backbone's precision
        if any(each.key == _SCOPES and "'embedder.backbone'" in each.value for each in node.metadata_props):
            node.name = f"{BACKBONE}{node.name}"
    model = bare(found)
    model.producer_name = "crossbatch"
    return model


def check_parity(
    encoder: Encoder, network: Callable[[Tensor], Sequence[Tensor]], images: Sequence[bytes]
) -> float:
    """Give the largest difference between a model file and its network; `BadArtifact` above `TOLERANCE`.

    The network gives all `OUTPUTS` or the first alone, on the CPU, for uint8 (B, S, S, 3).
    """
    largest, done, sizes = 0.0, 0, itertools.chain((1, 2, 3), itertools.repeat(_BATCH))
    while done < len(images):
        data = images[done : done + next(sizes)]
        done += len(data)
        batch = np.stack([encoder.preprocess(each) for each in data])  # (B, S, S, 3)
        with torch.no_grad():
            outputs = [output.numpy() for output in network(torch.from_numpy(batch))]
        wanted = dict(zip(OUTPUTS, outputs, strict=False))
        found = encoder.run(batch, *wanted)
        for name in wanted:
            largest = max(largest, _difference(found[name], wanted[name], name))
    return largest


def _difference(found: NDArray[Any], wanted: NDArray[Any], name: str) -> float:
    """Give the largest difference; of assignments none, where one location or one in a hundred may differ."""
    if name == "assignments":  # where two prototypes are as near as rounding goes
        different = int((found != wanted).sum())
        if different <= max(1, found.size // 100):
            return 0.0
        told = f"in {different} of {found.size} locations"
    else:
        difference = float(np.abs(found - wanted).max())
        if difference <= TOLERANCE:  # which NaN is not
            return difference
        told = f"by {difference:.2g}, where {TOLERANCE:g} is allowed; its backbone may not be exportable"
    raise BadArtifact(
        f"the exported file was not kept: its {name} {found.shape} differ from torch's {wanted.shape} {told}"
    )


def _fields(trained: Run, name: str | None) -> dict[str, Any]:
    """Collect what the spec says of the training; of a local path only the last part."""
    record, recipe, data = trained.record, trained.recipe, trained.record["data"]
    return {
        "name": name or record["name"],
        "backbone": recipe.backbone,
        "crop_fraction": recipe.crop_fraction,
        "resampling": recipe.resampling,
        "data": PurePath(data["root"]).name,
        "split": recipe.split,
        "classes": len(data["train_classes"]),
        "images": data["train_images"],
        "recipe": recipe.model_dump(mode="json") | {"weights": PurePath(recipe.weights).name},
        "accuracy": record["metrics"],
        "seed": record.get("seed"),
        "versions": record.get("versions", {}) | {"onnx": onnx.__version__},
        "git_commit": record.get("git_commit"),
    }


def _check_place(path: Path) -> None:
    """Refuse a path that no file can be written to, before the seconds that exporting takes."""
    if path.is_dir() or not path.parent.is_dir():
        found = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise BadSetting(f"{path} cannot be written: {found}; give a file in a folder that is there")


def _calibrating(settings: Settings, catalog: Catalog, trained: Run) -> list[bytes]:
    """Read the images that int8 takes its ranges from."""
    if settings.calibrate:
        given = read(settings.calibrate)
        return _sample(given, given.rows, _CALIBRATING, "--calibrate")
    return _sample(catalog, select(catalog, "train", trained.recipe.split), _CALIBRATING, "--calibrate")


def _sample(catalog: Catalog, rows: Sequence[Row], count: int, flag: str) -> list[bytes]:
    """Read that many images, spread evenly over the rows, leaving out those that are no images."""
    found, bad = list[bytes](), list[str]()
    # Evenly spread first, and then whatever is left, in case some cannot be read.
    spread = [len(rows) * i // count for i in range(count)] if len(rows) > count else []
    for i in dict.fromkeys([*spread, *range(len(rows))]):
        if len(found) == count:
            break
        try:
            data = rows[i].image.read_bytes()
            open_rgb(data)
            found.append(data)
        except (OSError, BadImage) as error:
            bad.append(f"{rows[i].key}: {error}")
    if len(found) < _LEAST_IMAGES:
        raise BadData(
            f"{catalog.root} holds {len(found)} images that can be read and {len(bad)} that cannot; an "
            f"exported file takes at least {_LEAST_IMAGES} to be checked and calibrated: give another folder "
            f"by {flag}"
        )
    if bad:
        _log.warning("%d images cannot be read and were passed over (first: %s)", len(bad), bad[0])
    return found
