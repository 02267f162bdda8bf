"""Retrieval metrics, exact: R@k, MAP@R and R-precision, in one pass over what a search finds; NMI and AMI.

Every image is a query against all others, or the queries of a data set are searched in its gallery, by cosine
similarity. R_q is how many references have the label of q; MAP@R = mean over q of 1/R_q · Σ_{j ≤ R_q}
precision(j) · match(j). Torch searches where it is installed, which is faster, and numpy elsewhere.
"""

import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from serving.catalog.catalog import Row, SplitRule
from serving.errors import BadData, BadSetting

__all__ = [
    "FIGURE_NAMES", "Floats", "Ints", "ProtocolName", "RetrievalMetrics", "cluster_figures", "exact_search",
    "find_originals", "groups_of", "k_means", "named_shares", "rank_queries", "retrieval_metrics", "roles_of",
    "sides_of", "unit_rows",
]  # fmt: skip

FIGURE_NAMES = {
    "map_at_r": "MAP@R", "r_precision": "R-precision", "nmi": "NMI", "ami": "AMI", "map_c": "MAP_c",
    "map_x": "MAP_x",
}  # fmt: skip
"""What the figures of an evaluation are called, R@k apart."""

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]
ProtocolName = Literal["auto", "leave-one-out", "query-gallery"]

_BLOCK = 1024  # most queries at a time; fewer where a block would take more than these bytes
_BLOCK_BYTES = 256 * 2**20  # for one block of similarities and of what is kept of them
_NUMPY_BYTES = 32 * 2**20  # of the similarities that numpy ranks at a time


@dataclass(frozen=True, slots=True)
class RetrievalMetrics:
    """What a retrieval measured; shares are in [0, 1]."""

    recall_at: dict[int, float]  # by k: share of queries with a match among the k nearest
    map_at_r: float
    r_precision: float  # share of matches among the R_q nearest, mean over queries
    queries: int
    excluded: int  # queries left out because no reference has their label
    gallery: int  # images that queries were searched in; 0 where each was searched among all others

    def told(self) -> dict[str, Any]:
        """Give all of it as JSON has it, with the k of `recall_at` as text."""
        return dataclasses.asdict(self) | {"recall_at": {str(k): s for k, s in self.recall_at.items()}}


@dataclass(frozen=True, slots=True)
class Ranked:
    """What b queries found."""

    queries: Ints  # which rows ask, (b,)
    places: Ints  # rows found, nearest first and equals by their number, -1 past the last, (b, depth)
    matches: npt.NDArray[np.bool_]  # which of them are of the query's label, (b, depth)
    wanted: Ints  # R_q, how many references are of its label, (b,)

    def shares(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Give R-precision and AP@R of each query, (b,) both."""
        ranks = np.arange(1, int(self.wanted.max()) + 1)
        matches = self.matches[:, : len(ranks)] & (ranks[: self.matches.shape[1]] <= self.wanted[:, None])
        precision_at = matches.cumsum(axis=1, dtype=np.int32) / ranks[: matches.shape[1]]  # float64 (b, R)
        average = (precision_at * matches).sum(axis=1) / self.wanted
        return matches.sum(axis=1) / self.wanted, average


def retrieval_metrics(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike,
    *,
    roles: Sequence[str] | None = None,
    groups: Ints | None = None,
    at: Sequence[int] = (1, 2, 4, 8),
) -> RetrievalMetrics:
    """Measure retrieval by exact search, over the queries that have a match at all.

    Takes embeddings, float (N, d), of any norm, and labels, integer (N,). Where any of the `roles` (N,) is
    "query", those are searched in the rows that are "gallery", and all others are left out; else each row is
    searched among all others. References of a query's own group, of `groups` (N,), are none of its
    references. A k of R@k, at least one each, counts all references where it is beyond them.
    A `BadData` if an embedding is not finite, no query has a match, or there are queries and no gallery.
    """
    hits = dict.fromkeys(at, 0)
    total, sums = 0, np.zeros(2)
    for ranked in rank_queries(embeddings, labels, depth=max(at, default=1), roles=roles, groups=groups):
        for k in hits:
            hits[k] += int(ranked.matches[:, :k].any(axis=1).sum())
        sums += [each.sum() for each in ranked.shares()]
        total += len(ranked.queries)
    asked, held = sides_of(roles, len(np.asarray(labels)))
    return RetrievalMetrics(
        recall_at={k: count / total for k, count in hits.items()},
        map_at_r=float(sums[1] / total),
        r_precision=float(sums[0] / total),
        queries=total,
        excluded=len(asked) - total,
        gallery=0 if held is None else len(held),
    )


def rank_queries(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike,
    *,
    depth: int,
    roles: Sequence[str] | None = None,
    groups: Ints | None = None,
) -> Iterator[Ranked]:
    """Rank the references of each query that has a match, down to `depth` or its R_q, blocks by rising R_q.

    Where each image is searched among all others, it is removed by its index, so that a copy of it still
    counts. Products are float32 (float64 for float64 embeddings), sums float64. References of equal
    similarity rank by index, and references with equal vectors always have equal similarity.

    The other arguments and the errors are those of `retrieval_metrics`.
    """
    vectors, names = _vectors(embeddings, labels)
    asked, held = sides_of(roles, len(names))
    itself = held is None
    held = asked if held is None else held
    wanted = _count_alike(names, asked, held)  # R_q, int64 (Q,)
    if groups is not None:
        wanted -= _count_alike(np.stack((names, groups), axis=1), asked, held)
    elif itself:
        wanted -= 1
    measured = np.flatnonzero(wanted > 0)
    if len(measured) == 0:
        raise BadData(
            f"none of the {len(asked)} queries has a reference of its label"
            f"{'' if groups is None else ' outside its own group'}: give at least two images of one class"
        )
    # Queries of alike R share a block, since a block ranks down to its largest R.
    measured = measured[wanted[measured].argsort(kind="stable")]
    deepest = max(depth, int(wanted[measured[-1]]))
    nearest = _open_search(vectors, asked, None if itself else held, deepest, groups)
    start = 0
    while start < len(measured):
        widest = max(depth, int(wanted[measured[min(start + _BLOCK, len(measured)) - 1]]))
        # A ranked place costs its value, its index, their sorted copies and its precision: about 64 bytes.
        room = _BLOCK_BYTES // (vectors.itemsize * len(held) + 64 * min(widest, len(held)))
        some = measured[start : start + max(1, min(_BLOCK, room))]
        start += len(some)
        found = nearest(some, min(max(depth, int(wanted[some].max())), len(held) - int(itself)))
        rows, places = asked[some], np.where(found < 0, -1, held[found])
        yield Ranked(rows, places, (names[places] == names[rows, None]) & (places >= 0), wanted[some])


def cluster_figures(embeddings: npt.ArrayLike, labels: Ints, *, seed: int = 0) -> dict[str, float]:
    """Cluster embeddings, finite (N, d), at unit length by Lloyd's k-means, as many clusters as classes.

    Gives `nmi`, the mutual information I of clusters and classes over the mean of both entropies H, and
    `ami`, (I − E) / (H − E) with E the I that two partitions of these sizes have by chance.
    """
    from sklearn import metrics  # only here: a model file is measured without

    rows = unit_rows(np.asarray(embeddings, dtype=np.float32))
    found = k_means(rows, len(np.unique(labels)), rounds=100, seed=seed).labels_
    return {
        "nmi": float(metrics.normalized_mutual_info_score(labels, found)),
        "ami": float(metrics.adjusted_mutual_info_score(labels, found)),
    }


def k_means(rows: Floats, clusters: int, *, rounds: int, seed: int) -> Any:
    """Fit sklearn's k-means to rows (N, d); fewer distinct ones leave clusters empty, without a warning."""
    from sklearn.cluster import KMeans  # a second of importing that few need
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return KMeans(clusters, n_init=1, max_iter=rounds, random_state=seed).fit(rows)


def exact_search(
    queries: Floats, gallery: Floats, groups: Ints, gallery_groups: Ints
) -> Callable[[Ints, int], Ints]:
    """Search unit rows (N, d) in unit rows (G, d) by numpy alone, but for those of a query's own group.

    What it gives takes queries (b,), and ranks (b, depth) of their references, at most G: the nearest are
    first and equals by index; -1 stands past a query's last reference.
    """
    # A product may round equal columns differently by their places: each is multiplied once.
    firsts, columns = np.unique(find_originals(gallery), return_inverse=True)
    distinct = gallery[firsts]

    def rank(rows: Ints, depth: int) -> Ints:
        scores = (queries[rows] @ distinct.T)[:, columns]  # (b, G)
        scores[groups[rows, None] == gallery_groups] = -np.inf
        last = -np.partition(-scores, depth - 1, axis=1)[:, depth - 1, None]
        above, equal = scores > last, scores == last
        room = depth - above.sum(axis=1, keepdims=True)  # for the first of the equals
        kept = np.nonzero(above | (equal & (equal.cumsum(axis=1, dtype=np.int32) <= room)))[1]
        indices = kept.reshape(len(rows), depth)
        values = np.take_along_axis(scores, indices, axis=1)
        order = np.argsort(-values, axis=1, kind="stable")
        return np.take_along_axis(np.where(np.isneginf(values), -1, indices), order, axis=1)

    def nearest(rows: Ints, depth: int) -> Ints:
        room = max(1, _NUMPY_BYTES // (len(columns) * queries.itemsize))
        parts = [rank(rows[start : start + room], depth) for start in range(0, len(rows), room)]
        return np.concatenate(parts) if parts else np.empty((0, depth), dtype=np.int64)

    return nearest


def named_shares(figures: Mapping[str, Any]) -> dict[str, float]:
    """Give the shares among some figures by what they are called."""
    recalls = {f"R@{k}": share for k, share in figures.get("recall_at", {}).items()}
    return recalls | {name: figures[key] for key, name in FIGURE_NAMES.items() if key in figures}


def unit_rows(vectors: Floats) -> Floats:
    """Scale each row, float (N, d), to length one; a row of zeros stays."""
    lengths: Floats = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    unit: Floats = vectors / np.maximum(lengths, 1e-12, dtype=vectors.dtype)
    return unit


def find_originals(vectors: Floats) -> Ints:
    """Give the first row that each row (N, d) repeats bit by bit, its own number where it repeats none."""
    firsts = dict[bytes, int]()
    bits = (hashlib.blake2b(row, digest_size=16).digest() for row in vectors)
    return np.array([firsts.setdefault(own, place) for place, own in enumerate(bits)], dtype=np.int64)


def _open_search(
    vectors: Floats, asked: Ints, held: Ints | None, depth: int, groups: Ints | None
) -> Callable[[Ints, int], Ints]:
    """Choose who searches: torch where it is installed, numpy where it is not or where groups are out."""
    unit = unit_rows(vectors)
    queries, gallery = (unit, None) if held is None else (unit[asked], unit[held])
    if groups is None:
        try:
            from training.evaluation.tensor_search import open_search
        except ModuleNotFoundError:
            groups = np.arange(len(unit))  # each image is alone in its group
        else:
            return open_search(queries, gallery, depth)
    if gallery is None or held is None:
        gallery, held = queries, asked
    return exact_search(queries, gallery, groups[asked], groups[held])


def _count_alike(names: Ints, asked: Ints, held: Ints) -> Ints:
    """Count the held rows that have the name, or row of names, of each asked one, int64 (Q,)."""
    numbers = np.unique(names, axis=0, return_inverse=True)[1].reshape(-1)  # of another shape in numpy 2.0
    return np.bincount(numbers[held], minlength=len(numbers))[numbers[asked]]


def _vectors(embeddings: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[Floats, Ints]:
    """Check one set; embeddings as float32 or float64 (N, d), labels as int64 (N,)."""
    vectors, names = np.asarray(embeddings), np.asarray(labels)
    numbers = vectors.dtype.kind == "f" and names.dtype.kind in "iu"
    if vectors.ndim != 2 or names.shape != vectors.shape[:1] or not numbers:
        raise ValueError(
            "embeddings must be floats (N, d) and labels integers (N,), but they are"
            f" {vectors.dtype} {vectors.shape} and {names.dtype} {names.shape}"
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


def sides_of(roles: Sequence[str] | None, count: int) -> tuple[Ints, Ints | None]:
    """Give the rows that ask and those that are searched, None where each is searched among all others."""
    if roles is None or "query" not in roles:
        return np.arange(count), None
    role = np.array(roles)
    asked, held = np.flatnonzero(role == "query"), np.flatnonzero(role == "gallery")
    if len(held) == 0:
        raise BadData(
            f"{len(asked)} images are queries and none is of a gallery: name gallery images too, or no"
            " queries, so that every image is searched among all others"
        )
    return asked, held


def roles_of(
    rows: Sequence[Row], split: str, rule: SplitRule, *, protocol: ProtocolName = "auto"
) -> list[str] | None:
    """Give the roles of rows, one side of a data set that a rule cut, for `retrieval_metrics`.

    `auto` is as the data set has it, where its own test is measured; `query-gallery` is that wherever the
    rows come from, so that none that the data set calls train is searched; a `BadData` without either side.
    """
    if protocol == "leave-one-out" or (protocol == "auto" and (split != "test" or rule.by != "given")):
        return None
    roles = [row.split for row in rows]
    for side in ("query", "gallery") if protocol == "query-gallery" else ():
        if side not in roles:
            raise BadData(
                f"the protocol query-gallery needs queries and a gallery, but the data set calls none of the"
                f" {len(rows)} images of the split {split} {side}: name them so, or take the protocol"
                " leave-one-out"
            )
    return roles


def groups_of(rows: Sequence[Row], field: str | None) -> Ints | None:
    """Number images by what a field of their metadata says, (N,); one without it is a group by itself."""
    if field is None:
        return None
    known = {name for row in rows for name in row.metadata}
    if field not in known:
        there = f"there are {', '.join(sorted(known))}" if known else "they have no metadata"
        if near := get_close_matches(field, known, 1):
            there = f"did you mean {near[0]!r}?"
        raise BadSetting(f"none of the {len(rows)} images has the field {field!r}: {there}")
    numbers = dict[object, int]()
    values = [(row.metadata[field],) if field in row.metadata else row.key for row in rows]
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
