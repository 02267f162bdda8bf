"""What `evaluate` measures: a run with its untrained backbone, or a model file; pixels in, vectors out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.catalog import SplitRule
from serving.errors import BadSetting, CrossbatchError
from training.embedder import Embedder, build_embedder
from training.embedding import describer_function, embedder_function, maps_function, pooled_function
from training.pictures import Decoder, viewing_decoder
from training.recipe import Recipe
from training.run import load_run

__all__ = ["Subject", "open_model", "open_run"]


@dataclass(frozen=True, slots=True)
class Subject:
    """How images are decoded and embedded, and how the data is cut for that."""

    decode: Decoder
    embed: Callable[[Tensor], Tensor]
    """uint8 (B, S, S, 3) to float32 (B, d + m + C): embeddings, histograms, untrained features."""
    split: SplitRule
    histogram: int = 0
    """m, or 0 where there are no histograms."""
    features: int = 0
    """C, or 0 where there is no untrained backbone."""
    epoch: int = 0
    """Of a run's weights."""
    lacking: str = ""
    """Why a run's untrained backbone cannot be had."""


def open_run(path: Path, *, fitted: bool) -> Subject:
    """Open a run's best weights, and beside them its backbone as training started it.

    Args:
        path: The run folder.
        fitted: Whether histograms are wanted too.

    Raises:
        CrossbatchError: If the run cannot be read.
    """
    run = load_run(path)
    shared = run.recipe.caches_features  # the backbone has rested: its maps are the untrained ones
    describe = describer_function if fitted else embedder_function
    trained = describe(run.embedder, mapped=shared)
    start, lacking = _start(run.recipe, shared=shared)
    if start is None:
        embed = trained
    else:
        maps = maps_function(run.embedder) if shared else _same
        pooled = pooled_function(start, mapped=shared)

        def embed(pixels: Tensor) -> Tensor:
            images = maps(pixels)
            return torch.cat((trained(images).float(), pooled(images).float()), dim=1)

    return Subject(
        viewing_decoder(run.recipe),
        embed,
        run.recipe.split,
        histogram=len(run.embedder.codebook) if fitted else 0,
        features=start.backbone.channels if start else 0,
        epoch=run.epoch,
        lacking=lacking,
    )


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
        raise BadSetting(
            f"--fitted needs histograms, and {path} has none, since nothing"
            " trained its prototypes: leave it out"
        )
    outputs = ("embeddings", "histograms") if fitted else ("embeddings",)

    def embed(pixels: Tensor) -> Tensor:
        images: NDArray[np.uint8] = pixels.numpy()  # (B, S, S, 3)
        found = encoder.run(images, *outputs)
        return torch.cat([torch.from_numpy(found[name]) for name in outputs], dim=1)

    prototypes = encoder.spec.prototypes if fitted else 0
    return Subject(encoder.preprocess, embed, encoder.spec.split, histogram=prototypes)


def _start(recipe: Recipe, *, shared: bool) -> tuple[Embedder | None, str]:
    """Build the embedder as training started it, or say why it cannot be; where it is shared, any weights do."""
    try:
        return build_embedder(recipe.model_copy(update={"weights": "none"}) if shared else recipe), ""
    except CrossbatchError as error:
        return None, str(error)


def _same(images: Tensor) -> Tensor:
    return images
