"""Work on a gallery that takes a model first: what is embedded is of the model that the gallery has then."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from serving.engine.fleet import Fleet
from serving.engine.pipeline import Pipeline
from serving.engine.shelf import Shelf
from serving.errors import ModelMismatch

if TYPE_CHECKING:  # both bring an engine, which whoever imports only the settings does not need
    from serving.gallery.gallery import Gallery
    from serving.gallery.store.schema import Meta

__all__ = ["on_gallery_of", "with_fitting_model"]

T = TypeVar("T")

TRIES = 3
"""A switch to another model in the middle of each of so many tries is no accident."""


async def with_fitting_model(
    shelf: Shelf,
    fleet: Fleet,
    deadline: float | None,
    name: str,
    work: "Callable[[Meta, Pipeline], Awaitable[T]]",
    *,
    model: str = "",
) -> T:
    """Do work with the model that fits a gallery, held meanwhile.

    The work is begun anew if it finds, as `on_gallery_of` does, that the gallery's name has gone to one of
    another model since: it must not have stored anything then.

    Args:
        shelf: The galleries.
        fleet: The models.
        deadline: The `time.monotonic()` until which somebody waits.
        name: Of the gallery.
        work: Gets what the gallery is made for, and the model.
        model: Name of the model that must fit; any that is served when empty.

    Returns:
        What the work returns.

    Raises:
        NotFound: if there is no gallery of that name, or no such model.
        ModelMismatch: if no model fits, or the gallery's changed again and again.
        CrossbatchError: what the work raises.
    """
    left = TRIES
    while True:
        meta, fits = await shelf.read(
            deadline, shelf.using, name, lambda gallery, fits: (gallery.meta, fits.name), model=model
        )
        left -= 1
        try:
            with fleet.holding(fits) as pipeline:
                return await work(meta, pipeline)
        except ModelMismatch:
            if not left:
                raise


def on_gallery_of(shelf: Shelf, name: str, pipeline: Pipeline, work: "Callable[[Gallery, Pipeline], T]") -> T:
    """Work on the gallery that has a name now, if it is one of this very model; blocks.

    Raises:
        NotFound: if there is none of that name.
        ModelMismatch: if it is one of another model.
        CrossbatchError: what the work raises.
    """

    def checked(gallery: "Gallery") -> T:
        gallery.check_model(pipeline.spec)
        return work(gallery, pipeline)

    return shelf.galleries.using(name, checked)
