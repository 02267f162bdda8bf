"""BN-Inception: the published file's names and shapes, the paper's maps, and each kind of block by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from serving.errors import BadSetting
from training.network.backbone import build_backbone
from training.network.bn_inception import BLOCKS, BNInception
from training.network.embedder import Embedder

SHAPES = {  # read off the definition that the published file was made with
    "conv1_7x7_s2.weight": (64, 3, 7, 7),
    "conv1_7x7_s2.bias": (64,),
    "conv1_7x7_s2_bn.running_mean": (64,),
    "conv2_3x3_reduce.weight": (64, 64, 1, 1),
    "conv2_3x3.weight": (192, 64, 3, 3),
    "inception_3a_1x1.weight": (64, 192, 1, 1),
    "inception_3a_pool_proj_bn.running_var": (32,),
    "inception_3b_double_3x3_reduce.weight": (64, 256, 1, 1),
    "inception_3c_3x3.weight": (160, 128, 3, 3),
    "inception_3c_double_3x3_2_bn.weight": (96,),
    "inception_4a_1x1.weight": (224, 576, 1, 1),
    "inception_4c_double_3x3_1.weight": (160, 128, 3, 3),
    "inception_4d_3x3_reduce.weight": (128, 608, 1, 1),
    "inception_4e_double_3x3_2.weight": (256, 256, 3, 3),
    "inception_5a_1x1.weight": (352, 1056, 1, 1),
    "inception_5b_double_3x3_reduce.bias": (192,),
    "inception_5b_pool_proj.weight": (128, 1024, 1, 1),
}


@pytest.fixture(scope="module")
def network() -> BNInception:
    torch.manual_seed(0)
    network = BNInception()
    for layer in network.modules():  # statistics that evaluation mode shows
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean = torch.rand(layer.num_features) * 10
            layer.running_var = torch.rand(layer.num_features) + 0.5
    return network.eval()


def test_names_and_shapes_are_those_of_the_published_file(network: BNInception) -> None:
    state = {
        name: tuple(value.shape)
        for name, value in network.state_dict().items()
        if not name.endswith("num_batches_tracked")  # younger than the file
    }
    assert {name: state.get(name) for name in SHAPES} == SHAPES
    # 69 convolutions with bias, each with the four arrays of a BatchNorm; the file's 416 count the classifier
    assert len(state) == 416 - 2
    assert sum(p.numel() for p in network.parameters()) == 11_295_240 - (1024 + 1) * 1000
    assert "inception_3c_1x1.weight" not in state
    assert "inception_4e_pool_proj.weight" not in state


@pytest.mark.parametrize(("size", "side"), [(224, 7), (227, 7), (256, 8)])
@torch.no_grad()
def test_maps_have_the_sizes_of_the_published_network(network: BNInception, size: int, side: int) -> None:
    maps = network(torch.zeros(1, 3, size, size))
    assert maps.shape == (1, 1024, side, side)
    assert maps.min() >= 0


@pytest.mark.parametrize("name", ["3a", "3c", "5b"])  # average pooling, halving, maximum pooling
@torch.no_grad()
def test_blocks_against_their_layers_one_by_one(network: BNInception, name: str) -> None:
    block = next(block for block in BLOCKS if block.name == name)
    state = network.state_dict()
    width = state[f"inception_{name}_3x3_reduce.weight"].shape[1]
    maps = torch.rand(2, width, 8, 8, generator=torch.Generator().manual_seed(1)) * 20

    def layer(part: str, values: Tensor, stride: int = 1) -> Tensor:
        key = f"inception_{name}_{part}"
        weight, bias = state[f"{key}.weight"], state[f"{key}.bias"]
        values = functional.conv2d(values, weight, bias, stride=stride, padding=weight.shape[2] // 2)
        mean, var = (state[f"{key}_bn.running_{what}"].view(1, -1, 1, 1) for what in ("mean", "var"))
        values = (values - mean) / (var + 1e-5).sqrt()  # scale 1, shift 0
        return values.clamp_min(0)

    double = layer("double_3x3_1", layer("double_3x3_reduce", maps))
    if name == "3c":
        edge = functional.pad(maps, (0, 1, 0, 1), value=-1)  # the last window is incomplete
        pooled = edge.unfold(2, 3, 2).unfold(3, 3, 2).amax(dim=(4, 5))
        parts = [layer("3x3", layer("3x3_reduce", maps), 2), layer("double_3x3_2", double, 2), pooled]
    else:
        windows = functional.pad(maps, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
        pooled = windows.amax(dim=(4, 5)) if name == "5b" else windows.mean(dim=(4, 5))  # zeros count
        parts = [layer("1x1", maps), layer("3x3", layer("3x3_reduce", maps)), layer("double_3x3_2", double)]
        parts.append(layer("pool_proj", pooled))
    torch.testing.assert_close(network._inception(block, maps), torch.cat(parts, dim=1), rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_running_statistics_are_no_copy_of_the_last_batch() -> None:
    network: Any = BNInception()
    assert {x.momentum for x in network.modules() if isinstance(x, torch.nn.BatchNorm2d)} == {0.1}
    images = torch.full((2, 3, 64, 64), 50.0)
    seen = network.conv1_7x7_s2(images).mean(dim=(0, 2, 3))
    network.train()(images)
    torch.testing.assert_close(network.conv1_7x7_s2_bn.running_mean, 0.1 * seen)


def test_pixels_go_in_as_the_published_weights_want_them() -> None:
    embedder = Embedder(
        build_backbone("bn_inception"),
        image_size=64,
        dimension=4,
        prototypes=2,
        assignment_scale=10.0,
        assign_on="unit",
    )
    pixels = torch.tensor([255, 10, 7], dtype=torch.uint8).expand(1, 64, 64, 3)  # red, green, blue
    found = embedder.normalise(pixels)
    wanted = torch.tensor([7.0 - 104, 10.0 - 117, 255.0 - 128])  # blue, green, red
    torch.testing.assert_close(found[0, :, 3, 5], wanted, rtol=0, atol=1e-4)
    assert embedder.grid == (2, 2)


def test_stages_are_the_stem_and_three() -> None:
    backbone = build_backbone("bn_inception")
    backbone.freeze(2)
    learns = {name: parameter.requires_grad for name, parameter in backbone.body.named_parameters()}
    assert not any(learns[name] for name in learns if name.startswith(("conv", "inception_3")))
    assert all(learns[name] for name in learns if name.startswith(("inception_4", "inception_5")))
    with pytest.raises(BadSetting, match="freeze_stages is 4, but the backbone has only 4 stages"):
        backbone.freeze(4)
