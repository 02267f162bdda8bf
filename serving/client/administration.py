"""What a client does with whole galleries and models, waiting for the answer or on an event loop."""

from collections.abc import AsyncIterator, Iterator

from serving.client.answers import BuildProgress, GalleryInfo, ModelInfo, Reloaded
from serving.client.async_driver import AsyncDriver
from serving.client.connection import Connection
from serving.client.driver import Driver
from serving.client.galleries import (
    build_index,
    create_gallery,
    delete_gallery,
    get_gallery,
    list_galleries,
    rollback_gallery,
    switch_gallery,
)
from serving.client.models import get_model, list_models, reload_models

__all__ = ["Administration", "AsyncAdministration"]


class Administration(Connection):
    """The calls about galleries and models, each of which waits for its answer."""

    @property
    def _driver(self) -> Driver:
        return Driver(self._line, self._options)

    def create(
        self,
        gallery: str,
        *,
        thumbnail_side: int = 0,
        index: str = "auto",
        recall: float | None = None,
        model: str = "",
    ) -> GalleryInfo:
        """Make an empty gallery for a model that is served.

        Args:
            gallery: Its name.
            thumbnail_side: Longer side in pixels of the thumbnails of its images, to 1,024; 0: it keeps none.
            index: "auto" (chosen by measurement), "exact" or a FAISS factory string.
            recall: Share of the true ten nearest neighbours that the index is to find; 0.99 when None.
            model: Name of the model; the first one served when empty.

        Raises:
            AlreadyExists: if the name is taken.
            InvalidArgument: if the name breaks the rule, or an option is out of range.
            NotFound: if there is no such model.
            CrossbatchError: if the call fails.
        """
        return self._driver.run(
            create_gallery(gallery, thumbnail_side=thumbnail_side, index=index, recall=recall, model=model)
        )

    def gallery(self, name: str) -> GalleryInfo:
        """Describe one gallery.

        Raises:
            NotFound: if there is none of that name; names those that there are.
            CrossbatchError: if the call fails for another reason.
        """
        return self._driver.run(get_gallery(name))

    def galleries(self) -> list[GalleryInfo]:
        """Describe all galleries, in the order of their names.

        Raises:
            CrossbatchError: if a call fails.
        """
        return self._driver.run(list_galleries())

    def delete_gallery(self, gallery: str) -> None:
        """Remove a gallery with everything in it, also one that is damaged.

        A call whose reply was lost is not made again: it raises Unavailable, and `galleries` tells what came
        of it.

        Raises:
            NotFound: if there is none of that name.
            CrossbatchError: if the call fails for another reason.
        """
        self._driver.run(delete_gallery(gallery))

    def switch(self, gallery: str, other: str) -> GalleryInfo:
        """Give the name `gallery` to the gallery called `other`, in one step that no search sees half of.

        The gallery that had the name is called `other` from then on, and `rollback` gives the name back. A
        call whose reply was lost is not made again: it raises Unavailable, and `gallery` tells what came of
        it.

        Returns:
            The gallery that has the name now.

        Raises:
            NotFound: if there is no gallery `other`.
            AlreadyExists: if the switch was made before.
            CrossbatchError: if the call fails for another reason.
        """
        return self._driver.run(switch_gallery(gallery, other))

    def rollback(self, gallery: str) -> GalleryInfo:
        """Undo the switch by which a gallery got its name; after a lost reply as in `switch`.

        Returns:
            The gallery that has the name again.

        Raises:
            NotFound: if there was none, or the gallery before it was deleted.
            CrossbatchError: if the call fails for another reason.
        """
        return self._driver.run(rollback_gallery(gallery))

    def build_index(
        self, gallery: str, *, index: str = "", recall: float | None = None, timeout: float = 3_600.0
    ) -> Iterator[BuildProgress]:
        """Make the search index of a gallery anew, which goes on while the progress is read.

        Leaving the iterator breaks the work off, and the index stays as it was.

        Args:
            gallery: Its name.
            index: Kind of index from now on, as in `create`; as before when empty.
            recall: What the index is to find from now on, as in `create`; as before when None.
            timeout: Seconds that the whole work has.

        Returns:
            How far it is, at least once a second; the last one has the gallery with its new index.

        Raises:
            NotFound: if there is no such gallery.
            InvalidArgument: if an option is out of range.
            CrossbatchError: if the call fails for another reason.
        """
        return self._driver.stream(build_index(gallery, index=index, recall=recall, timeout=timeout))

    def model(self, name: str = "") -> ModelInfo:
        """Describe a model that is served; the first one when no name is given.

        Raises:
            NotFound: if there is none of that name; names those that there are.
            CrossbatchError: if the call fails.
        """
        return self._driver.run(get_model(name))

    def models(self) -> list[ModelInfo]:
        """Describe every model that is served, the first one first.

        Raises:
            CrossbatchError: if the call fails.
        """
        return self._driver.run(list_models())

    def reload(self, *, timeout: float = 600.0) -> Reloaded:
        """Have the server look at its model files and galleries again; no call fails for it.

        Args:
            timeout: Seconds that it has; models are loaded and warmed up in them.

        Raises:
            BadArtifact: if a file cannot be served; then everything stays as it was.
            Mismatch: if a gallery would lose the last model that fits it; then so, too.
            CrossbatchError: if the call fails for another reason.
        """
        return self._driver.run(reload_models(timeout))


class AsyncAdministration(Connection):
    """The calls about galleries and models, to be awaited; `Administration` tells what each takes."""

    @property
    def _driver(self) -> AsyncDriver:
        return AsyncDriver(self._line, self._options)

    async def create(
        self,
        gallery: str,
        *,
        thumbnail_side: int = 0,
        index: str = "auto",
        recall: float | None = None,
        model: str = "",
    ) -> GalleryInfo:
        """Make an empty gallery for a model that is served, as `Client.create`."""
        return await self._driver.run(
            create_gallery(gallery, thumbnail_side=thumbnail_side, index=index, recall=recall, model=model)
        )

    async def gallery(self, name: str) -> GalleryInfo:
        """Describe one gallery, as `Client.gallery`."""
        return await self._driver.run(get_gallery(name))

    async def galleries(self) -> list[GalleryInfo]:
        """Describe all galleries, as `Client.galleries`."""
        return await self._driver.run(list_galleries())

    async def delete_gallery(self, gallery: str) -> None:
        """Remove a gallery with everything in it, as `Client.delete_gallery`."""
        await self._driver.run(delete_gallery(gallery))

    async def switch(self, gallery: str, other: str) -> GalleryInfo:
        """Give the name of one gallery to another one, as `Client.switch`."""
        return await self._driver.run(switch_gallery(gallery, other))

    async def rollback(self, gallery: str) -> GalleryInfo:
        """Undo the switch by which a gallery got its name, as `Client.rollback`."""
        return await self._driver.run(rollback_gallery(gallery))

    def build_index(
        self, gallery: str, *, index: str = "", recall: float | None = None, timeout: float = 3_600.0
    ) -> AsyncIterator[BuildProgress]:
        """Make the search index of a gallery anew, as `Client.build_index`."""
        return self._driver.stream(build_index(gallery, index=index, recall=recall, timeout=timeout))

    async def model(self, name: str = "") -> ModelInfo:
        """Describe a model that is served, as `Client.model`."""
        return await self._driver.run(get_model(name))

    async def models(self) -> list[ModelInfo]:
        """Describe every model that is served, as `Client.models`."""
        return await self._driver.run(list_models())

    async def reload(self, *, timeout: float = 600.0) -> Reloaded:  # noqa: ASYNC109 - the server knows it, too
        """Have the server look at its model files and galleries again, as `Client.reload`."""
        return await self._driver.run(reload_models(timeout))
