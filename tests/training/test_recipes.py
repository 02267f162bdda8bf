"""Recipes: what is checked, every one of ours by its steps and numbers, and what their heads tell."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import yaml

import training.loop.checkpoint
from serving.catalog.catalog import SplitRule
from serving.errors import BadSetting, NotFound
from tests.training.small import draw_folder, read_table
from training.losses.objective import Objective
from training.recipes.recipe import Recipe, make_recipe
from training.recipes.recipe_file import RECIPES, head_comment, load_recipe, recipe_names
from training.train import Settings, run

PUBLISHED = [name for name in recipe_names() if "/" in name]
OURS = [name for name in recipe_names() if "/" not in name]
DIGESTS = {
    "": "824f49e26840", "conventional/cars": "9bbf34c8040b", "conventional/cub": "518660ebbb1b",
    "conventional/inshop": "f59f4189ab94", "conventional/sop": "fb5dfede6fef", "mlrc/cars": "efc1ed4c4b7c",
    "mlrc/cub": "380999a7c2c7", "mlrc/inshop": "370bf6dde250", "mlrc/sop": "586d108fc47e",
}  # fmt: skip
"""Of the settings that are not defaults, as they were when each recipe was a file of its own."""


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
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


@pytest.mark.parametrize("name", [*OURS, *(n for n in PUBLISHED if "/cub/" in n), "conventional/sop/libc"])
def test_two_steps(name: str, drawn: dict[str, Path], out: Path) -> None:
    recipe = load_recipe(name)
    run(Settings(recipe=name, data=drawn[recipe.split_by], out=out, set=small(name, recipe)))
    start, row = read_table(out / "metrics.csv")
    assert (start["steps"], row["steps"]) == ("0", "2")
    assert float(row["loss"]) > 0
    assert (float(row["xml"]) > 0) == (recipe.xml_weight > 0)
    assert bool(recipe.folds or recipe.validation) == bool(row.get("map_at_r"))


def test_cifar10_with_unseen_classes_is_split_as_the_docs_and_its_head_advise() -> None:
    docs = (RECIPES.parents[1] / "docs/training.md").read_text(encoding="utf-8")
    (row,) = (line for line in docs.split("\n") if line.startswith("| CIFAR-10, 5 of its classes unseen"))
    advised = re.findall(r"`(\w+=\w+)`", row)
    assert advised == re.findall(r"--set (\w+=\w+)", _told("cifar10-contrastive-xml")["Unseen"])
    recipe = load_recipe("cifar10-contrastive-xml", advised)
    assert (recipe.split_by, recipe.split_train, recipe.classes_per_batch) == ("class", 5, 5)


@pytest.mark.parametrize("group", DIGESTS)
def test_no_setting_of_a_recipe_changes_unseen(group: str) -> None:
    defaults = Recipe().model_dump(mode="json")
    found = {}
    for name in (name for name in recipe_names() if name.rpartition("/")[0] == group):
        settings = load_recipe(name).model_dump(mode="json")
        found[name] = {key: value for key, value in settings.items() if value != defaults[key]}
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    assert digest[:12] == DIGESTS[group], found


def test_a_recipe_stands_on_others(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("base: mlrc/cub/proxy_anchor\nflip: 0.25\nseed: 3\n")
    (tmp_path / "mine.yaml").write_text("base: [demo, below.yaml]\nseed: 4\n")
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    expected = load_recipe("demo").model_dump() | load_recipe("mlrc/cub/proxy_anchor").model_dump()
    own = {"flip": 0.25, "seed": 4, "reconstruction_weight": 1, "warmup": 0.1}
    assert recipe.model_dump() == expected | own
    for base, told in (("mine.yaml", r"mine\.yaml is its own base"), ("3", "neither a name nor a list")):
        (tmp_path / "below.yaml").write_text(f"base: {base}\n")
        with pytest.raises(BadSetting, match=told):
            load_recipe(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_has_a_loss_and_the_memory_that_it_names(name: str) -> None:
    recipe = load_recipe(name)
    objective = Objective(recipe, classes=98)
    assert round(recipe.image_size / recipe.crop_fraction) == 256
    held = 0 if objective.memory is None else len(objective.memory.labels)
    assert held == recipe.memory_batches * recipe.batch_size


def _told(name: str) -> dict[str, str]:
    """The head of a recipe by its words, a line that goes on joined to the one before."""
    text = re.sub(r"\n {8,}", " ", head_comment(name))
    lines = (line.partition(":") for line in text.split("\n"))
    return {key: rest.strip() for key, colon, rest in lines if colon}


@pytest.mark.parametrize("name", OURS)
def test_the_head_states_paper_command_hardware_time_and_score(name: str) -> None:
    told = _told(name)
    assert told.get("Paper") or "no paper" in head_comment(name).lower()
    command = "demo" if name == "demo" else f"train {name} --data"
    assert told["Command"].startswith(f"crossbatch {command}")
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
        ("freeze=backbone", ["computes the features of each image once"]),  # and this recipe turns its images
        ("folds=2;patience=3;evaluate_every=4", ["3, but evaluate_every leaves 4 epochs"]),
        pytest.param("seed=" + "[" * 1000, ["YAML"], id="nested"),
    ],
)
def test_a_bad_key_is_named(override: str, words: list[str]) -> None:
    with pytest.raises(BadSetting) as caught:
        load_recipe("omniglot-contrastive-xml", override.split(";"))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(NotFound, match="'cub100-contrastive-xml'"):
        load_recipe("cub-contrastive-xml")
    with pytest.raises(NotFound, match=r"nowhere\.yaml"):
        load_recipe("nowhere.yaml")


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "a: [", "\udcff", "seed: 9999-99-99", pytest.param("[" * 1000, id="nested")]
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
