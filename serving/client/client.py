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
from serving.client.inputs import ImageLike
from serving.client.records import BuildProgress, Explanation, GalleryInfo, Hit, Item, ModelInfo, StoredItem
from serving.client.requests import IN_FLIGHT, BulkRequest, Chunk, Page, SearchOptions, request
from serving.errors import CrossbatchError

__all__ = ["Client"]

T = TypeVar("T")

Raise: TypeAlias = Literal["raise"]
Return: TypeAlias = Literal["return"]
Vector: TypeAlias = NDArray[np.float32]
Vectors: TypeAlias = list[Vector | CrossbatchError]
Hits: TypeAlias = list[list[Hit] | CrossbatchError]
Explanations: TypeAlias = list[Explanation | CrossbatchError]
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
    def embed(self, images: Images, *, model: str = "", on_error: Raise | Return = "raise") -> Any:
        """Embed images: float32 (N, d), unit rows; with "return" a list of rows (d,) or errors."""
        rows = self._ask(requests.embed(images, model, on_error))
        if on_error == "return":
            return rows
        return np.stack(rows) if rows else np.zeros((0, self.model(model).dimension), np.float32)

    @overload
    def search(self, gallery: str, *, on_error: Return, **options: Unpack[SearchOptions]) -> Hits: ...
    @overload
    def search(
        self, gallery: str, *, on_error: Raise = "raise", **options: Unpack[SearchOptions]
    ) -> list[list[Hit]]: ...
    def search(
        self, gallery: str, *, on_error: Raise | Return = "raise", **options: Unpack[SearchOptions]
    ) -> Any:
        """Find the nearest items to each of `images`, `vectors` float32 (Q, d) or `keys`; give one of these.

        `k` is 1 to 2,048, 10 by default; `minimum_score` is -1 to 1. A `filter` is a mapping, as {"price":
        {"$lt": 9}}, or made of the classes of `serving.gallery.search.filter`. Hits come nearest first, with
        `group_by_label` only the nearest of each label; with "return" an error stands for a bad query.
        """
        return self._ask(requests.search(gallery, on_error, options))

    @overload
    def explain(self, images: Images, *, model: str = "", on_error: Return) -> Explanations: ...
    @overload
    def explain(self, images: Images, *, model: str = "", on_error: Raise = "raise") -> list[Explanation]: ...
    def explain(self, images: Images, *, model: str = "", on_error: Raise | Return = "raise") -> Any:
        """Tell which of the model's prototypes make up each image, and where; arguments as in `embed`."""
        return self._ask(requests.explain(images, model, on_error))

    def upsert(self, gallery: str, items: Iterable[Item]) -> list[int]:
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
        """Remove items; with `expected_versions`, one a key, only if they have these.

        Gives the number of items that were there. A call whose reply was lost is made again, and then finds
        its items gone and does not count them; one with `expected_versions` raises Unavailable instead.
        """
        request_id = self._new_id()
        return sum(self._call(each, request_id) for each in requests.delete(gallery, keys, expected_versions))

    def get(self, gallery: str, key: str, *, thumbnail: bool = False) -> StoredItem:
        """Read one item with its vector, and with its thumbnail if that is wanted."""
        return self._call(requests.get(gallery, key, thumbnail))

    def items(self, gallery: str, *, prefix: str = "", vectors: bool = False) -> Iterator[StoredItem]:
        """Read all items in the order of their keys, those whose key begins with `prefix`.

        Each page is asked for when its turn comes. An item that is written meanwhile comes once, old or new.
        """
        return self._pages(requests.items(gallery, prefix, vectors))

    def create(
        self,
        gallery: str,
        *,
        thumbnail_side: int = 0,
        index: str = "auto",
        recall: float | None = None,
        model: str = "",
    ) -> GalleryInfo:
        """Make an empty gallery for a model that is served, the first one when none is named.

        `thumbnail_side` is in pixels, to 1,024; 0: it keeps none. `index` is "auto" (chosen by measurement),
        "exact" or a FAISS factory string; `recall` is the share of the true ten nearest neighbours that it is
        to find, 0.99 when None.
        """
        fields: dict[str, Any] = {
            "thumbnail_side": thumbnail_side,
            "index": index,
            "recall": recall,
            "model": model,
        }
        return self._call(request("CreateGallery", records.gallery_of, name=gallery, **fields))

    def gallery(self, name: str) -> GalleryInfo:
        """Describe one gallery."""
        return self._call(request("GetGallery", records.gallery_of, name=name))

    def galleries(self) -> list[GalleryInfo]:
        """Describe all galleries, in the order of their names."""
        return list(self._pages(requests.galleries()))

    def delete_gallery(self, gallery: str) -> None:
        """Remove a gallery with everything in it, also one that is damaged."""
        return self._call(request("DeleteGallery", lambda reply: None, name=gallery))

    def switch(self, gallery: str, other: str) -> GalleryInfo:
        """Give the name `gallery` to the gallery `other`, in one step; the two have changed names then.

        After a lost reply neither this nor `rollback`, `create` or `delete_gallery` is made again: it raises
        Unavailable, and `galleries` tells what came of it.
        """
        return self._call(request("SwitchGallery", records.gallery_of, name=gallery, other=other))

    def rollback(self, gallery: str) -> GalleryInfo:
        """Undo the switch by which a gallery got its name; gives the gallery that has it again."""
        return self._call(request("RollbackGallery", records.gallery_of, name=gallery))

    def build_index(
        self, gallery: str, *, index: str = "", recall: float | None = None, timeout: float = 3_600.0
    ) -> Iterator[BuildProgress]:
        """Make the search index of a gallery anew; `index` and `recall` as in `create`, or as before.

        It tells how far it is, at least once a second, and the last one has the gallery with its new index.
        Leaving the iterator breaks the work off, and the index stays as it was.
        """
        fields = {"name": gallery, "index": index, "recall": recall}
        return self._stream(request("BuildIndex", records.progress_of, timeout=timeout, **fields))

    def model(self, name: str = "") -> ModelInfo:
        """Describe a model that is served; the first one when no name is given."""
        return self._call(request("GetModel", lambda reply: records.model_info_of(reply.model), name=name))

    def models(self) -> list[ModelInfo]:
        """Describe every model that is served, the first one first."""
        return self._call(request("ListModels", records.models_of))

    def reload(self, *, timeout: float = 600.0) -> records.Reloaded:
        """Have the server look at its model files and galleries again; no call fails for it."""

        def read(reply: Any) -> records.Reloaded:
            return records.Reloaded(
                tuple(records.models_of(reply)), tuple(reply.loaded), tuple(reply.removed)
            )

        return self._call(request("ReloadModels", read, timeout=timeout))

    def _call(self, request: Request[T], request_id: str = "", begun: Any = None) -> T:
        """Make a call, or wait for one that was begun."""
        request_id = request_id or self._new_id()
        try:
            if begun is not None:
                return self._read(request, begun.result())
            method, options = self._prepared(request, request_id)
            return self._read(request, method(request.message, **options))
        except grpc.RpcError as failure:
            raise self._error(failure, request, request_id) from failure

    def _pages(self, request: Request[Page[T]]) -> Iterator[T]:
        request_id, more = self._new_id(), True
        while more:
            values, request.message.page_token = self._call(request, request_id)
            yield from values
            more = bool(request.message.page_token)

    def _stream(self, request: Request[T]) -> Iterator[T]:
        request_id = self._new_id()
        method, options = self._prepared(request, request_id)
        replies = method(request.message, **options)
        try:
            for reply in replies:
                yield self._read(request, reply)
        except grpc.RpcError as failure:
            raise self._error(failure, request, request_id) from failure
        finally:
            replies.cancel()

    def _ask(self, bulk: BulkRequest) -> list[Any]:
        """Answer each input, in calls of which four are on their way at once."""
        request_id, answers = self._new_id(), list[Any]()
        begun: deque[tuple[Chunk, Request[list[Any]], Any]] = deque()
        try:
            for chunk in bulk.chunks():
                if len(begun) == IN_FLIGHT:
                    answers += self._answers(bulk, request_id, *begun.popleft())
                asked, call = bulk.request(chunk), None
                if begun or not chunk.last:  # a call that is alone is quicker without a future
                    method, options = self._prepared(asked, request_id)
                    call = method.future(asked.message, **options)
                begun.append((chunk, asked, call))
            while begun:
                answers += self._answers(bulk, request_id, *begun.popleft())
        except CrossbatchError as error:
            error.stored = len(answers) if bulk.field == "items" else 0
            raise
        finally:
            for *_, call in begun:
                call.cancel()
        return answers

    def _answers(
        self, bulk: BulkRequest, request_id: str, chunk: Chunk, asked: Request[list[Any]], call: Any
    ) -> list[Any]:
        try:
            answers = self._call(asked, request_id, call)
        except CrossbatchError as error:
            answers = bulk.blamed(chunk, error)
        return bulk.placed(answers, chunk, request_id)
