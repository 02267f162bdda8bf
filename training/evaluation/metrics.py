"""Retrieval metrics, exact: R@k, MAP@R and R-precision, in one pass over what a search finds.

Every image is a query against all others (or against a separate gallery) by cosine similarity. R_q is the
number of references of the query's label; MAP@R = mean over q of 1/R_q · Σ_{j ≤ R_q} precision(j) · match(j).
Torch searches where it is installed, which is faster, and numpy elsewhere.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.errors import BadData, BadSetting
from training.evaluation.exact_search import ExactSearch, unit_rows

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

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]

_BLOCK_BYTES = 256 * 2**20  # for one block of similarities and of what is kept of them


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


def retrieval_metrics(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike,
    *,
    at: Sequence[int] = (1, 2, 4, 8),
    block: int = 1024,
    gallery_embeddings: npt.ArrayLike | None = None,
    gallery_labels: npt.ArrayLike | None = None,
    groups: Ints | None = None,
    gallery_groups: Ints | None = None,
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
        groups: Of each query, (N,): references of its own group are none of its references. Without a gallery
            an image is always in its own group, and so is never found by itself.
        gallery_groups: Of each reference, (G,); given with `groups` and a gallery.

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
        gallery, reference_labels, gallery_groups = queries, query_labels, groups
    else:
        gallery, reference_labels = _vectors(gallery_embeddings, gallery_labels)
    if gallery.shape[1] != queries.shape[1]:
        raise ValueError(f"queries have {queries.shape[1]} dimensions, the gallery has {gallery.shape[1]}")

    matches = _count_alike(query_labels, reference_labels)  # R_q, int64 (N,)
    if groups is not None and gallery_groups is not None:
        asked, held = np.stack((query_labels, groups), 1), np.stack((reference_labels, gallery_groups), 1)
        matches -= _count_alike(asked, held)
    elif itself:
        matches -= 1
    measured = np.flatnonzero(matches > 0)
    if len(measured) == 0:
        raise BadData(
            f"none of the {len(queries)} queries has a reference of its label"
            f"{'' if groups is None else ' outside its own group'}: give at least two images of one class"
        )
    # Queries of alike R share a block, since a block ranks down to its largest R.
    measured = measured[matches[measured].argsort(kind="stable")]
    deepest = max(at, default=1)
    nearest = _open_search(
        queries,
        None if itself else gallery,
        max(deepest, int(matches[measured[-1]])),
        groups=groups,
        gallery_groups=gallery_groups,
    )
    hits = dict.fromkeys(at, 0)
    precision_sum = average_sum = 0.0
    for rows in _blocks(
        measured, matches, width=len(gallery), itemsize=gallery.itemsize, least=deepest, block=block
    ):
        wanted = matches[rows]
        depth = min(max(int(wanted.max()), deepest), len(gallery) - int(itself))
        places = nearest(rows, depth)  # (b, depth)
        found = (reference_labels[places] == query_labels[rows, None]) & (places >= 0)
        for k in hits:
            hits[k] += int(found[:, :k].any(axis=1).sum())
        found = found[:, : int(wanted.max())]
        ranks = np.arange(1, found.shape[1] + 1)
        found &= ranks <= wanted[:, None]
        precision_at = found.cumsum(axis=1, dtype=np.int32) / ranks  # float64 (b, R)
        precision_sum += float((found.sum(axis=1) / wanted).sum())
        average_sum += float(((precision_at * found).sum(axis=1) / wanted).sum())
    total = len(measured)
    return RetrievalMetrics(
        recall_at={k: count / total for k, count in hits.items()},
        map_at_r=average_sum / total,
        r_precision=precision_sum / total,
        queries=total,
        excluded=len(queries) - total,
    )


def _open_search(
    queries: Floats, gallery: Floats | None, depth: int, *, groups: Ints | None, gallery_groups: Ints | None
) -> Callable[[Ints, int], Ints]:
    """Choose who searches: torch where it is installed, numpy where it is not or where groups are out."""
    queries = unit_rows(queries)
    gallery = None if gallery is None else unit_rows(gallery)
    if groups is None:
        try:
            from training.evaluation.tensor_search import open_search
        except ModuleNotFoundError:
            groups = np.arange(len(queries))
            gallery_groups = groups if gallery is None else np.full(len(gallery), -1)
        else:
            return open_search(queries, gallery, depth)
    gallery = queries if gallery is None else gallery
    return ExactSearch(queries, gallery, groups, groups if gallery_groups is None else gallery_groups).nearest


def _count_alike(asked: Ints, held: Ints) -> Ints:
    """Count the held numbers, or rows of them, that are each of the asked ones, int64 (N,)."""
    _, numbers = np.unique(np.concatenate((asked, held)), axis=0, return_inverse=True)
    numbers = numbers.reshape(-1)  # of another shape in numpy 2.0
    return np.bincount(numbers[len(asked) :], minlength=len(numbers))[numbers[: len(asked)]]


def _blocks(
    measured: Ints, matches: Ints, *, width: int, itemsize: int, least: int, block: int
) -> Iterator[Ints]:
    """Cut queries, sorted by R, into blocks of bounded memory."""
    start = 0
    while start < len(measured):
        widest = int(matches[measured[min(start + block, len(measured)) - 1]])
        # A ranked place costs its value, its index, their sorted copies and its precision: about 64 bytes.
        room = _BLOCK_BYTES // (itemsize * width + 64 * min(max(widest, least), width))
        rows = measured[start : start + max(1, min(block, room))]
        start += len(rows)
        yield rows


def _vectors(embeddings: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[Floats, Ints]:
    """Check one set; embeddings as float32 or float64 (N, d), labels as int64 (N,)."""
    vectors, names = np.asarray(embeddings), np.asarray(labels)
    if vectors.ndim != 2 or names.ndim != 1 or len(vectors) != len(names):
        raise ValueError(
            f"embeddings (N, d) and labels (N,) must share N, but their shapes are"
            f" {vectors.shape} and {names.shape}"
        )
    if vectors.dtype.kind != "f" or names.dtype.kind not in "iu":
        raise ValueError(
            f"embeddings must be floats and labels integers, but they are {vectors.dtype} and {names.dtype}"
        )
    vectors = np.ascontiguousarray(vectors, dtype=np.float64 if vectors.dtype == np.float64 else np.float32)
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise BadData(
            f"{int((~finite).sum())} of {len(vectors)} embeddings are not finite:"
            f" the model has diverged, so train it again with a lower learning rate"
        )
    # squares of extreme components would overflow or vanish
    largest = np.abs(vectors).max(axis=1, initial=0)
    extreme = (largest > 1e9) | ((largest < 1e-6) & (largest > 0))
    if extreme.any():
        vectors = vectors.copy()
        vectors[extreme] /= largest[extreme, None]
    return vectors, names.astype(np.int64)
