"""Recipes: what is checked, and what a person reads when it does not hold."""

from pathlib import Path

import pytest
import yaml

from serving.catalog.catalog import SplitRule
from serving.errors import BadSetting, NotFound
from training.recipes.recipe import Recipe, make_recipe
from training.recipes.recipe_file import load_recipe, recipe_names


def test_the_recipes_of_the_package_are_found_by_name() -> None:
    for name in ("cifar10-contrastive-xml", "cub100-contrastive-xml", "omniglot-contrastive-xml"):
        assert name in recipe_names()
        assert load_recipe(name).xml_weight > 0


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("dimension: 48\nlearning_rate: 1e-4\n")  # which YAML takes for text
    recipe = load_recipe(str(file))
    assert (recipe.dimension, recipe.learning_rate) == (48, 1e-4)


def test_overrides_win_and_are_read_as_yaml() -> None:
    recipe = load_recipe(
        "omniglot-contrastive-xml",
        ["xml_weight=0", "assign_on=raw", "batches_per_epoch=null", "split_train=0.5"],
    )
    assert recipe.xml_weight == 0
    assert recipe.assign_on == "raw"
    assert recipe.batches_per_epoch is None
    assert recipe.split == SplitRule(by="folder", train=0.5)


def test_count_and_share_of_a_split_stay_what_they_are() -> None:
    assert Recipe(split_train=5).split.train == 5
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


def test_a_dumped_recipe_reads_back_the_same() -> None:
    recipe = load_recipe("cub100-contrastive-xml")
    text = yaml.safe_dump(recipe.model_dump())
    assert make_recipe(yaml.safe_load(text), source="dump") == recipe


def test_every_setting_has_a_description_for_the_docs() -> None:
    for name, field in Recipe.model_fields.items():
        told = field.description or ""
        assert len(told.split()) >= 4, name
        assert not told.endswith("."), name
        assert "  " not in told, name
