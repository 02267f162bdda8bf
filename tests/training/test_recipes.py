"""Every recipe of ours: two steps on made-up images, the published numbers, and what its head tells."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

import training.loop.logbook
from tests.training.drawn import draw_folder
from training.loop.run import read_record
from training.losses.objective import Objective
from training.recipes.recipe import Recipe
from training.recipes.recipe_file import RECIPES, head_comment, load_recipe, recipe_names
from training.train import Settings, run

PUBLISHED = [name for name in recipe_names() if "/" in name]
OURS = [name for name in recipe_names() if "/" not in name]
BASES = sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("_*.yaml"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A data set for each way to split one: 8 classes to train on, 2 images of each."""
    root = tmp_path_factory.mktemp("drawn")
    draw_folder(root / "given", classes=8, images=2, below="train")
    draw_folder(root / "given", classes=2, images=1, below="test")
    for alphabet in range(8):
        draw_folder(root / "folder", classes=2, images=2, below=f"alphabet{alphabet}")
    draw_folder(root / "class", classes=16, images=2)
    return {name: root / name for name in ("given", "folder", "class")}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run whose weights, hundreds of megabytes for some, nobody needs afterwards."""
    monkeypatch.setattr(training.loop.logbook, "save_checkpoint", lambda *_: None)
    return tmp_path / "run"


def small(name: str, recipe: Recipe) -> list[str]:
    """What makes a recipe quick, and lets two steps show all of it.

    A protocol has one backbone for all data sets: the recipes for CUB have it here, the others a small one.
    """
    changed = ["classes_per_batch=4", "images_per_class=2", "batches_per_epoch=2", "epochs=1"]
    changed += ["image_size=32", "evaluate_every=1", "freeze_epochs=0", "memory_start=0"]
    changed += ["workers=0", "threads=1"]
    if recipe.weights != "none":
        changed += ["dimension=8"]
    if recipe.weights == "published":
        changed += ["weights=none"]
        changed += [] if "/cub/" in name else ["backbone=resnet20"]
    if recipe.made_for != "any":
        changed += ["made_for=any"]
    if recipe.validation:
        changed += ["validation=0.25"]
    return changed


@pytest.mark.parametrize("name", recipe_names())
def test_two_steps(
    name: str, drawn: dict[str, Path], out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = load_recipe(name)
    run(Settings(recipe=name, data=drawn[recipe.split_by], out=out, set=small(name, recipe)))
    with (out / "metrics.csv").open() as file:
        start, row = csv.DictReader(file)
    assert (start["steps"], row["steps"]) == ("0", "2")
    assert float(row["loss"]) > 0
    assert (float(row["xml"]) > 0) == (recipe.xml_weight > 0)
    assert bool(recipe.folds or recipe.validation) == bool(row.get("map_at_r"))


def test_cifar10_with_unseen_classes_trains_as_the_docs_and_its_head_advise(
    tmp_path: Path, out: Path
) -> None:
    docs = (RECIPES.parents[1] / "docs/training.md").read_text(encoding="utf-8")
    (row,) = (line for line in docs.split("\n") if line.startswith("| CIFAR-10, 5 of its classes unseen"))
    advised = re.findall(r"`(\w+=\w+)`", row)
    assert advised == re.findall(r"--set (\w+=\w+)", _told("cifar10-contrastive-xml")["Unseen"])
    for folder in ("train", "test"):
        draw_folder(tmp_path / "data", classes=10, images=12, below=folder)
    changed = [*advised, "batches_per_epoch=1", "epochs=1", "threads=1"]
    run(Settings(recipe="cifar10-contrastive-xml", data=tmp_path / "data", out=out, set=changed))
    about = read_record(out)["data"]
    assert about["train_classes"] == [f"class{number:02d}" for number in range(5)]
    assert about["train_images"] == 5 * 24


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_loss_and_memory_can_be_built_in_full(name: str) -> None:
    recipe = load_recipe(name)
    objective = Objective(recipe, classes=98)
    if recipe.memory_batches:
        assert objective.memory is not None
        assert len(objective.memory.labels) == recipe.memory_batches * (
            recipe.classes_per_batch * recipe.images_per_class
        )


@pytest.mark.parametrize("name", BASES)
def test_a_base_resolves_by_itself(name: str) -> None:
    load_recipe(name)
    assert name not in recipe_names()


@pytest.mark.parametrize("protocol", ["mlrc", "conventional"])
def test_a_protocol_has_every_method_on_every_data_set(protocol: str) -> None:
    methods = {"contrastive", "contrastive-xbm", "triplet", "multi_similarity", "proxy_nca", "proxy_anchor"}
    methods |= {"libc", "metrix"}
    for data_set in ("cub", "cars", "sop", "inshop"):
        own = {name.rpartition("/")[2] for name in PUBLISHED if name.startswith(f"{protocol}/{data_set}/")}
        original = {"original-contrastive"} if protocol == "mlrc" and data_set != "inshop" else set()
        assert own == methods | original


# What the published code and papers have, recipe by recipe; "*" is each data set.
NUMBERS: list[tuple[str, str, Any]] = [
    ("mlrc/*/contrastive", "backbone", "bn_inception"),
    ("mlrc/*/contrastive", "dimension", 128),
    ("mlrc/*/contrastive", "optimizer", "adam"),
    ("mlrc/*/contrastive", "learning_rate", 1e-5),
    ("mlrc/*/contrastive", "head_learning_rate", 1e-5),
    ("mlrc/*/contrastive", "weight_decay", 1e-4),
    ("mlrc/*/contrastive", "schedule", "constant"),
    ("mlrc/*/contrastive", "clip_norm", 10),
    ("mlrc/*/contrastive", "clip_value", 10),
    ("mlrc/*/contrastive", "classes_per_batch", 8),
    ("mlrc/*/contrastive", "images_per_class", 4),
    ("mlrc/*/contrastive", "freeze_batchnorm", True),
    ("mlrc/*/contrastive", "freeze_batchnorm_weights", True),
    ("mlrc/*/contrastive", "crop_scale", 0.16),
    ("mlrc/*/contrastive", "image_size", 227),
    ("mlrc/*/contrastive", "min_delta", 1e-5),
    ("mlrc/*/contrastive", "epochs", 10_000),
    ("mlrc/*/contrastive", "folds", 4),
    ("mlrc/*/contrastive", "fold_rule", "even"),
    ("mlrc/cub/contrastive", "batches_per_epoch", 100),
    ("mlrc/cars/contrastive", "patience", 15),
    ("mlrc/sop/contrastive", "batches_per_epoch", 1000),
    ("mlrc/inshop/contrastive", "patience", 10),
    ("mlrc/cub/contrastive", "loss_options.pos_margin", 0),
    ("mlrc/cub/contrastive", "loss_options.neg_margin", 0.3841),
    ("mlrc/cars/contrastive", "loss_options.pos_margin", 0.2652),
    ("mlrc/sop/contrastive", "loss_options.pos_margin", 0.2858),
    ("mlrc/inshop/contrastive", "loss_options.neg_margin", 0.5130),
    ("mlrc/*/contrastive", "loss_options.distance", "euclidean"),
    ("mlrc/*/contrastive-xbm", "loss_options.neg_margin", 0.5),
    ("mlrc/cub/contrastive-xbm", "memory_batches", 25),
    ("mlrc/cars/contrastive-xbm", "memory_batches", 25),
    ("mlrc/inshop/contrastive-xbm", "memory_batches", 400),
    ("mlrc/sop/contrastive-xbm", "memory_batches", 1400),
    ("mlrc/*/contrastive-xbm", "memory_start", 1000),
    ("mlrc/*/proxy_anchor", "classes_per_batch", 32),
    ("mlrc/*/proxy_anchor", "images_per_class", 1),
    ("mlrc/*/proxy_anchor", "loss_learning_rate", 1e-3),
    ("mlrc/*/proxy_anchor", "freeze_epochs", 1),
    ("mlrc/cub/original-contrastive", "optimizer", "rmsprop"),
    ("mlrc/cars/original-contrastive", "learning_rate", 1e-6),
    ("mlrc/sop/original-contrastive", "momentum", 0.9),
    ("mlrc/cub/original-contrastive", "freeze_batchnorm_weights", False),
    ("mlrc/cub/original-contrastive", "epochs", 1000),
    ("mlrc/cub/original-contrastive", "clip_norm", 0),
    ("mlrc/cub/original-contrastive", "min_delta", 0),
    ("mlrc/cub/original-contrastive", "loss_options.pos_margin", -0.2),
    ("mlrc/sop/original-contrastive", "loss_options.pos_margin", 0.285),
    ("conventional/*/triplet", "backbone", "resnet50"),
    ("conventional/*/triplet", "dimension", 512),
    ("conventional/*/triplet", "classes_per_batch", 28),
    ("conventional/*/triplet", "weight_decay", 4e-4),
    ("conventional/cars/triplet", "learning_rate", 1e-5),
    ("conventional/inshop/triplet", "learning_rate", 1e-4),
    ("conventional/*/proxy_anchor", "optimizer", "adamw"),
    ("conventional/*/proxy_anchor", "pooling", "gap_gmp"),
    ("conventional/*/proxy_anchor", "image_size", 224),
    ("conventional/*/proxy_anchor", "clip_value", 10),
    ("conventional/*/proxy_anchor", "epochs", 60),
    ("conventional/cub/proxy_anchor", "learning_rate", 1e-4),
    ("conventional/cars/proxy_anchor", "drop_epochs", [10, 20, 30, 40, 50]),
    ("conventional/sop/proxy_anchor", "learning_rate", 6e-4),
    ("conventional/inshop/proxy_anchor", "drop_factor", 0.25),
    ("conventional/sop/proxy_anchor", "freeze_batchnorm", False),
    ("conventional/*/libc", "optimizer", "radam"),
    ("conventional/*/libc", "epochs", 70),
    ("conventional/*/libc", "drop_epochs", [30]),
    ("conventional/*/libc", "erasing", 0.5),
    ("conventional/*/libc", "crop_scale", 0.08),
    ("conventional/*/libc", "freeze_batchnorm", False),
    ("conventional/cub/libc", "learning_rate", 1.56e-4),
    ("conventional/cub/libc", "images_per_class", 9),
    ("conventional/cars/libc", "weight_decay", 2.55e-9),
    ("conventional/cars/libc", "loss_options.layers", 2),
    ("conventional/sop/libc", "loss_options.temperature", 0.605),
    ("conventional/inshop/libc", "classes_per_batch", 14),
    ("conventional/*/metrix", "loss", "multi_similarity"),
    ("conventional/*/metrix", "mixing", "all"),
]


@pytest.mark.parametrize(("name", "key", "value"), NUMBERS)
def test_published_numbers(name: str, key: str, value: Any) -> None:
    for data_set in ("cub", "cars", "sop", "inshop"):
        found = load_recipe(name.replace("*", data_set)).model_dump()
        for part in key.split("."):
            found = found[part]
        assert found == value


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes_have_xml_and_the_published_split(name: str) -> None:
    recipe = load_recipe(name)
    _, data_set, method = name.split("/")
    assert recipe.xml_weight == 0.01
    assert recipe.prototypes == (64 if data_set in ("cub", "cars") else 128)
    assert recipe.weights == "published"
    assert round(recipe.image_size / recipe.crop_fraction) == 256
    if method == "original-contrastive":
        assert (recipe.split_by, recipe.split_train, recipe.fold_rule) == ("class", 0.5, "wrapped")
        waits = {"cub": (2, 10), "cars": (5, 15), "sop": (20, 40)}[data_set]
        assert (recipe.evaluate_every, recipe.patience) == waits
    else:
        assert recipe.split_by == "given"
    without = load_recipe(name, ["xml_weight=0"]).model_dump()
    assert without == recipe.model_dump() | {"xml_weight": 0}


def _told(name: str) -> dict[str, str]:
    """The head of a recipe by its words, a line that goes on joined to the one before."""
    text = re.sub(r"\n {8,}", " ", head_comment(name))
    return {
        key: rest.strip() for key, colon, rest in (line.partition(":") for line in text.split("\n")) if colon
    }


@pytest.mark.parametrize("name", OURS)
def test_the_head_states_paper_command_hardware_time_and_score(name: str) -> None:
    told = _told(name)
    assert told.get("Paper") or "no paper" in head_comment(name).lower()
    assert told["Command"].startswith(
        "crossbatch demo" if name == "demo" else f"crossbatch train {name} --data"
    )
    assert told["Hardware"]
    for word, figure in (("Time", r"\d"), ("Score", r"\d\.\d")):
        assert re.search(figure, told[word]), f"{word}: {told[word]}"
        assert "not measured" not in told[word]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_head_of_a_published_method_tells_whose_figures_it_has(name: str) -> None:
    told = _told(name)
    command = "mlrc" if name.startswith("mlrc/") else "train"
    assert "ICIP 2023" in told["Paper"]
    assert told["Command"].startswith(f"crossbatch {command} {name} --data ")
    assert "--set xml_weight=0" in told["Command"]
    assert told["Data"]
    assert "expected" in told["Hardware"]
    assert told["Time"].startswith("not measured")
    assert told["Score"].startswith("not measured by us")
    if re.search(r"\d\.\d", told["Score"]):
        assert "Reference (" in told["Score"]
        assert "without XML" in told["Score"]
    if name.endswith(("/libc", "/proxy_anchor")) and "R@1" in told["Score"] and command == "train":
        assert "chosen on the test classes" in told["Score"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_for_its_own_data_set(name: str) -> None:
    assert load_recipe(name).made_for == name.split("/")[1]
