"""Backbones: maps whatever form a network has, stages; the networks of our own, layer by layer."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from serving.errors import BadSetting
from tests.training.small import seeded
from training.network.backbone import BLOCKS, Backbone, BNInception, ResNet20, build_backbone
from training.network.embedder import Embedder
from training.recipes.recipe import Recipe

SHAPES = {
    "conv1_7x7_s2.weight": (64, 3, 7, 7), "inception_3a_pool_proj_bn.running_var": (32,),
    "inception_3c_3x3.weight": (160, 128, 3, 3), "inception_4d_3x3_reduce.weight": (128, 608, 1, 1),
    "inception_5b_pool_proj.weight": (128, 1024, 1, 1),
}  # fmt: skip
"""Read off the definition that the published file was made with."""


def test_resnet20_has_the_papers_size_and_map() -> None:
    backbone = build_backbone("resnet20").eval()
    assert backbone(torch.zeros(2, 3, 32, 32)).shape == (2, 64, 8, 8)
    # He et al. state 0.27 M, classifier included: 64 * 10 + 10
    assert sum(p.numel() for p in backbone.parameters()) + 650 == 269_722


def test_resnet20_shortcut_repeats_every_second_pixel() -> None:
    block = ResNet20().eval().blocks[3]
    torch.nn.init.zeros_(block.bn2.weight)  # type: ignore[union-attr, arg-type]
    maps = torch.rand(1, 16, 8, 8)
    out = block(maps)
    assert torch.equal(out[:, :16], maps[:, :, ::2, ::2])
    assert not out[:, 16:].any()


def test_unknown_names_tell_the_nearest() -> None:
    with pytest.raises(BadSetting, match=r"use resnet20, bn_inception or .* \(nearest: resnet20"):
        build_backbone("resnt20")


@torch.no_grad()
def test_patch_tokens_are_the_locations_row_by_row() -> None:
    backbone = build_backbone("test_vit", image_size=48).eval()
    images = torch.rand(2, 3, 48, 48, generator=seeded())
    body: Any = backbone.body
    tokens = body.forward_features(images)
    assert tokens.shape == (2, 1 + 9, 64)  # one token is of no place
    maps = backbone(images)
    assert maps.shape == (2, backbone.channels, 3, 3)
    assert torch.equal(maps.flatten(2).mT, tokens[:, 1:])


@torch.no_grad()
def test_maps_with_channels_last_are_turned() -> None:
    backbone = build_backbone("test_mambaout").eval()
    images = torch.rand(1, 3, 64, 64)
    assert torch.equal(backbone(images), backbone.body(images).permute(0, 3, 1, 2))
    assert backbone.channels == backbone(images).shape[1]


@pytest.mark.parametrize("name", ["test_vit", "test_vit4"])
def test_images_that_are_no_whole_number_of_patches(name: str) -> None:
    with pytest.raises(BadSetting, match=rf"{name} cuts .* patches of 16 px, .* multiple .* it is 40$"):
        build_backbone(name, image_size=40)


@pytest.mark.parametrize(
    ("name", "half"), [("resnet20", "blocks.4"), ("bn_inception", "middle"), ("test_vit", "blocks.2")]
)
@torch.no_grad()
def test_the_middle_can_be_given_other_images(name: str, half: str) -> None:
    backbone = build_backbone(name, image_size=64).eval()
    assert backbone.middle is backbone.body.get_submodule(half)
    images = torch.rand(2, 3, 64, 64, generator=seeded())
    plain = backbone(images)

    def replace(module: object, given: object, output: Tensor) -> Tensor:
        assert len(output) == 2
        return output[[1, 0, 1]]

    hook = backbone.middle.register_forward_hook(replace)
    torch.testing.assert_close(backbone(images), plain[[1, 0, 1]])
    hook.remove()
    assert torch.equal(backbone(images), plain)


def test_a_network_without_stages_has_no_middle() -> None:
    backbone = Backbone(torch.nn.Conv2d(3, 4, 1), 4, mean=(0.5,) * 3, std=(0.5,) * 3)
    with pytest.raises(BadSetting, match="does not say what its stages are"):
        _ = backbone.middle


@pytest.mark.parametrize(
    ("name", "frozen", "free"),
    [
        ("resnet10t", "conv1.0.weight", "layer4.0.conv1.weight"),
        ("test_vit", "patch_embed.proj.weight", "blocks.5.attn.proj.weight"),
    ],
)
def test_freezing_stops_at_the_stage(name: str, frozen: str, free: str) -> None:
    backbone = build_backbone(name)
    backbone.freeze(0)
    assert all(parameter.requires_grad for parameter in backbone.parameters())
    backbone.freeze(2)
    learns = {key: parameter.requires_grad for key, parameter in backbone.body.named_parameters()}
    assert not learns[frozen]
    assert learns[free]


@pytest.fixture(scope="module")
def network() -> BNInception:
    torch.manual_seed(0)
    network = BNInception()
    for name, values in network.named_buffers():  # statistics that evaluation mode shows
        if "running" in name:
            values.uniform_(0.5, 10)
    return network.eval()


def test_names_and_shapes_are_those_of_the_published_file(network: BNInception) -> None:
    state = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    assert {name: state.get(name) for name in SHAPES} == SHAPES
    # 69 convolutions with bias, each with the four arrays of a BatchNorm and a counter younger than the file;
    # the file's 416 count the classifier
    assert len(state) - 69 == 416 - 2
    assert sum(p.numel() for p in network.parameters()) == 11_295_240 - (1024 + 1) * 1000


@pytest.mark.parametrize("name", ["3a", "3c", "5b"])  # average pooling, halving, maximum pooling
@torch.no_grad()
def test_blocks_against_their_layers_one_by_one(network: BNInception, name: str) -> None:
    block = next(block for block in BLOCKS if block.name == name)
    state = network.state_dict()
    width = state[f"inception_{name}_3x3_reduce.weight"].shape[1]
    maps = torch.rand(2, width, 8, 8, generator=seeded(1)) * 20

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


def test_pixels_go_in_as_the_published_weights_want_them() -> None:
    embedder = Embedder(build_backbone("bn_inception"), Recipe(image_size=64, dimension=4, prototypes=2))
    pixels = torch.tensor([255, 10, 7], dtype=torch.uint8).expand(1, 64, 64, 3)  # red, green, blue
    found = embedder.normalise(pixels)
    wanted = torch.tensor([7.0 - 104, 10.0 - 117, 255.0 - 128])  # blue, green, red
    torch.testing.assert_close(found[0, :, 3, 5], wanted, rtol=0, atol=1e-4)
    assert embedder.grid == (2, 2)
