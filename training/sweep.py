"""`crossbatch sweep`: a recipe trained with each of some settings, from several seeds, compared in pairs.

Everything is scored on classes held out of the training ones, so that what is chosen by a sweep has seen no
test class; `--final` scores the test classes instead.
"""

import csv
import itertools
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from serving.catalog import Catalog, Format, read, select
from serving.errors import BadSetting
from training import train
from training.embedding import describer_function
from training.feature_cache import cache_features
from training.fitted import fitted_figures
from training.history import read_history
from training.paired import interval, paired
from training.pictures import Stream, class_numbers, embed_pictures, viewing_decoder
from training.protocol import measure_retrieval, roles_of
from training.recipe_file import load_recipe
from training.run import load_run

__all__ = ["Settings", "render", "run"]

_RUNS = "runs.csv"
_FIGURES = ("map_at_r", "recall_at_1")
_VALIDATION = 0.25
"""Share of the training classes that scores, of a recipe that holds none out."""

_Arm = Mapping[str, str]


class Settings(BaseModel):
    """Train a recipe over a grid of settings and seeds, and compare the arms in pairs of one seed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str = Field(
        description="name of a recipe, or path of a .yaml file", json_schema_extra={"positional": True}
    )
    data: Path = Field(description="the images: a folder, .csv, .tar or .parquet file")
    out: Path = Field(
        description="folder of the table, OUT/runs.csv; runs that are in it are not trained again"
    )
    over: list[str] = Field(
        description="KEY=V1,V2,...: values of one setting; may be repeated, and then each value meets each"
    )
    seeds: int = Field(3, ge=1, le=1000, description="how many runs an arm has, from seeds 0, 1 and so on")
    set: list[str] = Field([], description="key=value: one setting of all arms; may be repeated")
    final: bool = Field(
        False, description="train on all training classes and score the test classes, once all is chosen"
    )
    fitted: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="with --final also MAP_c and MAP_x, over that many halvings of the classes; 0 is without",
    )
    format: Format = Field("auto", description="layout of the data set; auto finds out")
    table: Path | None = Field(
        None, description="the .csv, .tar or .parquet file to read, where there are several"
    )
    cache: Path | None = Field(
        None, description="folder for the features of a frozen backbone; ~/.cache/crossbatch when not given"
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        "auto", description="where to train; auto is cuda where there is one, else cpu"
    )


def run(settings: Settings) -> dict[str, Any]:
    """Train and score what is not in the table yet.

    Returns:
        `recipe`, `out`, `scored_on` (`validation` or `test`), `seeds`, `arms` (a dict each: `settings`,
        `runs`, of each figure its `mean` and `half_width` of the 95 % interval, and, but for the first arm,
        `difference` from the first over pairs of one seed, as `mean` and `half_width`; shares in 0..1) and
        `seconds`.

    Raises:
        CrossbatchError: If a setting, the data set or the table does not fit, or a training fails.
    """
    started = time.monotonic()
    arms = _arms(settings.over)
    common = list(settings.set)
    recipe = load_recipe(settings.recipe, common)
    if settings.final:
        common += ["validation=0", "folds=0", "patience=0"]
    elif not (recipe.validation or recipe.folds):
        common.append(f"validation={_VALIDATION}")
    for arm in arms:  # a misspelt value is found before hours of training
        load_recipe(settings.recipe, [*common, *_words(arm)])
    table = settings.out / _RUNS
    settings.out.mkdir(parents=True, exist_ok=True)
    head = [*arms[0], "scored_on", "seed", "epoch", *_FIGURES, "map_c", "map_x", "seconds"]
    done = _read_table(table, head)
    catalog = read(settings.data, settings.format, table=settings.table)
    scored_on = "test" if settings.final else "validation"
    for seed, arm in itertools.product(range(settings.seeds), arms):
        key = {**arm, "scored_on": scored_on, "seed": str(seed)}
        if not any(all(row[name] == value for name, value in key.items()) for row in done):
            row = key | _train_and_score(settings, catalog, [*common, *_words(arm), f"seed={seed}"])
            done.append(row)
            _append(table, head, row)
    rows = [row for row in done if row["scored_on"] == scored_on and int(row["seed"]) < settings.seeds]
    return {
        "recipe": settings.recipe,
        "out": str(settings.out),
        "scored_on": scored_on,
        "seeds": settings.seeds,
        "arms": [_summary(arm, arms[0], rows) for arm in arms],
        "seconds": round(time.monotonic() - started, 1),
    }


def render(result: dict[str, Any]) -> str:
    """Tell a row an arm, in percent, with its difference from the first arm."""
    names = [" ".join(_words(arm["settings"])) for arm in result["arms"]]
    width = max(len(name) for name in names)
    lines = [
        f"{result['recipe']} on {result['scored_on']} classes, {result['seeds']} seeds (percent, 95 %"
        " intervals; differences from the first row over pairs of one seed):",
        "",
        f"{'':<{width}}  {'MAP@R':>13} {'difference':>14}  {'R@1':>13} {'difference':>14}",
    ]
    for name, arm in zip(names, result["arms"], strict=True):
        cells = (
            f"{_told(arm[figure]):>13} {_told(arm[figure].get('difference'), '+'):>14}" for figure in _FIGURES
        )
        lines.append(f"{name:<{width}}  {'  '.join(cells)}".rstrip())
    return "\n".join([*lines, "", f"All runs are in {result['out']}/{_RUNS}."])


def _arms(over: Sequence[str]) -> list[_Arm]:
    """Give every combination of the values, the last setting changing fastest."""
    grid = []
    for each in over:
        key, equals, values = each.partition("=")
        if not equals or not values:
            raise BadSetting(f"--over takes KEY=V1,V2,..., but got {each!r}")
        grid.append([(key.strip(), value.strip()) for value in values.split(",")])
    return [dict(chosen) for chosen in itertools.product(*grid)]


def _words(arm: _Arm) -> list[str]:
    return [f"{key}={value}" for key, value in arm.items()]


def _train_and_score(settings: Settings, catalog: Catalog, words: Sequence[str]) -> dict[str, str]:
    """Train one run in a folder that is then removed, and measure its last weights."""
    started = time.monotonic()
    folder = settings.out / "current"
    shutil.rmtree(folder, ignore_errors=True)  # of a sweep that was cut
    recipe = load_recipe(settings.recipe, words)
    train.run(
        train.Settings(
            recipe=settings.recipe, data=settings.data, out=folder, format=settings.format,
            table=settings.table, set=[*words, f"evaluate_every={recipe.epochs}"], cache=settings.cache,
            device=settings.device,
        )
    )  # fmt: skip
    last = read_history(folder).rows[-1]  # and not the best, which the classes that score would choose
    found = _score(settings, catalog, folder) if settings.final else {name: last[name] for name in _FIGURES}
    shutil.rmtree(folder)
    told = {"epoch": last["epoch"], **found, "seconds": time.monotonic() - started}
    return {name: f"{value:.6g}" for name, value in told.items()}


def _score(settings: Settings, catalog: Catalog, folder: Path) -> dict[str, float]:
    """Measure a run on the test classes."""
    trained = load_run(folder)
    recipe = trained.recipe
    rows = select(catalog, "test", recipe.split)
    images = (
        cache_features(rows, trained.embedder, recipe, views=1, folder=settings.cache)
        if recipe.caches_features
        else Stream(rows, viewing_decoder(recipe))
    )
    describe = describer_function(trained.embedder, mapped=recipe.caches_features)
    found = torch.from_numpy(embed_pictures(describe, images, label="Scoring"))
    embeddings, histograms = found.tensor_split((recipe.dimension,), dim=1)
    labels = class_numbers(images.rows, sorted({row.label for row in images.rows}))
    figures = measure_retrieval(embeddings, labels, roles=roles_of(images.rows, "test", recipe.split))
    told = {"map_at_r": figures["map_at_r"], "recall_at_1": figures["recall_at"]["1"]}
    if settings.fitted and recipe.learns_prototypes:
        fitted = fitted_figures(histograms, embeddings, labels, draws=settings.fitted)
        told |= {"map_c": fitted["map_c"], "map_x": fitted["map_x"]}
    return told


def _summary(arm: _Arm, first: _Arm, rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    mine, base = (
        sorted(
            (row for row in rows if all(row[key] == value for key, value in each.items())),
            key=lambda row: int(row["seed"]),
        )
        for each in (arm, first)
    )
    told: dict[str, Any] = {"settings": dict(arm), "runs": len(mine)}
    for figure in _FIGURES:
        values, theirs = ([float(row[figure]) for row in each] for each in (mine, base))
        told[figure] = dict(zip(("mean", "half_width"), interval(values), strict=True))
        if arm != first:
            pair = paired(values, theirs)
            told[figure]["difference"] = dict(zip(("mean", "half_width"), pair, strict=True))
    return told


def _told(figure: Mapping[str, Any] | None, sign: str = "") -> str:
    if figure is None:
        return ""
    half = "" if figure["half_width"] is None else f" ± {100 * figure['half_width']:.2f}"
    return f"{100 * figure['mean']:{sign}.2f}{half}"


def _read_table(table: Path, head: Sequence[str]) -> list[dict[str, str]]:
    """Read the runs so far.

    Raises:
        BadSetting: If the table is of a sweep over other settings.
    """
    if not table.is_file():
        return []
    with table.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        if reader.fieldnames != list(head):
            raise BadSetting(
                f"{table} is of a sweep with the columns {', '.join(reader.fieldnames or ())}, but this one"
                f" has {', '.join(head)}: give another --out"
            )
        return list(reader)


def _append(table: Path, head: Sequence[str], row: Mapping[str, str]) -> None:
    new = not table.is_file()
    with table.open("a", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, head, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
