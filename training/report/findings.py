"""What a report looks at: the images of one side of a split as a run's embedder sees them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.catalog.catalog import Row
from training.data.pictures import Stream, Unreadable, class_numbers, embed_pictures, viewing_decoder
from training.evaluation.protocol import measure_retrieval, roles_of
from training.network.embedder import Embedder, describer_function
from training.recipes.recipe import Recipe

__all__ = ["Findings", "embed_split", "find_assignments", "measure"]


@dataclass(frozen=True, slots=True)
class Findings:
    """N readable images and what the embedder gives for them."""

    rows: tuple[Row, ...]
    unreadable: tuple[Unreadable, ...]
    classes: tuple[str, ...]
    """Sorted, each of at least one readable image."""
    labels: NDArray[np.int64]
    """Places in `classes`, (N,)."""
    roles: NDArray[np.str_]
    """`query`, `gallery` or nothing of each image, (N,); a query is searched in the gallery alone."""
    embeddings: Tensor
    """float32 (N, d), of any length."""
    histograms: NDArray[np.float32]
    """(N, m), each row sums to one."""


def embed_split(
    rows: Sequence[Row], embedder: Embedder, recipe: Recipe, *, batch: int, split: str = "test"
) -> Findings:
    """Embed images of classes, leaving out what cannot be read.

    Args:
        rows: The images.
        embedder: In evaluation mode.
        recipe: Of the embedder.
        batch: Images at a time.
        split: Which side of the recipe's split the rows are.

    Raises:
        BadData: If not one image can be read.
    """
    stream = Stream(rows, viewing_decoder(recipe))
    found = embed_pictures(describer_function(embedder), stream, batch=batch)  # (N, d + m)
    width = found.shape[1] - len(embedder.codebook)
    classes = tuple(sorted({row.label for row in stream.rows}))
    return Findings(
        rows=tuple(stream.rows),
        unreadable=tuple(stream.unreadable),
        classes=classes,
        labels=class_numbers(stream.rows, classes),
        roles=np.array(roles_of(stream.rows, split, recipe.split) or [""] * len(stream.rows), dtype=np.str_),
        embeddings=torch.from_numpy(found[:, :width]),
        histograms=found[:, width:],
    )


def measure(findings: Findings) -> dict[str, Any]:
    """Measure retrieval, queries in the gallery where the data set keeps these apart.

    Returns:
        What `measure_retrieval` gives, with `images` and `classes`.

    Raises:
        BadData: If no query has a match, an embedding is not finite, or there are queries and no gallery.
    """
    figures = measure_retrieval(findings.embeddings, findings.labels, roles=findings.roles.tolist())
    return figures | {"images": len(findings.rows), "classes": len(findings.classes)}


@torch.no_grad()
def find_assignments(
    rows: Sequence[Row], embedder: Embedder, recipe: Recipe
) -> tuple[tuple[Row, ...], NDArray[np.uint8]]:
    """Find the dominant prototype of each place of a few images.

    Returns:
        Those of `rows` that can still be read, and uint8 (N, n) for them.
    """
    stream = Stream(rows, viewing_decoder(recipe))
    found = [
        embedder.assignments(embedder(embedder.normalise(torch.from_numpy(pixels.copy())[None])).locations)
        for pixels in stream
    ]
    return tuple(stream.rows), torch.cat(found).numpy() if found else np.empty((0, 0), dtype=np.uint8)
