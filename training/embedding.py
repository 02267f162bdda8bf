"""Embedding of many pictures in batches, for evaluation and for the closed-form start."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.catalog import Row, SplitRule
from serving.errors import BadData
from serving.progress import progress
from training.embedder import Embedder, Features
from training.feature_cache import FeatureSet
from training.metrics import retrieval_metrics
from training.pictures import Pictures, Share, Stream, first_of

__all__ = [
    "describer_function",
    "embed_pictures",
    "embedder_function",
    "locations_function",
    "maps_function",
    "measure_retrieval",
    "pooled_function",
    "roles_of",
]


def embed_pictures(
    embed: Callable[[Tensor], Tensor],
    images: Pictures | Share | Stream | FeatureSet,
    *,
    batch: int = 64,
    label: str = "Embedding",
) -> Tensor:
    """Embed images that are all S x S, a batch in memory at a time.

    Args:
        embed: Pixels, uint8 (B, S, S, 3), or maps, float16 (B, C, h, w), to float32 (B, d).
        images: What `viewing_decoder` decodes, or its features.
        batch: Most images at a time.
        label: Name of the progress bar.

    Returns:
        float32 (N, d) on the CPU, in the order of `images`.

    Raises:
        BadData: If not one image can be read.
    """
    parts = []
    with progress(images, label, total=len(images), unit="image") as bar:
        arrays: Any = iter(bar)
        while some := list(itertools.islice(arrays, batch)):
            parts.append(embed(torch.from_numpy(np.stack(some))).float().cpu())
    if not parts:
        raise BadData(
            f"none of the {len(images.unreadable)} images can be read{first_of(images.unreadable)}: repair"
            " them or give other images"
        )
    return torch.cat(parts)


def measure_retrieval(
    embeddings: Tensor,
    labels: NDArray[np.int64],
    *,
    roles: Sequence[str] | None = None,
    at: Sequence[int] = (1, 2, 4, 8),
) -> dict[str, Any]:
    """Search each embedding among all others, or the queries of a data set in its gallery.

    Args:
        embeddings: Float (N, d).
        labels: int64 (N,).
        roles: "query", "gallery" or "" of each row (N,). Where any is "query", those are searched in the
            rows that are "gallery"; all others are left out.
        at: The k of R@k.

    Returns:
        JSON-able: `recall_at` by k as text, `map_at_r`, `r_precision` (all in 0..1), `queries`, `excluded`;
        see `training.metrics`. `gallery` is how many rows queries were searched in, 0 where each was searched
        among all others.

    Raises:
        BadData: If no query has a match, an embedding is not finite, or there are queries and no gallery.
    """
    gallery, gallery_labels = None, None
    if roles is not None and "query" in roles:
        role = np.array(roles)
        asked, kept = np.flatnonzero(role == "query"), np.flatnonzero(role == "gallery")
        if len(kept) == 0:
            raise BadData(
                f"{len(asked)} images are queries and none is of a gallery: name gallery images too, or no"
                " queries, so that every image is searched among all others"
            )
        gallery, gallery_labels = embeddings[torch.from_numpy(kept)], labels[kept]
        embeddings, labels = embeddings[torch.from_numpy(asked)], labels[asked]
    found = retrieval_metrics(
        embeddings, labels, at=at, gallery_embeddings=gallery, gallery_labels=gallery_labels
    )
    return {
        "recall_at": {str(k): share for k, share in found.recall_at.items()},
        "map_at_r": found.map_at_r,
        "r_precision": found.r_precision,
        "queries": found.queries,
        "excluded": found.excluded,
        "gallery": 0 if gallery is None else len(gallery),
    }


def roles_of(rows: Sequence[Row], split: str, rule: SplitRule) -> list[str] | None:
    """Tell which rows ask and which are searched: as the data set has it, where its own test is measured.

    Returns:
        For `measure_retrieval`: "query", "gallery" or "" of each row; None where every image is searched
        among all others.
    """
    return [row.split for row in rows] if split == "test" and rule.by == "given" else None


def embedder_function(
    embedder: Embedder, device: torch.device | str = "cpu", *, mapped: bool = False
) -> Callable[[Tensor], Tensor]:
    """Give the map from pixels, uint8 (B, S, S, 3), to embeddings (B, d), in evaluation mode.

    With `mapped` it goes from the backbone's own maps (B, C, h, w), as from a `FeatureSet`; so do the others.
    """

    def embed(images: Tensor) -> Tensor:
        return _run(embedder, images, device, mapped).embeddings

    return _evaluating(embedder, embed)


def describer_function(
    embedder: Embedder, device: torch.device | str = "cpu", *, mapped: bool = False
) -> Callable[[Tensor], Tensor]:
    """Give the map from pixels, uint8 (B, S, S, 3), to embeddings and histograms side by side, (B, d + m)."""

    def embed(images: Tensor) -> Tensor:
        features = _run(embedder, images, device, mapped)
        return torch.cat((features.embeddings.float(), features.histograms.float()), dim=1)

    return _evaluating(embedder, embed)


def locations_function(
    embedder: Embedder, device: torch.device | str = "cpu", *, mapped: bool = False
) -> Callable[[Tensor], Tensor]:
    """Give the map from pixels, uint8 (B, S, S, 3), to local features (B, n, d)."""

    def embed(images: Tensor) -> Tensor:
        return _run(embedder, images, device, mapped).locations

    return _evaluating(embedder, embed)


def maps_function(
    embedder: Embedder, device: torch.device | str = "cpu"
) -> Callable[[Tensor], Tensor]:
    """Give the map from pixels, uint8 (B, S, S, 3), to what the others take with `mapped`, (B, C, h, w)."""

    def embed(images: Tensor) -> Tensor:
        return embedder.backbone(embedder.normalise(images.to(device)))  # type: ignore[no-any-return]

    return _evaluating(embedder, embed)


def pooled_function(
    embedder: Embedder, device: torch.device | str = "cpu", *, mapped: bool = False
) -> Callable[[Tensor], Tensor]:
    """Give the map from pixels, uint8 (B, S, S, 3), to the backbone's own features, (B, C)."""

    def embed(images: Tensor) -> Tensor:
        return embedder.pooled(embedder.normalise(images.to(device), mapped=mapped), mapped=mapped)

    return _evaluating(embedder, embed)


def _run(embedder: Embedder, images: Tensor, device: torch.device | str, mapped: bool) -> Features:
    return embedder(embedder.normalise(images.to(device), mapped=mapped), mapped=mapped)  # type: ignore[no-any-return]


def _evaluating(embedder: Embedder, embed: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @torch.no_grad()
    def wrapper(pixels: Tensor) -> Tensor:
        training = embedder.training
        embedder.eval()
        try:
            return embed(pixels)
        finally:
            embedder.train(training)

    return wrapper
