"""A run folder: recipe.yaml, record.json, metrics.csv, best.safetensors, last.safetensors."""

import contextlib
import csv
import hashlib
import io
import json
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from serving.errors import AlreadyExists, BadArtifact, BadSetting, CrossbatchError, NotFound
from training.loop.checkpoint import entry, load_checkpoint, load_module, load_state, unprefixed
from training.loop.record import check_record
from training.loop.whole_file import is_aside, write_file
from training.network.embedder import Embedder, build_embedder
from training.recipes.recipe import Recipe
from training.recipes.recipe_file import make_recipe, parse_yaml

__all__ = [
    "BEST",
    "LAST",
    "METRICS",
    "Run",
    "begin",
    "check_vacant",
    "load_run",
    "provenance",
    "read_recipe",
    "read_record",
    "reserved",
    "write_metrics",
    "write_record",
]

BEST = "best.safetensors"
LAST = "last.safetensors"
_RECIPE = "recipe.yaml"
_RECORD = "record.json"
METRICS = "metrics.csv"
_PACKAGES = (
    "crossbatch",
    "torch",
    "torchvision",
    "timm",
    "lightning-fabric",
    "pytorch-metric-learning",
    "pillow",
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """A finished or running training, with the best weights so far."""

    path: Path
    recipe: Recipe
    embedder: Embedder
    """In evaluation mode, on the CPU."""
    epoch: int
    """Of the weights, counted from 1; 0 is the start."""
    record: dict[str, Any]
    """`name`, `versions`, `seed`, `git_commit`, `data` (root, format, table, split, classes, ...),
    `metrics` of the weights that are kept (see `ModelSpec.accuracy`); checked by `training.loop.record`."""


def load_run(path: Path) -> Run:
    """Read a run folder and build its embedder with the best weights.

    Raises:
        NotFound: If it is not a run folder, or no epoch of it has ended.
        BadArtifact: If one of its files is damaged.
        ModelMismatch: If the checkpoint is of another architecture than the recipe.
    """
    recipe = read_recipe(path)
    record = read_record(path)
    if not (path / BEST).is_file():
        if (path / LAST).is_file():
            raise BadArtifact(
                f"the run {path} has lost {BEST}, the weights that it kept: bring the file back, or train"
                " again"
            )
        raise NotFound(f"the run {path} has no {BEST}: its first epoch has not ended")
    tensors, best = load_checkpoint(path / BEST)
    _check_trained(path, recipe, best)
    # the weights come from the checkpoint: the recipe's own package or file need not be here
    embedder = build_embedder(recipe.model_copy(update={"weights": "none"}))
    load_module(embedder, unprefixed("model", tensors), source=path / BEST)
    return Run(path, recipe, embedder.eval(), entry(best, "epoch", int, source=path / BEST), record)


def _check_trained(path: Path, recipe: Recipe, best: Mapping[str, Any]) -> None:
    """Refuse weights that no epoch has trained, and warn of a training that has not ended."""
    kept = entry(best, "epoch", int, source=path / BEST)
    done, finished = kept, True
    if (path / LAST).is_file():
        state = load_state(path / LAST)
        done = entry(state, "epochs_done", int, source=path / LAST)
        finished = bool(state.get("finished", done >= recipe.epochs))
    if done == 0:
        raise NotFound(
            f"the run {path} holds no trained weights, for its first epoch has not ended: go on by"
            f" `crossbatch train --resume --out {path}`"
        )
    if not finished:
        _log.warning("the run %s has ended %d of its %d epochs", path, done, recipe.epochs)
    if kept == 0:
        _log.warning(
            "the weights of %s are untrained: on validation, no epoch did better than the start", path
        )


def check_vacant(path: Path) -> None:
    """Refuse a folder that a new run cannot have; one whose run was cut before it had a recipe can be had.

    Raises:
        AlreadyExists: If a run or anything else is in it.
        BadSetting: If it is a file.
    """
    if (path / _RECIPE).exists():
        raise AlreadyExists(
            f"{path} holds a run already: go on with it by --resume, or choose another folder"
        )
    if path.exists() and not path.is_dir():
        raise BadSetting(f"{path} is a file: give --out a folder, which is made")
    if path.is_dir() and not _is_stump({file.name for file in path.iterdir()}, path):
        raise AlreadyExists(f"{path} is not empty and holds no run: choose another folder for --out")


def _is_stump(names: Set[str], path: Path) -> bool:
    """Tell whether a folder is empty, or holds only what `begin` leaves when it is cut before its end."""
    if any(name != _RECORD and not is_aside(name, _RECORD) and not is_aside(name, _RECIPE) for name in names):
        return False
    if _RECORD in names:
        try:
            read_record(path)
        except CrossbatchError:  # whatever it is, we have not written it
            return False
    return True


@contextlib.contextmanager
def reserved(path: Path) -> Iterator[None]:
    """Keep a run folder from every other process that would train in it; it is made where it is not there.

    Raises:
        AlreadyExists: If another process trains in it.
        BadSetting: If it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BadSetting(f"the run folder {path} cannot be made: {reason}") from error
    if os.name != "posix":  # where folders cannot be locked
        yield
        return
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyExists(
                f"another process trains in {path} just now: wait for its end, or choose another folder"
            ) from error
        yield
    finally:
        os.close(descriptor)  # and with it the lock, as at whatever end of the process


def begin(path: Path, recipe: Recipe, record: dict[str, Any]) -> None:
    """Fill the reserved folder of a new run, which can be resumed from then on; cut here, it is still vacant.

    Args:
        path: The folder.
        recipe: Every setting.
        record: Of the run; gets `recipe_digest`.

    Raises:
        AlreadyExists: If a run has come into it.
        CrossbatchError: If it cannot be written to.
    """
    check_vacant(path)
    text = yaml.safe_dump(recipe.model_dump(), sort_keys=False).encode()
    record["recipe_digest"] = hashlib.sha256(text).hexdigest()
    write_record(path, record)
    write_file(path / _RECIPE, text)  # last, since a folder with a recipe is a run


def read_recipe(path: Path) -> Recipe:
    """Read the resolved recipe of a run.

    Raises:
        NotFound: If `path` is not a run folder.
        BadArtifact: If the recipe is damaged.
    """
    file = path / _RECIPE
    if not file.is_file():
        cut = (path / _RECORD).is_file() and not (path / LAST).exists()
        hint = ", for its start was cut: train it again without --resume" if cut else ""
        if (path / "mlrc.json").is_file():
            hint = f"; of the runs of `crossbatch mlrc` take one, such as {path / 'repeat0' / 'fold0'}"
        raise NotFound(f"{path} is not a run folder: it has no {_RECIPE}{hint}")
    try:
        contents = file.read_bytes()
        values = parse_yaml(contents.decode())
    except (OSError, ValueError) as error:
        raise BadArtifact(f"{file} is damaged: it is not readable YAML") from error
    digest = read_record(path).get("recipe_digest") if (path / _RECORD).is_file() else None
    if digest not in (None, hashlib.sha256(contents).hexdigest()):
        raise BadArtifact(
            f"{file} is damaged or was edited: it is not what the run was started with; put it back, or train"
            " another run"
        )
    if not isinstance(values, dict):
        raise BadArtifact(f"{file} is damaged: it holds no table of settings")
    return make_recipe(_renamed(values), source=str(file))


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Give the settings of a run by today's names, whenever it was made."""
    if "unit" in values:
        values["assign_on"] = "unit" if values.pop("unit") else "raw"
    if "epsilon" in values:
        values["assignment_scale"] = values.pop("epsilon")
    return values


def read_record(path: Path) -> dict[str, Any]:
    """Read the record of a run.

    Raises:
        NotFound: If there is none.
        BadArtifact: If it is damaged; names the key.
    """
    file = path / _RECORD
    if not file.is_file():
        raise NotFound(f"{path} is not a run folder: it has no {_RECORD}")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadArtifact(f"{file} is damaged: it is not readable JSON") from error
    return check_record(record, source=str(file))


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record of the run.

    Raises:
        CrossbatchError: If the file cannot be written.
    """
    write_file(path / _RECORD, (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())


def write_metrics(path: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Write one line an epoch; what was not measured in an epoch is empty.

    Raises:
        CrossbatchError: If the file cannot be written.
    """
    names = list(dict.fromkeys(name for row in history for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    write_file(path / METRICS, text.getvalue().encode())


def provenance() -> dict[str, Any]:
    """Tell what code runs: versions of the packages that matter, and the git commit where there is one."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that was not installed
            versions[package] = "not installed"
    return {"versions": versions, "git_commit": _git_commit()}


def _git_commit() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    folder = Path(__file__).parent
    try:
        found = subprocess.run(
            [git, "-C", str(folder), "rev-parse", "--verify", "--quiet", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
