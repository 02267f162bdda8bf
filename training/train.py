"""`crossbatch train`: from a recipe and a folder of images to a run folder with the best weights."""

import builtins
import contextlib
import importlib
import logging
import os
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_fabric import Fabric
from pydantic import BaseModel, ConfigDict, Field

from serving.catalog.catalog import Catalog, Format, read
from serving.errors import BadData, BadSetting
from training.data.feature_cache import FeatureSet, cache_features
from training.data.partition import Exclude, Partition, Table, divide, read_own
from training.data.pictures import check_classes, check_pairs, first_of, read_pictures, tell_unreadable
from training.loop.checkpoint import load_state
from training.loop.fit import fit
from training.loop.logbook import waited_share
from training.loop.processes import agree, keep_freed_memory, processes
from training.loop.run import LAST, begin, check_vacant, new_record, read_recipe, read_record, reserved
from training.loop.trainee import build_network, start_trainee
from training.network.embedder import Embedder
from training.recipes.recipe import Recipe, check_settings
from training.recipes.recipe_file import head_comment, load_recipe, recipe_names

__all__ = ["Settings", "render", "run"]

_log = logging.getLogger(__name__)


class Settings(BaseModel):
    """Train an embedder, or go on with a training that was cut."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    recipe: str | None = Field(None, json_schema_extra={"positional": True})
    """name of a recipe, or path of a .yaml file; the run's own when resuming"""
    data: Path | None = None
    """the images: a folder, .csv, .tar or .parquet file; the run's own when resuming"""
    out: Path | None = None
    """folder of the run, made anew"""
    format: Format = "auto"
    """layout of the data set; auto finds out, or is the run's own when resuming"""
    table: Table = None
    exclude: Exclude = []
    set: builtins.list[str] = []
    """key=value: one setting of the recipe changed; may be repeated"""
    resume: bool = False
    """go on after the last whole epoch of the run in --out"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to train; auto is cuda where there is one, else cpu (mps has not been measured)"""
    cache: Path | None = None
    """folder for the features of a frozen backbone, which may be deleted at any time; ~/.cache/crossbatch
    when not given"""
    tensorboard: bool = False
    """write curves for TensorBoard into the run's folder, too"""
    list: bool = False
    """show the recipes, or all that one says at its head, and stop"""


def run(settings: Settings) -> dict[str, Any]:
    """Train as the recipe says; with `list`, give only `recipes`.

    Gives `run`, `recipe`, `epochs`, `finished` (there was nothing left to train), `best` (the epoch kept, its
    metrics on validation classes), `waited` (which share of the epochs' seconds steps waited for batches,
    None where no epoch told), `format`, `images` and `classes` that trained, `validation_images`,
    `unlabelled` (how many images are of no class), `unreadable` (those left out) and `seconds`.
    """
    if settings.list:
        names = [settings.recipe] if settings.recipe else recipe_names()
        return {"recipes": [{"name": name, "about": head_comment(name)} for name in names]}
    started = time.monotonic()
    keep_freed_memory()
    if settings.tensorboard:
        importlib.import_module("tensorboard")  # that it is missing is told before anything else is done
    recipe, record, folder, catalog = _prepare(settings)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    with processes(settings.device, recipe) as fabric:
        trained = _train(settings, recipe, record, folder, catalog, fabric)
    return trained | {"seconds": round(time.monotonic() - started, 1)}


def render(result: dict[str, Any]) -> str:
    """Tell where the run is and how well it does on validation classes."""
    if "recipes" in result:
        return _render_recipes(result["recipes"])
    lines = tell_unreadable(result["unreadable"])
    if result["unlabelled"]:
        lines.append(f"{result['unlabelled']} images are of no class and were left out.")
    best = result["best"]
    chose = f", and {result['validation_images']} chose the epoch" if result["validation_images"] else ""
    trained = f"{result['images']} images of {result['classes']} classes trained{chose}"
    lines.append(f"{trained}; the data set was read as {result['format']}.")
    epochs = "1 epoch" if result["epochs"] == 1 else f"{result['epochs']} epochs"
    told = f"Trained {epochs} in {result['seconds']:.0f} s"
    told = f"The run was finished already, after {epochs}" if result["finished"] else told
    measured = ""
    if "map_at_r" in best:
        measured = f": MAP@R {100 * best['map_at_r']:.1f}, R@1 {100 * best['recall_at']['1']:.1f}"
        measured += " on the validation classes (percent)"
    lines.append(f"{told}; epoch {best['epoch']} is kept{measured}.")
    if result["waited"] is not None:
        lines.append(f"Steps waited for batches {100 * result['waited']:.1f} % of the epochs' time.")
    if best["epoch"] == 0:
        lines.append("No epoch did better than the start on validation: these weights are untrained.")
    return "\n".join([*lines, f"The run is in {result['run']}."])


def _train(
    settings: Settings, recipe: Recipe, record: dict[str, Any], folder: Path, catalog: Catalog, fabric: Fabric
) -> dict[str, Any]:
    """Train on a catalogue with the processes that there are; gives what `run` does, less the time."""
    partition = divide(catalog, recipe)
    if fabric.is_global_zero:
        sys.stderr.write(f"{partition.tell()}\n")
    about = partition.describe()
    if settings.resume and record["data"]["digest"] != about["digest"]:
        raise BadData(
            f"{catalog.root}, read as {catalog.format}, holds other images than the run {folder} was started"
            f" on ({record['data']['root']}, read as {record['data']['format']}): resuming needs the same"
        )
    fresh = not (folder / LAST).is_file()
    # before the minutes that reading images may take: what a setting spoils, and weights that are not there
    network = build_network(recipe, classes=partition.classes, fresh=fresh)
    keep = recipe.memory_gib * 2**30 / fabric.world_size
    pictures, validation = (
        _read_features(partition, network[0], settings.cache, fabric)
        if recipe.caches_features
        else read_pictures(partition.train, partition.validation, recipe, keep=keep)
    )
    check_classes(pictures)
    if validation is not None:
        check_pairs(validation)
    unreadable = [*pictures.unreadable, *(validation.unreadable if validation else ())]
    about["unreadable"] = [bad.key for bad in unreadable]
    agree({"digest": about["digest"], "unreadable": about["unreadable"]}, fabric)
    if settings.resume:
        before = record["data"].get("unreadable", [])
        if sorted(about["unreadable"]) != sorted(before):
            raise BadData(
                f"{len(unreadable)} images of {catalog.root} cannot be read{first_of(unreadable)}, but"
                f" {len(before)} could not when the run {folder} was started: resuming needs the same images"
            )
    else:
        asked = settings.recipe or ""  # a name of ours, without slashes, or that of the caller's file
        name = asked.replace("/", "-") if asked in recipe_names() else Path(asked).stem
        record = new_record(name, recipe.seed, about)
    if unreadable:
        _log.warning("%d images cannot be read and are left out; the end names them", len(unreadable))
    trainee = start_trainee(recipe, network, pictures, fabric=fabric, fresh=fresh)
    fabric.barrier()  # every process has seen that the folder was vacant
    with reserved(folder) if fabric.is_global_zero else contextlib.nullcontext():
        if fabric.is_global_zero and not settings.resume:
            begin(folder, recipe, record)  # once nothing of the settings can fail any more
        fabric.barrier()
        finished = not fresh and bool(load_state(folder / LAST).get("finished"))
        options = {"fresh": fresh, "tensorboard": settings.tensorboard}
        logbook = fit(recipe, trainee, pictures, validation, folder, record, **options)
    return {
        "run": str(folder),
        "recipe": record["name"],
        "epochs": logbook.epochs_done,
        "finished": finished,
        "best": logbook.best,
        "waited": waited_share(logbook.history),
        "format": catalog.format,
        "images": len(pictures),
        "classes": len(pictures.classes),
        "validation_images": len(validation) if validation else 0,
        "unlabelled": catalog.unlabelled,
        "unreadable": [bad._asdict() for bad in unreadable],
    }


def _render_recipes(recipes: Sequence[Mapping[str, str]]) -> str:
    """Give the whole head of one recipe, or the first line of each of many."""
    if len(recipes) == 1:
        return f"{recipes[0]['name']}\n" + textwrap.indent(recipes[0]["about"], "    ")
    width = max(len(recipe["name"]) for recipe in recipes)
    lines = [f"{recipe['name']:<{width}}  {recipe['about'].partition(chr(10))[0]}" for recipe in recipes]
    return "\n".join([*lines, "", "`crossbatch train NAME --list` tells all of one."])


def _prepare(settings: Settings) -> tuple[Recipe, dict[str, Any], Path, Catalog]:
    """Settle the recipe, the record (empty for a new run), the run folder and the images."""
    folder = settings.out
    if folder is None:
        raise BadSetting("training needs --out, the folder of the run")
    _check_text(settings)
    if not settings.resume:
        if settings.recipe is None:
            raise BadSetting("training needs a recipe: a name that --list shows, or a .yaml file")
        if settings.data is None:
            raise BadSetting("training needs --data, the folder of the images")
        recipe = load_recipe(settings.recipe, settings.set)
        check_vacant(folder)  # before the minutes that reading images may take
        catalog = read(settings.data, settings.format, table=settings.table, exclude=settings.exclude)
        if recipe.made_for not in ("any", catalog.format):
            raise BadData(
                f"the recipe {settings.recipe} is for the data set {recipe.made_for}, but {catalog.root} was"
                f" read as {catalog.format}: choose another recipe, such as photos for folders, or add"
                " --set made_for=any"
            )
        return recipe, {}, folder, catalog
    recipe, record = read_recipe(folder), read_record(folder)
    if settings.recipe is not None:
        check_settings(folder, dict(recipe), dict(load_recipe(settings.recipe, settings.set)))
    elif settings.set:
        raise BadSetting("--set cannot change a run that is resumed: start another one")
    how: dict[str, Any] = settings.model_dump(include={"data", "format", "table", "exclude"})
    catalog = read_own(record, **how)
    return recipe, record, folder, catalog


def _read_features(
    partition: Partition, embedder: Embedder, folder: Path | None, fabric: Fabric
) -> tuple[FeatureSet, FeatureSet | None]:
    """Read what a frozen backbone gives for the images to train on and those to validate on."""
    rows = sorted((*partition.train, *partition.validation), key=lambda row: row.key)
    embedder.to(fabric.device)
    recipe = partition.recipe
    with fabric.rank_zero_first():  # which makes what the others then read
        found = cache_features(rows, embedder, recipe, views=recipe.views, folder=folder)
    return found.only(partition.train), found.only(partition.validation) if partition.validation else None


def _check_text(settings: Settings) -> None:
    """Refuse a path that is no UTF-8, which neither a record can hold nor safetensors open."""
    given = {"the recipe": settings.recipe, "--data": settings.data, "--out": settings.out}
    for name, path in (given | {"--table": settings.table}).items():
        try:
            os.path.abspath(path or "").encode()  # which is what the record has
        except UnicodeEncodeError as error:
            raise BadSetting(f"{name} is {str(path)!r}, a path that is not UTF-8: rename it") from error
