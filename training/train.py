"""`crossbatch train`: from a recipe and a folder of images to a run folder with the best weights."""

import builtins
import textwrap
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.errors import BadData, BadSetting
from training.dataset import Pictures, training_decoder, viewing_decoder
from training.fit import fit
from training.partition import read_partition
from training.recipe import Recipe, head_comment, load_recipe, recipe_names
from training.run import (
    check_vacant,
    open_folder,
    provenance,
    read_recipe,
    read_record,
    write_recipe,
    write_record,
)

__all__ = ["Settings", "render", "run"]


class Settings(BaseModel):
    """Train an embedder, or go on with a training that was cut."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str | None = Field(
        None,
        description="name of a recipe, or path of a .yaml file; the run's own when resuming",
        json_schema_extra={"positional": True},
    )
    data: Path | None = Field(None, description="folder of the images; the run's own when resuming")
    out: Path | None = Field(None, description="folder of the run, made anew")
    format: Literal["auto", "folder", "csv", "cifar10"] = Field("auto", description="layout of the data set")
    table: Path | None = Field(
        None, description="table of a csv data set, where it is not the one in the folder"
    )
    set: builtins.list[str] = Field(
        [], description="key=value: one setting of the recipe changed; may be repeated"
    )
    resume: bool = Field(False, description="go on after the last whole epoch of the run in --out")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="where to train")
    list: bool = Field(False, description="show the recipes and stop")


def run(settings: Settings) -> dict[str, Any]:
    """Train as the recipe says.

    Returns:
        `run`, `recipe`, `epochs`, `best` (the epoch kept, and its metrics on validation classes where there
        are any), `unreadable` and `seconds`; with `list`, only `recipes`.

    Raises:
        CrossbatchError: If a setting, the data or the run folder does not fit, or the loss is not finite.
    """
    if settings.list:
        return {"recipes": [{"name": name, "about": head_comment(name)} for name in recipe_names()]}
    started = time.monotonic()
    recipe, record, folder, data = _prepare(settings)
    format, table = settings.format, settings.table
    if record and format == "auto":
        format = record["data"]["format"]
    if record and table is None and record["table"]:
        table = Path(record["table"])
    partition = read_partition(data, recipe, format=format, table=table)
    if record and record["data"]["digest"] != partition.describe()["digest"]:
        raise BadData(
            f"{data} holds other images than the run {folder} was started on: resuming needs the same"
        )
    keep = recipe.memory_gib * 2**30
    pictures = Pictures(partition.train, training_decoder(recipe), keep=keep, label="Reading images")
    pictures.check_classes()
    validation = None
    if partition.validation:
        validation = Pictures(
            partition.validation, viewing_decoder(recipe), keep=keep, label="Reading validation images"
        )
    unreadable = [*pictures.unreadable, *(validation.unreadable if validation else ())]
    if not record:
        open_folder(folder)
        record = {
            "name": Path(settings.recipe or "").stem,
            **provenance(),
            "seed": recipe.seed,
            "data": partition.describe() | {"unreadable": [bad.key for bad in unreadable]},
            "table": str(settings.table.absolute()) if settings.table else None,
            "metrics": {},
        }
        write_record(folder, record)
        write_recipe(folder, recipe)  # last, since a folder with a recipe can be resumed
    best = fit(recipe, pictures, validation, folder, record, device=settings.device)
    return {
        "run": str(folder),
        "recipe": record["name"],
        "epochs": recipe.epochs,
        "best": best,
        "unreadable": [{"key": bad.key, "reason": bad.reason} for bad in unreadable],
        "seconds": round(time.monotonic() - started, 1),
    }


def render(result: dict[str, Any]) -> str:
    """Tell where the run is and how well it does on validation classes."""
    if "recipes" in result:
        return "\n\n".join(
            f"{recipe['name']}\n" + textwrap.indent(recipe["about"], "    ") for recipe in result["recipes"]
        )
    lines = [f"skipped {bad['key']}: {bad['reason']}" for bad in result["unreadable"]]
    best = result["best"]
    kept = f"Trained {result['epochs']} epochs in {result['seconds']:.0f} s; epoch {best['epoch']} is kept"
    if "map_at_r" in best:
        kept += (
            f": MAP@R {100 * best['map_at_r']:.1f}, R@1 {100 * best['recall_at']['1']:.1f}"
            " on the validation classes (percent)"
        )
    lines += [f"{kept}.", f"The run is in {result['run']}."]
    return "\n".join(lines)


def _prepare(settings: Settings) -> tuple[Recipe, dict[str, Any], Path, Path]:
    """Settle the recipe, the record (empty for a new run), the run folder and the folder of the images."""
    folder = settings.out
    if folder is None:
        raise BadSetting("training needs --out, the folder of the run")
    if not settings.resume:
        if settings.recipe is None:
            raise BadSetting(f"training needs a recipe: {', '.join(recipe_names())}, or a .yaml file")
        if settings.data is None:
            raise BadSetting("training needs --data, the folder of the images")
        recipe = load_recipe(settings.recipe, settings.set)
        check_vacant(folder)  # before the minutes that reading images may take
        return recipe, {}, folder, settings.data
    recipe, record = read_recipe(folder), read_record(folder)
    if settings.recipe is not None:
        asked = load_recipe(settings.recipe, settings.set).model_dump()
        for key, value in recipe.model_dump().items():
            if asked[key] != value:
                raise BadSetting(
                    f"the run {folder} was started with {key} = {value}, but now {asked[key]} is asked for:"
                    " resume it as it was started, or choose another folder"
                )
    elif settings.set:
        raise BadSetting("--set cannot change a run that is resumed: start another one")
    return recipe, record, folder, settings.data or Path(record["data"]["root"])
