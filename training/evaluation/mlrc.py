"""`crossbatch mlrc`: a recipe trained once for each fold, several times over, and tested as an ensemble.

The protocol of Musgrave et al., "A Metric Learning Reality Check", ECCV 2020.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional

from serving.catalog.catalog import Catalog, Format, Row, read, select
from serving.errors import BadData, BadSetting, NotFound
from training import train
from training.data.partition import Exclude, Table, divide
from training.data.pictures import Pictures, embed_pictures, tell_unreadable, viewing_decoder
from training.evaluation.metrics import Ints, retrieval_metrics, roles_of
from training.evaluation.paired import summarise, tell
from training.loop.checkpoint import load_state, write_file
from training.loop.processes import device_of
from training.loop.run import LAST, load_run, read_recipe, read_record
from training.network.embedder import embedder_function
from training.recipes.recipe import Recipe, check_settings
from training.recipes.recipe_file import load_recipe

__all__ = ["Settings", "render", "run"]

_RESULT = "mlrc.json"
_TITLES = {"recall_at_1": "R@1", "map_at_r": "MAP@R", "r_precision": "R-precision"}


class Settings(BaseModel):
    """Train on every fold of the training classes, and test the folds' embedders apart and together."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    recipe: str = Field(json_schema_extra={"positional": True})
    """name of a recipe with folds, or path of a .yaml file"""
    data: Path
    """the images: a folder, .csv, .tar or .parquet file"""
    out: Path
    """folder of the runs, OUT/repeat0/fold0 and so on; what is finished in it is kept, what was cut goes
    on"""
    repeats: int = Field(1, ge=1, le=1000)
    """how often all folds are trained, each time from other seeds"""
    format: Format = "auto"
    """layout of the data set; auto finds out"""
    table: Table = None
    exclude: Exclude = []
    set: list[str] = []
    """key=value: one setting of the recipe changed; may be repeated"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to train and embed; auto is cuda where there is one, else cpu"""
    batch: int = Field(64, ge=1, le=4096)
    """test images embedded at a time"""


@dataclass(frozen=True, slots=True)
class _Fold:
    """One training of the protocol."""

    name: str
    path: Path
    changes: list[str]  # to the recipe
    recipe: Recipe


def run(settings: Settings) -> dict[str, Any]:
    """Train what is not trained yet, then embed the test images by each fold's best weights.

    Gives `recipe`, `out`, `folds`, `dimension` (of `separate` and `concatenated`), `images`, `classes`,
    `queries`, `excluded` and `gallery` as `RetrievalMetrics` has them, `unreadable`, `repeats` (for each:
    `seeds`, the figures `by_fold`, `separate` and `concatenated`), `separate` and `concatenated` (each
    figure's `mean` over the repeats and `half_width` of its 95 % interval, None for one repeat) and
    `seconds`; the figures are `recall_at_1`, `map_at_r` and `r_precision`, in 0..1. The same is written to
    OUT/mlrc.json.
    """
    started = time.monotonic()
    recipe = load_recipe(settings.recipe, settings.set)
    if not recipe.folds:
        raise BadSetting(
            f"mlrc trains on folds, but the recipe {settings.recipe} sets folds to 0: choose one of those"
            " that begin with mlrc/, or add --set folds=4 --set validation=0"
        )
    if torch.distributed.is_torchelastic_launched():
        raise BadSetting(
            "mlrc runs in one process: train single folds by `torchrun -m crossbatch train` with --set fold=F"
            " --set seed=S into OUT/repeatR/foldF, which mlrc then takes for its own"
        )
    catalog = read(settings.data, settings.format, table=settings.table, exclude=settings.exclude)
    rows = select(catalog, "test", recipe.split)
    folds = [
        _plan_fold(settings, recipe, repeat, fold)
        for repeat in range(settings.repeats)
        for fold in range(recipe.folds)
    ]
    for each in folds:  # hours before it would be found out otherwise
        _check_own(each, catalog)
    for each in folds:
        _train(each, settings)
    result = _test(folds, rows, recipe, settings) | {"seconds": round(time.monotonic() - started, 1)}
    write_file(settings.out / _RESULT, (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode())
    return result


def render(result: dict[str, Any]) -> str:
    """Tell the figures in percent, each with its confidence interval."""
    lines = tell_unreadable(result["unreadable"])
    repeats = len(result["repeats"])
    lines.append(
        f"{result['recipe']} on test: {result['images']} images of {result['classes']} classes,"
        f" {result['folds']} folds, {repeats} {'repeat' if repeats == 1 else 'repeats'},"
        f" {result['seconds']:.0f} s"
    )
    lines.append(f"  {'':<22}" + "".join(f"{title:<16}" for title in _TITLES.values()).rstrip())
    for kind in ("separate", "concatenated"):
        cells = (tell(result[kind][name]) for name in _TITLES)
        title = f"{kind}, {result['dimension'][kind]}-D"
        lines.append(f"  {title:<22}" + "".join(f"{cell:<16}" for cell in cells).rstrip())
    if repeats == 1:
        lines.append("  one repeat gives no confidence interval: ask for more by --repeats")
    else:
        lines.append("  ± is half the width of the 95 % confidence interval over the repeats (Student's t)")
    if result["gallery"]:
        lines += [f"  {result['queries']} queries were searched in a gallery of {result['gallery']} images"]
    if result["excluded"]:
        lines.append(f"  {result['excluded']} images have no match and were not asked for")
    return "\n".join(lines)


def _measure(parts: Sequence[Tensor], labels: Ints, roles: Sequence[str] | None) -> dict[str, Any]:
    """Measure the embeddings (N, d) of each fold by themselves, and all side by side, each at unit length."""
    together = torch.cat([functional.normalize(part, dim=1) for part in parts], dim=1)
    parts = [*parts, functional.normalize(together, dim=1)]
    found = [retrieval_metrics(each, labels, roles=roles) for each in parts]
    *folds, concatenated = (
        {"recall_at_1": each.recall_at[1], "map_at_r": each.map_at_r, "r_precision": each.r_precision}
        for each in found
    )
    return {
        "by_fold": folds,
        "separate": {name: float(np.mean([each[name] for each in folds])) for name in _TITLES},
        "concatenated": concatenated,
        "queries": found[-1].queries,
        "excluded": found[-1].excluded,
        "gallery": found[-1].gallery,
    }


def _plan_fold(settings: Settings, recipe: Recipe, repeat: int, fold: int) -> _Fold:
    changes = [*settings.set, f"fold={fold}", f"seed={recipe.seed + repeat * recipe.folds + fold}"]
    name = f"repeat{repeat}/fold{fold}"
    return _Fold(name, settings.out / name, changes, load_recipe(settings.recipe, changes))


def _check_own(each: _Fold, catalog: Catalog) -> None:
    """Refuse a run that is there and is not the one that would be trained, and data that has no such fold."""
    digest = divide(catalog, each.recipe).describe()["digest"]
    if (found := _begun(each)) is None:
        return
    check_settings(each.path, dict(found), dict(each.recipe))
    if read_record(each.path)["data"]["digest"] != digest:
        raise BadData(
            f"the run {each.path} was trained on other images than those that {catalog.root} holds now:"
            " choose another folder for --out"
        )


def _train(each: _Fold, settings: Settings) -> None:
    """Train one fold, go on with it, or leave it where it is finished."""
    where: dict[str, Any] = {"out": each.path, "data": settings.data, "device": settings.device}
    where |= {"format": settings.format, "table": settings.table, "exclude": settings.exclude}
    if _begun(each) is None:
        train.run(train.Settings(recipe=settings.recipe, set=each.changes, **where))
    elif not ((last := each.path / LAST).is_file() and load_state(last).get("finished") is True):
        train.run(train.Settings(resume=True, **where))


def _begun(each: _Fold) -> Recipe | None:
    """Give the recipe of a run that is there, whether or not it was cut."""
    try:
        return read_recipe(each.path)
    except NotFound:
        return None


def _test(folds: Sequence[_Fold], rows: Sequence[Row], recipe: Recipe, settings: Settings) -> dict[str, Any]:
    """Embed the test images, which are decoded once, by every run of every repeat."""
    keep, device = recipe.memory_gib * 2**30, device_of(settings.device)
    pictures = Pictures(rows, viewing_decoder(recipe), keep=keep, label="Reading test images")
    roles = roles_of(pictures.rows, "test", recipe.split)

    def embedded(each: _Fold) -> Tensor:
        embed = embedder_function(load_run(each.path).embedder.to(device), device)
        found = embed_pictures(embed, pictures, batch=settings.batch, label=f"Testing {each.name}")
        return torch.from_numpy(found)

    repeats = []
    for start in range(0, len(folds), recipe.folds):
        runs = folds[start : start + recipe.folds]
        figures = _measure([embedded(each) for each in runs], pictures.labels, roles)
        repeats.append({"seeds": [each.recipe.seed for each in runs], **figures})
    return {
        "recipe": settings.recipe,
        "out": str(settings.out),
        "folds": recipe.folds,
        "dimension": {"separate": recipe.dimension, "concatenated": recipe.dimension * recipe.folds},
        "images": len(pictures),
        "classes": len(np.unique(pictures.labels)),
        **{name: repeats[0][name] for name in ("queries", "excluded", "gallery")},
        "unreadable": [bad._asdict() for bad in pictures.unreadable],
        "repeats": repeats,
        **{
            kind: {name: summarise([repeat[kind][name] for repeat in repeats]) for name in _TITLES}
            for kind in ("separate", "concatenated")
        },
    }
