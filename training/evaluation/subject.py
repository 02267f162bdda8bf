"""What `evaluate` measures: pixels in, vectors out; a model file is one, without torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.catalog.catalog import Row, SplitRule
from serving.errors import BadSetting
from training.data.pictures import Decoder, Embed

__all__ = ["Subject", "open_model"]

FeaturesOf = Callable[[Sequence[Row], bool], tuple[Sequence[Row], NDArray[np.float32]] | None]
"""Images, and whether to embed those that are not cached, to the readable ones and their features (N, C)."""


@dataclass(frozen=True, slots=True)
class Subject:
    """How images are decoded and embedded, and how the data is cut for that."""

    decode: Decoder
    embed: Embed
    """uint8 (B, S, S, 3) to float32 (B, d + m + C): embeddings, histograms, untrained features."""
    split: SplitRule
    histogram: int = 0
    """m, or 0 where there are no histograms."""
    features: int = 0
    """C, or 0 where there is no untrained backbone."""
    epoch: int = 0
    """Of a run's weights."""
    features_of: FeaturesOf | None = None
    """None where there is no backbone that was trained on other images before: it would find all alike."""
    lacking: str = ""
    """Why a run's untrained backbone cannot be had."""


def no_prototypes(path: Path) -> BadSetting:
    """Give the error of asking for histograms over prototypes that nothing trained."""
    return BadSetting(f"--fitted needs prototypes, and nothing trained those of {path}: leave it out")


def open_model(path: Path, *, fitted: bool) -> Subject:
    """Open a model file, which no longer has its backbone's start.

    Args:
        path: The file.
        fitted: Whether histograms are wanted too.

    Raises:
        BadSetting: If there are none.
        CrossbatchError: If the file cannot be read.
    """
    from serving.model.encoder import Encoder  # only here: a run is measured without ONNX Runtime

    encoder = Encoder(path)
    if fitted and not encoder.spec.prototypes:
        raise no_prototypes(path)
    outputs = ("embeddings", "histograms") if fitted else ("embeddings",)

    def embed(pixels: NDArray[Any]) -> NDArray[np.float32]:
        found = encoder.run(pixels, *outputs)
        return np.concatenate([found[name] for name in outputs], axis=1)

    prototypes = encoder.spec.prototypes if fitted else 0
    return Subject(encoder.preprocess, embed, encoder.spec.split, histogram=prototypes)
