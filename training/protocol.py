"""Who is searched among whom: each image among all others, or the queries of a data set in its gallery."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.catalog import Row, SplitRule
from serving.errors import BadData
from training.metrics import retrieval_metrics

__all__ = ["measure_retrieval", "roles_of"]


def measure_retrieval(
    embeddings: npt.ArrayLike,
    labels: npt.NDArray[np.int64],
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
    embeddings = np.asarray(embeddings)
    gallery, gallery_labels = None, None
    if roles is not None and "query" in roles:
        role = np.array(roles)
        asked, kept = np.flatnonzero(role == "query"), np.flatnonzero(role == "gallery")
        if len(kept) == 0:
            raise BadData(
                f"{len(asked)} images are queries and none is of a gallery: name gallery images too, or no"
                " queries, so that every image is searched among all others"
            )
        gallery, gallery_labels = embeddings[kept], labels[kept]
        embeddings, labels = embeddings[asked], labels[asked]
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
