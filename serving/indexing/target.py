"""The gallery that is filled: opened or made, what it holds of a data set, and what is to go from it."""

from collections.abc import Iterator, Sequence
from typing import Any

from serving.errors import AlreadyExists, BadSetting, Conflict, NotFound
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery
from serving.gallery.index.factory import check_type
from serving.gallery.item import Item
from serving.model.spec import ModelSpec

__all__ = ["THUMBNAIL_SIDE", "Target", "delete_items", "item_of", "keys_of", "stored_of"]

THUMBNAIL_SIDE = 256
_PAGE = 1024  # keys read at once


class Target:
    """One name in a folder of galleries, and the model whose embeddings go there."""

    def __init__(
        self,
        directory: GalleryDirectory,
        name: str,
        model: ModelSpec,
        *,
        thumbnails: bool = False,
        index: str | None = None,
        recall: float | None = None,
    ) -> None:
        """Open the gallery, if there is one.

        Args:
            directory: The folder of galleries.
            name: The gallery's name there.
            model: The model that embeds.
            thumbnails: Whether small pictures are kept with the items; one that is there must keep them.
            index: The type of index that a new gallery gets; None leaves the choice to it.
            recall: The recall that its index must reach; None for the usual one.

        Raises:
            ModelMismatch: The gallery is of another model.
            InvalidArgument: The index cannot be that of a gallery.
            BadSetting: The gallery keeps no thumbnails.
            CrossbatchError: It is damaged.
        """
        if index is not None:  # now, and not when all images have been embedded
            check_type(index, dimension=model.dimension)
        self._directory, self._name, self._model = directory, name, model
        self._thumbnails = thumbnails
        wanted = {"index": index, "recall": recall}
        self._wanted: dict[str, Any] = {key: value for key, value in wanted.items() if value is not None}
        self.gallery = self._existing()

    @property
    def thumbnail_side(self) -> int:
        """Longer side in pixels of the thumbnails that the gallery keeps, or will; 0 for none."""
        if self.gallery is not None:
            return self.gallery.meta.thumbnail_side
        return THUMBNAIL_SIDE if self._thumbnails else 0

    def made(self) -> Gallery:
        """Return the gallery, made where it is not there; another run may have made it meanwhile."""
        if self.gallery is None:
            model = self._model
            try:
                self.gallery = self._directory.create(
                    self._name,
                    model_name=model.name,
                    fingerprint=model.fingerprint,
                    dimension=model.dimension,
                    thumbnail_side=self.thumbnail_side,
                    **self._wanted,
                )
            except AlreadyExists:
                self.gallery = self._existing()
                if self.gallery is None:  # it is something else that is in the way
                    raise
        return self.gallery

    def _existing(self) -> Gallery | None:
        try:
            gallery = self._directory.get(self._name)
        except NotFound:
            return None
        gallery.check_model(self._model)
        if self._thumbnails and not gallery.meta.thumbnail_side:
            raise BadSetting(
                f"the gallery {self._name} was made without thumbnails and keeps none; leave --thumbnails "
                "out, or index into a new gallery"
            )
        return gallery


def stored_of(gallery: Gallery, keys: Sequence[str]) -> dict[str, Item]:
    """Return the items of those keys that were made of files.

    One that was put in by other means is found when its key turns out to be taken: to look for each key
    would cost more than to embed those few.
    """
    while True:
        try:
            return {item.key: item for item in gallery.get(list(gallery.sources(keys)))}
        except NotFound:  # deleted since
            continue


def item_of(gallery: Gallery, key: str) -> Item | None:
    """Return the item of a key, whatever it was made of; None where there is none."""
    try:
        return gallery.get([key])[0]
    except NotFound:
        return None


def keys_of(gallery: Gallery, origin: str) -> Iterator[list[str]]:
    """Yield all keys of an origin, ascending, page by page."""
    after = ""
    while keys := gallery.keys_of(origin, after=after, limit=_PAGE):
        yield keys
        after = keys[-1]


def delete_items(gallery: Gallery, keys: Sequence[str], origins: Sequence[str]) -> int:
    """Delete items of those origins, unless somebody has just put in others; returns how many went."""
    while True:
        versions = {
            key: item.version
            for key, item in stored_of(gallery, keys).items()
            if item.source and item.source.origin in origins
        }
        try:
            return gallery.delete(list(versions), expected=versions)
        except Conflict:  # look again at whose they are now
            continue
