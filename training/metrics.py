"""Retrieval metrics, exact: R@k, MAP@R and R-precision, in one pass over what a search finds.

Every image is a query against all others (or against a separate gallery) by cosine similarity. R_q is the
number of references of the query's label; MAP@R = mean over q of 1/R_q · Σ_{j ≤ R_q} precision(j) · match(j).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from serving.errors import BadData, BadSetting
from training.pair_search import PairSearch
from training.precision import full_precision
from training.row_search import CHUNK, RowSearch

__all__ = ["FIGURE_NAMES", "RetrievalMetrics", "retrieval_metrics"]

FIGURE_NAMES = {
    "map_at_r": "MAP@R",
    "r_precision": "R-precision",
    "nmi": "NMI",
    "ami": "AMI",
    "map_c": "MAP_c",
    "map_x": "MAP_x",
}
"""What the figures of an evaluation are called, R@k apart."""

Array = Tensor | npt.NDArray[Any]

_BLOCK_BYTES = 256 * 2**20  # for one block of similarities and of what is kept of them
_KEPT_BYTES = 128 * 2**20  # for the neighbours of a whole set, where it is searched in pairs


@dataclass(frozen=True, slots=True)
class RetrievalMetrics:
    """What a retrieval measured; shares are in [0, 1].

    Attributes:
        recall_at: R@k: share of queries with a match among the k nearest, by k.
        map_at_r: MAP@R.
        r_precision: Share of matches among the R_q nearest, mean over queries.
        queries: Queries measured.
        excluded: Queries left out because no reference has their label.
    """

    recall_at: dict[int, float]
    map_at_r: float
    r_precision: float
    queries: int
    excluded: int


@torch.no_grad()
@full_precision
def retrieval_metrics(
    embeddings: Array,
    labels: Array,
    *,
    at: Sequence[int] = (1, 2, 4, 8),
    block: int = 1024,
    gallery_embeddings: Array | None = None,
    gallery_labels: Array | None = None,
) -> RetrievalMetrics:
    """Measure retrieval by exact search.

    Without a gallery each image is searched among all others: it is removed by its index, so that a copy of
    it still counts. Products are float32 (float64 for float64 embeddings), sums float64. References of equal
    similarity rank by index, and references with equal vectors always have equal similarity.

    Args:
        embeddings: Queries, float (N, d), of any norm.
        labels: Integer (N,).
        at: The k of R@k, each at least one; a k beyond the references counts them all.
        block: Most queries at a time; fewer where a block would take more than 256 MiB.
        gallery_embeddings: References, float (G, d); the queries themselves when None.
        gallery_labels: Integer (G,); given with `gallery_embeddings`.

    Returns:
        R@k, MAP@R and R-precision over the queries that have a match at all.

    Raises:
        BadSetting: When a k or `block` is below one.
        BadData: When an embedding is not finite, or no query has a match.
        ValueError: When shapes or dtypes do not fit.
    """
    if block < 1 or any(k < 1 for k in at):
        raise BadSetting(f"at is {tuple(at)} and block is {block}, but each must be at least 1")
    queries, query_labels = _vectors(embeddings, labels)
    itself = gallery_embeddings is None
    if gallery_embeddings is None or gallery_labels is None:
        if (gallery_embeddings is None) != (gallery_labels is None):
            raise ValueError("gallery_embeddings and gallery_labels go together, but only one was given")
        gallery, reference_labels = queries, query_labels
    else:
        gallery, reference_labels = _vectors(gallery_embeddings, gallery_labels)
    if gallery.shape[1] != queries.shape[1]:
        raise ValueError(f"queries have {queries.shape[1]} dimensions, the gallery has {gallery.shape[1]}")

    matches = _count_matches(query_labels, reference_labels) - int(itself)  # R_q, int64 (N,)
    measured = torch.nonzero(matches > 0).flatten()
    if len(measured) == 0:
        raise BadData(
            f"none of the {len(queries)} queries has a reference of its label:"
            f" give at least two images of one class"
        )
    # Queries of alike R share a block, since a block ranks down to its largest R.
    measured = measured[matches[measured].argsort(stable=True)]
    deepest = max(at, default=1)
    search = _open_search(queries, None if itself else gallery, max(deepest, int(matches[measured[-1]])))
    hits = dict.fromkeys(at, 0)
    precision_sum = torch.zeros((), dtype=torch.float64, device=queries.device)
    average_sum = torch.zeros_like(precision_sum)
    for rows in _blocks(
        measured, matches, width=len(gallery), itemsize=gallery.itemsize, least=deepest, block=block
    ):
        wanted = matches[rows]
        depth = min(max(int(wanted.max()), deepest), search.references)
        found = reference_labels[search.nearest(rows, depth)] == query_labels[rows, None]  # bool (b, depth)
        for k in hits:
            hits[k] += int(found[:, :k].any(dim=1).sum())
        found = found[:, : int(wanted.max())]
        ranks = torch.arange(1, found.shape[1] + 1, device=rows.device)
        found &= ranks <= wanted[:, None]
        precision_at = found.cumsum(dim=1).double() / ranks  # (b, R)
        precision_sum += (found.sum(dim=1).double() / wanted).sum()
        average_sum += ((precision_at * found).sum(dim=1) / wanted).sum()
    total = len(measured)
    return RetrievalMetrics(
        recall_at={k: count / total for k, count in hits.items()},
        map_at_r=float(average_sum) / total,
        r_precision=float(precision_sum) / total,
        queries=total,
        excluded=len(queries) - total,
    )


def _open_search(queries: Tensor, gallery: Tensor | None, depth: int) -> PairSearch | RowSearch:
    """Choose the search: in pairs where a set is searched in itself for few neighbours, which is faster."""
    queries = functional.normalize(queries, dim=1)
    if gallery is not None:
        return RowSearch(queries, functional.normalize(gallery, dim=1))
    count = len(queries)
    kept = count * depth * (queries.itemsize + 4)
    if depth * CHUNK <= count and kept <= _KEPT_BYTES:
        return PairSearch(queries, depth=depth)
    return RowSearch(queries)


def _count_matches(query_labels: Tensor, reference_labels: Tensor) -> Tensor:
    """Count the references of each query's label, int64 (N,)."""
    _, numbers = torch.unique(torch.cat((query_labels, reference_labels)), return_inverse=True)
    counts = torch.bincount(numbers[len(query_labels) :], minlength=len(numbers))
    return counts[numbers[: len(query_labels)]]


def _blocks(
    measured: Tensor, matches: Tensor, *, width: int, itemsize: int, least: int, block: int
) -> Iterator[Tensor]:
    """Cut queries, sorted by R, into blocks of bounded memory."""
    start = 0
    while start < len(measured):
        widest = int(matches[measured[min(start + block, len(measured)) - 1]])
        # A ranked place costs its value, its index, their sorted copies and its precision: about 64 bytes.
        room = _BLOCK_BYTES // (itemsize * width + 64 * min(max(widest, least), width))
        rows = measured[start : start + max(1, min(block, room))]
        start += len(rows)
        yield rows


def _vectors(embeddings: Array, labels: Array) -> tuple[Tensor, Tensor]:
    """Check one set; embeddings as float32 or float64 (N, d), labels as int64 (N,) on the same device."""
    vectors, names = _tensor(embeddings), _tensor(labels)
    if vectors.ndim != 2 or names.ndim != 1 or len(vectors) != len(names):
        raise ValueError(
            f"embeddings (N, d) and labels (N,) must share N, but their shapes are"
            f" {tuple(vectors.shape)} and {tuple(names.shape)}"
        )
    if not vectors.is_floating_point() or names.is_floating_point():
        raise ValueError(
            f"embeddings must be floats and labels integers, but they are {vectors.dtype} and {names.dtype}"
        )
    if vectors.dtype != torch.float64:
        vectors = vectors.float()
    finite = vectors.isfinite().all(dim=1)
    if not finite.all():
        raise BadData(
            f"{int((~finite).sum())} of {len(vectors)} embeddings are not finite:"
            f" the model has diverged, so train it again with a lower learning rate"
        )
    # squares of extreme components would overflow or vanish
    largest = torch.linalg.vector_norm(vectors, ord=float("inf"), dim=1)
    extreme = (largest > 1e9) | ((largest < 1e-6) & (largest > 0))
    if extreme.any():
        vectors = vectors.clone()
        vectors[extreme] /= largest[extreme, None]
    return vectors, names.to(vectors.device, torch.int64)


def _tensor(array: Array) -> Tensor:
    if isinstance(array, Tensor):
        return array.detach()
    # torch warns of a read-only array and refuses a reversed one; this copies only where it must.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
