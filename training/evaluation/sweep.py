"""`crossbatch sweep`: a recipe trained with each of some settings, from several seeds, compared in pairs.

Everything is scored on classes held out of the training ones, so that what is chosen by a sweep has seen no
test class; `--final` scores the test classes instead.
"""

import csv
import itertools
import json
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from serving.catalog.catalog import Catalog, Format, read, select
from serving.errors import BadSetting
from training import train
from training.data.feature_cache import cache_features
from training.data.partition import Exclude, Table, divide
from training.data.pictures import Stream, class_numbers, embed_pictures, viewing_decoder
from training.evaluation.fitted import fitted_figures
from training.evaluation.metrics import retrieval_metrics, roles_of
from training.evaluation.paired import summarise, tell
from training.loop.checkpoint import write_file, write_table
from training.loop.logbook import read_history
from training.loop.processes import device_of
from training.loop.run import load_run, reserved
from training.network.embedder import describer_function
from training.recipes.recipe import Recipe, check_settings
from training.recipes.recipe_file import load_recipe

__all__ = ["Settings", "render", "run"]

_RUNS = "runs.csv"
_SETTINGS = "sweep.json"
_NAMES = {"map_at_r": "MAP@R", "recall_at_1": "R@1", "map_c": "MAP_c", "map_x": "MAP_x"}
_FIGURES = tuple(_NAMES)
"""Those that each run has, and those of --fitted."""
_WHICH, _MEASURED = ("scored_on", "seed"), ("epoch", *_FIGURES, "seconds")
"""Columns of the table beside an arm's settings: those that tell runs apart, and what was found."""
_COMMA = r",(?![^{\[]*[}\]])"
"""One between values, and not within a list or a table."""
_VALIDATION = 0.25
"""Share of the training classes that scores, of a recipe that holds none out; two at the least."""
_OWN = {"seed", "evaluate_every", "patience"}
"""Settings that a sweep makes itself."""
_SCORING = {"validation", "folds", "fold_rule", "split_by", "split_train"}
"""Settings by which two arms would be scored on different classes."""

_Arm = Mapping[str, str]
_Row = Mapping[str, str]


class Settings(BaseModel):
    """Train a recipe over a grid of settings and seeds, and compare the arms in pairs of one seed."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    recipe: str = Field(json_schema_extra={"positional": True})
    """name of a recipe, or path of a .yaml file"""
    data: Path
    """the images: a folder, .csv, .tar or .parquet file"""
    out: Path
    """folder of the table, OUT/runs.csv; runs that are in it are not trained again"""
    over: list[str]
    """KEY=V1,V2,...: values of one setting, whose own commas stand within brackets; may be repeated, and
    then each value meets each"""
    seeds: int = Field(3, ge=1, le=1000)
    """how many runs an arm has, from seeds 0, 1 and so on"""
    set: list[str] = []
    """key=value: one setting of all arms; may be repeated"""
    final: bool = False
    """train on all training classes and score the test classes, once all is chosen"""
    fitted: int = Field(0, ge=0, le=1_000_000)
    """with --final also MAP_c and MAP_x, over that many halvings of the classes; 0 is without"""
    format: Format = "auto"
    """layout of the data set; auto finds out"""
    table: Table = None
    exclude: Exclude = []
    cache: Path | None = None
    """folder for the features of a frozen backbone; ~/.cache/crossbatch when not given"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to train; auto is cuda where there is one, else cpu"""


def run(settings: Settings) -> dict[str, Any]:
    """Train and score what is not in the table yet.

    Gives `recipe`, `out`, `scored_on` (`validation` or `test`), `seeds`, `arms` (a dict each: `settings`,
    `runs`, of each figure its `mean` and `half_width` of the 95 % interval, and, but for the first arm,
    `difference` from the first over pairs of one seed, as `mean` and `half_width`; shares in 0..1) and
    `seconds`.
    """
    started = time.monotonic()
    arms = _arms(settings)
    scored_on = "test" if settings.final else "validation"
    catalog = read(settings.data, settings.format, table=settings.table, exclude=settings.exclude)
    common = [*settings.set, *_held_out(settings, catalog, arms[0])]
    # of all arms, so that a misspelt value is found before hours of training
    recipes = [load_recipe(settings.recipe, [*common, *_words(arm)]) for arm in arms]
    columns = [*arms[0], *_WHICH, *_MEASURED]
    with reserved(settings.out):
        _check_same(settings.out / _SETTINGS, scored_on, recipes[0], catalog, arms[0])
        table = _read_table(settings.out / _RUNS, columns)
        for number, (seed, arm) in enumerate(itertools.product(range(settings.seeds), arms), 1):
            key = {**arm, "scored_on": scored_on, "seed": str(seed)}
            if any(key.items() <= row.items() for row in table):
                continue
            words = [*_words(arm), f"seed={seed}"]
            sys.stderr.write(f"Run {number} of {settings.seeds * len(arms)}: {' '.join(words)}\n")
            table.append(key | _train_and_score(settings, catalog, [*common, *words]))
            write_table(settings.out / _RUNS, table, columns)
    rows = [row for row in table if row["scored_on"] == scored_on and int(row["seed"]) < settings.seeds]
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
    figures = [figure for figure in _FIGURES if any(figure in arm for arm in result["arms"])]
    lines = [
        f"{result['recipe']} on {result['scored_on']} classes, {result['seeds']} seeds (percent, 95 %"
        " intervals; differences from the first row over pairs of one seed):",
        "",
        f"{'':<{width}}" + "".join(f"  {_NAMES[figure]:>13} {'difference':>14}" for figure in figures),
    ]
    for name, arm in zip(names, result["arms"], strict=True):
        cells = (
            f"{tell(arm.get(figure)):>13} {tell(arm.get(figure, {}).get('difference'), '+'):>14}"
            for figure in figures
        )
        lines.append(f"{name:<{width}}  {'  '.join(cells)}".rstrip())
    return "\n".join([*lines, "", f"All runs are in {result['out']}/{_RUNS}."])


def _arms(settings: Settings) -> list[_Arm]:
    """Give every combination of the values, the last setting changing fastest."""
    if settings.fitted and not settings.final:
        raise BadSetting("MAP_c and MAP_x (--fitted) are of the test classes: add --final")
    grid: list[list[tuple[str, str]]] = []
    for each in settings.over:
        key, equals, values = each.partition("=")
        if not equals or not values:
            raise BadSetting(f"--over takes KEY=V1,V2,..., but got {each!r}")
        told = [value.strip() for value in re.split(_COMMA, values)]
        if len(set(told)) < len(told) or any(key.strip() == done[0][0] for done in grid):
            raise BadSetting(f"--over {each!r} names a setting or a value twice")
        grid.append([(key.strip(), value) for value in told])
    names = {key for (key, _), *_ in grid}
    if refused := sorted(
        (_OWN | _SCORING) & names or _OWN & {each.partition("=")[0] for each in settings.set}
    ):
        raise BadSetting(
            f"{refused[0]} cannot be given: the sweep sets {', '.join(sorted(_OWN))} itself, and"
            f" arms that differ in {', '.join(sorted(_SCORING))} would be scored on different classes"
        )
    return [dict(chosen) for chosen in itertools.product(*grid)]


def _held_out(settings: Settings, catalog: Catalog, arm: _Arm) -> list[str]:
    """Give the settings by which the last epoch is scored, on classes that do not train."""
    if settings.final:
        return ["validation=0", "folds=0", "patience=0"]
    recipe = load_recipe(settings.recipe, [*settings.set, "patience=0", *_words(arm)])
    if recipe.validation or recipe.folds:
        return ["patience=0"]
    classes = len({row.label for row in divide(catalog, recipe).train})
    return ["patience=0", f"validation={max(_VALIDATION, 2 / classes)}"]


def _check_same(path: Path, scored_on: str, recipe: Recipe, catalog: Catalog, arm: _Arm) -> None:
    """Refuse to go on with the runs of another recipe, other settings or other images."""
    now = recipe.model_dump(mode="json", exclude={key.partition(".")[0] for key in arm})
    now["images"] = divide(catalog, recipe).describe()["digest"]
    try:
        known = json.loads(path.read_bytes()) if path.is_file() else {}
        check_settings(path.parent, known.setdefault(scored_on, now), now)
    except (ValueError, AttributeError) as error:  # no JSON, or no table
        raise BadSetting(f"{path} is damaged: give another --out") from error
    write_file(path, json.dumps(known, indent=1).encode())


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
            table=settings.table, exclude=settings.exclude, cache=settings.cache, device=settings.device,
            set=[*words, f"evaluate_every={recipe.epochs}"],
        )
    )  # fmt: skip
    last = read_history(folder)[-1]  # and not the best, which the classes that score would choose
    found = _score(settings, catalog, folder) if settings.final else {key: last[key] for key in _FIGURES[:2]}
    shutil.rmtree(folder)
    told = {"epoch": last["epoch"], **found, "seconds": time.monotonic() - started}
    return {name: f"{value:.6g}" for name, value in told.items()}


def _score(settings: Settings, catalog: Catalog, folder: Path) -> dict[str, float]:
    """Measure a run on the test classes."""
    trained, device = load_run(folder), device_of(settings.device)
    recipe, embedder = trained.recipe, trained.embedder.to(device)
    rows = select(catalog, "test", recipe.split)
    images = (
        cache_features(rows, embedder, recipe, views=1, folder=settings.cache)
        if recipe.caches_features
        else Stream(rows, viewing_decoder(recipe))
    )
    describe = describer_function(embedder, device, mapped=recipe.caches_features)
    found = embed_pictures(describe, images, label="Scoring")
    embeddings, histograms = np.split(found, (recipe.dimension,), axis=1)
    labels = class_numbers(images.rows, sorted({row.label for row in images.rows}))
    figures = retrieval_metrics(embeddings, labels, roles=roles_of(images.rows, "test", recipe.split))
    told = {"map_at_r": figures.map_at_r, "recall_at_1": figures.recall_at[1]}
    if settings.fitted and recipe.learns_prototypes:
        fitted = fitted_figures(histograms, embeddings, labels, draws=settings.fitted)
        told |= {name: fitted[name] for name in ("map_c", "map_x")}
    return told


def _summary(arm: _Arm, first: _Arm, rows: Sequence[_Row]) -> dict[str, Any]:
    """Give the mean of each figure, and its difference from the first arm over pairs of one seed."""
    mine, base = (
        {int(row["seed"]): row for row in rows if each.items() <= row.items()} for each in (arm, first)
    )
    told: dict[str, Any] = {"settings": dict(arm), "runs": len(mine)}
    for figure in _FIGURES:
        values, theirs = (
            {seed: float(row[figure]) for seed, row in each.items() if row.get(figure)}
            for each in (mine, base)
        )
        if not values:
            continue
        told[figure] = summarise([*values.values()])
        if arm != first and values.keys() == theirs.keys():
            told[figure]["difference"] = summarise([*values.values()], [theirs[seed] for seed in values])
    return told


def _read_table(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Read the runs so far; raises BadSetting where they are of another sweep."""
    if not path.is_file():
        return []
    reader = csv.DictReader(path.read_text(encoding="utf-8", errors="replace").splitlines())
    if reader.fieldnames != list(columns):
        raise BadSetting(
            f"{path} is of a sweep with the columns {', '.join(reader.fieldnames or ())}, but this"
            f" one has {', '.join(columns)}: give another --out"
        )
    rows = []
    for row in reader:
        try:
            found = [float(row[name]) for name in _FIGURES if row[name] or name in _FIGURES[:2]]
            if None in (*row, *row.values()) or not np.isfinite([int(row["seed"]), *found]).all():
                raise ValueError  # also of cells too many, or too few
        except (TypeError, ValueError) as error:
            raise BadSetting(
                f"{path}, line {reader.line_num}, is no run: take the line out, and it is done again"
            ) from error
        rows.append(row)
    return rows
