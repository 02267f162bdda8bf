"""Backbones by name: pictures to feature maps, whatever form the network itself gives them.

Two are not timm's, and have the attributes that timm's have. ResNet-20 is the CIFAR form of He et al., arXiv
1512.03385, section 4.2. BN-Inception is that of Ioffe and Szegedy, arXiv 1502.03167, as in the published
`bn_inception-239d2248.pth`, whose names its layers have; it takes BGR pixels in 0..255 less (104, 117, 128).
Letters: B images, S pixels a side, h * w locations.
"""

import difflib
import itertools
from typing import Any, ClassVar, Literal, NamedTuple

import timm
import torch
from timm.models import group_parameters
from torch import Tensor, nn
from torch.nn import functional

from serving.errors import BadSetting, cause_of
from training.network.weights import fit_weights, read_weights

__all__ = ["BLOCKS", "BNInception", "Backbone", "ResNet20", "build_backbone"]

Colour = tuple[float, ...]
Order = Literal["RGB", "BGR"]


class Backbone(nn.Module):
    """A feature extractor and the normalisation that it was trained with."""

    def __init__(
        self, body: nn.Module, channels: int, *, mean: Colour, std: Colour, order: Order = "RGB"
    ) -> None:
        super().__init__()
        self.body, self.channels = body, channels
        self.mean, self.std = mean, std  # of pixels in 0..1, in the body's own order of colours
        self.order: Order = order

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float32 (B, 3, S, S), normalised, to features (B, channels, h, w)."""
        return _as_map(self.body(images), self.body, images)

    @property
    def middle(self) -> nn.Module:
        """The module half way, whose output, batch first, can be replaced by that of other images."""
        stages = getattr(self.body, "feature_info", None)  # timm's: a list, or an object around one
        stages = list(getattr(stages, "info", stages) or ())
        try:
            return self.body.get_submodule(stages[(len(stages) - 1) // 2]["module"])
        except (IndexError, KeyError, TypeError, AttributeError) as error:
            raise BadSetting(
                "the backbone does not say what its stages are: choose another one, or another mixing"
            ) from error

    def freeze(self, stages: int) -> None:
        """Stop the training of the first `stages` stages, the stem being one."""
        if stages == 0:
            return
        # timm's own grouping: stage number to the names of its parameters, from the input on
        matcher = self.body.group_matcher(coarse=True)  # type: ignore[operator]
        layers = group_parameters(self.body, matcher, reverse=False)
        if stages >= len(layers):
            raise BadSetting(f"freeze_stages is {stages}, but the backbone has only {len(layers)} stages")
        for stage in sorted(layers)[:stages]:
            for name in layers[stage]:
                self.body.get_parameter(name).requires_grad_(False)


def build_backbone(name: str, weights: str = "none", *, image_size: int | None = None) -> Backbone:
    """Build `resnet20`, `bn_inception` or a model of timm, and load its weights.

    These are `none` for a random start, `published` for the usual file in a cache of this machine,
    `package:MODULE` for weights installed by pip, else the path of a `.safetensors`, `.pth` or `.pt` file.
    Networks made for one size of image are made for `image_size`, or else for that of the published weights.
    """
    if name in _OWN:
        body: Any = _OWN[name]()
    elif timm.is_model(name):
        body = _build_timm(name, image_size)
    else:
        close = difflib.get_close_matches(name, [*_OWN, *timm.list_models()], n=1)
        nearest = f" (nearest: {close[0]})" if close else ""
        raise BadSetting(f"no backbone is called {name!r}: use {', '.join(_OWN)} or a model of timm{nearest}")
    config = body.pretrained_cfg
    if weights != "none":
        found = config.get("classifier") or ()
        classifier = (found,) if isinstance(found, str) else tuple(found)
        state, source = read_weights(weights, name, body)
        fit_weights(body, state, source=source, classifier=(*classifier, "attn_pool"))
    mean, std, order = tuple(config["mean"]), tuple(config["std"]), config.get("order", "RGB")
    return Backbone(body, body.head_hidden_size, mean=mean, std=std, order=order)


def _build_timm(name: str, image_size: int | None) -> Any:
    """Build a model of timm without weights, classifier and pooling."""
    size: dict[str, Any] = {}
    try:
        published = timm.get_pretrained_cfg(name)  # how timm trained it: only read for what its images were
        if published is not None and published.fixed_input_size and image_size:
            size = {"img_size": image_size}
        body: Any = timm.create_model(name, pretrained=False, num_classes=0, **size)
        body.reset_classifier(0, "")  # only now, so that all other layers are those of the weights files
    except (AssertionError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        where = f" for images of {image_size} px" if size else ""
        raise BadSetting(f"timm cannot make a feature map of {name}{where}: {cause_of(error)}") from error
    patch = _patch_size(body)
    if patch and image_size and any(image_size % side for side in patch):
        raise BadSetting(
            f"{name} cuts images into patches of {patch[0]} px, so that image_size has to be a multiple of"
            f" {patch[0]}, and it is {image_size}"
        )
    return body


def _patch_size(body: nn.Module) -> tuple[int, int] | None:
    """Tell how many pixels (height, width) a token stands for, if the network cuts images into patches."""
    ratio = getattr(getattr(body, "patch_embed", None), "feat_ratio", None)
    if ratio is None:
        return None
    height, width = ratio(as_scalar=False)
    return int(height), int(width)


def _as_map(features: Tensor, body: nn.Module, images: Tensor) -> Tensor:
    """Lay out what the body gives for images (B, 3, S, S) as (B, channels, h, w); what has no places stays.

    Of tokens (B, p + h * w, channels) the first p, a class token and registers, stand for no place.
    """
    if features.ndim == 4 and str(getattr(body, "output_fmt", "NCHW")) == "NHWC":
        return features.permute(0, 3, 1, 2)
    patch = _patch_size(body)
    if features.ndim == 3 and patch:
        h, w = images.shape[2] // patch[0], images.shape[3] // patch[1]
        prefix = int(getattr(body, "num_prefix_tokens", 0))
        if features.shape[1] == prefix + h * w:
            places = features[:, prefix:].transpose(1, 2)  # (B, channels, n), row by row
            return places.reshape(*places.shape[:2], h, w)
    return features


_WIDTHS = (16, 32, 64)  # channels of the three stages; the map shrinks by 2 between them
_DEEP = 3  # blocks a stage: 6 * 3 + 2 = 20 layers with the stem and the (absent) classifier


class _Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A of section 3.3)."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.stride = width_out // width_in  # 1 inside a stage, 2 at the first block of the next one
        self.grown = width_out - width_in
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride=self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width_out)

    def forward(self, maps: Tensor) -> Tensor:
        """Map (B, width_in, h, w) to (B, width_out, h / stride, w / stride)."""
        shortcut = maps
        if self.grown:  # every second pixel, new channels zero
            shortcut = functional.pad(maps[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.grown))
        out = functional.relu(self.bn1(self.conv1(maps)))
        return functional.relu(self.bn2(self.conv2(out)) + shortcut)


class ResNet20(nn.Module):
    """Images to a feature map of 64 channels at a quarter of their size; no classifier."""

    head_hidden_size = _WIDTHS[-1]
    pretrained_cfg: ClassVar = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    feature_info: ClassVar = [{"module": "blocks.4"}]  # the middle of nine blocks

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, _WIDTHS[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(_WIDTHS[0])
        widths = [_WIDTHS[0], *(width for width in _WIDTHS for _ in range(_DEEP))]
        self.blocks = nn.Sequential(*(_Residual(*pair) for pair in itertools.pairwise(widths)))
        _start(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Tell which stage a parameter belongs to, in timm's form: the stem, then the blocks."""
        return {"stem": r"^conv|^bn", "blocks": r"^blocks\.(\d+)"}

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float32 (B, 3, S, S), to features (B, 64, S/4, S/4)."""
        features: Tensor = self.blocks(functional.relu(self.bn(self.conv(images))))
        return features


class _Inception(NamedTuple):
    """Output channels of one inception block; without `one` and `projection` it halves the map."""

    name: str
    one: int  # of the 1x1 branch
    reduce: int  # of the 3x3 branch's 1x1
    three: int
    double_reduce: int  # of the double 3x3 branch's 1x1
    double: int
    projection: int  # of the 1x1 after the pooling
    pool: str = "mean"


BLOCKS = (
    _Inception("3a", 64, 64, 64, 64, 96, 32),
    _Inception("3b", 64, 64, 96, 64, 96, 64),
    _Inception("3c", 0, 128, 160, 64, 96, 0, "maximum"),
    _Inception("4a", 224, 64, 96, 96, 128, 128),
    _Inception("4b", 192, 96, 128, 96, 128, 128),
    _Inception("4c", 160, 128, 160, 128, 160, 128),
    _Inception("4d", 96, 128, 192, 160, 192, 128),
    _Inception("4e", 0, 128, 192, 192, 256, 0, "maximum"),
    _Inception("5a", 352, 192, 320, 160, 224, 128),
    _Inception("5b", 352, 192, 320, 192, 224, 128, "maximum"),
)
HALF = "4b"  # five of the ten blocks


class BNInception(nn.Module):
    """Images to a feature map of 1024 channels at a 32nd of their size; no classifier."""

    head_hidden_size = 1024
    pretrained_cfg: ClassVar = {
        "mean": (104 / 255, 117 / 255, 128 / 255), "std": (1 / 255,) * 3, "order": "BGR",
        "classifier": "last_linear",
    }  # fmt: skip
    feature_info: ClassVar = [{"module": "middle"}]

    def __init__(self) -> None:
        super().__init__()
        self._add("conv1_7x7_s2", 3, 64, kernel=7, stride=2)
        self._add("conv2_3x3_reduce", 64, 64)
        self._add("conv2_3x3", 64, 192, kernel=3)
        width = 192
        for block in BLOCKS:
            width = self._add_block(block, width)
        self.middle = nn.Identity()  # where the rest of the network can be given other maps
        _start(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Tell which stage a parameter belongs to, in timm's form: the stem, then the blocks 3, 4 and 5."""
        return {"stem": r"^conv", "blocks": r"^inception_(\d)"}

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float32 (B, 3, S, S), to features (B, 1024, S/32, S/32), all at least 0."""
        maps = _halve(self._layer("conv1_7x7_s2", images))
        maps = _halve(self._layer("conv2_3x3", self._layer("conv2_3x3_reduce", maps)))
        for block in BLOCKS:
            maps = self._inception(block, maps)
            if block.name == HALF:
                maps = self.middle(maps)
        return maps

    def _add(self, name: str, width_in: int, width_out: int, *, kernel: int = 1, stride: int = 1) -> None:
        convolution = nn.Conv2d(width_in, width_out, kernel, stride=stride, padding=kernel // 2)
        self.add_module(name, convolution)
        self.add_module(f"{name}_bn", nn.BatchNorm2d(width_out, momentum=0.1))

    def _add_block(self, block: _Inception, width: int) -> int:
        """Add the layers of a block for `width` channels, and tell how many channels it gives."""
        prefix, stride = f"inception_{block.name}_", 1 if block.one else 2
        if block.one:
            self._add(f"{prefix}1x1", width, block.one)
        self._add(f"{prefix}3x3_reduce", width, block.reduce)
        self._add(f"{prefix}3x3", block.reduce, block.three, kernel=3, stride=stride)
        self._add(f"{prefix}double_3x3_reduce", width, block.double_reduce)
        self._add(f"{prefix}double_3x3_1", block.double_reduce, block.double, kernel=3)
        self._add(f"{prefix}double_3x3_2", block.double, block.double, kernel=3, stride=stride)
        if block.projection:
            self._add(f"{prefix}pool_proj", width, block.projection)
        return block.one + block.three + block.double + (block.projection or width)

    def _layer(self, name: str, maps: Tensor) -> Tensor:
        normed: Tensor = self.get_submodule(f"{name}_bn")(self.get_submodule(name)(maps))
        return functional.relu(normed, inplace=True)

    def _inception(self, block: _Inception, maps: Tensor) -> Tensor:
        """Run a block: its branches' channels stand side by side."""
        prefix = f"inception_{block.name}_"
        found = [self._layer(f"{prefix}1x1", maps)] if block.one else []
        found.append(self._layer(f"{prefix}3x3", self._layer(f"{prefix}3x3_reduce", maps)))
        double = self._layer(f"{prefix}double_3x3_1", self._layer(f"{prefix}double_3x3_reduce", maps))
        found.append(self._layer(f"{prefix}double_3x3_2", double))
        if not block.projection:
            found.append(_halve(maps))
        else:
            pool = functional.avg_pool2d if block.pool == "mean" else functional.max_pool2d
            found.append(self._layer(f"{prefix}pool_proj", pool(maps, 3, stride=1, padding=1)))
        return torch.cat(found, dim=1)


def _halve(maps: Tensor) -> Tensor:
    """Take the maximum of 3x3, every second pixel; an incomplete window at the edge counts."""
    return functional.max_pool2d(maps, 3, stride=2, ceil_mode=True)


def _start(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):  # arXiv 1502.01852
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


_OWN: dict[str, Any] = {"resnet20": ResNet20, "bn_inception": BNInception}  # with timm's attributes
