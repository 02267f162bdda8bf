"""Retrieval metrics, exact: R@k, MAP@R and R-precision in one pass over blocks of queries.

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
from training.precision import full_precision

__all__ = ["RetrievalMetrics", "retrieval_metrics"]

Array = Tensor | npt.NDArray[Any]

_BLOCK_BYTES = 256 * 2**20  # for one block of similarities and of what is kept of them
_CHUNK = 64  # columns whose maximum is taken first


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
    search = _Search(queries, gallery, itself=itself)
    deepest = max(at, default=1)
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


class _Search:
    """Exact nearest references, block by block, in one buffer that the blocks share."""

    def __init__(self, queries: Tensor, gallery: Tensor, *, itself: bool) -> None:
        self._itself = itself
        self._size = len(gallery)
        self.references = self._size - int(itself)  # per query
        self._gallery = functional.normalize(gallery, dim=1)
        self._queries = self._gallery if itself else functional.normalize(queries, dim=1)
        self._copies, self._originals = _find_copies(self._gallery)
        self._buffer = queries.new_empty(0)

    def nearest(self, rows: Tensor, depth: int) -> Tensor:
        """Rank the references of the queries `rows`, int64 (b,).

        Returns:
            Indices of the `depth` nearest, nearest first and equals by index, int64 (b, depth).
        """
        similarity = self._similarity(rows)  # (b, width)
        # One more than asked for shows whether the last place is shared.
        values, indices = _top(similarity, min(depth + 1, self.references))
        if values.shape[1] > depth:
            shared = torch.nonzero(values[:, depth - 1] == values[:, depth]).flatten()
            values, indices = values[:, :depth], indices[:, :depth]
            for some in torch.split(shared, _CHUNK):
                values[some], indices[some] = _top_by_index(similarity[some], values[some, -1:], depth)
        return _order(values, indices)

    def _similarity(self, rows: Tensor) -> Tensor:
        """Cosine of queries and references, (b, width); -inf for each self and past the last reference."""
        width = -(-self._size // _CHUNK) * _CHUNK
        if self._buffer.numel() < len(rows) * width:
            self._buffer = self._gallery.new_empty(len(rows) * width)
        similarity = self._buffer[: len(rows) * width].view(len(rows), width)
        real = similarity[:, : self._size]
        torch.mm(self._queries[rows], self._gallery.T, out=real)
        # A product may round a column's last bit by its position: copies must tie exactly.
        if len(self._copies) > 0:
            real[:, self._copies] = real[:, self._originals]
        similarity[:, self._size :] = -torch.inf
        if self._itself:
            similarity[torch.arange(len(rows), device=rows.device), rows] = -torch.inf
        return similarity


def _top(similarity: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Largest values of each row and where they are, in no given order among equals.

    The largest `count` values lie in the `count` chunks of largest maximum, and maxima are fast.
    """
    rows, width = similarity.shape
    chunks = width // _CHUNK
    if count * 4 > chunks:
        return similarity.topk(count, dim=1)
    split = similarity.view(rows, chunks, _CHUNK)
    best = split.amax(dim=2).topk(count, dim=1, sorted=False).indices  # (b, count)
    kept = split.gather(1, best[:, :, None].expand(-1, -1, _CHUNK)).flatten(1)  # (b, count · chunk)
    values, places = kept.topk(count, dim=1)
    indices = best.gather(1, places // _CHUNK) * _CHUNK + places % _CHUNK
    return values, indices


def _top_by_index(similarity: Tensor, last: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Settle a shared last place: all values above `last` (b, 1), then its equals of lowest index."""
    above, equal = similarity > last, similarity == last
    room = count - above.sum(dim=1, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= room))
    indices = kept.nonzero()[:, 1].view(-1, count)
    return similarity.gather(1, indices), indices


def _order(values: Tensor, indices: Tensor) -> Tensor:
    """Sort indices by falling value, equals by index."""
    indices, by_index = indices.sort(dim=1)
    by_value = values.gather(1, by_index).argsort(dim=1, descending=True, stable=True)
    return indices.gather(1, by_value)


def _find_copies(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Find the rows that repeat an earlier one bit by bit.

    Returns:
        Their indices and those of the first row of each value, int64 (c,) both.
    """
    bits = vectors.view(torch.int64 if vectors.dtype == torch.float64 else torch.int32)
    _, group = torch.unique(bits.sum(dim=1, dtype=torch.int64), return_inverse=True)
    places = torch.arange(len(vectors), device=vectors.device)
    first = places.clone().scatter_reduce(0, group, places, "amin", include_self=False)[group]
    copies = torch.nonzero(first != places).flatten()
    # Equal sums need not be equal rows.
    copies = copies[(vectors[copies] == vectors[first[copies]]).all(dim=1)]
    return copies, first[copies]


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
    return vectors, names.to(vectors.device, torch.int64)


def _tensor(array: Array) -> Tensor:
    if isinstance(array, Tensor):
        return array.detach()
    # torch warns of a read-only array and refuses a reversed one; this copies only where it must.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
