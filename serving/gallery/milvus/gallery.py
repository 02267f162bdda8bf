"""A gallery in a collection of a Milvus server."""

import builtins
import json
import math
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from serving.errors import Unsupported
from serving.gallery.index.builder import Advance
from serving.gallery.item import (
    MAX_K,
    CheckedItem,
    GalleryItem,
    ItemChange,
    Neighbour,
    Source,
    change_items,
    check_cosine,
    check_fields,
    check_items,
    check_keys,
    check_model,
    check_origin,
    check_unpictured,
    check_whole,
    in_order,
    normalize_queries,
    with_source_of,
)
from serving.gallery.milvus.differences import MOST_COUNTED
from serving.gallery.milvus.duplicates import duplicates, duplicates_page
from serving.gallery.milvus.expression import ALWAYS, among, expression, having, quoted
from serving.gallery.milvus.meta import FORMAT, alias_of, previous_of
from serving.gallery.milvus.reader import PAGE, Reader, Row, as_cosine, parts
from serving.gallery.milvus.rows import ITEM_FIELDS, LOTS, TEXT_FIELDS, in_parts, item_of, row_of
from serving.gallery.milvus.server import WINDOW, Gone, Server
from serving.gallery.search.columns import KINDS, Columns
from serving.gallery.search.counts import FieldCount, ValueCount, count_fields, count_values
from serving.gallery.search.duplicates import Duplicate, DuplicatesPage
from serving.gallery.search.filter import LABEL, AllOf, Filter, check_filter, check_kinds, unknown_fields
from serving.gallery.search.others import SAME_SCORE, others_than
from serving.gallery.status import GalleryStatus
from serving.gallery.store.schema import Meta

if TYPE_CHECKING:
    from serving.gallery.vectors import Maker
    from serving.model.spec import ModelSpec

__all__ = ["MilvusGallery"]

_LIGHT_PAGE = 1_024  # rows read at once with their label and metadata
_MOST_DRAWN = WINDOW // 4  # of a sample


class MilvusGallery:
    """A gallery on a Milvus server: what `Gallery` is on a disk, but for what `DIFFERENCES` tells.

    Its methods are those of `Gallery`, where more is told; any may raise Unavailable, DeadlineExceeded,
    Overloaded, Unauthenticated or PermissionDenied, and NotFound where its collection is gone.
    """

    def __init__(self, server: Server, name: str, collection: str, meta: Meta) -> None:
        """Use `MilvusDirectory`."""
        self.name = name
        self.path = f"{server.address}/{name}"
        self.meta = meta
        self.collection = collection
        self._server, self._reader = server, Reader(server, collection)
        self._seen = set[str]()  # fields, and kinds in them, that some item has had

    def info(self) -> GalleryStatus:
        """Return what the gallery is and how it stands."""
        meta, items = self.meta, self.count()
        return GalleryStatus(
            name=self.name, path=self.path, model_name=meta.model_name, fingerprint=meta.fingerprint,
            dimension=meta.dimension, items=items, fresh=0, deleted=0, index_type="HNSW", wanted_index="auto",
            recall=0.0, wanted_recall=0.0, latency_ms=0.0, parameters={}, trials=(),
            note="Milvus builds the index, and its recall is not measured", index_items=items, index_bytes=0,
            store_bytes=0, generation=0, previous_name=self._previous_name(), format_version=FORMAT,
            created=meta.created,
        )  # fmt: skip

    def check_model(self, model: "ModelSpec | Maker") -> None:
        """Accept the gallery's own model, and a file of lower precision made from it; else ModelMismatch."""
        check_model(self.meta, model, self.name)

    def search(
        self,
        vectors: ArrayLike,
        k: int,
        *,
        minimum_score: float | None = None,
        exclude: Sequence[str] = (),
        filter: Filter | None = None,
        group_by_label: bool = False,
        exclude_same: str = "",
        exclude_same_above: float = SAME_SCORE,
        query_keys: Sequence[str] = (),
        with_vectors: bool = False,
        with_thumbnails: bool = False,
    ) -> list[list[Neighbour]]:
        """Find the k items nearest to each query, unit vectors (Q, d); all where there are fewer."""
        queries = normalize_queries(vectors, dimension=self.meta.dimension)
        k = check_whole(k, "k", least=1, most=MAX_K)
        least = -math.inf if minimum_score is None else check_cosine("the minimum score", minimum_score)
        check_cosine("exclude_same_above", exclude_same_above)
        demanded = None if filter is None else check_filter(filter)
        excluded = set(check_keys(exclude))
        ready = len(queries) * k <= PAGE and not with_vectors  # few enough to come with their texts
        options: Any = {"by_label": group_by_label, "fields": TEXT_FIELDS if ready else ("label", "version")}
        if exclude_same:
            found = []
            for row, key in enumerate(query_keys or [""] * len(queries)):
                query = queries[row : row + 1]
                own, other = self._left_out(query, key, exclude_same, exclude_same_above)
                both = other if demanded is None else AllOf((demanded, other))
                found += self._reader.best(query, k, least, excluded | own, both, **options)
        else:
            found = self._reader.best(queries, k, least, excluded, demanded, **options)
        if not all(found):
            self._check(demanded)
        return self._neighbours(found, ready=ready, with_vectors=with_vectors)

    def count(self, filter: Filter | None = None) -> int:
        """Return how many items fulfil a filter; all of them with none."""
        count = self._reader.count("" if filter is None else expression(check_filter(filter)))
        if not count and filter is not None:
            self._check(filter)
        return count

    def matching(self, filter: Filter, *, after: int = 0, thumbnails: bool = False) -> Generator[GalleryItem]:
        """Yield the items that fulfil a filter, by version, of those above `after`."""
        condition = expression(check_filter(filter))
        while rows := self._reader.next_versions(condition, after):
            for part in parts(rows, PAGE):
                items = self.find([key for _, key in part])
                yield from (
                    items[key] for version, key in part if key in items and items[key].version == version
                )
            after = rows[-1][0]
        if not after:
            self._check(filter)

    def sample(
        self, size: int, *, filter: Filter | None = None, seed: int = 0, thumbnails: bool = False
    ) -> Generator[GalleryItem]:
        """Yield `size` items that fulfil a filter, or all where there are fewer, drawn by lot."""
        check_whole(size, "the size of the sample", least=0, most=_MOST_DRAWN)
        rng = np.random.default_rng(seed or None)
        condition = ALWAYS if filter is None else expression(check_filter(filter))
        count = self.count(filter)
        if count > WINDOW:  # draw from a stretch of the lots that holds about half as many as can be read
            start, length = int(rng.integers(LOTS)), LOTS // count * (WINDOW // 2)
            end = (start + length) % LOTS
            joint = "and" if start < end else "or"
            condition = f"({condition}) and (lot >= {start} {joint} lot < {end})"
        rows = sorted(self._reader.versions(condition))
        keys = [rows[place][1] for place in rng.choice(len(rows), min(size, len(rows)), replace=False)]
        for part in parts(keys, PAGE):
            found = self.find(part)
            yield from (found[key] for key in part if key in found)

    def duplicates(self, above: float, *, progress: Advance = lambda *_: None) -> builtins.list[Duplicate]:
        """Find pairs of items that score at least `above`, by their clusters, the largest first."""
        check_cosine("above", above)
        return duplicates(self._reader, above, progress)

    def duplicates_page(
        self, above: float, *, after: int = 0, limit: int = 100, progress: Advance = lambda *_: None
    ) -> DuplicatesPage:
        """Find likewise the pairs of the first `limit` items, by version, of those above `after`."""
        check_cosine("above", above)
        return duplicates_page(self._reader, above, after, limit, progress)

    def fields(self, limit: int = sys.maxsize) -> builtins.list[FieldCount]:
        """Return the fields of the metadata, and the label's: by name, the `limit` fullest."""
        return count_fields(self._columns(), limit)

    def values(
        self, field: str, *, prefix: str = "", limit: int = 100
    ) -> tuple[builtins.list[ValueCount], int]:
        """Return the `limit` most frequent values of a field, in order, and how many there are in all."""
        return count_values(self._columns(), field, prefix, limit)

    def unknown_fields(self, filter: Filter) -> tuple[str, ...]:
        """Return the fields of a filter that no item has, sorted."""
        return unknown_fields(
            check_filter(filter), lambda field: frozenset() if field == LABEL or self._has(field) else None
        )

    def upsert(
        self, items: Iterable[GalleryItem], *, expected: Mapping[str, int] | None = None
    ) -> builtins.list[int]:
        """Store items; one whose key is there is replaced. Unsupported with `expected` versions."""
        return self.upsert_checked(check_items(items, dimension=self.meta.dimension), expected=expected)

    def upsert_checked(
        self, items: Sequence[CheckedItem], *, expected: Mapping[str, int] | None = None
    ) -> builtins.list[int]:
        """Store, as `upsert` does, items that were checked one by one; no key twice."""
        self._refuse(expected)
        check_unpictured(items, self.name)
        stored = self.find([item.key for item, _ in items if item.source is None])
        same = {
            item.key: stored[item.key]
            for item, _ in items
            if item.key in stored and np.array_equal(stored[item.key].vector, item.vector)
        }
        versions = _new_versions(len(items), max((it.version for it in stored.values()), default=0))
        rows = [
            row_of(with_source_of(same.get(checked.item.key), checked), version)
            for checked, version in zip(items, versions, strict=True)
        ]
        for part in in_parts(rows):
            self._server.put(self.collection, part)
        return versions

    def delete(self, keys: Sequence[str], *, expected: Mapping[str, int] | None = None) -> int:
        """Delete the items of `keys` that are there; returns how many were. Unsupported with `expected`."""
        self._refuse(expected)
        there = [row["key"] for row in self._reader.of_keys(check_keys(keys), ["key"])]
        for part in parts(there, _LIGHT_PAGE):
            self._server.remove(self.collection, among(part))
        return len(there)

    def update(
        self, changes: Sequence[ItemChange], *, expected: Mapping[str, int] | None = None
    ) -> builtins.list[int]:
        """Change the texts of items that are there, whose rest stays."""
        self._refuse(expected)
        return self.upsert_checked(change_items(changes, self.find([change.key for change in changes])))

    def touch(self, sources: Mapping[str, Source]) -> None:
        """Note where files of the same bytes lie now, of those items that still are made from such bytes."""
        for source in sources.values():
            check_origin(source.origin)
        rows = []
        for key, item in self.find(list(sources)).items():
            if item.source and item.source.digest == sources[key].digest:
                moved = replace(item, source=replace(sources[key], given=item.source.given))
                rows.append(row_of(CheckedItem(moved, check_fields(moved)), item.version))
        for part in in_parts(rows):
            self._server.put(self.collection, part)

    def find(self, keys: Sequence[str], *, thumbnails: bool = False) -> dict[str, GalleryItem]:
        """Return the items of those `keys` that are there."""
        return self._reader.items(check_keys(keys))

    def get(self, keys: Sequence[str], *, thumbnails: bool = False) -> builtins.list[GalleryItem]:
        """Return the items of `keys`, in that order; NotFound names the first that is not there."""
        return in_order(keys, self.find(keys), self.name)

    def keys_of(self, origin: str, *, after: str = "", limit: int = 1000) -> builtins.list[str]:
        """Return the first `limit` keys after `after` of items made from a data set's files, ascending."""
        condition = f"origin == {quoted(check_origin(origin))}"
        rows = self._reader.by_key(condition, ["key"], after=after, page=min(limit, WINDOW))
        return [row["key"] for row in islice(rows, limit)]

    def list(self, *, after: str = "", limit: int = 100, prefix: str = "") -> builtins.list[GalleryItem]:
        """Return the first `limit` items by key of those that follow `after` and begin with `prefix`."""
        return [*islice(self.by_key(after=after, prefix=prefix), limit)]

    def by_key(
        self, *, after: str = "", prefix: str = "", thumbnails: bool = False
    ) -> Generator[GalleryItem]:
        """Yield the items by key that follow `after` and begin with `prefix`."""
        for row in self._reader.by_key(f"key >= {quoted(prefix)}", ITEM_FIELDS, after=after, page=PAGE):
            if not row["key"].startswith(prefix):
                return
            yield item_of(row)

    def rebuild(
        self,
        index: str | None = None,
        recall: float | None = None,
        *,
        whole: bool = True,
        progress: Advance = lambda *_: None,
    ) -> None:
        """Bring the index up to date; Unsupported: to make it anew, or of another type."""
        if whole or index is not None or recall is not None:
            raise Unsupported(
                f"the gallery {self.name} is on Milvus, which builds its index and keeps it up to date "
                "itself; leave that to it"
            )
        self._server.flush(self.collection)

    def reading(self) -> NoReturn:
        """Raise Unsupported: there is no snapshot of a collection in memory, and so no map."""
        raise Unsupported(
            f"the gallery {self.name} is on Milvus, where galleries have no map; use a local one"
        )

    def _neighbours(
        self, found: builtins.list[builtins.list[Row]], *, ready: bool, with_vectors: bool
    ) -> builtins.list[builtins.list[Neighbour]]:
        """Return what was found, with its texts; what is gone meanwhile is left out."""
        texts = {row["key"]: row for near in found for row in near}
        if not ready:
            fields = ["key", *TEXT_FIELDS, *(["vector"] if with_vectors else [])]
            texts = {row["key"]: row for row in self._reader.of_keys(list(texts), fields)}
        return [
            [_neighbour(texts[row["key"]], row["score"], with_vectors) for row in near if row["key"] in texts]
            for near in found
        ]

    def _left_out(
        self, query: NDArray[np.float32], key: str, field: str, above: float
    ) -> tuple[set[str], Filter]:
        """Tell the item that a query (1, d) shows, by its key, and the filter that others than it fulfil."""
        if not key:
            near = self._reader.best(query, 1, above, frozenset(), None, by_label=False)[0]
            key = near[0]["key"] if near else ""
        item = self.find([key]).get(key) if key else None
        return ({key}, others_than(field, item.label, item.metadata)) if item else (set(), AllOf(()))

    def _has(self, field: str, kind: str = "") -> bool:
        """Tell whether an item has a field, or values of a kind there."""
        condition = having(field, kind)
        if condition not in self._seen and self._reader.count(condition):
            self._seen.add(condition)
        return condition in self._seen

    def _check(self, filter: Filter | None) -> None:
        """Refuse a filter that found nothing if it compares a field with a kind that no item holds there."""
        if filter is not None and self._reader.count():
            check_kinds(filter, self._kinds_of)

    def _kinds_of(self, field: str) -> frozenset[str] | None:
        if field == LABEL:
            return frozenset({"string"})
        return frozenset(kind for kind in KINDS[1:] if self._has(field, kind)) if self._has(field) else None

    def _columns(self) -> builtins.list[tuple[Columns, NDArray[np.bool_]]]:
        """Read the labels and metadata of all items, which are not many."""
        if (count := self.count()) > MOST_COUNTED:
            raise Unsupported(
                f"the gallery {self.name} has {count:,} items, and on Milvus the fields and values of more "
                f"than {MOST_COUNTED:,} are not counted: each item would be read for it"
            )
        rows = [*self._reader.by_key(ALWAYS, ["key", "label", "metadata"], after="", page=_LIGHT_PAGE)]
        columns = Columns.of([row["label"] for row in rows], [json.dumps(row["metadata"]) for row in rows])
        return [(columns, np.zeros(len(rows), np.bool_))]

    def _previous_name(self) -> str:
        """Return where the gallery lies whose name this one took by a switch; empty where none does."""
        name, collection = previous_of(self._server.describe(self.collection).properties)
        try:
            there = name not in ("", self.name) and self._server.describe(alias_of(name)).name == collection
        except Gone:
            there = False
        return name if there else ""

    def _refuse(self, expected: Mapping[str, int] | None) -> None:
        if expected:
            raise Unsupported(
                f"the gallery {self.name} is on Milvus, which cannot write on the condition that an item "
                "is of an expected version; leave the version out"
            )


def _neighbour(row: Row, score: float, with_vector: bool) -> Neighbour:
    vector = np.array(row["vector"], np.float32) if with_vector else None
    texts = row["key"], row["label"], row["uri"], row["metadata"]
    return Neighbour(*texts, as_cosine(score), row["version"], vector)


_clock = threading.Lock()
_last_version = 0


def _new_versions(count: int, above: int) -> list[int]:
    """Return versions above one, and above all that this process has given."""
    global _last_version
    with _clock:
        first = max(time.time_ns(), _last_version + 1, above + 1)
        _last_version = first + count - 1
    return [*range(first, first + count)]
