"""BN-Inception: Ioffe and Szegedy, arXiv 1502.03167, as in the published `bn_inception-239d2248.pth`.

Layers have that file's names. It takes BGR pixels in 0..255 less (104, 117, 128). The framework that it was
trained in counts BatchNorm's momentum the other way round: 0.9 there is 0.1 in torch, and 0.9 in torch makes
the running statistics those of the last batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["BNInception"]


class _Block(NamedTuple):
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
    _Block("3a", 64, 64, 64, 64, 96, 32),
    _Block("3b", 64, 64, 96, 64, 96, 64),
    _Block("3c", 0, 128, 160, 64, 96, 0, "maximum"),
    _Block("4a", 224, 64, 96, 96, 128, 128),
    _Block("4b", 192, 96, 128, 96, 128, 128),
    _Block("4c", 160, 128, 160, 128, 160, 128),
    _Block("4d", 96, 128, 192, 160, 192, 128),
    _Block("4e", 0, 128, 192, 192, 256, 0, "maximum"),
    _Block("5a", 352, 192, 320, 160, 224, 128),
    _Block("5b", 352, 192, 320, 192, 224, 128, "maximum"),
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
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # arXiv 1502.01852
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

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

    def _add_block(self, block: _Block, width: int) -> int:
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

    def _inception(self, block: _Block, maps: Tensor) -> Tensor:
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
