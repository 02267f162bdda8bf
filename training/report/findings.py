"""What a run finds among the images of a split: embeddings, figures, each query's neighbours, a plane."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.decomposition import PCA

from serving.catalog.catalog import Row
from serving.errors import CrossbatchError
from training.data.pictures import Stream, Unreadable, class_numbers, embed_pictures, viewing_decoder
from training.evaluation.metrics import ProtocolName, rank_queries, retrieval_metrics, roles_of, unit_rows
from training.network.embedder import Embedder, describer_function
from training.network.start import open_start
from training.recipes.recipe import Recipe

__all__ = [
    "Findings", "Ranking", "choose_queries", "class_histograms", "embed_split", "find_assignments", "project",
    "rank",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Findings:
    """N readable images and what the embedder gives for them."""

    rows: tuple[Row, ...]
    unreadable: tuple[Unreadable, ...]
    classes: tuple[str, ...]  # sorted, each of at least one readable image
    labels: NDArray[np.int64]  # places in `classes`, (N,)
    roles: Sequence[str] | None  # of each row, where queries are searched in a gallery
    embeddings: NDArray[np.float32]  # (N, d), of any length
    histograms: NDArray[np.float32]  # (N, m), each row sums to one
    untrained: NDArray[np.float32] | None = None  # (N, C), pooled features of the backbone at the start
    lacking: str = ""  # why there are none

    def before(self) -> "Findings | None":
        """Give what the untrained backbone finds among the same images, where it can be had."""
        return None if self.untrained is None else replace(self, embeddings=self.untrained, untrained=None)

    def measure(self) -> dict[str, Any]:
        """Give what `retrieval_metrics` tells, with `images` and `classes`; it raises the same."""
        figures = retrieval_metrics(self.embeddings, self.labels, roles=self.roles).told()
        return figures | {"images": len(self.rows), "classes": len(self.classes)}


class Ranking(NamedTuple):
    """What the Q queries that have a match find, in the order of the rows."""

    queries: NDArray[np.int64]  # which rows ask, (Q,)
    nearest: NDArray[np.int64]  # which rows are found, nearest first and equals by their number, (Q, k)
    similarity: NDArray[np.float32]  # their cosine with the query, (Q, k)
    precision: NDArray[np.float64]  # average precision down to rank R, (Q,): MAP@R is its mean


def embed_split(
    rows: Sequence[Row],
    embedder: Embedder,
    recipe: Recipe,
    *,
    batch: int,
    split: str = "test",
    protocol: ProtocolName = "auto",
) -> Findings:
    """Embed images of one side of the recipe's split, leaving out what cannot be read.

    The backbone as training started it embeds them too, where its weights can be had.
    """
    stream = Stream(rows, viewing_decoder(recipe))
    start, lacking = None, ""
    try:
        start = open_start(embedder, recipe)
    except CrossbatchError as error:
        lacking = str(error)
    trained = describer_function(embedder, mapped=start is not None and start.shared)

    def embed(pixels: NDArray[Any]) -> NDArray[Any]:
        if start is None:
            return trained(pixels)
        images = start.maps(pixels)
        return np.concatenate((trained(images), start.pooled(images)), axis=1)

    found = embed_pictures(embed, stream, batch=batch)  # (N, d + m + C)
    last = found.shape[1] - (start.channels if start else 0)
    width = last - len(embedder.codebook)
    classes = tuple(sorted({row.label for row in stream.rows}))
    return Findings(
        rows=tuple(stream.rows),
        unreadable=tuple(stream.unreadable),
        classes=classes,
        labels=class_numbers(stream.rows, classes),
        roles=roles_of(stream.rows, split, recipe.split, protocol=protocol),
        embeddings=found[:, :width],
        histograms=found[:, width:last],
        untrained=found[:, last:] if start else None,
        lacking=lacking,
    )


def rank(findings: Findings, *, neighbours: int) -> Ranking:
    """Search the queries, of which at least one has a match, for so many neighbours or all there are."""
    unit = unit_rows(findings.embeddings)
    found = list(rank_queries(unit, findings.labels, depth=neighbours, roles=findings.roles))
    queries = np.concatenate([each.queries for each in found])
    nearest = np.concatenate([each.places[:, :neighbours] for each in found])
    precision = np.concatenate([each.shares()[1] for each in found])
    order = np.argsort(queries)
    queries, nearest = queries[order], nearest[order]
    similarity = np.einsum("qd,qkd->qk", unit[queries], unit[nearest])
    return Ranking(queries, nearest, similarity, precision[order])


def choose_queries(
    precision: NDArray[np.float64], labels: NDArray[np.int64], *, count: int, seed: int
) -> dict[str, list[int]]:
    """Choose the best, typical and worst of Q queries by average precision, (Q,); typical is near the median.

    Gives places in `precision`, `count` in all or as many as there are. Of equals the seed draws, and none is
    taken twice. A kind holds one query a class, `labels` (Q,), as long as there are classes.
    """
    chance = np.random.default_rng(seed).permutation(len(precision))
    left = np.full(len(precision), True)

    def take(key: NDArray[np.float64], share: int) -> list[int]:
        order = np.lexsort((chance, key))
        order = order[left[order]]
        firsts = np.sort(np.unique(labels[order], return_index=True)[1])  # where in `order` each class begins
        taken = np.concatenate((order[firsts], np.delete(order, firsts)))[:share]
        left[taken] = False
        return [int(place) for place in taken]

    best, worst = take(-precision, (count + 2) // 3), take(precision, (count + 1) // 3)
    typical = take(np.abs(precision - np.median(precision)), count // 3)
    return {"best": best, "typical": typical, "worst": worst}


def project(embeddings: NDArray[np.floating]) -> tuple[NDArray[np.float64], tuple[float, float]]:
    """Project embeddings, float (N, d), N and d at least 2, at unit length, on their principal components.

    Gives points (N, 2), and the share of the variance along each axis; 0 where there is no variance at all.
    """
    unit = unit_rows(embeddings.astype(np.float64))
    if np.ptp(unit, axis=0).max() < 1e-6:  # but for rounding, all are one
        return np.zeros((len(unit), 2)), (0.0, 0.0)
    found = PCA(2, svd_solver="full" if unit.shape[1] > unit.shape[0] else "covariance_eigh").fit(unit)
    first, second = found.explained_variance_ratio_.tolist()
    return found.transform(unit), (first, second)


@torch.no_grad()
def find_assignments(
    rows: Sequence[Row], embedder: Embedder, recipe: Recipe
) -> tuple[tuple[Row, ...], NDArray[np.uint8]]:
    """Give those of `rows` that can still be read, and the dominant prototypes of their places, (N, h, w)."""
    stream = Stream(rows, viewing_decoder(recipe))
    found = [
        embedder.assignments(embedder(embedder.normalise(torch.from_numpy(pixels.copy())[None])).locations)
        for pixels in stream
    ]
    maps = torch.cat(found).numpy() if found else np.empty(0, dtype=np.uint8)
    return tuple(stream.rows), maps.reshape(len(found), *embedder.grid)


def class_histograms(
    histograms: NDArray[np.float32], labels: NDArray[np.int64], count: int
) -> NDArray[np.float64]:
    """Give the mean histogram of each class, (C, m), of histograms (N, m)."""
    sums = np.zeros((count, histograms.shape[1]))
    np.add.at(sums, labels, histograms)
    return sums / np.bincount(labels, minlength=count)[:, None]
