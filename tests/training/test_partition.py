"""What training may see: shares and folds of the classes held out; near-duplicates, also by `evaluate`."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from serving.catalog.catalog import Row, read
from serving.catalog.picture import File
from serving.errors import BadData, BadSetting
from tests.training.small import TINY, Train, draw_folder
from training.data.partition import cut_fold, divide, hold_out
from training.evaluation.evaluate import NEAR, Settings, find_duplicates, render, run
from training.network.backbone import build_backbone
from training.recipes.recipe import Recipe

RECIPE = Recipe(image_size=16, classes_per_batch=2, images_per_class=2)
TURNED = {"split_train": 1, "quarter_turns": True}
ONE = {"split_train": 2, "classes_per_batch": 1}


def _rows(labels: list[str]) -> list[Row]:
    return [Row(f"{label}/{i}", File(Path(f"/{label}/{i}")), label) for label in labels for i in range(2)]


def test_validation_classes_are_spread_over_the_names() -> None:
    rows = _rows([f"c{i:02d}" for i in range(20)])
    train, held = hold_out(rows, Recipe(validation=0.2))
    assert sorted({row.label for row in held}) == ["c02", "c07", "c12", "c17"]
    assert len(train) + len(held) == len(rows)
    assert not {row.label for row in train} & {row.label for row in held}
    assert hold_out(rows, Recipe()) == (tuple(rows), ())


def test_validation_by_folder_holds_out_whole_folders() -> None:
    rows = _rows([f"{letter}/c{i}" for letter in "abcde" for i in range(3)])
    _, held = hold_out(rows, Recipe(validation=0.2, split_by="folder"))
    assert {row.label for row in held} == {"c/c0", "c/c1", "c/c2"}
    with pytest.raises(BadData, match="1 folders to train on"):
        hold_out(_rows(["a/x", "a/y"]), Recipe(validation=0.2, split_by="folder"))


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (100, [25, 25, 25, 25]),  # CUB-200-2011
        (98, [24, 25, 24, 25]),  # Cars196
        (11_318, [2829, 2830, 2829, 2830]),  # SOP, official
        (7, [1, 2, 2, 2]),
    ],
)
def test_even_folds_hold_out_each_class_once(count: int, sizes: list[int]) -> None:
    folds = [cut_fold(count, folds=4, fold=fold, rule="even") for fold in range(4)]
    assert [len(fold) for fold in folds] == sizes
    assert np.concatenate(folds).tolist() == list(range(count))


@pytest.mark.parametrize(
    ("count", "size", "never"),
    [(100, 25, []), (98, 24, [24, 73]), (11_317, 2829, [8487])],  # CUB, Cars, SOP by half of its classes
)
def test_wrapped_folds_are_those_of_the_original_protocol(count: int, size: int, never: list[int]) -> None:
    held = []
    for fold in range(4):
        # the published rule: the list turned to start at the fold's share, its front trains
        turned = np.roll(np.arange(count), -int(count * fold / 4))
        found = cut_fold(count, folds=4, fold=fold, rule="wrapped")
        assert found.tolist() == turned[count - size :].tolist()
        held += found.tolist()
    assert sorted(set(range(count)) - set(held)) == never
    assert len(held) == len(set(held)) == 4 * size


def test_a_fold_of_the_rows_is_a_block_of_the_sorted_names() -> None:
    rows = _rows([f"c{i}" for i in (5, 3, 1, 7, 0, 2, 6, 4)])
    train, held = hold_out(rows, Recipe(folds=4, fold=1))
    assert sorted({row.label for row in held}) == ["c2", "c3"]
    assert sorted({row.label for row in train}) == ["c0", "c1", "c4", "c5", "c6", "c7"]
    _, held = hold_out(rows, Recipe(folds=4, fold=0, fold_rule="wrapped"))
    assert sorted({row.label for row in held}) == ["c6", "c7"]


def test_partition_of_a_data_set(root: Path) -> None:
    recipe = RECIPE.model_copy(update={"split_train": 2})
    about = divide(read(root), recipe).describe()
    told = {"train_classes": ["class00", "class01"], "validation_classes": [], "train_images": 6}
    assert (told | {"format": "folder", "root": str(root)}).items() <= about.items()
    (root / "class00" / "0.png").unlink()
    assert divide(read(root), recipe).describe()["digest"] != about["digest"]
    (root / "class99").mkdir()
    with pytest.raises(BadData, match=r"'class99'.*has no image"):
        divide(read(root), RECIPE)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, r"one class is left to train on \('class00'\), but two or more are needed"),
        ({"classes_per_batch": 1}, "one class is left to train on"),
        ({"split_train": 2, "classes_per_batch": 3}, "2 classes to train on, but a batch takes 3: .* to 2"),
        (TURNED | {"classes_per_batch": 5}, "4 classes with their quarter turns to train on"),
        ({"split_train": 2, "validation": 0.1}, "would hold out one class, where whatever is found is right"),
        ({"split_train": 2, "folds": 2}, r"folds would hold out one class.*set fewer folds"),
        ({"split_train": 2, "folds": 4}, "2 classes to train on, of which 4 folds cannot be cut"),
        (ONE | {"images_per_class": 7}, "6 images to train on, but a batch takes 7, so that some would"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(changes: dict[str, object], told: str, root: Path) -> None:
    assert len(divide(read(root), RECIPE.model_copy(update=TURNED | {"classes_per_batch": 4})).train) == 3
    with pytest.raises(BadData, match=told):
        divide(read(root), RECIPE.model_copy(update=changes))


def test_pairs_are_the_double_loop() -> None:
    rng = np.random.default_rng(0)
    tests, trains = rng.normal(size=(40, 3)), rng.normal(size=(30, 3))
    expected: list[Any] = []
    for i, a in enumerate(tests):
        cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for b in trains]
        if max(cosines) >= NEAR:
            expected.append((i, int(np.argmax(cosines)), pytest.approx(max(cosines))))
    found = find_duplicates(tests, trains)
    assert 3 < len(found) < 40
    assert sorted(found) == expected
    assert found == sorted(found, key=lambda pair: -pair[2])


@pytest.fixture(scope="module")
def doubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six classes, the fourth of which, unseen, holds a copy of the first's."""
    root = draw_folder(tmp_path_factory.mktemp("data"), classes=6, images=4, size=18)
    Image.open(root / "class00" / "2.png").save(root / "class03" / "copy.png")
    return root


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The setting of weights that are on this machine."""
    path = tmp_path_factory.mktemp("weights") / "start.safetensors"
    save_file(build_backbone("resnet20").body.state_dict(), path)
    return f"weights={path}"


def test_copies_of_what_trained_are_told(train: Train, start: str, doubled: Path, tmp_path: Path) -> None:
    trained = tmp_path / "run"
    train(trained, *TINY, start, data=doubled)
    assert run(Settings(target=trained))["duplicates"] is None
    result = run(Settings(target=trained, duplicates=True))
    found = result["duplicates"]
    assert found["least"] == NEAR <= min(pair["cosine"] for pair in found["pairs"])
    nearest = {"test": "class03/copy.png", "train": "class00/2.png", "cosine": pytest.approx(1)}
    assert nearest.items() <= found["pairs"][0].items()
    told = "test images with a near-duplicate that trained:"
    assert f"{told} {found['images']}, e.g. class03/copy.png ~ class00/2.png" in render(result)
    result["duplicates"] = {"images": 0, "least": NEAR, "pairs": []}
    assert f"  {told} 0" in render(result).splitlines()
    with pytest.raises(BadSetting, match="compares the split test"):
        run(Settings(target=trained, duplicates=True, split="train"))
    train(tmp_path / "fresh", *TINY, data=doubled)
    with pytest.raises(BadSetting, match="needs a backbone that knew images before this training"):
        run(Settings(target=tmp_path / "fresh", duplicates=True))


def test_cached_features_tell_it_unasked(
    train: Train, start: str, doubled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trained = tmp_path / "run"
    train(trained, *TINY, start, "freeze=backbone", "views=2", data=doubled)
    cached = run(Settings(target=trained))["duplicates"]
    assert cached["pairs"][0]["test"] == "class03/copy.png"
    shutil.rmtree(tmp_path / "cache")
    assert run(Settings(target=trained))["duplicates"] is None
    asked = run(Settings(target=trained, duplicates=True))["duplicates"]
    assert asked["images"] == cached["images"]  # as float16 has it
    assert not (tmp_path / "cache").exists()
