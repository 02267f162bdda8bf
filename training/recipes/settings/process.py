"""How the training runs on a machine: precision, seed, processes, memory, when it ends."""

from typing import Literal

from pydantic import BaseModel, Field

__all__ = ["ProcessSettings"]


class ProcessSettings(BaseModel):
    """Neither what is trained nor on what."""

    evaluate_every: int = Field(
        1, ge=1, description="how many epochs lie between evaluations on the validation classes"
    )
    patience: int = Field(
        0,
        ge=0,
        description="how many epochs training goes on without a better validation MAP@R; 0 never stops early",
    )
    min_delta: float = Field(
        0.0, ge=0, lt=1, description="by how much a better MAP@R has to be better, for `patience`"
    )
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = Field(
        "32-true",
        description="precision of the products in a training step; losses and the fit of prototypes stay"
        " float32",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of every random draw")
    workers: int = Field(
        0, ge=0, le=256, description="how many processes augment images; 0 does it in the training process"
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="how many threads a training step takes on the CPU; 0 is torch's own choice, one a core",
    )
    cache_gib: float = Field(
        8.0, ge=0, description="of a frozen backbone: the largest cache of features that is made, in GiB"
    )
    memory_gib: float = Field(
        4.0, ge=0, description="memory for decoded images, in GiB; those beyond it are read at each use"
    )
