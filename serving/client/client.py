"""The Python client: images and arrays in, arrays and records out; needs the base installation only."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, Self, TypeAlias, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from serving.client import records, requests
from serving.client.base import BaseClient
from serving.client.records import Explanation, Hit, Images
from serving.client.requests import Bulk, Request, SearchOptions, image_bytes, item_message, request, search
from serving.errors import CrossbatchError
from serving.gallery.search.filter import Filter
from serving.rpc.limits import DEFAULT_PAGE, MAX_EXPLAINED, MAX_PAGE

__all__ = ["Client"]

T = TypeVar("T")

Raise: TypeAlias = Literal["raise"]
Return: TypeAlias = Literal["return"]
Rows: TypeAlias = NDArray[np.float32]
OrErrors: TypeAlias = list[T | CrossbatchError]
Found: TypeAlias = list[list[Hit]]
FoundOr: TypeAlias = OrErrors[list[Hit]]


class Client(BaseClient):
    """A connection whose calls wait for their answer; may be used from several threads. A context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up, any number of times; calls of other threads end with an error."""
        if self._owner:
            for channel in self._connection.close():
                channel.close()

    def ready(self, *, wait: float = 0.0) -> bool:
        """Ask whether the server serves, for up to `wait` seconds; never raises."""
        return self._run(self._ready(wait))

    @overload
    def embed(self, images: Images, *, model: str = "", on_error: Raise = "raise") -> Rows: ...
    @overload
    def embed(self, images: Images, *, model: str = "", on_error: Return) -> OrErrors[Rows]: ...
    def embed(self, images: Images, *, model: str = "", on_error: Raise | Return = "raise") -> Any:
        """Embed images: float32 (N, d), unit rows; with "return" a list of rows (d,) or errors."""
        return self._run(self._embed(images, model, on_error))

    @overload
    def search(self, gallery: str, *, on_error: Return, **options: Unpack[SearchOptions]) -> FoundOr: ...
    @overload
    def search(self, gallery: str, *, on_error: Raise = ..., **options: Unpack[SearchOptions]) -> Found: ...
    def search(
        self, gallery: str, *, on_error: Raise | Return = "raise", **options: Unpack[SearchOptions]
    ) -> Any:
        """Find the nearest items to each of `images`, `vectors` float32 (Q, d) or `keys`; give one of these.

        `k` is 1 to 2,048, 10 by default; `minimum_score` is -1 to 1. A `filter` is a mapping, as {"price":
        {"$lt": 9}}, or made of the classes of `serving.gallery.search.filter`. Hits come nearest first, with
        `group_by_label` only the nearest of each label; with "return" an error stands for a bad query.

        With `exclude_same`, a field of the metadata or "$label", hits are other things than the query shows:
        none has the value there of the query's item, or of the best hit of an image or a vector, where that
        scores at least `exclude_same_above` (0.9). Hits have a vector and a thumbnail only with
        `with_vectors` and `with_thumbnails`.
        """
        return self._run(self._ask(search(gallery, on_error, options)))

    @overload
    def explain(self, images: Images, *, model: str = "", on_error: Return) -> OrErrors[Explanation]: ...
    @overload
    def explain(self, images: Images, *, model: str = "", on_error: Raise = "raise") -> list[Explanation]: ...
    def explain(self, images: Images, *, model: str = "", on_error: Raise | Return = "raise") -> Any:
        """Tell which of the model's prototypes make up each image, and where; arguments as in `embed`."""
        whole, read = request("Explain", model=model), records.explanations_of
        return self._run(self._ask(Bulk(whole, "images", images, image_bytes, read, on_error, MAX_EXPLAINED)))

    def upsert(self, gallery: str, items: records.Items) -> list[int]:
        """Store items, each key once, in place of those that have them; gives the new versions, in order.

        Up to 256 items (or about 32 MB) are one call, which stores all of them or none. More are sent in
        smaller calls, four at a time. The first error ends it: its `stored` tells how many items, from the
        first on, are stored for certain; some of the 256 after them may be, too.

        A call whose reply was lost is made again, but for one with an `expected_version`: that raises
        Unavailable, and `get` tells whether it was carried out.
        """
        whole = request("UpsertItems", gallery=gallery)
        bulk = Bulk(whole, "items", items, item_message, lambda reply: list(reply.versions))
        return self._run(self._ask(bulk))

    def update(self, gallery: str, items: records.Items, *, replace_metadata: bool = False) -> list[int]:
        """Change the label, URI and metadata of items that are there; gives their new versions, in order.

        Items have no image nor vector here. What one does not name stays, None takes a field of the metadata
        away; with `replace_metadata` they stand in place of all that there was. Else as `upsert`.
        """
        whole = request("UpdateItems", gallery=gallery)
        change = partial(item_message, replace_metadata=replace_metadata)
        return self._run(self._ask(Bulk(whole, "items", items, change, lambda reply: list(reply.versions))))

    def delete(
        self, gallery: str, keys: Iterable[str], *, expected_versions: Iterable[int] | None = None
    ) -> int:
        """Remove items, with `expected_versions`, one a key, only if they have these; gives how many did.

        A call whose reply was lost is made again, and then finds its items gone and does not count them; one
        with `expected_versions` raises Unavailable instead.
        """
        return self._run(self._delete(gallery, keys, expected_versions))

    def get(self, gallery: str, key: str, *, thumbnail: bool = False) -> records.StoredItem:
        """Read one item with its vector, and with its thumbnail if that is wanted."""
        return self._send("GetItem", records.item_of, gallery=gallery, key=key, with_thumbnail=thumbnail)

    def items(
        self,
        gallery: str,
        *,
        prefix: str = "",
        filter: Filter | Mapping[str, Any] | None = None,
        vectors: bool = False,
        thumbnails: bool = False,
    ) -> Iterator[records.StoredItem]:
        """Read all items in the order of their keys, those whose key begins with `prefix`.

        With a `filter` it is those that fulfil it, in the order in which they were written; give one of the
        two. Each page is asked for when its turn comes. An item that is written meanwhile comes once, old or
        new; with a filter it may come again.
        """
        fields: dict[str, Any] = {"with_vectors": vectors, "with_thumbnails": thumbnails}
        fields |= {"key_prefix": prefix, "filter": requests.filter_sent(filter), "page_size": MAX_PAGE}
        return self._iterate(self._pages(request("ListItems", gallery=gallery, **fields), records.items_of))

    def sample(
        self,
        gallery: str,
        size: int = DEFAULT_PAGE,
        *,
        filter: Filter | Mapping[str, Any] | None = None,
        thumbnails: bool = False,
        seed: int = 0,
    ) -> list[records.StoredItem]:
        """Read up to 1,000 items drawn at random, all equally likely, of those that fulfil a filter.

        The same `seed` draws the same items of an unchanged gallery; 0 draws anew.
        """
        fields: dict[str, Any] = {"size": size, "with_thumbnails": thumbnails, "seed": seed}
        fields["filter"] = requests.filter_sent(filter)
        return self._send("SampleItems", records.items_of, gallery=gallery, **fields)

    def fields(self, gallery: str) -> list[records.FieldInfo]:
        """Tell the fields of the metadata, and the label's, "$label", sorted by name."""
        return self._send("ListFields", records.fields_of, gallery=gallery)

    def values(
        self, gallery: str, field: str, *, prefix: str = "", limit: int = DEFAULT_PAGE
    ) -> records.FieldValues:
        """Tell the most frequent values of a field, up to 1,000, and how many items have each.

        With a `prefix` it is the strings that begin with it, whatever the case of their letters.
        """
        fields: dict[str, Any] = {"field": field, "prefix": prefix, "page_size": limit}
        return self._send("ListValues", records.values_of, gallery=gallery, **fields)

    def duplicates(self, gallery: str, above: float) -> Iterator[records.Pair]:
        """Find pairs of items that score at least `above`, a page of items after the other.

        Each item is compared with its 64 nearest by the index. A pair may come twice, once from each side.
        """
        return self._iterate(
            self._pages(request("ListDuplicates", gallery=gallery, above=above), records.pairs_of)
        )

    def count(self, gallery: str, *, filter: Filter | Mapping[str, Any] | None = None) -> int:
        """Count the items that fulfil a filter, of either form that `search` takes; all of them without."""

        def read(reply: Any) -> int:
            requests.warn_of_unknown(gallery, reply)
            return int(reply.items)

        return self._send("CountItems", read, gallery=gallery, filter=requests.filter_sent(filter))

    def create(
        self,
        gallery: str,
        *,
        thumbnail_side: int = 0,
        index: str = "auto",
        recall: float | None = None,
        model: str = "",
    ) -> records.GalleryInfo:
        """Make an empty gallery for a model that is served, the first one when none is named.

        `thumbnail_side` is in pixels, to 1,024; 0: it keeps none. `index` is "auto" (chosen by measurement),
        "exact" or a FAISS factory string; `recall` is the share of the true ten nearest neighbours that it is
        to find, 0.99 when None.
        """
        fields: dict[str, Any] = {"thumbnail_side": thumbnail_side, "index": index, "recall": recall}
        return self._send("CreateGallery", records.gallery_of, name=gallery, model=model, **fields)

    def gallery(self, name: str) -> records.GalleryInfo:
        """Describe one gallery."""
        return self._send("GetGallery", records.gallery_of, name=name)

    def galleries(self) -> list[records.GalleryInfo]:
        """Describe all galleries, in the order of their names."""
        return self._run(self._galleries())

    def delete_gallery(self, gallery: str) -> None:
        """Remove a gallery with everything in it, also one that is damaged."""
        return self._send("DeleteGallery", lambda reply: None, name=gallery)

    def switch(self, gallery: str, other: str) -> records.GalleryInfo:
        """Give the name `gallery` to the gallery `other`, in one step; the two have changed names then.

        After a lost reply neither this nor `rollback`, `create` or `delete_gallery` is made again: it raises
        Unavailable, and `galleries` tells what came of it.
        """
        return self._send("SwitchGallery", records.gallery_of, name=gallery, other=other)

    def rollback(self, gallery: str) -> records.GalleryInfo:
        """Undo the switch by which a gallery got its name; gives the gallery that has it again."""
        return self._send("RollbackGallery", records.gallery_of, name=gallery)

    def build_index(
        self, gallery: str, *, index: str = "", recall: float | None = None, timeout: float = 3_600.0
    ) -> Iterator[records.BuildProgress]:
        """Make the search index of a gallery anew; `index` and `recall` as in `create`, or as before.

        It tells how far it is, at least once a second, and the last one has the gallery with its new index.
        Leaving the iterator breaks the work off, and the index stays as it was.
        """
        fields: dict[str, Any] = {"name": gallery, "index": index, "recall": recall}
        wanted = request("BuildIndex", timeout=timeout, **fields)
        return self._iterate(self._stream(wanted, records.progress_of))

    def model(self, name: str = "") -> records.ModelInfo:
        """Describe a model that is served; the first one when no name is given."""
        return self._send("GetModel", records.model_of, name=name)

    def models(self) -> list[records.ModelInfo]:
        """Describe every model that is served, the first one first."""
        return self._send("ListModels", records.models_of)

    def reload(self, *, timeout: float = 600.0) -> records.Reloaded:
        """Have the server look at its model files and galleries again; no call fails for it."""
        return self._send("ReloadModels", records.reloaded_of, timeout=timeout)

    def _run(self, waiting: Coroutine[Any, Any, T]) -> T:
        try:
            waiting.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        raise AssertionError("a coroutine of the client without a loop was suspended")

    def _iterate(self, values: AsyncGenerator[T]) -> Iterator[T]:
        try:
            while True:
                yield self._run(anext(values))
        except StopAsyncIteration:
            return
        finally:
            self._run(values.aclose())

    async def _aside(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    async def _reply(self, request: Request, begun: Any) -> Any:
        return self._begin(request) if begun is None else begun.result()

    def _calls(self, bulk: Bulk) -> Iterator[Request]:
        return bulk.calls()
