"""The Python client for asyncio: the same calls as `serving.client.client`, to be awaited."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from types import TracebackType
from typing import Literal, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from serving.client.administration import AsyncAdministration
from serving.client.answers import Explanation, Hit, Item, StoredItem
from serving.client.arriving import iterable_of
from serving.client.given import ImageLike
from serving.client.items import delete_items, get_item, list_items, upsert_items
from serving.client.models import ready
from serving.client.query import SearchOptions
from serving.client.retrieval import embed_images, explain_images, search_gallery
from serving.errors import CrossbatchError

__all__ = ["AsyncClient"]

Images = Iterable[ImageLike] | AsyncIterable[ImageLike]


class AsyncClient(AsyncAdministration):
    """A connection whose calls are awaited; `async with` closes it.

    Any number of calls may be on their way at once, from several event loops and threads. A call whose task
    is cancelled is cancelled at the server, too, which drops what it has not begun. Files, and iterables
    other than lists and tuples, are read in a thread; an asynchronous iterable of images or items is read on
    the loop.

    Each call takes, returns and raises what the one of `serving.client.client.Client` does.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up, any number of times; calls on their way end with an error."""
        self._hang_up()

    async def ready(self, *, wait: float = 0.0) -> bool:
        """Ask whether the server serves, as `Client.ready`."""
        return await self._driver.run(ready(wait))

    @overload
    async def embed(
        self, images: Images, *, model: str = "", on_error: Literal["raise"] = "raise"
    ) -> NDArray[np.float32]: ...
    @overload
    async def embed(
        self, images: Images, *, model: str = "", on_error: Literal["return"]
    ) -> list[NDArray[np.float32] | CrossbatchError]: ...
    async def embed(
        self, images: Images, *, model: str = "", on_error: Literal["raise", "return"] = "raise"
    ) -> NDArray[np.float32] | list[NDArray[np.float32] | CrossbatchError]:
        """Embed images, as `Client.embed`."""
        with iterable_of(images) as given:
            return await self._driver.run(embed_images(given, model=model, on_error=on_error))

    @overload
    async def search(
        self, gallery: str, *, on_error: Literal["raise"] = "raise", **options: Unpack[SearchOptions]
    ) -> list[list[Hit]]: ...
    @overload
    async def search(
        self, gallery: str, *, on_error: Literal["return"], **options: Unpack[SearchOptions]
    ) -> list[list[Hit] | CrossbatchError]: ...
    async def search(
        self,
        gallery: str,
        *,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[SearchOptions],
    ) -> list[list[Hit]] | list[list[Hit] | CrossbatchError]:
        """Find the nearest items to each query, as `Client.search`."""
        return await self._driver.run(search_gallery(gallery, on_error=on_error, **options))

    @overload
    async def explain(
        self, images: Images, *, model: str = "", on_error: Literal["raise"] = "raise"
    ) -> list[Explanation]: ...
    @overload
    async def explain(
        self, images: Images, *, model: str = "", on_error: Literal["return"]
    ) -> list[Explanation | CrossbatchError]: ...
    async def explain(
        self, images: Images, *, model: str = "", on_error: Literal["raise", "return"] = "raise"
    ) -> list[Explanation] | list[Explanation | CrossbatchError]:
        """Tell which of the model's prototypes make up each image, as `Client.explain`."""
        with iterable_of(images) as given:
            return await self._driver.run(explain_images(given, model=model, on_error=on_error))

    async def upsert(self, gallery: str, items: Iterable[Item] | AsyncIterable[Item]) -> list[int]:
        """Store items, as `Client.upsert`.

        When the task is cancelled, some of the items that were on their way may be stored.
        """
        with iterable_of(items) as given:
            return await self._driver.run(upsert_items(gallery, given))

    async def delete(
        self, gallery: str, keys: Iterable[str], *, expected_versions: Iterable[int] | None = None
    ) -> int:
        """Remove items, as `Client.delete`."""
        return await self._driver.run(delete_items(gallery, keys, expected_versions))

    async def get(self, gallery: str, key: str, *, thumbnail: bool = False) -> StoredItem:
        """Read one item, as `Client.get`."""
        return await self._driver.run(get_item(gallery, key, thumbnail=thumbnail))

    def items(self, gallery: str, *, prefix: str = "", vectors: bool = False) -> AsyncIterator[StoredItem]:
        """Read all items in the order of their keys, as `Client.items`."""
        return self._driver.stream(list_items(gallery, prefix=prefix, vectors=vectors))
