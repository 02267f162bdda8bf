"""Checkpoints: tensors in safetensors, everything else as JSON in its metadata; no pickle."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer

from serving.errors import BadArtifact, ModelMismatch, NotFound
from training.loop.whole_file import write_file
from training.network.weights import check_shapes

__all__ = [
    "entry", "load_checkpoint", "load_module", "load_optimizer", "load_state", "pack_optimizer", "prefixed",
    "save_checkpoint", "unprefixed",
]  # fmt: skip

FORMAT_VERSION = 2
"""2 calls the histogram operator's weights `codebook`; they were `prototypes` in 1."""

T = TypeVar("T")


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-able state as one file, or leave the previous file as it is."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    described = json.dumps({"format_version": FORMAT_VERSION, **state})
    write_file(path, save(plain, metadata={"crossbatch": described, "digest": _digest(plain)}))


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote; tensors are on the CPU.

    Raises:
        NotFound: If there is no such file.
        BadArtifact: If the file is damaged, of a newer format, or not ours.
    """
    with _open(path) as (file, state):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        digest = file.metadata().get("digest")
    if digest not in (None, _digest(tensors)):  # the first checkpoints had none
        raise BadArtifact(f"the checkpoint {path} is damaged: its weights are not those that were saved")
    if state["format_version"] == 1:
        old, new = ".prototypes", ".codebook"
        tensors = {
            name.removesuffix(old) + new if name.endswith(old) else name: value
            for name, value in tensors.items()
        }
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


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put `prefix` and a dot in front of each name."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def unprefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take out the tensors whose name begins with `prefix` and a dot, and drop that."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def load_module(module: nn.Module, tensors: Mapping[str, Tensor], *, source: Path) -> None:
    """Fill a module's weights and buffers; `ModelMismatch` if a name or a shape differs."""
    own = module.state_dict()
    differing = sorted(own.keys() ^ tensors.keys())
    if differing:
        raise ModelMismatch(
            f"{source} is a checkpoint of another architecture: it differs from the recipe's in"
            f" {len(differing)} names (first: {differing[0]})"
        )
    check_shapes(own, tensors, source=source)
    module.load_state_dict(dict(tensors))


def pack_optimizer(optimizer: Optimizer) -> dict[str, Tensor]:
    """Give an optimiser's state as tensors, named `<number of the parameter>.<name of the state>`."""
    return {
        f"{number}.{name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], *, source: Path) -> None:
    """Restore what `pack_optimizer` gave, or tell that it is damaged; learning rates stay the recipe's."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        known = number.isdecimal() and int(number) < len(parameters)
        like = parameters[int(number)] if known else None
        if like is None or value.shape != (() if name == "step" else like.shape):
            raise BadArtifact(
                f"the checkpoint {source} is damaged: the optimiser has no state optimizer.{key} of shape"
                f" {tuple(value.shape)}"
            )
        if name != "step":  # back to the parameter's own memory format
            value = torch.empty_like(like, dtype=value.dtype).copy_(value)
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
