"""What `evaluate` measures: pixels in, vectors out; a model file is one without torch, a run by torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.catalog.catalog import Row, SplitRule
from serving.errors import BadSetting, CrossbatchError
from training.data.pictures import Decoder, Embed, Stream, embed_pictures

__all__ = ["Subject", "open_model", "open_run"]

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


def open_model(path: Path, *, fitted: bool) -> Subject:
    """Open a model file, which no longer has its backbone's start.

    Raises:
        BadSetting: If histograms are wanted (`fitted`), but nothing trained the prototypes.
        CrossbatchError: If the file cannot be read.
    """
    from serving.model.encoder import Encoder  # only here: a run is measured without ONNX Runtime

    encoder = Encoder(path)
    if fitted and not encoder.spec.prototypes:
        raise _no_prototypes(path)
    outputs = ("embeddings", "histograms") if fitted else ("embeddings",)

    def embed(pixels: NDArray[Any]) -> NDArray[np.float32]:
        found = encoder.run(pixels, *outputs)
        return np.concatenate([found[name] for name in outputs], axis=1)

    prototypes = encoder.spec.prototypes if fitted else 0
    return Subject(encoder.preprocess, embed, encoder.spec.split, histogram=prototypes)


def open_run(path: Path, *, fitted: bool) -> Subject:
    """Open a run's best weights, and beside them its backbone as training started it.

    Raises:
        BadSetting: If histograms are wanted (`fitted`), but nothing trained the prototypes.
        CrossbatchError: If the run cannot be read.
    """
    # only here: a model file is measured without torch
    from training.data.feature_cache import find_features
    from training.data.pictures import viewing_decoder
    from training.loop.processes import keep_freed_memory
    from training.loop.run import load_run
    from training.network.embedder import (
        build_embedder,
        describer_function,
        embedder_function,
        maps_function,
        pooled_function,
    )

    keep_freed_memory()
    run = load_run(path)
    if fitted and not run.recipe.learns_prototypes:
        raise _no_prototypes(path)
    shared = run.recipe.caches_features  # the backbone has rested: its maps are the untrained ones
    trained = (describer_function if fitted else embedder_function)(run.embedder, mapped=shared)
    decode = viewing_decoder(run.recipe)
    subject = Subject(
        decode,
        trained,
        run.recipe.split,
        histogram=len(run.embedder.codebook) if fitted else 0,
        epoch=run.epoch,
    )
    try:  # where maps are shared, any weights do
        start = build_embedder(run.recipe.model_copy(update={"weights": "none"}) if shared else run.recipe)
    except CrossbatchError as error:
        return replace(subject, lacking=str(error))
    pooled = pooled_function(start, mapped=shared)
    maps = maps_function(run.embedder) if shared else lambda pixels: pixels

    def embed(pixels: NDArray[Any]) -> NDArray[np.float32]:
        images = maps(pixels)
        return np.concatenate((trained(images), pooled(images)), axis=1)

    def features_of(rows: Sequence[Row], wanted: bool) -> tuple[Sequence[Row], NDArray[np.float32]] | None:
        if shared:
            cached = find_features(rows, run.embedder, run.recipe, views=run.recipe.views, folder=None)
            if cached is not None:
                return cached.rows, embed_pictures(pooled, cached, label="Training images")
        if not wanted:
            return None
        stream = Stream(rows, decode)
        found = embed_pictures(lambda pixels: pooled(maps(pixels)), stream, label="Training images")
        return stream.rows, found

    return replace(
        subject,
        embed=embed,
        features=start.backbone.channels,
        features_of=None if run.recipe.weights == "none" else features_of,
    )


def _no_prototypes(path: Path) -> BadSetting:
    return BadSetting(f"--fitted needs prototypes, and nothing trained those of {path}: leave it out")
