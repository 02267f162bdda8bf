"""`crossbatch evaluate`: retrieval metrics of a run or an ONNX model, on unseen classes by default."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from serving.catalog import Catalog, Format, SplitRule, read, select
from serving.errors import BadData, BadSetting, CrossbatchError, NotFound
from training.embedder import build_embedder
from training.embedding import (
    describer_function,
    embed_pictures,
    embedder_function,
    measure_retrieval,
    pooled_function,
    roles_of,
)
from training.fitted import fitted_figures
from training.metrics import FIGURE_NAMES
from training.partition import check_complete, is_own, read_own
from training.pictures import Decoder, Stream, class_numbers, tell_unreadable, viewing_decoder
from training.recipe import Recipe
from training.run import load_run, read_recipe, read_record, write_record

__all__ = ["Settings", "render", "run"]


class Settings(BaseModel):
    """Measure how well images of one class find each other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Path = Field(
        description="a run folder (its best weights, by torch) or a .onnx model (by ONNX Runtime)",
        json_schema_extra={"positional": True},
    )
    data: Path | None = Field(
        None, description="the images: a folder, .csv, .tar or .parquet file; a run's own when not given"
    )
    split: Literal["test", "train", "all"] = Field(
        "test",
        description="classes that training has not seen, those it has, or all, by the model's own rule",
    )
    untrained: bool = Field(False, description="the run's backbone before training: its raw pooled features")
    format: Format = Field(
        "auto", description="layout of the data set; auto is a run's own, or finds out elsewhere"
    )
    table: Path | None = Field(
        None, description="the .csv, .tar or .parquet file to read, where there are several"
    )
    batch: int = Field(64, ge=1, le=4096, description="images embedded at a time")
    at: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 2, 4, 8], description="k of an R@k to tell; may be given again for another"
    )
    clusters: bool = Field(
        False,
        description="also NMI and AMI of as many k-means clusters as classes; slow with thousands of them",
    )
    fitted: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="also MAP_c and MAP_x of prototypes fitted to histograms, over that many random halvings"
        " of the classes, 1000 for a good mean; 0 is without",
    )


class _Subject:
    """What is measured: pixels in, embeddings out, and how the data is cut for it."""

    def __init__(
        self,
        decode: Decoder,
        embed: Callable[[Tensor], Tensor],
        split: SplitRule,
        *,
        prototypes: int = 0,
        epoch: int = 0,
    ) -> None:
        self.decode = decode
        self.embed = embed
        self.split = split
        self.prototypes = prototypes  # how many of the last components are a histogram
        self.epoch = epoch  # of a run's weights


def run(settings: Settings) -> dict[str, Any]:
    """Embed every readable image of the split and search each among the others.

    Where a data set tells queries from a gallery, as In-Shop does, the split `test` searches those in this.
    The figures of a run on its own data set are noted in its record, from where `export` takes them into the
    model file.

    Returns:
        `target`, `split`, `untrained`, `dimension`, `images`, `classes`, `recall_at` (by k as text),
        `map_at_r` and `r_precision` (all in 0..1), `queries`, `excluded` (those without a match), `gallery`
        (images that queries were searched in; 0 where each was searched among all others), with `clusters`
        `nmi` and `ami`, with `fitted` `map_c`, `map_x`, `halvings` and how many of these are `distinct`,
        `unlabelled` (how many images of the data set are of no class), `unreadable`, `noted` (whether in
        the run's record), `not_noted` (why not, where the run itself was measured) and `seconds`.

    Raises:
        CrossbatchError: If the run, model or data set cannot be read, or no image has a match.
    """
    started = time.monotonic()
    is_model = settings.target.suffix == ".onnx"
    if not settings.target.exists():
        raise NotFound(f"there is neither a run folder nor a model at {settings.target}")
    if is_model and settings.untrained:
        raise BadSetting("--untrained needs a run folder: a model file no longer has its backbone's start")
    if settings.untrained and settings.fitted:
        raise BadSetting(
            "--fitted needs histograms, and an --untrained backbone has none: give one of the two"
        )
    catalog = _read(settings, is_model)
    check_complete(catalog)
    subject = _open_model(settings) if is_model else _open_run(settings)
    rows = [row for row in select(catalog, settings.split, subject.split) if row.label]
    if not rows:
        raise BadData(f"none of the {len(catalog.rows)} images of {catalog.root} is of a class")
    of_run = not is_model and not settings.untrained
    not_noted = _why_not_own(settings.target, catalog, subject.split) if of_run else ""
    stream = Stream(rows, subject.decode)
    described = embed_pictures(subject.embed, stream, batch=settings.batch)  # (N, d + m)
    embeddings, histograms = described.tensor_split((described.shape[1] - subject.prototypes,), dim=1)
    labels = class_numbers(stream.rows, sorted({row.label for row in rows}))
    roles = roles_of(stream.rows, settings.split, subject.split)
    figures = measure_retrieval(embeddings, labels, roles=roles, at=settings.at)
    if settings.clusters:
        from training.clustering import cluster_figures  # only here: scikit-learn takes a second to load

        figures |= cluster_figures(embeddings, labels)
    if settings.fitted:
        figures |= fitted_figures(histograms, embeddings, labels, draws=settings.fitted)
    counts = {"images": len(labels), "classes": len(np.unique(labels))}
    if of_run and not not_noted:
        not_noted = _note(settings.target, {settings.split: figures | counts}, epoch=subject.epoch)
    return {
        "target": str(settings.target),
        "split": settings.split,
        "untrained": settings.untrained,
        "dimension": embeddings.shape[1],
        **counts,
        **figures,
        "unlabelled": catalog.unlabelled,
        "unreadable": [{"key": bad.key, "reason": bad.reason} for bad in stream.unreadable],
        "noted": of_run and not not_noted,
        "not_noted": not_noted,
        "seconds": round(time.monotonic() - started, 1),
    }


def render(result: dict[str, Any]) -> str:
    """Tell the figures in percent."""
    lines = tell_unreadable(result["unreadable"])
    what = "untrained backbone of " if result["untrained"] else ""
    lines.append(
        f"{what}{result['target']} on {result['split']}: {result['images']} images of {result['classes']}"
        f" classes, {result['dimension']} dimensions, {result['seconds']:.0f} s"
    )
    figures = {f"R@{k}": share for k, share in result["recall_at"].items()}
    figures |= {FIGURE_NAMES[key]: result[key] for key in FIGURE_NAMES if key in result}
    lines += [f"  {name:<12}{100 * share:6.2f} %" for name, share in figures.items()]
    if "map_x" in result:
        lines.append(f"  MAP_x is over {result['halvings']} halvings, of which {result['distinct']} differ")
    if result["gallery"]:
        lines.append(
            f"  {result['queries']} queries were searched in a gallery of {result['gallery']} images"
        )
    if result["excluded"]:
        why = "have no match in the gallery" if result["gallery"] else "are alone in their class"
        lines.append(f"  {result['excluded']} images {why} and were not asked for")
    if result["unlabelled"]:
        lines.append(f"  {result['unlabelled']} images are of no class and were left out")
    if result["not_noted"]:
        lines.append(f"  these figures are not noted in the run: {result['not_noted']}")
    return "\n".join(lines)


def _read(settings: Settings, is_model: bool) -> Catalog:
    """Read the images: a run's own, or those given."""
    if not is_model:
        record = read_record(settings.target)
        return read_own(record, data=settings.data, format=settings.format, table=settings.table)
    if settings.data is None:
        raise BadSetting("evaluating a model file needs --data, the folder of the images")
    return read(settings.data, settings.format, table=settings.table)


def _why_not_own(path: Path, catalog: Catalog, rule: SplitRule) -> str:
    """Say why figures on a catalogue are not those of the run itself; nothing where they are."""
    record = read_record(path)
    if is_own(record, catalog, rule):
        return ""
    own = record["data"]
    return f"its own images are those that {own['root']}, read as {own['format']}, held when it was started"


def _note(path: Path, figures: dict[str, Any], *, epoch: int) -> str:
    """Put figures of an epoch's weights into a run's record; says why it could not, which spoils nothing."""
    record = read_record(path)
    if record["metrics"].get("epoch", epoch) != epoch:  # it is being trained
        return f"they are of epoch {epoch}, and by now the run keeps epoch {record['metrics']['epoch']}"
    record["metrics"] |= figures
    try:
        write_record(path, record)
    except CrossbatchError as error:
        return str(error)
    return ""


def _open_run(settings: Settings) -> _Subject:
    if settings.untrained:
        recipe: Recipe = read_recipe(settings.target)
        return _Subject(viewing_decoder(recipe), pooled_function(build_embedder(recipe)), recipe.split)
    run = load_run(settings.target)
    decode, split = viewing_decoder(run.recipe), run.recipe.split
    if settings.fitted:
        embed = describer_function(run.embedder)
        return _Subject(decode, embed, split, prototypes=len(run.embedder.codebook), epoch=run.epoch)
    return _Subject(decode, embedder_function(run.embedder), split, epoch=run.epoch)


def _open_model(settings: Settings) -> _Subject:
    from serving.model.encoder import Encoder  # only here: a run is measured without ONNX Runtime

    encoder = Encoder(settings.target)
    if settings.fitted and not encoder.spec.prototypes:
        raise BadSetting(
            f"--fitted needs histograms, and {settings.target} has none, since nothing"
            " trained its prototypes: leave it out"
        )
    outputs = ("embeddings", "histograms") if settings.fitted else ("embeddings",)

    def embed(pixels: Tensor) -> Tensor:
        images: NDArray[np.uint8] = pixels.numpy()  # (B, S, S, 3)
        found = encoder.run(images, *outputs)
        return torch.cat([torch.from_numpy(found[name]) for name in outputs], dim=1)

    prototypes = encoder.spec.prototypes if settings.fitted else 0
    return _Subject(encoder.preprocess, embed, encoder.spec.split, prototypes=prototypes)
