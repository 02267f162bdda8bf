"""The gallery that is filled: opened where it is there, made when the first image is ready."""

from functools import partial

from serving.errors import AlreadyExists, BadSetting, NotFound
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery
from serving.gallery.index.factory import check_type
from serving.gallery.index.kind import AUTOMATIC
from serving.gallery.info import ModelIdentity

__all__ = ["THUMBNAIL_SIDE", "Target"]

THUMBNAIL_SIDE = 256


class Target:
    """One name in a folder of galleries, and the model whose embeddings go there."""

    def __init__(
        self,
        directory: GalleryDirectory,
        name: str,
        model: ModelIdentity,
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
        self._index, self._recall = index or AUTOMATIC, recall
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
            create = partial(
                self._directory.create,
                self._name,
                model_name=self._model.name,
                fingerprint=self._model.fingerprint,
                dimension=self._model.dimension,
                thumbnail_side=self.thumbnail_side,
                index=self._index,
            )
            try:
                self.gallery = create() if self._recall is None else create(recall=self._recall)
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
