"""A recipe: every number that training needs, by name and checked."""

import difflib
import reprlib
from collections.abc import Mapping
from typing import Any, Self

from pydantic import ConfigDict, ValidationError, model_validator

from serving.catalog.catalog import SplitRule
from serving.errors import BadSetting
from training.recipes.settings.augmentation import AugmentationSettings
from training.recipes.settings.batches import BatchSettings
from training.recipes.settings.data import DataSettings
from training.recipes.settings.network import NetworkSettings
from training.recipes.settings.objective import ObjectiveSettings
from training.recipes.settings.process import ProcessSettings
from training.recipes.settings.steps import StepSettings

__all__ = ["Recipe", "make_recipe"]


class Recipe(  # pydantic lists the fields of the last class first
    ProcessSettings,
    DataSettings,
    AugmentationSettings,
    StepSettings,
    BatchSettings,
    ObjectiveSettings,
    NetworkSettings,
):
    """The settings of one training; letters: B batch, C classes, d dimensions, m prototypes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def split(self) -> SplitRule:
        """The rule that `serving.catalog.catalog.select` takes."""
        return SplitRule(by=self.split_by, train=self.split_train)

    @property
    def caches_features(self) -> bool:
        """Whether the backbone rests, so that its features come from a cache."""
        return self.freeze == "backbone"

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.folds == 1:
            raise ValueError("folds is 1, which would leave nothing to train on; give at least 2, or 0")
        if self.folds and self.fold >= self.folds:
            raise ValueError(f"fold is {self.fold}, but {self.folds} folds are counted from 0")
        if self.folds and self.validation:
            raise ValueError("folds and validation both hold classes out; set one of them to 0")
        if self.patience and not (self.folds or self.validation):
            raise ValueError("patience needs validation classes; set validation or folds")
        if 0 < self.patience < self.evaluate_every:
            raise ValueError(
                f"patience is {self.patience}, but evaluate_every leaves {self.evaluate_every} epochs between"
                " two evaluations; set it to as many or more"
            )
        if self.xml_weight and self.classes_per_batch == 1:
            raise ValueError(
                "the XML loss expresses some classes of a batch by others, but classes_per_batch is 1; set it"
                " to 2 or more, or xml_weight to 0"
            )
        if self.caches_features and (self.quarter_turns or self.mixing in ("input", "feature", "all")):
            raise ValueError(
                "freeze backbone computes the features of each image once, but quarter_turns and mixing of"
                " pixels or features change them at each step; set freeze to none, or these off"
            )
        if (self.schedule == "drops") != bool(self.drop_epochs):
            raise ValueError("schedule drops and drop_epochs go together; set both or neither")
        return self


def make_recipe(values: Mapping[str, Any], *, source: str) -> Recipe:
    """Check values read from a file or the command line.

    Raises:
        BadSetting: If a key is unknown or its value ill-typed.
    """
    for key in values:
        if key not in Recipe.model_fields:
            raise BadSetting(
                f"recipe {source} has the unknown key {key!r}; the nearest valid one is {_nearest(key)!r}"
            )
    try:
        return Recipe.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # settings that do not fit one another
            raise BadSetting(f"recipe {source}: {first['ctx']['error']}") from error
        key = str(first["loc"][0])
        told = Recipe.model_fields[key].description
        raise BadSetting(
            f"recipe {source} sets {key!r} to {_shown(first['input'])}: {first['msg'].lower()}"
            f" ({key}: {told})"
        ) from error


def _shown(value: object) -> str:
    """Give a value in a few words, whatever it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a number of more digits than Python writes
        return f"a very large {type(value).__name__}"


def _nearest(key: object) -> str:
    """Find the setting that was meant: by its initials (`lr`), else by its spelling."""
    for name in Recipe.model_fields:
        if "".join(part[0] for part in name.split("_")) == key:
            return name
    return difflib.get_close_matches(str(key), Recipe.model_fields, n=1, cutoff=0.0)[0]
