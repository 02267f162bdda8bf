"""The Python client: images and arrays in, arrays and records out; needs the base installation only."""

from collections.abc import Iterable, Iterator
from typing import Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protos import gallery_service_pb2 as gallery_pb
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.errors import CrossbatchError, InvalidArgument
from serving.rpc.asking.answers import (
    GalleryInfo,
    Hit,
    Item,
    ModelInfo,
    StoredItem,
    gallery_info_of,
    hits_of,
    model_info_of,
    stored_item_of,
)
from serving.rpc.asking.connection import Connection
from serving.rpc.asking.given import ImageLike, text
from serving.rpc.asking.query import FilterLike, images_of, queries_of, search_request
from serving.rpc.asking.splitting import answers_to
from serving.rpc.asking.writes import create_request, delete_items, upsert_items
from serving.rpc.limits import DEFAULT_K, MAX_HITS, MAX_INPUTS, MAX_PAGE
from serving.rpc.status import from_status
from serving.rpc.wire import vector_of

__all__ = ["Client", "GalleryInfo", "Hit", "Item", "ModelInfo", "StoredItem"]


class Client(Connection):
    """A connection to one server; may be used from several threads.

    Every call has `timeout` seconds, retries included. A call that is refused for want of room, or that finds
    no server, is made again up to `retries` times while time is left; as many as by default last more than 4
    seconds, so that a server's restart is ridden out. Inputs beyond the limits of one call
    are sent in several, one after the other; each of them has the whole `timeout`.
    """

    @overload
    def embed(
        self, images: Iterable[ImageLike], *, on_error: Literal["raise"] = "raise"
    ) -> NDArray[np.float32]: ...
    @overload
    def embed(
        self, images: Iterable[ImageLike], *, on_error: Literal["return"]
    ) -> list[NDArray[np.float32] | CrossbatchError]: ...
    def embed(
        self, images: Iterable[ImageLike], *, on_error: Literal["raise", "return"] = "raise"
    ) -> NDArray[np.float32] | list[NDArray[np.float32] | CrossbatchError]:
        """Embed images.

        Args:
            images: Encoded bytes, or paths (`Path` or `str`) that are read as they are needed.
            on_error: "raise" the first bad image's error, or "return" each error in its image's place.

        Returns:
            float32 (N, d), unit rows; with "return" a list of N rows float32 (d,) or errors.

        Raises:
            BadImage: if an image is bad; says which.
            InvalidArgument: if an argument is of another kind.
            CrossbatchError: if the call as a whole fails.
        """
        _check_on_error(on_error)
        raising = on_error == "raise"
        rows = answers_to(images_of(images), len, MAX_INPUTS, self._embed, raising=raising)
        if not raising:
            return rows
        return np.stack(rows) if rows else np.zeros((0, self.model().dimension), np.float32)

    @overload
    def search(
        self,
        gallery: str,
        *,
        images: Iterable[ImageLike] | None = None,
        vectors: ArrayLike | None = None,
        keys: Iterable[str] | None = None,
        k: int = DEFAULT_K,
        minimum_score: float | None = None,
        exclude: Iterable[str] = (),
        filter: FilterLike | None = None,
        group_by_label: bool = False,
        on_error: Literal["raise"] = "raise",
    ) -> list[list[Hit]]: ...
    @overload
    def search(
        self,
        gallery: str,
        *,
        images: Iterable[ImageLike] | None = None,
        vectors: ArrayLike | None = None,
        keys: Iterable[str] | None = None,
        k: int = DEFAULT_K,
        minimum_score: float | None = None,
        exclude: Iterable[str] = (),
        filter: FilterLike | None = None,
        group_by_label: bool = False,
        on_error: Literal["return"],
    ) -> list[list[Hit] | CrossbatchError]: ...
    def search(
        self,
        gallery: str,
        *,
        images: Iterable[ImageLike] | None = None,
        vectors: ArrayLike | None = None,
        keys: Iterable[str] | None = None,
        k: int = DEFAULT_K,
        minimum_score: float | None = None,
        exclude: Iterable[str] = (),
        filter: FilterLike | None = None,
        group_by_label: bool = False,
        on_error: Literal["raise", "return"] = "raise",
    ) -> list[list[Hit]] | list[list[Hit] | CrossbatchError]:
        """Find the nearest items to each query; give exactly one of `images`, `vectors` and `keys`.

        Args:
            gallery: Where to look.
            images: Encoded bytes, or paths (`Path` or `str`) that are read as they are needed.
            vectors: float32 (Q, d), unit rows.
            keys: Items of the gallery; each finds itself unless it is excluded.
            k: Neighbours of each query, 1 to 2,048.
            minimum_score: Leaves out items with a lower score, -1 to 1.
            exclude: Keys of items to leave out, at most 1,000.
            filter: What every hit must fulfil, as {"brand": "acme", "price": {"$lt": 9}} (`parse_filter`) or
                made of the classes of `serving.gallery.search.filter`.
            group_by_label: Whether to return only the nearest item of each label.
            on_error: "raise" the first bad query's error, or "return" each error in its query's place.

        Returns:
            One list of hits a query, nearest first.

        Raises:
            InvalidArgument: if a query or an option is bad.
            NotFound: if there is no such gallery or key.
            ModelMismatch: if the gallery belongs to another model.
            CrossbatchError: if the call as a whole fails.
        """
        _check_on_error(on_error)
        asked = search_request(
            gallery,
            k=k,
            minimum_score=minimum_score,
            exclude=exclude,
            filter=filter,
            group_by_label=group_by_label,
        )

        def search_once(queries: list[retrieval_pb.Query]) -> list[list[Hit] | CrossbatchError]:
            request = retrieval_pb.SearchRequest(queries=queries)
            request.MergeFrom(asked)
            results = self._caller.call(self._retrieval.Search, request).results
            return [from_status(each.error) if each.HasField("error") else hits_of(each) for each in results]

        return answers_to(
            queries_of(images, vectors, keys),
            retrieval_pb.Query.ByteSize,
            min(MAX_INPUTS, MAX_HITS // asked.k),
            search_once,
            raising=on_error == "raise",
        )

    def upsert(self, gallery: str, items: Iterable[Item]) -> list[int]:
        """Store items, replacing those with the same keys; under the condition that an item may have.

        Items are sent in calls of at most 256; each call stores all of its items or none, and what an earlier
        call has stored stays. A call whose reply was lost is made again, but for one with an
        `expected_version`: that raises Unavailable, and `get` tells whether it was carried out.

        Returns:
            The new version of each item, in order; all of them are on disk.

        Raises:
            InvalidArgument: if an item is bad; says which.
            Conflict: if an item has another version than expected; tells its key and both versions.
            NotFound: if there is no such gallery.
            ModelMismatch: if the gallery belongs to another model.
            CrossbatchError: if a call fails for another reason.
        """
        return upsert_items(self._caller, self._galleries.UpsertItems, gallery, items)

    def delete(
        self, gallery: str, keys: Iterable[str], *, expected_versions: Iterable[int] | None = None
    ) -> int:
        """Remove items; with `expected_versions`, one a key, only if they have these.

        Keys are sent in calls of at most 1,000. A call whose reply was lost is made again, and then finds its
        items gone: they are removed, and not in the count. One with `expected_versions` is not: it raises
        Unavailable, and `get` tells whether it was carried out.

        Returns:
            How many were there and are gone; too few after a lost reply.

        Raises:
            InvalidArgument: if the keys are no list of strings, or one cannot be a key.
            Conflict: if an item has another version than expected; tells its key and both versions.
            NotFound: if there is no such gallery.
            CrossbatchError: if a call fails for another reason.
        """
        return delete_items(self._caller, self._galleries.DeleteItems, gallery, keys, expected_versions)

    def get(self, gallery: str, key: str, *, thumbnail: bool = False) -> StoredItem:
        """Read one item with its vector, and with its thumbnail if that is wanted.

        Raises:
            NotFound: if there is no such gallery or item.
            ModelMismatch: if the gallery belongs to another model.
            CrossbatchError: if the call fails for another reason.
        """
        request = gallery_pb.GetItemRequest(
            gallery=text(gallery, "gallery"), key=text(key, "key"), with_thumbnail=bool(thumbnail)
        )
        reply = self._caller.call(self._galleries.GetItem, request)
        return stored_item_of(reply.item, reply.thumbnail)

    def items(self, gallery: str, *, prefix: str = "", vectors: bool = False) -> Iterator[StoredItem]:
        """Read all items in the order of their keys, those whose key begins with `prefix`, page by page.

        Each page is asked for when its turn comes. An item that is written meanwhile comes once, old or new.

        Returns:
            The items, with their vectors if those are wanted.

        Raises:
            NotFound: if there is no such gallery.
            ModelMismatch: if the gallery belongs to another model.
            CrossbatchError: if a call fails for another reason.
        """
        request = gallery_pb.ListItemsRequest(
            gallery=text(gallery, "gallery"),
            key_prefix=text(prefix, "prefix"),
            with_vectors=bool(vectors),
            page_size=MAX_PAGE,
        )
        pages = self._caller.pages(self._galleries.ListItems, request)
        return (stored_item_of(item) for page in pages for item in page.items)

    def create(
        self, gallery: str, *, thumbnail_side: int = 0, index: str = "auto", recall: float | None = None
    ) -> GalleryInfo:
        """Make an empty gallery for the model that is served.

        Args:
            gallery: Its name.
            thumbnail_side: Longer side in pixels of the thumbnails of its images, to 1,024; 0: it keeps none.
            index: "auto" (chosen by measurement), "exact" or a FAISS factory string.
            recall: Share of the true ten nearest neighbours that the index is to find; 0.99 when None.

        Raises:
            AlreadyExists: if the name is taken.
            InvalidArgument: if the name breaks the rule, or an option is out of range.
            CrossbatchError: if the call fails for another reason.
        """
        request = create_request(gallery, thumbnail_side=thumbnail_side, index=index, recall=recall)
        # Made again after a lost reply, it would find its own gallery and say that the name is taken.
        reply = self._caller.call(self._galleries.CreateGallery, request, idempotent=False)
        return gallery_info_of(reply.gallery)

    def gallery(self, name: str) -> GalleryInfo:
        """Describe one gallery.

        Raises:
            NotFound: if there is none of that name; names those that there are.
            CrossbatchError: if the call fails for another reason.
        """
        request = gallery_pb.GetGalleryRequest(name=text(name, "name"))
        return gallery_info_of(self._caller.call(self._galleries.GetGallery, request).gallery)

    def galleries(self) -> list[GalleryInfo]:
        """Describe all galleries, in the order of their names.

        Raises:
            CrossbatchError: if a call fails.
        """
        pages = self._caller.pages(self._galleries.ListGalleries, gallery_pb.ListGalleriesRequest())
        return [gallery_info_of(gallery) for page in pages for gallery in page.galleries]

    def model(self) -> ModelInfo:
        """Describe the model that is served.

        Raises:
            CrossbatchError: if the call fails.
        """
        return model_info_of(self._caller.call(self._models.GetModel, model_pb.GetModelRequest()).model)

    def _embed(self, images: list[bytes]) -> list[NDArray[np.float32] | CrossbatchError]:
        results = self._caller.call(self._retrieval.Embed, retrieval_pb.EmbedRequest(images=images)).results
        return [
            from_status(each.error) if each.HasField("error") else vector_of(each.vector) for each in results
        ]


def _check_on_error(choice: str) -> None:
    if choice not in ("raise", "return"):
        raise InvalidArgument(f"on_error cannot be {choice!r}; it must be 'raise' or 'return'.")
