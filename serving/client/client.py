"""The Python client: images and arrays in, arrays and records out; needs the base installation only.

`serving.client.async_client` has the same for asyncio.
"""

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Literal, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from serving.client.administration import Administration
from serving.client.answers import (
    BuildProgress,
    Explanation,
    GalleryInfo,
    Hit,
    Item,
    ModelInfo,
    Reloaded,
    StoredItem,
)
from serving.client.given import ImageLike
from serving.client.items import delete_items, get_item, list_items, upsert_items
from serving.client.models import ready
from serving.client.query import SearchOptions
from serving.client.retrieval import embed_images, explain_images, search_gallery
from serving.errors import CrossbatchError

__all__ = [
    "BuildProgress",
    "Client",
    "Explanation",
    "GalleryInfo",
    "Hit",
    "Item",
    "ModelInfo",
    "Reloaded",
    "StoredItem",
]


class Client(Administration):
    """A connection whose calls wait for their answer; may be used from several threads. A context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up, any number of times; calls of other threads end with an error."""
        self._hang_up()

    def ready(self, *, wait: float = 0.0) -> bool:
        """Ask whether the server serves.

        Args:
            wait: Seconds to go on asking for.

        Returns:
            True as soon as it does; False when it does not, or is not there.
        """
        return self._driver.run(ready(wait))

    @overload
    def embed(
        self, images: Iterable[ImageLike], *, model: str = "", on_error: Literal["raise"] = "raise"
    ) -> NDArray[np.float32]: ...
    @overload
    def embed(
        self, images: Iterable[ImageLike], *, model: str = "", on_error: Literal["return"]
    ) -> list[NDArray[np.float32] | CrossbatchError]: ...
    def embed(
        self, images: Iterable[ImageLike], *, model: str = "", on_error: Literal["raise", "return"] = "raise"
    ) -> NDArray[np.float32] | list[NDArray[np.float32] | CrossbatchError]:
        """Embed images.

        Args:
            images: Encoded bytes, paths or files open in binary mode; read as they are needed.
            model: Name of the model; the first one served when empty.
            on_error: "raise" the first bad image's error, or "return" each error in its image's place.

        Returns:
            float32 (N, d), unit rows; with "return" a list of N rows float32 (d,) or errors.

        Raises:
            BadImage: if an image is bad; says which.
            InvalidArgument: if an argument is of another kind.
            NotFound: if there is no such model.
            CrossbatchError: if the call as a whole fails.
        """
        rows: NDArray[np.float32] | list[NDArray[np.float32] | CrossbatchError]
        rows = self._driver.run(embed_images(images, model=model, on_error=on_error))
        return rows

    @overload
    def search(
        self, gallery: str, *, on_error: Literal["raise"] = "raise", **options: Unpack[SearchOptions]
    ) -> list[list[Hit]]: ...
    @overload
    def search(
        self, gallery: str, *, on_error: Literal["return"], **options: Unpack[SearchOptions]
    ) -> list[list[Hit] | CrossbatchError]: ...
    def search(
        self,
        gallery: str,
        *,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[SearchOptions],
    ) -> list[list[Hit]] | list[list[Hit] | CrossbatchError]:
        """Find the nearest items to each query; give exactly one of `images`, `vectors` and `keys`.

        Args:
            gallery: Where to look.
            on_error: "raise" the first bad query's error, or "return" each error in its query's place.
            options:
                images: Encoded bytes, paths or files open in binary mode; read as they are needed.
                vectors: float32 (Q, d), unit rows.
                keys: Items of the gallery; each finds itself unless it is excluded.
                k: Neighbours of each query, 1 to 2,048; 10 by default.
                minimum_score: Leaves out items with a lower score, -1 to 1.
                exclude: Keys of items to leave out, at most 1,000.
                filter: What every hit must fulfil, as {"brand": "acme", "price": {"$lt": 9}} (`parse_filter`)
                    or made of the classes of `serving.gallery.search.filter`.
                group_by_label: Whether to return only the nearest item of each label.
                model: Name of the model that embeds the images; the first one that fits when empty.

        Returns:
            One list of hits a query, nearest first.

        Raises:
            InvalidArgument: if a query or an option is bad.
            NotFound: if there is no such gallery, key or model.
            ModelMismatch: if the gallery belongs to another model.
            CrossbatchError: if the call as a whole fails.
        """
        return self._driver.run(search_gallery(gallery, on_error=on_error, **options))

    @overload
    def explain(
        self, images: Iterable[ImageLike], *, model: str = "", on_error: Literal["raise"] = "raise"
    ) -> list[Explanation]: ...
    @overload
    def explain(
        self, images: Iterable[ImageLike], *, model: str = "", on_error: Literal["return"]
    ) -> list[Explanation | CrossbatchError]: ...
    def explain(
        self, images: Iterable[ImageLike], *, model: str = "", on_error: Literal["raise", "return"] = "raise"
    ) -> list[Explanation] | list[Explanation | CrossbatchError]:
        """Tell which of the model's prototypes make up each image, and where; arguments as in `embed`.

        Returns:
            One explanation an image; `overlap` compares two of them.

        Raises:
            BadImage: if an image is bad; says which.
            Mismatch: if the model was exported without prototypes.
            CrossbatchError: if the call as a whole fails, as in `embed`.
        """
        return self._driver.run(explain_images(images, model=model, on_error=on_error))

    def upsert(self, gallery: str, items: Iterable[Item]) -> list[int]:
        """Store items, replacing those with the same keys; under the condition that an item may have.

        Up to 256 items (or about 32 MB) are one call, which stores all of them or none. More are taken as
        there is room for them and sent in smaller calls, four at a time, each of which stores all of its
        items or none; of two items with the same key the later one wins. The first error ends it: its
        `stored` tells how many items, from the first on, are stored for certain; some of the 256 after them
        may be, too.

        A call whose reply was lost is made again, but for one with an `expected_version`: that raises
        Unavailable, and `get` tells whether it was carried out.

        Returns:
            The new version of each item, in order; all of them are on disk.

        Raises:
            InvalidArgument: if an item is bad; says which.
            Conflict: if an item has another version than expected; tells its key and both versions.
            NotFound: if there is no such gallery.
            ModelMismatch: if the gallery belongs to another model.
            CrossbatchError: if a call fails for another reason.
        """
        return self._driver.run(upsert_items(gallery, items))

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
        return self._driver.run(delete_items(gallery, keys, expected_versions))

    def get(self, gallery: str, key: str, *, thumbnail: bool = False) -> StoredItem:
        """Read one item with its vector, and with its thumbnail if that is wanted.

        Raises:
            NotFound: if there is no such gallery or item.
            ModelMismatch: if the gallery belongs to another model.
            CrossbatchError: if the call fails for another reason.
        """
        return self._driver.run(get_item(gallery, key, thumbnail=thumbnail))

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
        return self._driver.stream(list_items(gallery, prefix=prefix, vectors=vectors))
