"""`crossbatch evaluate`: retrieval metrics of a run or an ONNX model, on unseen classes by default."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from serving.catalog import SplitRule, select
from serving.errors import BadSetting, CrossbatchError, NotFound
from training.dataset import Decoder, Pictures, viewing_decoder
from training.embedder import build_embedder
from training.embedding import embed_pictures, embedder_function, measure_retrieval, pooled_function
from training.partition import read_catalog
from training.recipe import Recipe
from training.run import load_run, read_recipe, read_record, write_record

__all__ = ["Settings", "render", "run"]


_log = logging.getLogger(__name__)


class Settings(BaseModel):
    """Measure how well images of one class find each other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Path = Field(
        description="a run folder (its best weights, by torch) or a .onnx model (by ONNX Runtime)",
        json_schema_extra={"positional": True},
    )
    data: Path | None = Field(None, description="folder of the images; a run's own when not given")
    split: Literal["test", "train", "all"] = Field(
        "test",
        description="classes that training has not seen, those it has, or all, by the model's own rule",
    )
    untrained: bool = Field(False, description="the run's backbone before training: its raw pooled features")
    format: Literal["auto", "folder", "csv", "cifar10"] = Field("auto", description="layout of the data set")
    table: Path | None = Field(
        None, description="table of a csv data set, where it is not the one in the folder"
    )
    batch: int = Field(64, ge=1, le=4096, description="images embedded at a time")


class _Subject:
    """What is measured: pixels in, embeddings out, and how the data is cut for it."""

    def __init__(self, decode: Decoder, embed: Callable[[Tensor], Tensor], split: SplitRule) -> None:
        self.decode = decode
        self.embed = embed
        self.split = split


def run(settings: Settings) -> dict[str, Any]:
    """Embed every readable image of the split and search each among the others.

    The figures of a run are noted in its record, from where `export` takes them into the model file.

    Returns:
        `target`, `split`, `untrained`, `dimension`, `images`, `classes`, `recall_at` (by k as text),
        `map_at_r` and `r_precision` (all in 0..1), `queries`, `excluded` (images alone in their class),
        `unreadable` and `seconds`.

    Raises:
        CrossbatchError: If the run, model or data set cannot be read, or no image has a match.
    """
    started = time.monotonic()
    is_model = settings.target.suffix == ".onnx"
    if not settings.target.exists():
        raise NotFound(f"there is neither a run folder nor a model at {settings.target}")
    if is_model and settings.untrained:
        raise BadSetting("--untrained needs a run folder: a model file no longer has its backbone's start")
    data = settings.data
    if data is None:
        if is_model:
            raise BadSetting("evaluating a model file needs --data, the folder of the images")
        data = Path(read_record(settings.target)["data"]["root"])
    subject = _open_model(settings.target) if is_model else _open_run(settings.target, settings.untrained)
    catalog = read_catalog(data, format=settings.format, table=settings.table)
    rows = select(catalog, settings.split, subject.split)
    pictures = Pictures(rows, subject.decode, label="Reading images")
    embeddings = embed_pictures(subject.embed, pictures, batch=settings.batch)
    figures = measure_retrieval(embeddings, pictures.labels)
    counts = {"images": len(pictures), "classes": len(np.unique(pictures.labels))}
    if not is_model and not settings.untrained:
        _note(settings.target, {settings.split: figures | counts})
    return {
        "target": str(settings.target),
        "split": settings.split,
        "untrained": settings.untrained,
        "dimension": embeddings.shape[1],
        **counts,
        **figures,
        "unreadable": [{"key": bad.key, "reason": bad.reason} for bad in pictures.unreadable],
        "seconds": round(time.monotonic() - started, 1),
    }


def render(result: dict[str, Any]) -> str:
    """Tell the figures in percent."""
    lines = [f"skipped {bad['key']}: {bad['reason']}" for bad in result["unreadable"]]
    what = "untrained backbone of " if result["untrained"] else ""
    lines.append(
        f"{what}{result['target']} on {result['split']}: {result['images']} images of {result['classes']}"
        f" classes, {result['dimension']} dimensions, {result['seconds']:.0f} s"
    )
    figures = {f"R@{k}": share for k, share in result["recall_at"].items()}
    figures |= {"MAP@R": result["map_at_r"], "R-precision": result["r_precision"]}
    lines += [f"  {name:<12}{100 * share:6.2f} %" for name, share in figures.items()]
    if result["excluded"]:
        lines.append(f"  {result['excluded']} images are alone in their class and were not asked for")
    return "\n".join(lines)


def _note(path: Path, figures: dict[str, Any]) -> None:
    """Put figures into a run's record; a folder that cannot be written to does not spoil the evaluation."""
    record = read_record(path)
    record["metrics"] |= figures
    try:
        write_record(path, record)
    except CrossbatchError as error:
        _log.warning("the figures are not noted in the run: %s", error)


def _open_run(path: Path, untrained: bool) -> _Subject:
    if untrained:
        recipe: Recipe = read_recipe(path)
        return _Subject(viewing_decoder(recipe), pooled_function(build_embedder(recipe)), recipe.split)
    run = load_run(path)
    return _Subject(viewing_decoder(run.recipe), embedder_function(run.embedder), run.recipe.split)


def _open_model(path: Path) -> _Subject:
    from serving.model.encoder import Encoder  # only here: a run is measured without ONNX Runtime

    encoder = Encoder(path)

    def embed(pixels: Tensor) -> Tensor:
        images: NDArray[np.uint8] = pixels.numpy()  # (B, S, S, 3)
        return torch.from_numpy(encoder.encode(images))

    return _Subject(encoder.preprocess, embed, encoder.spec.split)
