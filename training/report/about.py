"""The section about the run: its recipe, its data, and what code made it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.recipes.recipe import Recipe
from training.report.document import Section
from training.report.markup import clip, element, table

__all__ = ["about_section"]

_LONGEST = 300


def about_section(path: Path, recipe: Recipe, record: Mapping[str, Any]) -> Section:
    """Tell the recipe and where the run comes from.

    Args:
        path: The run folder.
        recipe: Of the run.
        record: Of the run.
    """
    settings = recipe.model_dump()
    fields = Recipe.model_fields
    changed = {
        name: value
        for name, value in settings.items()
        if value != fields[name].get_default(call_default_factory=True)
    }
    others = {name: value for name, value in settings.items() if name not in changed}
    own = record["data"]
    facts = {
        "run": str(path),
        "recipe": record["name"],
        "epoch that is kept": record.get("metrics", {}).get("epoch"),
        "seed": record.get("seed"),
        "images at": own["root"],
        "read as": own["format"],
        "table": own.get("table"),
        "trained on": f"{own['train_images']:,} images of {len(own['train_classes']):,} classes",
        "validated on": _held_out(own),
        "images named, but not there": _count(own.get("missing")),
        "images that could not be read": _count(own.get("unreadable")),
        "images of no class": own.get("unlabelled"),
        "digest of the training images": own["digest"],
        "git commit": record.get("git_commit"),
    }
    versions = record.get("versions", {})
    return Section(
        "about",
        "Recipe and provenance",
        [
            table(["what", "value"], _lines(facts), caption="Where the run comes from"),
            element("h3", "Recipe"),
            element("p", "Settings that differ from their defaults; the others are below."),
            _settings(changed, "Settings of this recipe"),
            element(
                "details",
                element("summary", f"The {len(others)} settings at their defaults"),
                _settings(others, "Settings at their defaults"),
            ),
            element("h3", "Versions"),
            table(["package", "version"], _lines(versions), caption="What code trained it"),
        ],
    )


def _settings(values: Mapping[str, Any], caption: str) -> str:
    fields = Recipe.model_fields
    lines = [[name, _told(value), str(fields[name].description)] for name, value in values.items()]
    return table(["setting", "value", "what it says"], lines, caption=caption)


def _lines(facts: Mapping[str, Any]) -> list[list[str]]:
    return [[clip(name), _told(value)] for name, value in facts.items() if value is not None]


def _told(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = ", ".join(f"{key}: {each}" for key, each in value.items()) or "none"
    elif isinstance(value, list):
        value = ", ".join(map(str, value)) or "none"
    return clip("none" if value is None else str(value), _LONGEST)


def _held_out(own: Mapping[str, Any]) -> str | None:
    """Say what was held out; a record need not tell it."""
    classes, images = own.get("validation_classes"), own.get("validation_images")
    if not isinstance(classes, Sequence) or not isinstance(images, int):
        return None
    return f"{images:,} images of {len(classes):,} classes" if classes else "nothing"


def _count(found: object) -> str | None:
    return f"{len(found):,}" if isinstance(found, Sequence) else None
