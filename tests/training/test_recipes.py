"""Recipes: what is checked, every one of ours by its steps and numbers, and what their heads tell."""

import csv
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import training.loop.checkpoint
from serving.catalog.catalog import SplitRule
from serving.errors import BadSetting, NotFound
from tests.training.drawn import draw_folder
from training.loop.run import read_record
from training.losses.objective import Objective
from training.recipes.recipe import Recipe, make_recipe
from training.recipes.recipe_file import RECIPES, head_comment, load_recipe, recipe_names
from training.train import Settings, run

PUBLISHED = [name for name in recipe_names() if "/" in name]
OURS = [name for name in recipe_names() if "/" not in name]


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
    monkeypatch.setattr(training.loop.checkpoint, "save_checkpoint", lambda *_: None)
    return tmp_path / "run"


def small(name: str, recipe: Recipe) -> list[str]:
    """What makes a recipe quick, and lets two steps show all of it.

    A protocol has one backbone for all methods: two of them have it here, the others a small one.
    """
    changed = [
        "classes_per_batch=4", "images_per_class=2", "batches_per_epoch=2", "epochs=1", "image_size=32",
        "evaluate_every=1", "freeze_epochs=0", "memory_start=0", "workers=0", "threads=1", "made_for=any",
    ]  # fmt: skip
    if recipe.weights != "none":
        changed += ["dimension=8"]
    if recipe.weights == "published":
        changed += ["weights=none"]
        changed += [] if name.endswith(("/cub/contrastive", "/cub/metrix")) else ["backbone=resnet20"]
    return [*changed, "validation=0.25"] if recipe.validation else changed


@pytest.mark.parametrize(
    "name", [*OURS, *(name for name in PUBLISHED if "/cub/" in name), "conventional/sop/libc"]
)
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


# Of the settings that are not defaults, as they were when each recipe was a file of its own.
DIGESTS = {
    "": "824f49e26840",
    "conventional/cars": "9bbf34c8040b",
    "conventional/cub": "518660ebbb1b",
    "conventional/inshop": "f59f4189ab94",
    "conventional/sop": "fb5dfede6fef",
    "mlrc/cars": "efc1ed4c4b7c",
    "mlrc/cub": "380999a7c2c7",
    "mlrc/inshop": "370bf6dde250",
    "mlrc/sop": "586d108fc47e",
}


@pytest.mark.parametrize("group", DIGESTS)
def test_no_setting_of_a_recipe_changes_unseen(group: str) -> None:
    defaults = Recipe().model_dump(mode="json")
    found = {
        name: {
            key: value
            for key, value in load_recipe(name).model_dump(mode="json").items()
            if value != defaults[key]
        }
        for name in recipe_names()
        if name.rpartition("/")[0] == group
    }
    assert hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12] == DIGESTS[group], (
        found
    )


def test_a_recipe_stands_on_others(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("base: mlrc/cub/proxy_anchor\nflip: 0.25\nseed: 3\n")
    (tmp_path / "mine.yaml").write_text("base: [demo, below.yaml]\nseed: 4\n")
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    expected = load_recipe("demo").model_dump() | load_recipe("mlrc/cub/proxy_anchor").model_dump()
    assert recipe.model_dump() == expected | {
        "flip": 0.25,
        "seed": 4,
        "reconstruction_weight": 1,
        "warmup": 0.1,
    }
    (tmp_path / "below.yaml").write_text("base: mine.yaml\n")
    with pytest.raises(BadSetting, match=r"mine\.yaml is its own base"):
        load_recipe(str(tmp_path / "mine.yaml"))
    (tmp_path / "below.yaml").write_text("base: 3\n")
    with pytest.raises(BadSetting, match="neither a name nor a list of names"):
        load_recipe(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("protocol", ["mlrc", "conventional"])
def test_a_protocol_has_every_method_on_every_data_set(protocol: str) -> None:
    methods = {"contrastive", "contrastive-xbm", "triplet", "multi_similarity", "proxy_nca", "proxy_anchor"}
    methods |= {"libc", "metrix"}
    for data_set in ("cub", "cars", "sop", "inshop"):
        own = {name.rpartition("/")[2] for name in PUBLISHED if name.startswith(f"{protocol}/{data_set}/")}
        original = {"original-contrastive"} if protocol == "mlrc" and data_set != "inshop" else set()
        assert own == methods | original


# What the published code and papers have, recipe by recipe; "*" is each data set.
NUMBERS: dict[str, dict[str, Any]] = {
    "mlrc/*/contrastive": {
        "backbone": "bn_inception", "dimension": 128, "optimizer": "adam", "learning_rate": 1e-05,
        "head_learning_rate": 1e-05, "weight_decay": 0.0001, "schedule": "constant",
        "clip_norm": 10, "clip_value": 10, "classes_per_batch": 8, "images_per_class": 4,
        "freeze_batchnorm": True, "freeze_batchnorm_weights": True, "crop_scale": 0.16,
        "image_size": 227, "min_delta": 1e-05, "epochs": 10000, "folds": 4, "fold_rule": "even",
        "loss_options.distance": "euclidean",
    },
    "mlrc/cub/contrastive": {"loss_options.pos_margin": 0, "loss_options.neg_margin": 0.3841},
    "mlrc/*/contrastive-xbm": {"loss_options.neg_margin": 0.5, "memory_start": 1000},
    "mlrc/sop/contrastive-xbm": {"memory_batches": 1400},
    "mlrc/*/proxy_anchor": {
        "classes_per_batch": 32, "images_per_class": 1, "loss_learning_rate": 0.001, "freeze_epochs": 1,
    },
    "mlrc/cub/original-contrastive": {
        "optimizer": "rmsprop", "freeze_batchnorm_weights": False, "epochs": 1000, "clip_norm": 0,
        "min_delta": 0, "loss_options.pos_margin": -0.2,
    },
    "conventional/*/triplet": {
        "backbone": "resnet50", "dimension": 512, "classes_per_batch": 28, "weight_decay": 0.0004,
    },
    "conventional/*/proxy_anchor": {
        "optimizer": "adamw", "pooling": "gap_gmp", "image_size": 224, "clip_value": 10, "epochs": 60,
    },
    "conventional/cars/proxy_anchor": {"drop_epochs": [10, 20, 30, 40, 50]},
    "conventional/*/libc": {
        "optimizer": "radam", "epochs": 70, "drop_epochs": [30], "erasing": 0.5, "crop_scale": 0.08,
        "freeze_batchnorm": False,
    },
    "conventional/cub/libc": {"learning_rate": 0.000156, "images_per_class": 9},
    "conventional/*/metrix": {"loss": "multi_similarity", "mixing": "all"},
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_published_numbers(name: str) -> None:
    for data_set in ("cub", "cars", "sop", "inshop"):
        found = load_recipe(name.replace("*", data_set)).model_dump()
        found |= {f"loss_options.{key}": value for key, value in found["loss_options"].items()}
        assert {key: found[key] for key in NUMBERS[name]} == NUMBERS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes_have_xml_and_the_published_split(name: str) -> None:
    recipe = load_recipe(name)
    _, data_set, method = name.split("/")
    assert (recipe.xml_weight, recipe.made_for, recipe.weights) == (0.01, data_set, "published")
    assert recipe.prototypes == (64 if data_set in ("cub", "cars") else 128)
    assert round(recipe.image_size / recipe.crop_fraction) == 256
    if method == "original-contrastive":
        assert (recipe.split_by, recipe.split_train, recipe.fold_rule) == ("class", 0.5, "wrapped")
        waits = {"cub": (2, 10), "cars": (5, 15), "sop": (20, 40)}[data_set]
        assert (recipe.evaluate_every, recipe.patience) == waits
    else:
        assert recipe.split_by == "given"
    without = load_recipe(name, ["xml_weight=0"]).model_dump()
    assert without == recipe.model_dump() | {"xml_weight": 0}
    objective = Objective(recipe, classes=98)
    if recipe.memory_batches:
        assert objective.memory is not None
        assert len(objective.memory.labels) == recipe.memory_batches * recipe.batch_size


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


def test_overrides_win_and_are_read_as_yaml() -> None:
    changes = ["xml_weight=0", "assign_on=raw", "batches_per_epoch=null", "split_train=0.5"]
    recipe = load_recipe("omniglot-contrastive-xml", changes)
    assert (recipe.xml_weight, recipe.assign_on, recipe.batches_per_epoch) == (0, "raw", None)
    assert recipe.split == SplitRule(by="folder", train=0.5)
    assert isinstance(Recipe(split_train=5).split.train, int)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("dimensions=3", ["'dimensions'", "'dimension'"]),
        ("lerning_rate=3", ["'lerning_rate'", "'learning_rate'"]),
        ("lr=3", ["'lr'", "'learning_rate'"]),
        ("dimension=many", ["'dimension'", "'many'", "integer"]),
        ("dimension=0", ["'dimension'", "greater than or equal to 2"]),
        ("flip=1.5", ["'flip'", "less than or equal to 1"]),
        ("head_init=pcaa", ["'head_init'", "'pca'"]),
        ("split_train=1.5", ["'split_train'"]),
        ("epochs=[1, 2]", ["'epochs'"]),
        ("epochs", ["key=value", "'epochs'"]),
        ("epochs={", ["YAML"]),
        ("seed=9999-99-99", ["9999-99-99", "YAML"]),
        ("seed=!!timestamp now", ["YAML"]),
        ("seed=!!bool perhaps", ["YAML"]),
        ("classes_per_batch=1", ["2 or more, or xml_weight to 0"]),
        pytest.param("seed=" + "[" * 1000, ["YAML"], id="nested"),
    ],
)
def test_a_bad_key_is_named(override: str, words: list[str]) -> None:
    with pytest.raises(BadSetting) as caught:
        load_recipe("omniglot-contrastive-xml", [override])
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(NotFound, match="'cub100-contrastive-xml'"):
        load_recipe("cub-contrastive-xml")
    with pytest.raises(NotFound, match=r"nowhere\.yaml"):
        load_recipe("nowhere.yaml")


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "a: [", "\udcff", "seed: 9999-99-99", pytest.param("[" * 3000, id="nested")]
)
def test_a_file_that_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadSetting, match=r"bad\.yaml"):
        load_recipe(str(file))


def test_a_file_is_read_by_its_path_and_a_dumped_recipe_reads_back_the_same(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("dimension: 48\nlearning_rate: 1e-4\n")  # which YAML takes for text
    recipe = load_recipe(str(file))
    assert (recipe.dimension, recipe.learning_rate) == (48, 1e-4)
    recipe = load_recipe("cub100-contrastive-xml")
    assert make_recipe(yaml.safe_load(yaml.safe_dump(recipe.model_dump())), source="dump") == recipe


def test_every_setting_has_a_description_for_the_docs() -> None:
    for name, field in Recipe.model_fields.items():
        told = field.description or ""
        assert len(told.split()) >= 4, name
        assert not told.endswith("."), name
        assert "  " not in told, name
