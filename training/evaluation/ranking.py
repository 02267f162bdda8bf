"""What each query finds: its nearest references and its average precision, query by query."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from training.method.precision import full_precision

__all__ = ["Ranking", "choose_queries", "rank"]

_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Ranking:
    """The queries that have a match at all, Q of them."""

    queries: NDArray[np.int64]
    """Which rows ask, (Q,)."""
    nearest: NDArray[np.int64]
    """Which rows are found, nearest first and equals by their number, (Q, k)."""
    similarity: NDArray[np.float32]
    """Their cosine with the query, (Q, k)."""
    precision: NDArray[np.float64]
    """Average precision down to rank R, (Q,): MAP@R is its mean."""


@torch.no_grad()
@full_precision
def rank(
    embeddings: Tensor, labels: NDArray[np.int64], roles: NDArray[np.str_], *, neighbours: int
) -> Ranking:
    """Search each query among all other rows, or, where any row is a query, in the gallery alone.

    Args:
        embeddings: Float (N, d), of any length, finite.
        labels: (N,).
        roles: `query`, `gallery` or anything else of each row, (N,).
        neighbours: How many of the nearest are told; fewer where there are fewer.

    Returns:
        AP@R of a query with R references of its label:
        1/R · sum over ranks j <= R of match(j) · (matches among the j nearest) / j.
    """
    apart = bool((roles == "query").any())
    asking = np.flatnonzero(roles == "query") if apart else np.arange(len(labels))
    held = np.flatnonzero(roles == "gallery") if apart else np.arange(len(labels))
    unit = functional.normalize(embeddings.float(), dim=1)
    classes = torch.from_numpy(labels)
    references, reference_labels = unit[held], classes[held]
    wanted = np.array([(labels[held] == label).sum() for label in np.unique(labels)], dtype=np.int64)
    matches = wanted[np.unique(labels, return_inverse=True)[1]][asking] - int(not apart)  # R, (N,)
    asking, matches = asking[matches > 0], matches[matches > 0]
    count = min(neighbours, len(held) - int(not apart))
    nearest, similarity, precision = [], [], []
    block = max(1, _BLOCK_BYTES // (32 * max(1, len(held))))  # similarities, their order, its copies
    for start in range(0, len(asking), block):
        rows = asking[start : start + block]
        scores = unit[rows] @ references.T  # (b, G)
        if not apart:
            scores[torch.arange(len(rows)), torch.from_numpy(rows)] = -torch.inf
        values, order = scores.sort(dim=1, descending=True, stable=True)
        depth = torch.from_numpy(matches[start : start + block])[:, None]  # R, (b, 1)
        places = torch.arange(1, order.shape[1] + 1)
        found = (reference_labels[order] == classes[rows][:, None]) & (places <= depth)
        shares = found.cumsum(dim=1).double() / places
        precision.append(((shares * found).sum(dim=1) / depth[:, 0]).numpy())
        nearest.append(held[order[:, :count].numpy()])
        similarity.append(values[:, :count].numpy())
    empty = np.empty((0, count))
    return Ranking(
        asking,
        np.concatenate(nearest) if nearest else empty.astype(np.int64),
        np.concatenate(similarity) if similarity else empty.astype(np.float32),
        np.concatenate(precision) if precision else np.empty(0),
    )


def choose_queries(
    precision: NDArray[np.float64], labels: NDArray[np.int64], *, count: int, seed: int
) -> dict[str, list[int]]:
    """Choose the best, typical and worst queries by average precision; typical is nearest to the median.

    Of equals the seed draws, and none is taken twice. A kind holds one query a class, as long as there are
    classes.

    Args:
        precision: Of Q queries, (Q,).
        labels: Their classes, (Q,).
        count: How many in all; as many as there are at the most.
        seed: Of the draw.

    Returns:
        Places in `precision`, by `best`, `typical` and `worst`.
    """
    chance = np.random.default_rng(seed).permutation(len(precision))
    middle = np.abs(precision - np.median(precision)) if len(precision) else precision
    taken, chosen = set[int](), dict[str, list[int]]()
    for kind, key, share in (
        ("best", -precision, (count + 2) // 3),
        ("worst", precision, (count + 1) // 3),
        ("typical", middle, count // 3),
    ):
        order = np.array([place for place in np.lexsort((chance, key)) if place not in taken], dtype=np.int64)
        firsts = np.sort(np.unique(labels[order], return_index=True)[1])  # where in `order` each class begins
        ordered = [*order[firsts], *np.delete(order, firsts)]
        chosen[kind] = [int(place) for place in ordered[:share]]
        taken |= set(chosen[kind])
    return {kind: chosen[kind] for kind in ("best", "typical", "worst")}
