"""Reads the rows of a collection as far as Milvus returns them at once, and ranks what it finds."""

from collections.abc import Iterator, Sequence, Set
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from serving.gallery.item import GalleryItem
from serving.gallery.milvus.expression import among, expression, quoted
from serving.gallery.milvus.rows import ITEM_FIELDS, item_of
from serving.gallery.milvus.server import WINDOW, Server
from serving.gallery.search.filter import Filter

__all__ = ["DIGITS", "PAGE", "Reader", "Row", "as_cosine", "parts"]

Row = dict[str, Any]
"""Some of a row's fields, and of what was searched for its `score`."""
T = TypeVar("T")

PAGE = 256
"""Rows read at once with their vectors and texts: Milvus refuses to send 100 MB."""
_SPARE = 16  # rows looked for beyond the k, for ties
_WIDER = 4  # times as many are looked for where those were not enough
DIGITS = 6  # of a score, by which ties are told: sums differ in the last bits between segments


class Reader:
    """Reads one collection; thread-safe."""

    def __init__(self, server: Server, collection: str) -> None:
        self._server = server
        self._collection = collection

    def count(self, condition: str = "") -> int:
        """Count the rows that fulfil a condition."""
        return self._server.count(self._collection, condition)

    def of_keys(self, keys: Sequence[str], fields: Sequence[str]) -> Iterator[Row]:
        """Yield the rows of those keys that are there."""
        for part in parts(keys, PAGE):  # in order, as what is not in order may lack rows that are overwritten
            yield from islice(self.by_key(among(part), fields, after="", page=PAGE), len({*part}))

    def items(self, keys: Sequence[str]) -> dict[str, GalleryItem]:
        """Return the items of those keys that are there."""
        return {row["key"]: item_of(row) for row in self.of_keys(keys, ITEM_FIELDS)}

    def by_key(self, condition: str, fields: Sequence[str], *, after: str, page: int) -> Iterator[Row]:
        """Yield the rows that fulfil a condition and whose keys follow one, by key, `page` read at once."""
        while rows := self._server.first(
            self._collection, f"({condition}) and key > {quoted(after)}", fields, page
        ):  # a page is short where a segment ends
            yield from rows
            after = rows[-1]["key"]

    def versions(self, condition: str) -> list[tuple[int, str]]:
        """Return version and key of as many rows that fulfil a condition as can be read at once."""
        rows = self._server.rows(self._collection, condition, ["key", "version"], limit=WINDOW)
        return [(row["version"], row["key"]) for row in rows]

    def next_versions(self, condition: str, after: int) -> list[tuple[int, str]]:
        """Return the first versions above one, with their keys, ascending; none where none is left."""
        # Milvus does not sort: where there are more than it returns, the upper half is left out, and so on.
        begun = wanted = f"({condition}) and version > {after}"
        while len(rows := sorted(self.versions(wanted))) == WINDOW:
            wanted = f"{begun} and version <= {rows[WINDOW // 2][0]}"
        return rows

    def near(
        self, queries: NDArray[np.float32], limit: int, condition: str, fields: Sequence[str]
    ) -> list[list[Row]]:
        """Return the `limit` rows nearest to each query (Q, d), best first."""
        found = []
        for some in parts(queries, max(1, WINDOW // limit)):
            found += self._server.nearest(self._collection, some, limit, condition, fields)
        return found

    def best(
        self,
        queries: NDArray[np.float32],
        k: int,
        least: float,
        excluded: Set[str],
        filter: Filter | None,
        *,
        by_label: bool,
        fields: Sequence[str] = ("label", "version"),
    ) -> list[list[Row]]:
        """Return the k best for each query (Q, d), as `Gallery.search` ranks them."""
        condition = "" if filter is None else expression(filter)
        found: list[list[Row]] = [[] for _ in queries]
        left, limit = [*range(len(queries))], k + len(excluded) + _SPARE
        while left:
            limit = min(limit, WINDOW)
            near = self.near(queries[left], limit, condition, fields)
            short = []
            for place, rows in zip(left, near, strict=True):
                found[place] = _ranked(rows, least, excluded, by_label)[:k]
                there_is_more = len(rows) == limit < WINDOW and rows[-1]["score"] >= least
                if there_is_more and len(found[place]) < k:
                    short.append(place)
            left, limit = short, limit * _WIDER
        return found


def as_cosine(score: float) -> float:
    """Return a score within [-1, 1], which vectors of unit length but for rounding may leave."""
    return max(-1.0, min(1.0, score))


def parts(whole: Sequence[T] | NDArray[Any], size: int) -> Iterator[Any]:
    """Yield so many at once."""
    return (whole[start : start + size] for start in range(0, len(whole), size))


def _ranked(rows: list[Row], least: float, excluded: Set[str], by_label: bool) -> list[Row]:
    kept = [row for row in rows if row["score"] >= least and row["key"] not in excluded]
    kept.sort(key=lambda row: (-round(row["score"], DIGITS), row["key"]))
    if not by_label:
        return kept
    first = dict[tuple[str, str], Row]()
    for row in kept:
        first.setdefault((row["label"], "" if row["label"] else row["key"]), row)
    return list(first.values())
