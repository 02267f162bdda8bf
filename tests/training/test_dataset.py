"""Pictures and their classes: bad files named, pixels kept or read again, draws that depend on their seed."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from serving.catalog import Row, read
from serving.errors import BadData
from serving.model.preprocess import preprocess
from tests.training.drawn import draw_folder
from training.augment import Augmentation
from training.dataset import Draws, Pictures, TrainingSet, training_decoder, viewing_decoder
from training.partition import hold_out, read_partition
from training.recipe import Recipe
from training.sampler import PKSampler

RECIPE = Recipe(image_size=16, classes_per_batch=2, images_per_class=2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return draw_folder(tmp_path / "data", classes=3, images=3, size=20)


def _spoil(root: Path) -> None:
    (root / "class00" / "text.jpg").write_text("this is no image")
    whole = (root / "class01" / "0.png").read_bytes()
    (root / "class01" / "cut.png").write_bytes(whole[: len(whole) // 2])


def test_bad_images_are_left_out_and_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    _spoil(root)
    pictures = Pictures(read(root).rows, viewing_decoder(RECIPE), label="Reading")
    assert [bad.key for bad in pictures.unreadable] == ["class00/text.jpg", "class01/cut.png"]
    assert all(bad.reason for bad in pictures.unreadable)
    assert "class01/cut.png" in caplog.text
    assert len(pictures) == 9
    assert pictures.classes == ("class00", "class01", "class02")
    assert pictures.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    pictures.check_classes()


def test_a_class_without_a_readable_image_is_named(root: Path) -> None:
    for file in (root / "class01").iterdir():
        file.write_bytes(b"")
    pictures = Pictures(read(root).rows, viewing_decoder(RECIPE), label="Reading")
    with pytest.raises(BadData, match="'class01' has no readable image"):
        pictures.check_classes()


def test_what_does_not_fit_is_read_again(root: Path) -> None:
    rows = read(root).rows
    kept = Pictures(rows, training_decoder(RECIPE), label="Reading")
    some = Pictures(rows, training_decoder(RECIPE), keep=2 * 20 * 20 * 3, label="Reading")
    for i in range(len(rows)):
        assert np.array_equal(kept[i], some[i])
    rows[0].image.unlink()
    rows[5].image.unlink()
    assert some[0].shape == (20, 20, 3)  # kept
    with pytest.raises(BadData, match=r"class01.2\.png could be read before"):
        some[5]


def test_decoders(tmp_path: Path) -> None:
    file = tmp_path / "wide.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 100, 3), dtype=np.uint8)).save(file)
    data = file.read_bytes()
    assert training_decoder(RECIPE)(data).shape == (32, 40, 3)  # shorter side 2 S
    viewed = viewing_decoder(RECIPE)(data)
    expected = preprocess(data, size=16, crop_fraction=RECIPE.crop_fraction, resampling=RECIPE.resampling)
    assert np.array_equal(viewed, expected)


def test_a_draw_depends_on_its_seed_alone() -> None:
    image = np.random.default_rng(0).integers(0, 256, (24, 30, 3), dtype=np.uint8)
    recipe = Recipe(
        image_size=16, crop_scale=0.4, flip=0.5, jitter=0.3, rotation=10, translation=0.1, zoom=0.1, shear=5
    )
    augmentation = Augmentation(recipe)
    torch.manual_seed(3)
    first = augmentation(image, 7)
    drawn = torch.rand(1)
    assert first.shape == (16, 16, 3)
    assert first.dtype == np.uint8
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))  # nothing was taken from the global generator
    augmentation(image, 8)
    assert np.array_equal(augmentation(image, 7), first)
    assert not np.array_equal(augmentation(image, 8), first)


def test_no_augmentation_is_the_image_itself() -> None:
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    assert np.array_equal(Augmentation(Recipe(image_size=16))(image, 1), image)


def test_an_image_drawn_twice_is_augmented_twice(root: Path) -> None:
    pictures = Pictures(read(root).rows, training_decoder(RECIPE), label="Reading")
    sampler = PKSampler(pictures.labels, classes_per_batch=3, images_per_class=5, seed=0)
    draws = [item for batch in Draws(sampler) for item in batch]
    assert len(Draws(sampler)) == len(sampler)
    assert [draw for _, draw in draws] == list(range(len(draws)))
    recipe = RECIPE.model_copy(update={"crop_scale": 0.3})
    views = TrainingSet(pictures, Augmentation(recipe), seed=0, epoch=0)
    image, label = views[(4, 0)]
    assert image.shape == (16, 16, 3)
    assert label == 1
    assert torch.equal(image, views[(4, 0)][0])
    assert not torch.equal(image, views[(4, 1)][0])
    assert not torch.equal(image, TrainingSet(pictures, Augmentation(recipe), seed=0, epoch=1)[(4, 0)][0])


def test_a_training_set_can_be_handed_to_a_process(root: Path) -> None:
    pictures = Pictures(read(root).rows, training_decoder(RECIPE), keep=0, label="Reading")
    views = TrainingSet(pictures, Augmentation(RECIPE), seed=0, epoch=0)
    copy = pickle.loads(pickle.dumps(views))
    assert torch.equal(copy[(4, 0)][0], views[(4, 0)][0])


def _rows(labels: list[str]) -> list[Row]:
    return [Row(f"{label}/{i}", Path(f"/{label}/{i}"), label) for label in labels for i in range(2)]


def test_validation_classes_are_spread_over_the_names() -> None:
    rows = _rows([f"c{i:02d}" for i in range(20)])
    train, held = hold_out(rows, 0.2, by="class")
    assert sorted({row.label for row in held}) == ["c02", "c07", "c12", "c17"]
    assert len(train) + len(held) == len(rows)
    assert not {row.label for row in train} & {row.label for row in held}
    assert hold_out(rows, 0, by="class") == (tuple(rows), ())


def test_validation_by_folder_holds_out_whole_folders() -> None:
    rows = _rows([f"{letter}/c{i}" for letter in "abcde" for i in range(3)])
    _, held = hold_out(rows, 0.2, by="folder")
    assert {row.label for row in held} == {"c/c0", "c/c1", "c/c2"}
    with pytest.raises(BadData, match="1 folders to train on"):
        hold_out(_rows(["a/x", "a/y"]), 0.2, by="folder")


def test_partition_of_a_data_set(root: Path) -> None:
    partition = read_partition(root, RECIPE.model_copy(update={"split_train": 2}))
    about = partition.describe()
    assert about["train_classes"] == ["class00", "class01"]
    assert about["validation_classes"] == []
    assert (about["train_images"], about["format"], about["root"]) == (6, "folder", str(root))
    (root / "class00" / "0.png").unlink()
    again = read_partition(root, RECIPE.model_copy(update={"split_train": 2})).describe()
    assert again["digest"] != about["digest"]


def test_data_that_cannot_be_trained_on_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="1 classes to train on, but a batch takes 2"):
        read_partition(root, RECIPE)
    singles = draw_folder(tmp_path / "singles", classes=8, images=1)
    with pytest.raises(BadData, match="validation classes has two images"):
        read_partition(singles, RECIPE.model_copy(update={"validation": 0.5}))
    (root / "class99").mkdir()
    with pytest.raises(BadData, match=r"'class99'.*has no image"):
        read_partition(root, RECIPE)
    with pytest.raises(BadData, match="nowhere"):
        read_partition(tmp_path / "nowhere", RECIPE)
