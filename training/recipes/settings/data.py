"""Which classes train, which choose the best epoch, and which are left for the test."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from serving.catalog.catalog import Layout

__all__ = ["DataSettings"]


class DataSettings(BaseModel):
    """Classes are taken in the order of their sorted names."""

    made_for: Literal["any", Layout] = Field(
        "any", description="format of the one data set that the recipe is for; another one is refused"
    )
    split_by: Literal["class", "folder", "given"] = Field(
        "class",
        description="what is split into train and test: classes, top-level folders, or as the data set says",
    )
    split_train: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="how many of the sorted names train: a share below 1, else a count"
    )
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the training classes held out to choose the best epoch; 0 keeps the last",
    )
    folds: int = Field(
        0,
        ge=0,
        le=100,
        description="into how many blocks the sorted training classes are cut, of which one is held out"
        " instead of `validation`; 0 is without",
    )
    fold: int = Field(0, ge=0, le=99, description="which of the folds is held out, counted from 0")
    fold_rule: Literal["even", "wrapped"] = Field(
        "even",
        description="where folds are cut: in even blocks, or in blocks that follow a training part of fixed"
        " size round the end of the list, as the original MLRC code does",
    )
