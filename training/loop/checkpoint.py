"""Checkpoints: tensors in safetensors, everything else as JSON in its metadata; no pickle.

A full disk or a power cut while one is written leaves the previous one (`training.loop.whole_file`).
"""

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
from torch.optim import Optimizer, RMSprop

from serving.errors import BadArtifact, ModelMismatch, NotFound
from training.loop.whole_file import write_file

__all__ = [
    "FORMAT_VERSION",
    "check_shapes",
    "entry",
    "load_checkpoint",
    "load_module",
    "load_optimizer",
    "load_state",
    "pack_optimizer",
    "prefixed",
    "save_checkpoint",
    "unprefixed",
]

FORMAT_VERSION = 2
"""2 calls the histogram operator's weights `codebook`; they were `prototypes` in 1."""

T = TypeVar("T")

_MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq"})
_MOMENTS_OF_RMSPROP = frozenset({"step", "square_avg", "momentum_buffer"})
"""What an optimiser keeps for a parameter, once that has had a gradient."""


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-able state as one file, or leave the previous file as it is.

    Raises:
        CrossbatchError: If the file cannot be written.
    """
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    described = json.dumps({"format_version": FORMAT_VERSION, **state})
    write_file(path, save(plain, metadata={"crossbatch": described, "digest": _digest(plain)}))


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote; tensors are on the CPU.

    Raises:
        NotFound: If there is no such file.
        BadArtifact: If the file is damaged, of a newer format, or not ours.
    """
    with _open(path) as file:
        state = _state(file, path)
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
    with _open(path) as file:
        return _state(file, path)


def entry(state: Mapping[str, Any], key: str, kind: type[T], *, source: Path) -> T:
    """Give one entry of a checkpoint's state.

    Raises:
        BadArtifact: If it is missing or of another type.
    """
    value = state.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadArtifact(f"the checkpoint {source} is damaged: its state has no {key} that is of use")
    return value


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put `prefix` and a dot in front of each name."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def unprefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take out the tensors whose name begins with `prefix` and a dot, and drop that."""
    return {
        name.removeprefix(f"{prefix}."): value
        for name, value in tensors.items()
        if name.startswith(f"{prefix}.")
    }


def load_module(module: nn.Module, tensors: Mapping[str, Tensor], *, source: Path) -> None:
    """Fill a module's weights and buffers.

    Raises:
        ModelMismatch: If a name or a shape differs.
    """
    own = module.state_dict()
    differing = sorted(own.keys() ^ tensors.keys())
    if differing:
        raise ModelMismatch(
            f"{source} is a checkpoint of another architecture: it differs from the recipe's in"
            f" {len(differing)} names (first: {differing[0]})"
        )
    check_shapes(own, tensors, source=source)
    module.load_state_dict(dict(tensors))


def check_shapes(own: Mapping[str, Tensor], given: Mapping[str, Tensor], *, source: str | Path) -> None:
    """Refuse weights of other shapes; every name of `given` is one of `own`.

    Raises:
        ModelMismatch: Names the first that differs.
    """
    for name, value in given.items():
        if value.shape != own[name].shape:
            raise ModelMismatch(
                f"{source} holds weights of another architecture: {name} has shape {tuple(value.shape)},"
                f" but the recipe's has {tuple(own[name].shape)}"
            )


def pack_optimizer(optimizer: Optimizer) -> dict[str, Tensor]:
    """Give an optimiser's state as tensors, named `<number of the parameter>.<name of the state>`."""
    return {
        f"{number}.{name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], *, source: Path) -> None:
    """Restore what `pack_optimizer` gave of Adam, its kin or RMSprop; learning rates stay the recipe's.

    Raises:
        BadArtifact: If a name or a shape is not one that the optimiser has.
    """
    moments = _MOMENTS
    if isinstance(optimizer, RMSprop):
        moments = _MOMENTS_OF_RMSPROP - (set() if optimizer.defaults["momentum"] else {"momentum_buffer"})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        known = number.isdecimal() and int(number) < len(parameters) and name in moments
        like = parameters[int(number)] if known else value
        if not known or value.shape != (() if name == "step" else like.shape):
            raise BadArtifact(
                f"the checkpoint {source} is damaged: the optimiser has no state optimizer.{key} of shape"
                f" {tuple(value.shape)}"
            )
        if name != "step":  # back to the parameter's own memory format
            value = torch.empty_like(like, dtype=value.dtype).copy_(value)
        state.setdefault(int(number), {})[name] = value
    for place, found in state.items():
        if missing := sorted(moments - found.keys()):
            raise BadArtifact(
                f"the checkpoint {source} is damaged: the optimiser's state"
                f" optimizer.{place}.{missing[0]} is missing"
            )
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a safetensors file; whatever is wrong with it while it is open is damage."""
    if not path.is_file():
        raise NotFound(f"no checkpoint is at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise BadArtifact(f"the checkpoint {path} is damaged: {error}") from error


def _state(file: Any, path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((file.metadata() or {})["crossbatch"])
        version = int(state["format_version"])
    except KeyError as error:
        raise BadArtifact(f"{path} is a safetensors file, but not a checkpoint of crossbatch") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise BadArtifact(f"the checkpoint {path} is damaged: {error}") from error
    if version > FORMAT_VERSION:
        raise BadArtifact(
            f"the checkpoint {path} has format version {version}, but this crossbatch reads up to"
            f" {FORMAT_VERSION}: update crossbatch"
        )
    return state


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Give the SHA-256 of names and values; safetensors itself would not see a bit that has flipped."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
