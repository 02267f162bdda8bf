"""A gallery: a folder of items with embeddings, searched while it changes.

    gallery.sqlite    the truth (`store`)
    index-*.faiss     derived from it (`index`); the one that is published is named in the store
    rebuild.lock      held by the process that makes the next one (`rebuild`)

A search runs in one read transaction of the store, with the snapshot in memory that stands for the same
state: it sees every write acknowledged before it began, by any process, and nothing of a later one.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from numpy.typing import ArrayLike

from serving.errors import InvalidArgument, NotFound
from serving.gallery.argument import check_number, check_text, check_whole
from serving.gallery.folder import check_path, make_gallery
from serving.gallery.identity import ModelIdentity, check_model
from serving.gallery.index.builder import Advance
from serving.gallery.index.factory import check_recall, check_type
from serving.gallery.index.index import require_faiss
from serving.gallery.index.metadata import IndexMetadata
from serving.gallery.index.rebuild import Rebuilder, RebuildPolicy
from serving.gallery.info import GalleryInfo
from serving.gallery.item import MAX_K, MAX_KEY_BYTES, Hit, Item, check_keys
from serving.gallery.items import Items
from serving.gallery.search.filter import Filter
from serving.gallery.search.filter_bounds import check_filter, check_kinds, unknown_fields
from serving.gallery.search.snapshot import Snapshot
from serving.gallery.search.view import View
from serving.gallery.store.schema import FILE_NAME, FORMAT_VERSION, MAX_DIMENSION, MAX_THUMBNAIL_SIDE
from serving.gallery.store.store import Store
from serving.gallery.store.transaction import Row
from serving.gallery.unit import unit_rows

__all__ = ["Gallery", "GalleryInfo", "Hit", "Item", "RebuildPolicy"]


class Gallery(Items):
    """An open gallery: its items, and search over them; every method is thread-safe."""

    def __init__(self, path: Path, store: Store, policy: RebuildPolicy, device: str) -> None:
        """Use `open` or `create`."""
        self._rebuilder = Rebuilder(store, policy)
        super().__init__(path, store, self._rebuilder.consider)
        self._view = View(store, self._rebuild_if_due, device=device)

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        model_name: str,
        fingerprint: str,
        dimension: int,
        thumbnail_side: int = 0,
        index: str = "auto",
        recall: float = 0.99,
        policy: RebuildPolicy | None = None,
        device: str = "cpu",
    ) -> Self:
        """Make a new, empty gallery and open it; the folder appears complete or not at all.

        Args:
            path: Its folder.
            model_name: The model that its vectors come from.
            fingerprint: That model's.
            dimension: Of the vectors.
            thumbnail_side: Longer side in pixels of the thumbnails stored with its items; 0: it keeps none.
            index: The index that is built: "auto", "exact" or a FAISS factory string.
            recall: The recall@10 that an index chosen by "auto" is to reach.
            policy: When the index is made anew.
            device: Where it is searched: "cpu", or "cuda" for the first GPU.

        Raises:
            AlreadyExists: There is something at `path`.
            InvalidArgument: An argument is out of bounds, or the path is not UTF-8.
            ReadOnly: The folder cannot be written.
            Overloaded: The disk is full.
        """
        dimension = check_whole(dimension, "the dimension", least=1, most=MAX_DIMENSION)
        side = check_whole(thumbnail_side, "the side of thumbnails", least=0, most=MAX_THUMBNAIL_SIDE)
        check_recall(check_number(recall, "the wanted recall"))
        check_type(check_text(index, "type of the index", least=0, most=MAX_KEY_BYTES), dimension=dimension)
        check_path(path)
        make_gallery(
            path,
            model_name=check_text(model_name, "name of the model", least=0, most=MAX_KEY_BYTES),
            fingerprint=check_text(fingerprint, "fingerprint of the model", least=0, most=MAX_KEY_BYTES),
            dimension=dimension,
            thumbnail_side=side,
            index=index,
            recall=recall,
        )
        return cls.open(path, policy=policy, device=device)

    @classmethod
    def open(cls, path: Path, *, policy: RebuildPolicy | None = None, device: str = "cpu") -> Self:
        """Open a gallery and its index, to be searched on a device as `create` tells.

        Raises:
            NotFound: There is no gallery at `path`.
            BadArtifact: It is damaged, or of a newer format.
            ReadOnly: This process may not write to it, and nobody has it open who may.
            InvalidArgument: The path is not UTF-8.
            BadSetting: FAISS is not installed, or there is no such device.
        """
        require_faiss(device)
        check_path(path)
        if not (path / FILE_NAME).is_file():
            raise NotFound(f"there is no gallery at {path}; create it with crossbatch index")
        gallery = cls(path, Store(path / FILE_NAME), policy or RebuildPolicy(), device)
        try:
            with gallery._view.open():
                pass
        except BaseException:
            gallery.close()
            raise
        return gallery

    @property
    def identity(self) -> tuple[int, int]:
        """The device and inode of the file that was opened."""
        return self._store.identity

    def info(self) -> GalleryInfo:
        """Return what the gallery is and how it stands."""
        with self._view.open() as (snapshot, _):
            facts = snapshot.main.facts if snapshot.main else IndexMetadata()
            previous = snapshot.state.previous_name
            return GalleryInfo(
                name=self.name,
                path=str(self.path),
                model_name=self.meta.model_name,
                fingerprint=self.meta.fingerprint,
                dimension=self.meta.dimension,
                items=snapshot.count,
                fresh=int((~snapshot.fresh_dead).sum()),
                deleted=snapshot.dead_count,
                index_type=facts.type,
                wanted_index=snapshot.state.wanted_index,
                recall=facts.recall,
                wanted_recall=snapshot.state.wanted_recall,
                latency_ms=facts.latency_ms,
                parameters=facts.parameters,
                trials=facts.trials,
                note=facts.note,
                index_items=len(snapshot.main) if snapshot.main else 0,
                index_bytes=snapshot.main.bytes if snapshot.main else 0,
                store_bytes=self._store.bytes,
                generation=snapshot.state.generation,
                previous_name=previous if self._is_there(previous) else "",
                format_version=FORMAT_VERSION,
                created=self.meta.created,
            )

    def check_model(self, model: ModelIdentity) -> None:
        """Accept the gallery's own model, and a file of lower precision made from it.

        Raises:
            ModelMismatch: It is another model; both are named.
        """
        check_model(self.name, self.meta, model)

    def search(
        self,
        vectors: ArrayLike,
        k: int,
        *,
        minimum_score: float | None = None,
        exclude: Sequence[str] = (),
        filter: Filter | None = None,
        group_by_label: bool = False,
        at_once: bool = False,
    ) -> list[list[Hit]]:
        """Find the k items nearest to each query.

        Args:
            vectors: Unit vectors (Q, d).
            k: How many to find; all where there are fewer.
            minimum_score: The least cosine of a hit.
            exclude: Keys of items that are passed over, for every query.
            filter: What the label and metadata of a hit must fulfil.
            group_by_label: Whether of the items of one label only the best is a hit; an item with an empty
                label stands for itself.
            at_once: Whether to search only what is in memory and needs nothing first.

        Returns:
            For each query its hits, best first, ties in the order of their keys. Hits of one item share
            their metadata: do not write to it.

        Raises:
            InvalidArgument: A vector, k, the minimum, a key or the filter is out of bounds, or the filter
                compares a field with a kind of value that no item holds there. One that no item has is none
                of that: a condition on it holds for no item.
            BadArtifact: The gallery file is damaged.
            NotAtHand: What is newer, or a new index, had first to be read, though it was to be `at_once`.
        """
        queries = unit_rows(vectors, dimension=self.meta.dimension)
        k = check_whole(k, "k", least=1, most=MAX_K)
        least = -math.inf if minimum_score is None else check_number(minimum_score, "the minimum score")
        if minimum_score is not None and not -1.0 <= minimum_score <= 1.0:  # NaN too
            raise InvalidArgument(f"the minimum score is {minimum_score}; expected a cosine in [-1, 1]")
        keys = check_keys(exclude)
        demanded = None if filter is None else check_filter(filter)
        with self._view.open(at_once=at_once) as (snapshot, reader):
            if demanded is not None and snapshot.count:
                check_kinds(demanded, snapshot.kinds_of)
            found = snapshot.search(
                queries,
                k,
                minimum_score=least,
                excluded=reader.seqs(keys).values() if keys else (),
                filter=demanded,
                by_label=group_by_label,
            )
            rows = reader.rows({seq for near in found for seq, _ in near})
        best = [sorted(near, key=lambda pair: (-pair[1], rows[pair[0]].key)) for near in found]
        if group_by_label:
            best = [_first_of_each_label(near, rows) for near in best]
        best = [near[:k] for near in best]
        shown = {seq for near in best for seq, _ in near}
        metadata = reader.metadata(rows[seq] for seq in shown)
        return [
            [
                Hit((row := rows[seq]).key, row.label, row.uri, metadata[seq], _cosine(score), seq)
                for seq, score in near
            ]
            for near in best
        ]

    def fields(self) -> dict[str, tuple[str, ...]]:
        """Return the fields of the metadata by name, and the kinds of value that each holds, sorted.

        Those that deleted items had may be among them, until the next rebuild at the latest; one that holds
        only objects has no kind.
        """
        with self._view.open() as (snapshot, _):
            return snapshot.fields()

    def unknown_fields(self, filter: Filter) -> tuple[str, ...]:
        """Return the fields of a filter that no item has, sorted, for who may have misspelt one.

        One that deleted items had is unknown from the next rebuild on at the latest.

        Raises:
            InvalidArgument: The filter is out of bounds.
        """
        demanded = check_filter(filter)
        with self._view.open() as (snapshot, _):
            return unknown_fields(demanded, snapshot.kinds_of)

    def rebuild(
        self,
        index: str | None = None,
        recall: float | None = None,
        *,
        whole: bool = True,
        progress: Advance = lambda *_: None,
    ) -> None:
        """Make the index anew from the store and publish it; searches go on meanwhile.

        Args:
            index: The type wanted from now on: "auto", "exact" or a FAISS factory string.
            recall: The recall at 10 wanted from now on.
            whole: Whether to build it anew even where adding what is newer would do.
            progress: Called with the stage, what is done of it and its total; what it raises ends the work.

        Raises:
            InvalidArgument: The type or recall cannot be that of this gallery.
            Overloaded: Another rebuild did not end, or the disk is full.
            ReadOnly: The folder cannot be written.
        """
        if index is not None or recall is not None:
            self._want(index, recall)
        if not whole:
            with self._view.open() as (snapshot, _):
                whole = snapshot.damaged
        self._rebuilder.run(whole=whole, progress=progress)

    def retire(self) -> None:
        """Keep no file open and nothing in memory between calls from now on; each call costs more.

        For a gallery that has not been asked for lately, while some may still hold it.
        """
        self._store.retire()
        self._view.retire()

    def close(self) -> None:
        """Stop the background rebuild and close the files; calls that are running still end well."""
        self._rebuilder.close()
        self._view.retire()  # a mapped file of columns is an open one
        self._store.close()

    def _want(self, index: str | None, recall: float | None) -> None:
        if index is not None:
            check_text(index, "type of the index", least=0, most=MAX_KEY_BYTES)
            check_type(index, dimension=self.meta.dimension)
        if recall is not None:
            check_recall(check_number(recall, "the wanted recall"))
        with self._store.write() as writer:
            state = writer.state()
            writer.want(
                state.wanted_index if index is None else index,
                state.wanted_recall if recall is None else recall,
            )

    def _is_there(self, name: str) -> bool:
        """Tell whether there is another gallery of that name beside this one."""
        return name not in ("", self.name) and (self.path.with_name(name) / FILE_NAME).is_file()

    def _rebuild_if_due(self, snapshot: Snapshot) -> None:
        self._rebuilder.consider(snapshot.state, damaged=snapshot.damaged)


def _cosine(score: float) -> float:
    """Return an inner product of two vectors that are of unit length but for rounding, in [-1, 1]."""
    return max(-1.0, min(1.0, score))


def _first_of_each_label(near: list[tuple[int, float]], rows: Mapping[int, Row]) -> list[tuple[int, float]]:
    first: dict[str | int, tuple[int, float]] = {}
    for seq, score in near:
        first.setdefault(rows[seq].label or seq, (seq, score))
    return list(first.values())
