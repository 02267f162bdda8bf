"""A run folder: recipe.yaml, record.json, metrics.csv, best.safetensors, last.safetensors."""

import contextlib
import hashlib
import json
import logging
import platform
import reprlib
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from serving.catalog.catalog import Layout
from serving.errors import AlreadyExists, BadArtifact, BadSetting, CrossbatchError, NotFound
from training.loop import checkpoint
from training.network.embedder import Embedder, build_embedder
from training.network.weights import fit_weights
from training.recipes.recipe import Recipe, make_recipe
from training.recipes.recipe_file import parse_yaml

__all__ = [
    "BEST", "LAST", "METRICS", "Run", "begin", "check_record", "check_vacant", "load_run", "new_record",
    "read_recipe", "read_record", "reserved", "write_record",
]  # fmt: skip

BEST = "best.safetensors"
LAST = "last.safetensors"
METRICS = "metrics.csv"
_MAX_NAME = 200  # characters; it becomes the name of the exported model
_RECIPE = "recipe.yaml"
_RECORD = "record.json"
_PACKAGES = (
    "crossbatch", "torch", "torchvision", "timm", "lightning-fabric", "pytorch-metric-learning", "pillow",
)  # fmt: skip

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """A finished or running training, with the best weights so far."""

    path: Path
    recipe: Recipe
    embedder: Embedder  # in evaluation mode, on the CPU
    epoch: int  # of the weights, counted from 1; 0 is the start
    record: dict[str, Any]  # name, versions, seed, git_commit, data, and metrics of the weights that are kept


def load_run(path: Path) -> Run:
    """Read a run folder and build its embedder with the best weights.

    `NotFound` if it is none or no epoch has ended, `BadArtifact` or `ModelMismatch` if its files are damaged.
    """
    recipe, record = read_recipe(path), read_record(path)
    if not (path / BEST).is_file():
        if (path / LAST).is_file():
            raise BadArtifact(f"the run {path} has lost {BEST}: bring the file back, or train again")
        raise NotFound(f"the run {path} has no {BEST}: its first epoch has not ended")
    tensors, best = checkpoint.load_checkpoint(path / BEST)
    kept = checkpoint.entry(best, "epoch", int, source=path / BEST)
    _check_trained(path, recipe, kept)
    # the weights come from the checkpoint: the recipe's own package or file need not be here
    embedder = build_embedder(recipe.model_copy(update={"weights": "none"}))
    fit_weights(embedder, checkpoint.unprefixed("model", tensors), source=path / BEST)
    return Run(path, recipe, embedder.eval(), kept, record)


def _check_trained(path: Path, recipe: Recipe, kept: int) -> None:
    """Refuse weights that no epoch has trained, and warn of a training that has not ended."""
    done, finished = kept, True
    if (path / LAST).is_file():
        state = checkpoint.load_state(path / LAST)
        done = checkpoint.entry(state, "epochs_done", int, source=path / LAST)
        finished = bool(state.get("finished", done >= recipe.epochs))
    if done == 0:
        raise NotFound(
            f"the run {path} holds no trained weights, for its first epoch has not ended: go on by"
            f" `crossbatch train --resume --out {path}`"
        )
    if not finished:
        _log.warning("the run %s has ended %d of its %d epochs", path, done, recipe.epochs)
    if kept == 0:
        told = "the weights of %s are untrained: on validation, no epoch did better than the start"
        _log.warning(told, path)


def check_vacant(path: Path) -> None:
    """Refuse a folder in which something is; a run that was cut before it had a recipe is nothing."""
    if (path / _RECIPE).exists():
        raise AlreadyExists(f"{path} holds a run already: go on by --resume, or choose another folder")
    if path.exists() and not path.is_dir():
        raise BadSetting(f"{path} is a file: give --out a folder, which is made")
    if path.is_dir() and not _is_stump(path):
        raise AlreadyExists(f"{path} is not empty and holds no run: choose another folder for --out")


def _is_stump(path: Path) -> bool:
    """Tell whether a folder is empty, or holds only what `begin` leaves when it is cut before its end."""
    ours = {path / _RECORD, checkpoint.aside_of(path / _RECORD), checkpoint.aside_of(path / _RECIPE)}
    if not set(path.iterdir()) <= ours:
        return False
    try:
        return not (path / _RECORD).exists() or bool(read_record(path))
    except CrossbatchError:  # whatever it is, we have not written it
        return False


@contextlib.contextmanager
def reserved(path: Path) -> Iterator[None]:
    """Keep a run folder, made where it is not there, from every other process that would train in it."""
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(checkpoint.locked(path))
        except BlockingIOError as error:
            raise AlreadyExists(f"another process trains in {path}: wait, or take another folder") from error
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise BadSetting(f"the run folder {path} cannot be made: {reason}") from error
        yield


def begin(path: Path, recipe: Recipe, record: dict[str, Any]) -> None:
    """Fill the reserved folder of a new run, which can be resumed from then on; cut here, it stays vacant."""
    check_vacant(path)
    text = yaml.safe_dump(recipe.model_dump(), sort_keys=False).encode()
    record["recipe_digest"] = hashlib.sha256(text).hexdigest()
    write_record(path, record)
    checkpoint.write_file(path / _RECIPE, text)  # last, since a folder with a recipe is a run


def read_recipe(path: Path) -> Recipe:
    """Read the resolved recipe of a run; `NotFound` if there is none, `BadArtifact` if it is damaged."""
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
        raise BadArtifact(f"{file} is damaged or was edited: put back what the run was started with")
    if not isinstance(values, dict):
        raise BadArtifact(f"{file} is damaged: it holds no table of settings")
    if "unit" in values:  # names of an earlier version
        values["assign_on"] = "unit" if values.pop("unit") else "raw"
    if "epsilon" in values:
        values["assignment_scale"] = values.pop("epsilon")
    return make_recipe(values, source=str(file))


def read_record(path: Path) -> dict[str, Any]:
    """Read the record of a run; `NotFound` if there is none, `BadArtifact` if it is damaged."""
    file = path / _RECORD
    if not file.is_file():
        raise NotFound(f"{path} is not a run folder: it has no {_RECORD}")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadArtifact(f"{file} is damaged: it is not readable JSON") from error
    return check_record(record, source=str(file))


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record of the run; a `CrossbatchError` if the file cannot be written."""
    checkpoint.write_file(path / _RECORD, (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())


_Path = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]


class _Data(BaseModel):
    """Where a run's images are, how they were read, and which of them train."""

    model_config = ConfigDict(strict=True)

    root: _Path
    format: Layout
    table: _Path | None
    train_classes: list[str]
    train_images: int = Field(ge=0)
    digest: str = Field(pattern="^[0-9a-f]{64}$")


class _Record(BaseModel):
    """The keys of a record that are read again; others may stand beside them."""

    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1, max_length=_MAX_NAME)
    data: _Data
    metrics: dict[str, JsonValue]
    versions: dict[str, str] = {}
    seed: int | None = None
    git_commit: str | None = None


def check_record(values: object, *, source: str) -> dict[str, Any]:
    """Give a record as it was read from `source`; a `BadArtifact` names the first key that is not sound."""
    if not isinstance(values, dict):
        raise BadArtifact(f"{source} is damaged: it holds no record")
    try:
        _Record.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:3])
        reason = first["msg"][:1].lower() + first["msg"][1:]
        told = f"its {key} is {reprlib.repr(first['input'])}, but {reason}"
        told = f"it has no {key}" if first["type"] == "missing" else told
        raise BadArtifact(f"{source} is damaged: {told}") from error
    return values


def new_record(name: str, seed: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """Begin the record of a run: what code runs is told by versions of packages and the git commit."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that was not installed
            versions[package] = "not installed"
    commit = None
    # of a repository that has this file, and is not that of a user in which crossbatch is installed
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", f"HEAD:./{Path(__file__).name}", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # git is not installed, for one
        found = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
        commit = found.stdout.split()[1]
    told = {"name": name[:_MAX_NAME], "versions": versions, "git_commit": commit, "seed": seed}
    return told | {"data": data, "metrics": {}}
