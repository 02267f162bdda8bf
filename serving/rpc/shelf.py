"""The galleries as calls see them: opened by name, checked against the model, worked on in threads."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from serving.gallery.item import Hit, Item
from serving.rpc.pipeline import SpecLike

__all__ = ["GalleriesLike", "GalleryInfoLike", "GalleryLike", "Shelf"]

P = ParamSpec("P")
T = TypeVar("T")

READERS, WRITERS = 4, 2


class GalleryInfoLike(Protocol):
    """What the server reads of a gallery's own account."""

    @property
    def model_name(self) -> str: ...  # noqa: D102
    @property
    def fingerprint(self) -> str: ...  # noqa: D102
    @property
    def dimension(self) -> int: ...  # noqa: D102
    @property
    def items(self) -> int: ...  # noqa: D102


class GalleryLike(Protocol):
    """What the server needs of a `serving.gallery.gallery.Gallery`, from any thread."""

    def info(self) -> GalleryInfoLike: ...  # noqa: D102
    def check_model(self, spec: Any, /) -> None: ...  # noqa: D102
    def upsert(self, items: Iterable[Item], /) -> int: ...  # noqa: D102
    def delete(self, keys: Sequence[str], /) -> int: ...  # noqa: D102
    def get(self, keys: Sequence[str], /) -> list[Item]: ...  # noqa: D102
    def search(  # noqa: D102
        self,
        vectors: NDArray[np.float32],
        k: int,
        /,
        *,
        minimum_score: float | None = None,
        exclude: Sequence[str] = (),
    ) -> list[list[Hit]]: ...


class GalleriesLike(Protocol):
    """What the server needs of a `serving.gallery.directory.GalleryDirectory`."""

    def names(self) -> Sequence[str]: ...  # noqa: D102
    def get(self, name: str, /) -> GalleryLike: ...  # noqa: D102
    def create(self, name: str, /, *, model_name: str, fingerprint: str, dimension: int) -> GalleryLike: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class Shelf:
    """A folder of galleries and the threads that work on them.

    Reads and writes have threads of their own, so that a search never waits for a disk to confirm a write.
    """

    def __init__(self, galleries: GalleriesLike, spec: SpecLike) -> None:
        """Keep the galleries and the model that they must fit."""
        self.galleries = galleries
        self.spec = spec
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="gallery-read")
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="gallery-write")

    def usable(self, name: str) -> GalleryLike:
        """Open a gallery that fits the model; blocks, so call it through `read`.

        Returns:
            The gallery.

        Raises:
            NotFound: if there is none of that name.
            Mismatch: if it belongs to another model or is damaged.
        """
        gallery = self.galleries.get(name)
        gallery.check_model(self.spec)
        return gallery

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that reads a gallery in a thread.

        Returns:
            What the function returns.

        Raises:
            Exception: whatever the function raises.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._readers, lambda: function(*args, **kwargs)
        )

    async def write(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that writes to a gallery in a thread.

        Returns:
            What the function returns.

        Raises:
            Exception: whatever the function raises.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._writers, lambda: function(*args, **kwargs)
        )

    def close(self) -> None:
        """Finish the writes that have begun, and close the galleries.

        Raises:
            CrossbatchError: if a gallery cannot be closed.
        """
        self._writers.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        self.galleries.close()
