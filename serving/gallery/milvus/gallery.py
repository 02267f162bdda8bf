"""A gallery in a collection of a Milvus server."""

import builtins
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from numpy.typing import ArrayLike

from serving.gallery.item import CheckedItem, GalleryItem, ItemChange, Neighbour, Source
from serving.gallery.search.counts import FieldCount, ValueCount
from serving.gallery.search.duplicates import Duplicate, DuplicatesPage
from serving.gallery.search.filter import Filter
from serving.gallery.search.others import SAME_SCORE
from serving.gallery.status import GalleryStatus
from serving.gallery.store.schema import Meta

if TYPE_CHECKING:
    from serving.gallery.vectors import Maker
    from serving.model.spec import ModelSpec

__all__ = ["MilvusGallery"]

Advance = Callable[[str, int, int], None]


class MilvusGallery:
    """A gallery on a Milvus server: what `Gallery` is on a disk, but for what `DIFFERENCES` tells."""

    name: str
    path: str  # the address of the server and the name
    meta: Meta

    def info(self) -> GalleryStatus:
        """Return what the gallery is and how it stands."""
        raise NotImplementedError

    def check_model(self, model: "ModelSpec | Maker") -> None:
        """Accept the gallery's own model, and a file of lower precision made from it; else ModelMismatch."""
        raise NotImplementedError

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
        """Find the k items nearest to each query, as `Gallery.search` does."""
        raise NotImplementedError

    def count(self, filter: Filter | None = None) -> int:
        """Return how many items fulfil a filter; all of them with none."""
        raise NotImplementedError

    def matching(self, filter: Filter, *, after: int = 0, thumbnails: bool = False) -> Generator[GalleryItem]:
        """Yield the items that fulfil a filter, by version, of those above `after`."""
        raise NotImplementedError

    def sample(
        self, size: int, *, filter: Filter | None = None, seed: int = 0, thumbnails: bool = False
    ) -> Generator[GalleryItem]:
        """Yield `size` items that fulfil a filter, or all where there are fewer, each as likely as any other."""
        raise NotImplementedError

    def duplicates(self, above: float, *, progress: Advance = lambda *_: None) -> builtins.list[Duplicate]:
        """Find pairs of items that score at least `above`, by their clusters, the largest first."""
        raise NotImplementedError

    def duplicates_page(
        self, above: float, *, after: int = 0, limit: int = 100, progress: Advance = lambda *_: None
    ) -> DuplicatesPage:
        """Find likewise the pairs of the first `limit` items, by version, of those above `after`."""
        raise NotImplementedError

    def fields(self, limit: int = sys.maxsize) -> builtins.list[FieldCount]:
        """Return the fields of the metadata, and the label's: by name, the `limit` fullest."""
        raise NotImplementedError

    def values(
        self, field: str, *, prefix: str = "", limit: int = 100
    ) -> tuple[builtins.list[ValueCount], int]:
        """Return the `limit` most frequent values of a field, in order, and how many there are in all."""
        raise NotImplementedError

    def unknown_fields(self, filter: Filter) -> tuple[str, ...]:
        """Return the fields of a filter that no item has, sorted."""
        raise NotImplementedError

    def upsert(
        self, items: Iterable[GalleryItem], *, expected: Mapping[str, int] | None = None
    ) -> builtins.list[int]:
        """Store items; one whose key is there is replaced. Unsupported with `expected` versions."""
        raise NotImplementedError

    def upsert_checked(
        self, items: Sequence[CheckedItem], *, expected: Mapping[str, int] | None = None
    ) -> builtins.list[int]:
        """Store, as `upsert` does, items that were checked one by one; no key twice."""
        raise NotImplementedError

    def delete(self, keys: Sequence[str], *, expected: Mapping[str, int] | None = None) -> int:
        """Delete the items of `keys` that are there; returns how many were. Unsupported with `expected`."""
        raise NotImplementedError

    def update(
        self, changes: Sequence[ItemChange], *, expected: Mapping[str, int] | None = None
    ) -> builtins.list[int]:
        """Change the texts of items that are there, whose rest stays."""
        raise NotImplementedError

    def touch(self, sources: Mapping[str, Source]) -> None:
        """Note where files of the same bytes lie now, of those items that still are made from such bytes."""
        raise NotImplementedError

    def find(self, keys: Sequence[str], *, thumbnails: bool = False) -> dict[str, GalleryItem]:
        """Return the items of those `keys` that are there."""
        raise NotImplementedError

    def get(self, keys: Sequence[str], *, thumbnails: bool = False) -> builtins.list[GalleryItem]:
        """Return the items of `keys`, in that order; NotFound names the first that is not there."""
        raise NotImplementedError

    def keys_of(self, origin: str, *, after: str = "", limit: int = 1000) -> builtins.list[str]:
        """Return the first `limit` keys after `after` of items made from a data set's files, ascending."""
        raise NotImplementedError

    def list(self, *, after: str = "", limit: int = 100, prefix: str = "") -> builtins.list[GalleryItem]:
        """Return the first `limit` items by key of those that follow `after` and begin with `prefix`."""
        raise NotImplementedError

    def by_key(
        self, *, after: str = "", prefix: str = "", thumbnails: bool = False
    ) -> Generator[GalleryItem]:
        """Yield the items by key that follow `after` and begin with `prefix`."""
        raise NotImplementedError

    def rebuild(
        self,
        index: str | None = None,
        recall: float | None = None,
        *,
        whole: bool = True,
        progress: Advance = lambda *_: None,
    ) -> None:
        """Do nothing where the index is to be brought up to date: Milvus does it; else Unsupported."""
        raise NotImplementedError

    def reading(self) -> NoReturn:
        """Raise Unsupported: there is no snapshot of a Milvus collection in memory."""
        raise NotImplementedError

    def retire(self) -> None:
        """Do nothing: a gallery on a server keeps nothing open of its own."""

    def close(self) -> None:
        """Do nothing, likewise: the connection is the directory's."""
