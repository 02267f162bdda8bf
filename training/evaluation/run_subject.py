"""A run as what `evaluate` measures, its untrained backbone beside it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.catalog.catalog import Row
from serving.errors import CrossbatchError
from training.data.feature_cache import find_features
from training.data.pictures import Stream, embed_pictures, viewing_decoder
from training.evaluation.subject import Subject, no_prototypes
from training.loop.processes import keep_freed_memory
from training.loop.run import load_run
from training.network.embedder import (
    Embedder,
    build_embedder,
    describer_function,
    embedder_function,
    maps_function,
    pooled_function,
)
from training.recipes.recipe import Recipe

__all__ = ["open_run"]


def open_run(path: Path, *, fitted: bool) -> Subject:
    """Open a run's best weights, and beside them its backbone as training started it.

    Args:
        path: The run folder.
        fitted: Whether histograms are wanted too.

    Raises:
        BadSetting: If histograms are wanted, but nothing trained the prototypes.
        CrossbatchError: If the run cannot be read.
    """
    keep_freed_memory()
    run = load_run(path)
    if fitted and not run.recipe.learns_prototypes:
        raise no_prototypes(path)
    shared = run.recipe.caches_features  # the backbone has rested: its maps are the untrained ones
    describe = describer_function if fitted else embedder_function
    trained = describe(run.embedder, mapped=shared)
    start, lacking = _start(run.recipe, shared=shared)
    decode = viewing_decoder(run.recipe)
    plain = Subject(
        decode,
        trained,
        run.recipe.split,
        histogram=len(run.embedder.codebook) if fitted else 0,
        epoch=run.epoch,
        lacking=lacking,
    )
    if start is None:
        return plain
    maps = maps_function(run.embedder) if shared else _same
    pooled = pooled_function(start, mapped=shared)

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
        plain,
        embed=embed,
        features=start.backbone.channels,
        features_of=None if run.recipe.weights == "none" else features_of,
    )


def _start(recipe: Recipe, *, shared: bool) -> tuple[Embedder | None, str]:
    """Build the embedder as training started it, or say why not; where maps are shared, any weights do."""
    try:
        return build_embedder(recipe.model_copy(update={"weights": "none"}) if shared else recipe), ""
    except CrossbatchError as error:
        return None, str(error)


def _same(images: NDArray[Any]) -> NDArray[Any]:
    return images
