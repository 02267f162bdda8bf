"""The Python client: images and arrays in, arrays and records out; needs the base installation only."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Literal, Self, TypeAlias, TypeVar, Unpack, overload

import grpc
import numpy as np
from numpy.typing import NDArray

from serving.client import records, requests
from serving.client.connection import BaseClient, Request
from serving.client.inputs import IN_FLIGHT, BulkRequest, ImageLike, Part
from serving.client.requests import Page, SearchOptions, request
from serving.errors import CrossbatchError
from serving.rpc.limits import MAX_PAGE

__all__ = ["Client"]

T = TypeVar("T")

Raise: TypeAlias = Literal["raise"]
Return: TypeAlias = Literal["return"]
OnError: TypeAlias = Literal["raise", "return"]
Vector: TypeAlias = NDArray[np.float32]
Vectors: TypeAlias = list[Vector | CrossbatchError]
Found: TypeAlias = list[list[records.Hit]]
Hits: TypeAlias = list[list[records.Hit] | CrossbatchError]
Explained: TypeAlias = list[records.Explanation]
Explanations: TypeAlias = list[records.Explanation | CrossbatchError]
Images: TypeAlias = Iterable[ImageLike]


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
        deadline = time.monotonic() + wait
        probe = self.with_options(retries=0, timeout=max(1.0, min(wait, 5.0)))
        while True:
            with suppress(CrossbatchError):  # which is no answer
                if probe._call(requests.health()):
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)

    @overload
    def embed(self, images: Images, *, model: str = "", on_error: Raise = "raise") -> Vector: ...
    @overload
    def embed(self, images: Images, *, model: str = "", on_error: Return) -> Vectors: ...
    def embed(self, images: Images, *, model: str = "", on_error: OnError = "raise") -> Any:
        """Embed images: float32 (N, d), unit rows; with "return" a list of rows (d,) or errors."""
        rows = self._ask(requests.embed(images, model, on_error))
        if on_error == "return":
            return rows
        return np.stack(rows) if rows else np.zeros((0, self.model(model).dimension), np.float32)

    @overload
    def search(self, gallery: str, *, on_error: Return, **options: Unpack[SearchOptions]) -> Hits: ...
    @overload
    def search(self, gallery: str, *, on_error: Raise = ..., **options: Unpack[SearchOptions]) -> Found: ...
    def search(self, gallery: str, *, on_error: OnError = "raise", **options: Unpack[SearchOptions]) -> Any:
        """Find the nearest items to each of `images`, `vectors` float32 (Q, d) or `keys`; give one of these.

        `k` is 1 to 2,048, 10 by default; `minimum_score` is -1 to 1. A `filter` is a mapping, as {"price":
        {"$lt": 9}}, or made of the classes of `serving.gallery.search.filter`. Hits come nearest first, with
        `group_by_label` only the nearest of each label; with "return" an error stands for a bad query.
        """
        return self._ask(requests.search(gallery, on_error, options))

    @overload
    def explain(self, images: Images, *, model: str = "", on_error: Return) -> Explanations: ...
    @overload
    def explain(self, images: Images, *, model: str = "", on_error: Raise = "raise") -> Explained: ...
    def explain(self, images: Images, *, model: str = "", on_error: OnError = "raise") -> Any:
        """Tell which of the model's prototypes make up each image, and where; arguments as in `embed`."""
        return self._ask(requests.explain(images, model, on_error))

    def upsert(self, gallery: str, items: Iterable[records.Item]) -> list[int]:
        """Store items, replacing those with the same keys; gives the new version of each, in order.

        Up to 256 items (or about 32 MB) are one call, which stores all of them or none. More are sent in
        smaller calls, four at a time. The first error ends it: its `stored` tells how many items, from the
        first on, are stored for certain; some of the 256 after them may be, too.

        A call whose reply was lost is made again, but for one with an `expected_version`: that raises
        Unavailable, and `get` tells whether it was carried out.
        """
        return self._ask(requests.upsert(gallery, items))

    def delete(
        self, gallery: str, keys: Iterable[str], *, expected_versions: Iterable[int] | None = None
    ) -> int:
        """Remove items, with `expected_versions`, one a key, only if they have these; gives how many did.

        A call whose reply was lost is made again, and then finds its items gone and does not count them; one
        with `expected_versions` raises Unavailable instead.
        """
        calls = requests.delete(gallery, keys, expected_versions, self._new_id())
        return sum(map(self._call, calls))

    def get(self, gallery: str, key: str, *, thumbnail: bool = False) -> records.StoredItem:
        """Read one item with its vector, and with its thumbnail if that is wanted."""
        fields: dict[str, Any] = {"gallery": gallery, "key": key, "with_thumbnail": thumbnail}
        return self._call(
            request("GetItem", lambda it: requests.stored_item_of(it.item, it.thumbnail), **fields)
        )

    def items(self, gallery: str, *, prefix: str = "", vectors: bool = False) -> Iterator[records.StoredItem]:
        """Read all items in the order of their keys, those whose key begins with `prefix`.

        Each page is asked for when its turn comes. An item that is written meanwhile comes once, old or new.
        """
        read = requests.page_of("items", requests.stored_item_of)
        fields: dict[str, Any] = {"key_prefix": prefix, "with_vectors": vectors, "page_size": MAX_PAGE}
        return self._pages(request("ListItems", read, gallery=gallery, **fields))

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
        return self._call(request("CreateGallery", requests.gallery_of, name=gallery, model=model, **fields))

    def gallery(self, name: str) -> records.GalleryInfo:
        """Describe one gallery."""
        return self._call(request("GetGallery", requests.gallery_of, name=name))

    def galleries(self) -> list[records.GalleryInfo]:
        """Describe all galleries, in the order of their names."""
        return list(self._pages(requests.galleries()))

    def delete_gallery(self, gallery: str) -> None:
        """Remove a gallery with everything in it, also one that is damaged."""
        return self._call(request("DeleteGallery", lambda reply: None, name=gallery))

    def switch(self, gallery: str, other: str) -> records.GalleryInfo:
        """Give the name `gallery` to the gallery `other`, in one step; the two have changed names then.

        After a lost reply neither this nor `rollback`, `create` or `delete_gallery` is made again: it raises
        Unavailable, and `galleries` tells what came of it.
        """
        return self._call(request("SwitchGallery", requests.gallery_of, name=gallery, other=other))

    def rollback(self, gallery: str) -> records.GalleryInfo:
        """Undo the switch by which a gallery got its name; gives the gallery that has it again."""
        return self._call(request("RollbackGallery", requests.gallery_of, name=gallery))

    def build_index(
        self, gallery: str, *, index: str = "", recall: float | None = None, timeout: float = 3_600.0
    ) -> Iterator[records.BuildProgress]:
        """Make the search index of a gallery anew; `index` and `recall` as in `create`, or as before.

        It tells how far it is, at least once a second, and the last one has the gallery with its new index.
        Leaving the iterator breaks the work off, and the index stays as it was.
        """
        fields: dict[str, Any] = {"name": gallery, "index": index, "recall": recall}
        return self._stream(request("BuildIndex", requests.progress_of, timeout=timeout, **fields))

    def model(self, name: str = "") -> records.ModelInfo:
        """Describe a model that is served; the first one when no name is given."""
        return self._call(request("GetModel", requests.model_of, name=name))

    def models(self) -> list[records.ModelInfo]:
        """Describe every model that is served, the first one first."""
        return self._call(request("ListModels", requests.models_of))

    def reload(self, *, timeout: float = 600.0) -> records.Reloaded:
        """Have the server look at its model files and galleries again; no call fails for it."""
        return self._call(request("ReloadModels", requests.reloaded_of, timeout=timeout))

    def _call(self, request: Request[T], begun: Any = None) -> T:
        """Make a call, or wait for one that was begun."""
        try:
            return self._read(request, self._begin(request) if begun is None else begun.result())
        except grpc.RpcError as failure:
            raise self._error(failure, request) from failure

    def _pages(self, request: Request[Page[T]]) -> Iterator[T]:
        more = True
        while more:
            values, request.message.page_token = self._call(request)
            yield from values
            more = bool(request.message.page_token)

    def _stream(self, request: Request[T]) -> Iterator[T]:
        replies = self._begin(request)
        try:
            for reply in replies:
                yield self._read(request, reply)
        except grpc.RpcError as failure:
            raise self._error(failure, request) from failure
        finally:
            replies.cancel()

    def _ask(self, bulk: BulkRequest) -> list[Any]:
        """Answer each input, in calls of which four are on their way at once."""
        bulk.whole.id, answers, begun = self._new_id(), list[Any](), deque[Part]()
        try:
            for part in bulk.parts():
                if len(begun) == IN_FLIGHT:
                    answers += self._answers(bulk, begun.popleft())
                if begun or not part.last:  # a call that is alone is quicker without a future
                    part.call = self._begin(part.request, "future")
                begun.append(part)
            while begun:
                answers += self._answers(bulk, begun.popleft())
        except CrossbatchError as error:
            error.stored = len(answers) if bulk.field == "items" else 0
            raise
        finally:
            for part in begun:
                part.call.cancel()
        return answers

    def _answers(self, bulk: BulkRequest, part: Part) -> list[Any]:
        outcome: list[Any] | CrossbatchError
        try:
            outcome = self._call(part.request, part.call)
        except CrossbatchError as error:
            outcome = error
        return bulk.answers(part, outcome)
