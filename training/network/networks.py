"""Networks that timm does not have: ResNet-20 for small pictures, and BN-Inception.

ResNet-20 is the CIFAR form of He et al., arXiv 1512.03385, section 4.2. BN-Inception is that of Ioffe and
Szegedy, arXiv 1502.03167, as in the published `bn_inception-239d2248.pth`, whose names its layers have; it
takes BGR pixels in 0..255 less (104, 117, 128).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["BLOCKS", "BNInception", "ResNet20"]

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

    num_features = _WIDTHS[-1]

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, _WIDTHS[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(_WIDTHS[0])
        blocks: list[nn.Module] = []
        width_in = _WIDTHS[0]
        for width in _WIDTHS:
            for _ in range(_DEEP):
                blocks.append(_Residual(width_in, width))
                width_in = width
        self.blocks = nn.Sequential(*blocks)
        _start(self)

    @property
    def middle(self) -> nn.Module:
        """The fifth of the nine blocks."""
        return self.blocks[len(self.blocks) // 2]

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

    num_features = 1024

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
