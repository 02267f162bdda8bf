"""Recipe files: the ones in `recipes/` by name, a user's own by path, each on the base that it names.

`base: NAME`, or a list of names, at the top of a file takes over the settings of other files, later ones and
the file's own winning. A file of ours whose name begins with an underscore is only ever a base.
"""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from serving.errors import BadSetting, NotFound
from training.recipes.recipe import Recipe, make_recipe

__all__ = ["RECIPES", "head_comment", "load_recipe", "parse_yaml", "recipe_names"]

RECIPES = Path(__file__).parent
_DEEPEST = 8
"""Most files that stand on one another."""
_MOST = 64
"""Most files that a recipe is read from."""


def recipe_names() -> list[str]:
    """Name the recipes that come with the package: their paths below `recipes/`, without suffix."""
    return sorted(name for name in _ours() if not name.rpartition("/")[2].startswith("_"))


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by its name, or by the path of a YAML file, with some keys set anew.

    Args:
        name: One of `recipe_names()`, or a path that ends in .yaml.
        overrides: `key=value` each; the value is read as YAML. `loss_options.margin=0.1` sets one option.

    Raises:
        NotFound: If there is no such recipe or file.
        BadSetting: If a key is unknown or its value ill-typed; the message names the nearest key.
    """
    values = _read_layered(_find(name))
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


def parse_yaml(text: str) -> Any:
    """Read plain values.

    Raises:
        ValueError: If it is no YAML, a date that is none for one, or nested too deeply.
    """
    try:
        return yaml.safe_load(text)
    except Exception as error:  # beside its own, PyYAML lets pass whatever the making of a value raises
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from error


def head_comment(name: str) -> str:
    """Return the comment at the head of a recipe of ours: paper, command, hardware, time, score.

    Raises:
        NotFound: If there is no such recipe.
    """
    lines = []
    for line in _find(name).read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" ").rstrip())
    return "\n".join(lines)


def _ours() -> dict[str, Path]:
    return {path.relative_to(RECIPES).with_suffix("").as_posix(): path for path in RECIPES.rglob("*.yaml")}


def _find(name: str) -> Path:
    """Give the path of a recipe of ours by name, or of the caller's own file."""
    if (ours := _ours()).get(name):
        return ours[name]
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


def _read_layered(path: Path, depth: int = 1, read: list[Path] | None = None) -> dict[str, Any]:
    """Read a file on top of its bases; `read` lists the files so far."""
    read = [] if read is None else read
    read.append(path)
    if len(read) > _MOST:
        raise BadSetting(f"recipe {read[0]} stands on more than {_MOST} files")
    values = _read_yaml(path)
    bases = values.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise BadSetting(f"recipe {path} has a base that is neither a name nor a list of names")
    if bases and depth == _DEEPEST:
        raise BadSetting(f"recipe {path} stands on more than {_DEEPEST} bases, one of which may be itself")
    below: dict[str, Any] = {}
    for base in bases:
        beside = path.parent / base  # a user's file may name a file next to it
        found = beside if beside.suffix in (".yaml", ".yml") and beside.is_file() else _find(base)
        below |= _read_layered(found, depth + 1, read)
    return below | values


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadSetting(f"recipe {path} is not readable YAML: {line}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise BadSetting(f"recipe {path} must be a table of key: value, but holds a {type(values).__name__}")
    return values
