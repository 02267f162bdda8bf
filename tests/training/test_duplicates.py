"""Near-duplicates across train and test: against the double loop, and by `evaluate`."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from serving.errors import BadSetting
from tests.training.drawn import draw_folder
from training import train
from training.data.partition import NEAR, find_duplicates
from training.evaluation.evaluate import Settings, render, run
from training.network.backbone import build_backbone


def test_pairs_are_the_double_loop() -> None:
    rng = np.random.default_rng(0)
    tests, trains = rng.normal(size=(40, 3)), rng.normal(size=(30, 3))
    expected = dict[int, tuple[int, float]]()
    for i, a in enumerate(tests):
        cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for b in trains]
        if max(cosines) >= NEAR:
            expected[i] = int(np.argmax(cosines)), max(cosines)
    found = find_duplicates(tests, trains)
    assert 3 < len(found) < 40
    assert {i: j for i, j, _ in found} == {i: j for i, (j, _) in expected.items()}
    assert [cosine for _, _, cosine in found] == pytest.approx(
        sorted((c for _, c in expected.values()), reverse=True)
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six classes, the fourth of which, unseen, holds a copy of the first's."""
    root = draw_folder(tmp_path_factory.mktemp("data"), classes=6, images=4, size=18)
    Image.open(root / "class00" / "2.png").save(root / "class03" / "copy.png")
    return root


def _train(data: Path, folder: Path, lines: str) -> Path:
    save_file(build_backbone("resnet20").body.state_dict(), folder / "start.safetensors")
    small = "image_size: 16\ndimension: 8\nprototypes: 4\nclasses_per_batch: 2\nimages_per_class: 2\n"
    (folder / "small.yaml").write_text(f"{small}epochs: 1\n{lines}")
    train.run(train.Settings(recipe=str(folder / "small.yaml"), data=data, out=folder / "run"))
    return folder / "run"


def test_a_copy_of_what_trained_is_told_on_wish(data: Path, tmp_path: Path) -> None:
    trained = _train(data, tmp_path, f"weights: {tmp_path}/start.safetensors\n")
    assert run(Settings(target=trained))["duplicates"] is None
    result = run(Settings(target=trained, duplicates=True))
    found = result["duplicates"]
    assert found["least"] == NEAR <= min(pair["cosine"] for pair in found["pairs"])
    assert found["pairs"][0]["cosine"] == pytest.approx(1)
    assert (found["pairs"][0]["test"], found["pairs"][0]["train"]) == ("class03/copy.png", "class00/2.png")
    told = "test images with a near-duplicate that trained:"
    assert f"{told} {found['images']}, e.g. class03/copy.png ~ class00/2.png" in render(result)
    result["duplicates"] = {"images": 0, "least": NEAR, "pairs": []}
    assert f"  {told} 0" in render(result).splitlines()
    with pytest.raises(BadSetting, match="compares the split test"):
        run(Settings(target=trained, duplicates=True, split="train"))


def test_cached_features_tell_it_unasked(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines = f"weights: {tmp_path}/start.safetensors\nfreeze: backbone\nviews: 2\nvalidation: 0\n"
    trained = _train(data, tmp_path, lines)
    cached = run(Settings(target=trained))["duplicates"]
    assert cached["pairs"][0]["test"] == "class03/copy.png"
    shutil.rmtree(tmp_path / "cache")
    assert run(Settings(target=trained))["duplicates"] is None
    asked = run(Settings(target=trained, duplicates=True))["duplicates"]
    assert asked["images"] == cached["images"]  # as float16 has it
    assert not (tmp_path / "cache").exists()


def test_a_backbone_that_knew_nothing_finds_no_duplicates(data: Path, tmp_path: Path) -> None:
    trained = _train(data, tmp_path, "")
    with pytest.raises(BadSetting, match="needs a backbone that knew images before this training"):
        run(Settings(target=trained, duplicates=True))
