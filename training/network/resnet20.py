"""ResNet-20 for small pictures: the CIFAR form of He et al., arXiv 1512.03385, section 4.2."""

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ResNet20"]

WIDTHS = (16, 32, 64)  # channels of the three stages; the map shrinks by 2 between them
BLOCKS = 3  # blocks a stage: 6 * 3 + 2 = 20 layers with the stem and the (absent) classifier


class _Block(nn.Module):
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

    num_features = WIDTHS[-1]

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(WIDTHS[0])
        blocks: list[nn.Module] = []
        width_in = WIDTHS[0]
        for width in WIDTHS:
            for _ in range(BLOCKS):
                blocks.append(_Block(width_in, width))
                width_in = width
        self.blocks = nn.Sequential(*blocks)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # arXiv 1502.01852
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

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
