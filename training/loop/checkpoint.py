"""Checkpoints, tensors in safetensors and the rest as JSON in its metadata; files written whole."""

import contextlib
import csv
import fcntl
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.optim import Optimizer

from serving.errors import BadArtifact, CrossbatchError, NotFound

__all__ = [
    "aside_of", "entry", "load_checkpoint", "load_optimizer", "load_state", "locked", "pack_optimizer",
    "replacing", "save_checkpoint", "unprefixed", "write_file", "write_table",
]  # fmt: skip

FORMAT_VERSION = 2  # which calls the histogram operator's weights `codebook`; they were `prototypes` in 1

T = TypeVar("T")


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-able state as one file, or leave the previous file as it is."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    described = json.dumps({"format_version": FORMAT_VERSION, **state})
    write_file(path, save(plain, metadata={"crossbatch": described, "digest": _digest(plain)}))


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote, onto the CPU; `NotFound`, or `BadArtifact` if it is damaged."""
    with _open(path) as (file, state):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        digest = file.metadata().get("digest")
    if digest not in (None, _digest(tensors)):  # the first checkpoints had none
        raise BadArtifact(f"the checkpoint {path} is damaged: its weights are not those that were saved")
    if state["format_version"] == 1:
        tensors = {re.sub(r"\.prototypes$", ".codebook", name): value for name, value in tensors.items()}
    return tensors, state


def load_state(path: Path) -> dict[str, Any]:
    """Read only the state of a checkpoint; raises what `load_checkpoint` does."""
    with _open(path) as (_, state):
        return state


def entry(state: Mapping[str, Any], key: str, kind: type[T], *, source: Path) -> T:
    """Give one entry of a checkpoint's state; `BadArtifact` if it is missing or of another type."""
    value = state.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadArtifact(f"the checkpoint {source} is damaged: its state has no {key} that is of use")
    return value


def unprefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take out the tensors whose name begins with `prefix` and a dot, and drop that."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def pack_optimizer(optimizer: Optimizer) -> dict[str, Tensor]:
    """Give an optimiser's state as tensors, named `optimizer.<number of parameter>.<name of state>`."""
    return {
        f"optimizer.{number}.{name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `pack_optimizer` gave, found among other tensors; learning rates stay the recipe's."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in unprefixed("optimizer", tensors).items():
        number, name = key.split(".")
        if name != "step":  # back to the parameter's own memory format
            value = torch.empty_like(parameters[int(number)], dtype=value.dtype).copy_(value)
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Open a checkpoint and read its state; whatever is wrong with it while it is open is damage."""
    if not path.is_file():
        raise NotFound(f"no checkpoint is at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            if "crossbatch" not in (file.metadata() or {}):
                raise BadArtifact(f"{path} is a safetensors file, but not a checkpoint of crossbatch")
            state: dict[str, Any] = json.loads(file.metadata()["crossbatch"])
            version = int(state["format_version"])
            if version > FORMAT_VERSION:
                raise BadArtifact(
                    f"the checkpoint {path} has format version {version}, but this crossbatch reads up to"
                    f" {FORMAT_VERSION}: update crossbatch"
                )
            yield file, state
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadArtifact(f"the checkpoint {path} is damaged: {error}") from error


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Give the SHA-256 of names and values; safetensors itself would not see a bit that has flipped."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_file(path: Path, contents: bytes) -> None:
    """Replace a file in one step, or leave the previous one as it is, with a `CrossbatchError`."""
    with replacing(path) as aside:
        aside.write_bytes(contents)


def write_table(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Replace a table of comma-separated values, as `write_file` does; a cell that a row lacks is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue().encode())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the place for a file's new contents, which replace it in one step when the block ends well."""
    aside = aside_of(path)
    try:
        if path.exists() and not path.is_file():  # a device, for one
            raise OSError(0, "something is there that is no plain file", str(path))
        yield aside
        with aside.open("r+b") as file:
            os.fsync(file.fileno())
        aside.replace(path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CrossbatchError(
            f"{path} cannot be written ({(error.strerror or str(error)).lower()}); a previous one is"
            " unharmed: make room or choose another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def aside_of(path: Path) -> Path:
    """Tell where a file is written before it has its name, over what a killed process left there."""
    return path.with_name(f".{path.name}.tmp")


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes that ask out of a folder; `BlockingIOError` if one has it and we do not `wait`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)  # and with it the lock, as at whatever end of the process
