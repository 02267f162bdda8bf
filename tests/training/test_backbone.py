"""Backbones: maps whatever form a network has, stages, and a plain word about those that give none."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from serving.errors import BadSetting
from training.network.backbone import Backbone, build_backbone
from training.network.resnet20 import ResNet20


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
    images = torch.rand(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    body: Any = backbone.body
    tokens = body.forward_features(images)
    assert tokens.shape == (2, 1 + 9, 64)  # one token is of no place
    maps = backbone(images)
    assert maps.shape == (2, backbone.channels, 3, 3)
    for row in range(3):
        for column in range(3):
            assert torch.equal(maps[:, :, row, column], tokens[:, 1 + 3 * row + column])


@torch.no_grad()
def test_maps_with_channels_last_are_turned() -> None:
    backbone = build_backbone("test_mambaout").eval()
    images = torch.rand(1, 3, 64, 64)
    assert torch.equal(backbone(images), backbone.body(images).permute(0, 3, 1, 2))
    assert backbone.channels == backbone(images).shape[1]


@pytest.mark.parametrize(("name", "patch"), [("test_vit", 16), ("test_vit4", 16)])
@pytest.mark.parametrize("size", [40, 8])
def test_images_that_are_no_whole_number_of_patches(name: str, patch: int, size: int) -> None:
    with pytest.raises(
        BadSetting, match=rf"{name} cuts .* patches of {patch} px, .* multiple .* it is {size}$"
    ):
        build_backbone(name, image_size=size)


def test_a_network_that_only_makes_vectors() -> None:
    with pytest.raises(
        BadSetting, match=r"timm cannot make a feature map of coat_tiny for images of 64 px: "
    ):
        build_backbone("coat_tiny", image_size=64)


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("resnet20", "blocks.4"),
        ("bn_inception", "middle"),
        ("test_resnet", "layer2"),
        ("test_convnext", "stages.1"),
        ("test_efficientnet", "blocks.2"),
        ("test_vit", "blocks.2"),
    ],
)
@torch.no_grad()
def test_the_middle_can_be_given_other_images(name: str, half: str) -> None:
    backbone = build_backbone(name, image_size=64).eval()
    assert backbone.middle is backbone.body.get_submodule(half)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
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
        ("resnet20", "conv.weight", "blocks.8.conv2.weight"),
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
    with pytest.raises(BadSetting, match="stages"):
        backbone.freeze(100)


def test_resnet50_freezes_by_stage() -> None:
    with torch.device("meta"):
        backbone = build_backbone("resnet50")
    backbone.freeze(2)
    assert {
        name.split(".")[0] for name, value in backbone.body.named_parameters() if not value.requires_grad
    } == {"conv1", "bn1", "layer1"}


def test_what_a_backbone_was_trained_on_is_known() -> None:
    for name in ("test_vit", "resnet10t"):
        config: Any = timm.get_pretrained_cfg(name)
        backbone = build_backbone(name)
        assert (backbone.mean, backbone.std, backbone.order) == (config.mean, config.std, "RGB")
    assert build_backbone("bn_inception").order == "BGR"
