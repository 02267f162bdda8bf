"""Recipe files: ours by name, a user's own by path.

A name of three words, `mlrc/cub/contrastive`, puts a protocol, a data set and a method together, each a file.
Its settings come in that order, later ones winning; those under `when` only where the name has their words.
`about` in these files is what `crossbatch train NAME --list` tells.
"""

import difflib
import functools
import itertools
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from serving.errors import BadSetting, NotFound, cause_of
from training.recipes.recipe import Recipe, make_recipe

__all__ = ["RECIPES", "head_comment", "load_recipe", "parse_yaml", "recipe_names"]

RECIPES = Path(__file__).parent
_PARTS = ("protocols", "data_sets", "methods")
_TOLD = ("Paper", "Method", "Command", "Data", "Hardware", "Time", "Score")


def recipe_names() -> list[str]:
    """Name the recipes that come with the package, by a word each or by protocol, data set and method."""
    words = [sorted(path.stem for path in (RECIPES / folder).glob("*.yaml")) for folder in _PARTS]
    combined = map("/".join, itertools.product(*words))
    return sorted([*(path.stem for path in RECIPES.glob("*.yaml")), *filter(_combine, combined)])


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by its name, or by the path of a YAML file, with some keys set anew.

    Overrides are `key=value` each, the value read as YAML; `loss_options.margin=0.1` sets one option.
    `NotFound` if there is no such recipe or file; a `BadSetting` names the key nearest to an unknown one.
    """
    values = _read_settings(name)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise BadSetting(f"--set takes key=value, but got {override!r}")
        try:
            value = parse_yaml(text)
        except ValueError as error:
            raise BadSetting(f"the value of --set {override[:80]!r} is not YAML") from error
        key, dot, option = key.strip().partition(".")
        if dot and isinstance(values.get(key, {}), dict):
            value = {**values.get(key, {}), option: value}
        elif dot:
            raise BadSetting(f"--set {override[:80]!r} names an option of {key}, which is a single value")
        values[key] = value
    return make_recipe(values, source=name)


def head_comment(name: str) -> str:
    """Return what a recipe of ours tells of itself: paper, command, hardware, time, score."""
    if combined := _combine(name):
        return _compose_head(combined["about"])
    lines = _find(name).read_text(encoding="utf-8", errors="replace").splitlines()
    head = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return "\n".join(line.removeprefix("#").removeprefix(" ").rstrip() for line in head)


def parse_yaml(text: str) -> Any:
    """Read plain values; a ValueError where it is no YAML, a date that is none, or nested too deeply."""
    try:
        return yaml.safe_load(text)
    except Exception as error:  # beside its own, PyYAML lets pass whatever the making of a value raises
        raise ValueError(cause_of(error)) from error


def _combine(name: str) -> dict[str, Any]:
    """Merge the files of a protocol, a data set and a method; empty where there is no such combination."""
    words = name.split("/")
    if len(words) != len(_PARTS):
        return {}
    files = [RECIPES / folder / f"{word}.yaml" for folder, word in zip(_PARTS, words, strict=True)]
    values: dict[str, Any] = {}
    about = {"name": name, "run": "-".join(words[1:])}
    for file in files:
        part = _read_part(file)
        if not part or "/".join(words[:2]) not in part.get("only", ["/".join(words[:2])]):
            return {}
        about[file.parent.name] = part["about"]["title"]
        then = part.get("when", {})
        layers = [part, *(then[when] for when in then if set(when.split("/")) <= set(words))]
        for layer in layers:
            about |= layer.get("about", {})
            values |= {key: layer[key] for key in layer if key not in ("about", "when", "only")}
    return {**values, "about": about}


@functools.cache
def _read_part(file: Path) -> dict[str, Any]:
    return _read_yaml(file) if file.is_file() else {}


def _compose_head(about: Mapping[str, str]) -> str:
    lines = [f"{about['data_sets']} by {about['protocols']}: {about['methods']} + XML."]
    for key in _TOLD:
        told = about.get(key, "").format_map(about).strip().split("\n")
        wrapped = [line for each in told if each for line in textwrap.wrap(each, 105, break_on_hyphens=False)]
        if wrapped:
            lines.append(f"{key + ':':<10}" + ("\n" + " " * 10).join(wrapped))
    return "\n".join(lines)


def _find(name: str) -> Path:
    """Give the path of a recipe of ours that is one file, or of the caller's own file."""
    if (ours := RECIPES / f"{name}.yaml").parent == RECIPES and ours.is_file():
        return ours
    path = Path(os.path.expanduser(name))  # which leaves an unknown user's name as it is
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise NotFound(f"no recipe file is at {path}")
    close = difflib.get_close_matches(name, recipe_names(), n=1, cutoff=0.0)
    nearest = f"; the nearest is {close[0]!r}" if close else ""
    raise NotFound(
        f"no recipe is called {name!r}{nearest}; `crossbatch train --list` shows them, and a .yaml file of"
        " your own is given by its path"
    )


def _read_settings(name: str, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe, itself a base of the files `above`, on its own `base`: of a list, later ones win."""
    if combined := _combine(name):
        del combined["about"]
        return combined
    beside = above[-1].parent / name if above else Path(name)
    path = beside if beside.suffix in (".yaml", ".yml") and beside.is_file() else _find(name)
    if any(path.samefile(other) for other in above):
        raise BadSetting(f"recipe {path} is its own base")
    values = _read_yaml(path)
    bases = values.pop("base", [])
    below: dict[str, Any] = {}
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            raise BadSetting(f"recipe {path} has a base that is neither a name nor a list of names")
        below |= _read_settings(base, (*above, path))
    return below | values


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadSetting(f"recipe {path} is not readable YAML: {cause_of(error)}") from error
    if not isinstance(values, dict | None):
        raise BadSetting(f"recipe {path} must be a table of key: value, but holds a {type(values).__name__}")
    return values or {}
