"""A network as functions of arrays, in evaluation mode: pixels in, vectors out."""

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from training.data.pictures import Embed
from training.network.embedder import Embedder, Features

__all__ = [
    "describer_function",
    "embedder_function",
    "locations_function",
    "maps_function",
    "pooled_function",
]


def embedder_function(
    embedder: Embedder, device: torch.device | str = "cpu", *, mapped: bool = False
) -> Embed:
    """Give the map from pixels, uint8 (B, S, S, 3), to embeddings (B, d), in evaluation mode.

    With `mapped` it goes from the backbone's own maps (B, C, h, w), as from a `FeatureSet`; so do the others.
    """

    def embed(images: Tensor) -> Tensor:
        return _run(embedder, images, device, mapped).embeddings

    return _evaluating(embedder, embed)


def describer_function(
    embedder: Embedder, device: torch.device | str = "cpu", *, mapped: bool = False
) -> Embed:
    """Give the map from pixels, uint8 (B, S, S, 3), to embeddings and histograms side by side, (B, d + m)."""

    def embed(images: Tensor) -> Tensor:
        features = _run(embedder, images, device, mapped)
        return torch.cat((features.embeddings, features.histograms), dim=1)

    return _evaluating(embedder, embed)


def locations_function(
    embedder: Embedder, device: torch.device | str = "cpu", *, mapped: bool = False
) -> Embed:
    """Give the map from pixels, uint8 (B, S, S, 3), to local features (B, n, d)."""

    def embed(images: Tensor) -> Tensor:
        return _run(embedder, images, device, mapped).locations

    return _evaluating(embedder, embed)


def maps_function(embedder: Embedder, device: torch.device | str = "cpu") -> Embed:
    """Give the map from pixels, uint8 (B, S, S, 3), to what the others take with `mapped`, (B, C, h, w)."""

    def embed(images: Tensor) -> Tensor:
        return embedder.backbone(embedder.normalise(images.to(device)))  # type: ignore[no-any-return]

    return _evaluating(embedder, embed)


def pooled_function(embedder: Embedder, device: torch.device | str = "cpu", *, mapped: bool = False) -> Embed:
    """Give the map from pixels, uint8 (B, S, S, 3), to the backbone's own features, (B, C)."""

    def embed(images: Tensor) -> Tensor:
        return embedder.pooled(embedder.normalise(images.to(device), mapped=mapped), mapped=mapped)

    return _evaluating(embedder, embed)


def _run(embedder: Embedder, images: Tensor, device: torch.device | str, mapped: bool) -> Features:
    return embedder(embedder.normalise(images.to(device), mapped=mapped), mapped=mapped)  # type: ignore[no-any-return]


def _evaluating(embedder: Embedder, embed: Callable[[Tensor], Tensor]) -> Embed:
    @torch.no_grad()
    def wrapper(images: NDArray[Any]) -> NDArray[Any]:
        training = embedder.training
        embedder.eval()
        try:
            return embed(torch.from_numpy(images)).float().cpu().numpy()
        finally:
            embedder.train(training)

    return wrapper
