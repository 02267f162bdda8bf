"""How weights move: optimiser, rates and their schedule, and what stays frozen."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

__all__ = ["StepSettings"]


class StepSettings(BaseModel):
    """Learning rates are peaks, each of its own group of weights."""

    optimizer: Literal["adamw", "adam", "radam", "rmsprop"] = Field(
        "adamw",
        description="rule of a step; all but adamw add the weight decay to the gradient",
    )
    learning_rate: float = Field(
        1e-3,
        ge=0,
        le=10,
        description="peak learning rate of the backbone; 0 leaves it as it is, BatchNorm's statistics apart",
    )
    head_learning_rate: float = Field(
        1e-3, ge=0, le=10, description="peak learning rate of the 1x1 convolution"
    )
    prototype_learning_rate: float = Field(
        1e-3, ge=0, le=10, description="peak learning rate of the prototypes of the histogram operator"
    )
    loss_learning_rate: float = Field(
        1e-3,
        ge=0,
        le=100,
        description="peak learning rate of what a loss learns itself: its proxies, classifier or messages",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="share of the last step that rmsprop takes again")
    weight_decay: float = Field(
        1e-4, ge=0, le=1, description="weight decay, on weights of two dimensions and more"
    )
    warmup: float = Field(
        0.0, ge=0, le=0.9, description="share of all steps over which learning rates rise from 0"
    )
    schedule: Literal["cosine", "constant", "drops"] = Field(
        "cosine",
        description="how learning rates go on after the warm-up: half a cosine down to 0, as they are, or"
        " times drop_factor at each of drop_epochs",
    )
    drop_epochs: list[Annotated[int, Field(ge=1)]] = Field(
        [], description="with schedule drops: after how many epochs the learning rates drop"
    )
    drop_factor: float = Field(
        0.1, gt=0, le=1, description="with schedule drops: what the learning rates are multiplied by"
    )
    clip_norm: float = Field(
        0.0, ge=0, description="length that a longer gradient is shortened to; 0 leaves it as it is"
    )
    clip_value: float = Field(
        0.0, ge=0, description="largest component of a gradient, either way; 0 leaves them as they are"
    )
    ema_decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the moving average of weights that a step keeps; the average is what is"
        " measured and kept, and 0 is without",
    )
    freeze: Literal["none", "backbone"] = Field(
        "none",
        description="what stays as it starts: nothing as a whole, or the backbone, whose features of every"
        " image are computed once and cached, so that a head trains in seconds",
    )
    freeze_batchnorm: bool = Field(
        False, description="whether BatchNorm keeps the statistics that it starts with"
    )
    freeze_batchnorm_weights: bool = Field(
        False,
        description="whether scale and shift of BatchNorm stay as they start, and its statistics with them",
    )
    freeze_stages: int = Field(
        0, ge=0, le=100, description="how many stages of the backbone stay as they start, the stem first"
    )
    freeze_epochs: int = Field(
        0, ge=0, description="over how many epochs, at the start, the whole backbone stays as it is"
    )
