"""The galleries as calls see them: opened by name, checked against the model, worked on in threads."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from serving.engine.builds import Build, Builds
from serving.engine.fleet import Fleet, fits
from serving.engine.pipeline import Pipeline
from serving.engine.workers import Workers
from serving.errors import CrossbatchError, Mismatch

if TYPE_CHECKING:  # both bring an engine, which whoever imports only the settings does not need
    from serving.gallery.directory import GalleryDirectory
    from serving.gallery.gallery import Gallery

__all__ = ["Shelf"]

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

READERS, WRITERS, KEEPERS = 4, 2, 4
MOST_NAMED = 10
"""Most galleries that a message names."""
MOST_UPKEEP = 32
"""Most switches, rollbacks and removals that wait or run: each may have to wait for a lock."""


class Shelf:
    """A folder of galleries and the threads that work on them.

    Reads and writes have threads of their own, so that a search never waits for a disk to confirm a write. So
    has upkeep, which waits for locks that a rebuild holds, and so has each rebuild.
    """

    def __init__(self, galleries: "GalleryDirectory", fleet: Fleet, *, most: int) -> None:
        """Keep the galleries and the models of which one must fit each.

        Args:
            galleries: The folder; an absolute path, so that it is known in a message.
            fleet: The models.
            most: Most reads, and most writes, that wait or run.
        """
        self.galleries = galleries
        self._fleet = fleet
        self._path = re.compile(re.escape(str(galleries.path)) + r"(/|(?![\w.-]))")
        self._readers = Workers("gallery-read", READERS, most=most, what="the gallery was read")
        self._writers = Workers("gallery-write", WRITERS, most=most, what="anything was stored")
        self._keepers = Workers(
            "gallery-upkeep", KEEPERS, most=MOST_UPKEEP, what="anything was done to the gallery"
        )
        self._builds = Builds()

    def using(self, name: str, work: "Callable[[Gallery, Pipeline], T]", *, model: str = "") -> T:
        """Work on the gallery that has a name now, with the model that fits it; blocks, so use `read`.

        The work is begun anew where another gallery took the name meanwhile, so that a switch fails no call.

        Args:
            name: Of the gallery.
            work: What to do.
            model: Name of the model that must fit; any that is served when empty.

        Raises:
            NotFound: if there is none of that name, or no such model.
            Mismatch: if it belongs to another model or is damaged.
        """
        return self.galleries.using(name, lambda gallery: work(gallery, self._fleet.fitting(gallery, model)))

    def at_once(self, name: str, work: "Callable[[Gallery, Pipeline], T]", *, model: str = "") -> T:
        """Work, as `using` does, on a gallery that is open already; waits for nobody.

        Raises:
            NotAtHand: if it is not.
            CrossbatchError: as `using` does; names no path.
        """
        try:
            return self.galleries.at_once(
                name, lambda gallery: work(gallery, self._fleet.fitting(gallery, model))
            )
        except CrossbatchError as error:
            self.hide(error)
            raise

    def check_kept(self, before: Sequence[Pipeline], after: Sequence[Pipeline]) -> None:
        """Find out whether each gallery that one of the models fits keeps one that does; blocks.

        Galleries that cannot be opened, and those that none fitted before, do not count.

        Args:
            before: The models as they are.
            after: The models as they would be.

        Raises:
            Mismatch: if not; names the galleries and their models.
        """
        lost = []
        for name in self.galleries.names():
            try:
                model = self.galleries.using(name, lambda gallery: _lost(gallery, before, after))
            except CrossbatchError:  # the calls to it say it
                continue
            except Exception:  # a bug that one gallery shows must not keep models from being loaded
                logger.exception("gallery %s cannot be opened", name, extra={"gallery": name})
                continue
            if model:
                lost.append(f"{name} (of the model {model})")
        if lost:
            more = f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
            raise Mismatch(
                f"no model would be served that fits {', '.join(lost[:MOST_NAMED])}{more}; load the new "
                "model beside the old one under another name, index a gallery with it, switch to that and "
                "drop the one before, and only then remove the old model"
            )

    async def read(
        self, deadline: float | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function that reads a gallery in a thread; what it raises names no path."""
        try:
            return await self._readers.run(deadline, function, *args, **kwargs)
        except CrossbatchError as error:
            self.hide(error)
            raise

    async def write(
        self, deadline: float | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function that writes to a gallery in a thread; what it raises names no path."""
        try:
            return await self._writers.run(deadline, function, *args, **kwargs)
        except CrossbatchError as error:
            self.hide(error)
            raise

    async def upkeep(
        self, deadline: float | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function that changes a gallery as a whole in a thread; what it raises names no path."""
        try:
            return await self._keepers.run(deadline, function, *args, **kwargs)
        except CrossbatchError as error:
            self.hide(error)
            raise

    @asynccontextmanager
    async def building(
        self, deadline: float | None, name: str, index: str | None, recall: float | None
    ) -> "AsyncIterator[tuple[Build, asyncio.Future[None]]]":
        """Make the index of a gallery anew while the block runs; one that is left breaks the work off.

        Args:
            deadline: The `time.monotonic()` until which somebody waits.
            name: Of the gallery.
            index: The type wanted from now on; None for that which was wanted before.
            recall: The recall wanted from now on; None for that which was wanted before.

        Yields:
            How far it is, which tells of the end as well, and what is done when it is.

        Raises:
            Overloaded: if too many are being made.
        """
        build = Build(deadline)

        def rebuild() -> None:
            try:
                self.galleries.using(
                    name, lambda gallery: gallery.rebuild(index, recall, progress=build.advance)
                )
            except CrossbatchError as error:
                self.hide(error)
                raise

        done = self._builds.start(name, rebuild)
        done.add_done_callback(lambda _: build.changed.set())
        try:
            yield build, done
        finally:
            build.leave()

    def hide(self, error: CrossbatchError) -> CrossbatchError:
        """Take the folder's path, which a caller need not know, out of an error; the gallery's name stays."""
        if self.galleries.path.is_absolute():
            text = self._path.sub(lambda found: "" if found[1] else "the server's folder", str(error))
            error.args = (text,)
        return error

    def close(self) -> None:
        """Finish what has begun but for rebuilds, which are broken off, and close the galleries; blocks.

        Raises:
            CrossbatchError: if a gallery cannot be closed.
        """
        self._keepers.close()
        self._writers.close()
        self._readers.close()
        self.galleries.close()


def _lost(gallery: "Gallery", before: Sequence[Pipeline], after: Sequence[Pipeline]) -> str:
    """Name the model that fits a gallery before, where none does after; empty otherwise."""
    if fits(gallery, after):
        return ""
    return next((each.name for each in before if fits(gallery, [each])), "")
