"""The galleries as calls see them: opened by name, with the model that fits, indexed anew."""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, TypeVar

from serving.engine.instances import ModelInstances
from serving.engine.models import ModelRegistry, fits
from serving.errors import Cancelled, CrossbatchError, Mismatch, ModelMismatch, Overloaded
from serving.observability.call import Call

if TYPE_CHECKING:  # both bring an engine, which whoever imports only the settings does not need
    from serving.gallery.directory import GalleryDirectory
    from serving.gallery.gallery import Gallery
    from serving.gallery.store.schema import Meta

__all__ = ["TRIES", "GalleryExecutor"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRIES = 3
"""A switch to another model in the middle of each of so many tries is no accident."""
READERS, WRITERS = 8, 4
"""Most calls that read, and that write, galleries at once: more would only fight for the interpreter, each
with a connection of its own to SQLite; and no search waits for a disk to confirm a write."""
MOST_BUILDS = 2
"""Most rebuilds at once; each takes every core, and memory for all vectors of its gallery."""
MOST_UPKEEP = 32
"""Most switches, rollbacks and removals at once: each may have to wait for a lock."""
MOST_NAMED = 10
"""Most galleries that a message names."""
OFTEN, SELDOM = 0.1, 1.0
"""Seconds between two records of how far a rebuild is: at least, and at most."""


class GalleryExecutor:
    """Works on a folder of galleries, in the threads that ask for it; what it raises names no path."""

    def __init__(self, directory: "GalleryDirectory", models: ModelRegistry) -> None:
        """Keep the folder, an absolute path so that it is known in a message, and the models."""
        self.directory = directory
        self._models = models
        self._path = re.compile(re.escape(str(directory.path)) + r"(/|(?![\w.-]))")
        self._readers = threading.BoundedSemaphore(READERS)
        self._writers = threading.BoundedSemaphore(WRITERS)
        self._builds = threading.BoundedSemaphore(MOST_BUILDS)
        self._upkeep = threading.BoundedSemaphore(MOST_UPKEEP)

    def using(
        self,
        name: str,
        work: "Callable[[Gallery, ModelInstances], T]",
        *,
        model: str = "",
        writes: bool = False,
    ) -> T:
        """Work on the gallery that has a name now, with the model that fits it.

        The work is begun anew where another gallery took the name meanwhile, so that a switch fails no call.

        Args:
            name: Of the gallery.
            work: What to do.
            model: Name of the model that must fit; any that is served when empty.
            writes: Whether the work writes to the gallery.

        Raises:
            NotFound: There is none of that name, or no such model.
            Mismatch: It belongs to another model or is damaged.
            CrossbatchError: What the work raises.
        """
        with self._writers if writes else self._readers:
            return self._named(name, lambda gallery: work(gallery, self._models.fitting(gallery, model)))

    def with_model(self, name: str, work: "Callable[[Meta, ModelInstances], T]", *, model: str = "") -> T:
        """Do work with the model that fits a gallery, held meanwhile.

        The work is begun anew if it finds, as `on_gallery_of` does, that the gallery's name has gone to one
        of another model since: it must not have stored anything then.

        Raises:
            NotFound: There is no gallery of that name, or no such model.
            ModelMismatch: No model fits, or the gallery's changed again and again.
            CrossbatchError: What the work raises.
        """
        left = TRIES
        while True:
            meta, fitting = self.using(name, lambda gallery, fits: (gallery.meta, fits.name), model=model)
            left -= 1
            try:
                with self._models.holding(fitting) as instances:
                    return work(meta, instances)
            except ModelMismatch:
                if not left:
                    raise

    def on_gallery_of(
        self,
        name: str,
        instances: ModelInstances,
        work: "Callable[[Gallery, ModelInstances], T]",
        *,
        writes: bool = False,
    ) -> T:
        """Work, as `using` does, on the gallery that has a name now, if it is one of this very model.

        Raises:
            NotFound: There is none of that name.
            ModelMismatch: It is one of another model.
            CrossbatchError: What the work raises.
        """

        def checked(gallery: "Gallery") -> T:
            gallery.check_model(instances.spec)
            return work(gallery, instances)

        with self._writers if writes else self._readers:
            return self._named(name, checked)

    def upkeep(self, work: Callable[[], T]) -> T:
        """Change a gallery as a whole (switch, roll back, remove), which may wait for locks.

        Raises:
            Overloaded: Too many do so already.
            CrossbatchError: What the work raises.
        """
        if not self._upkeep.acquire(blocking=False):
            raise Overloaded(f"{MOST_UPKEEP} changes of galleries are under way, the most; try again later.")
        try:
            return work()
        except CrossbatchError as error:
            self.hide(error)
            raise
        finally:
            self._upkeep.release()

    def building(
        self, name: str, index: str | None, recall: float | None, call: Call
    ) -> Iterator[tuple[str, int, int]]:
        """Make the index of a gallery anew; leaving the iterator breaks that off.

        The work is done in a daemon thread: a step of FAISS may take minutes and cannot be broken off, and
        what is made aside is thrown away when the process ends.

        Args:
            name: Of the gallery.
            index: The type wanted from now on; None for that which was wanted before.
            recall: The recall wanted; likewise.
            call: Who waits for it.

        Yields:
            The stage, what is done of it and its total: when that changes but not too often, and once a
            second when it does not.

        Raises:
            Overloaded: Too many are being made.
            CrossbatchError: It cannot be made, or nobody waits for it any more; it is what it was.
        """
        if not self._builds.acquire(blocking=False):
            raise Overloaded(
                f"{MOST_BUILDS} indexes are being made, the most at once; try again later.", retry_after=5.0
            )
        build = _Build(call)

        def rebuild() -> None:
            try:
                self._named(name, lambda gallery: gallery.rebuild(index, recall, progress=build.advance))
            except BaseException as error:
                build.failure = error
            finally:
                self._builds.release()
                build.ended.set()
                build.changed.set()

        context = copy_context()  # the request id of log lines
        threading.Thread(
            target=context.run, args=(rebuild,), name=f"gallery-build {name}", daemon=True
        ).start()
        try:
            while not build.ended.is_set():
                call.check()
                build.changed.clear()
                yield build.reached
                build.ended.wait(OFTEN)
                build.changed.wait(SELDOM - OFTEN)
        finally:
            build.left = True
        if build.failure is not None:
            raise build.failure

    def check_kept(self, before: Sequence[ModelInstances], after: Sequence[ModelInstances]) -> None:
        """Find out whether each gallery that one of the models fits before keeps one that does after.

        Raises:
            Mismatch: One does not; names the galleries and their models.
        """
        lost = []
        for name in self.directory.names():
            try:
                model = self.directory.using(name, lambda gallery: _lost(gallery, before, after))
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

    def report(self) -> None:
        """Open each gallery, so that one that cannot be used shows in the log and not only in a call."""
        folder, names = self.directory.path, self.directory.names()
        if not folder.is_dir():
            logger.warning("there is no folder %s; it is made with the first gallery", folder)
        logger.info("galleries in %s: %d", folder, len(names), extra={"galleries": len(names)})
        for name in names:
            try:
                self.using(name, lambda *_: None)
            except CrossbatchError as error:
                logger.warning("gallery %s cannot be used: %s", name, error, extra={"gallery": name})
            except Exception:  # a bug that one gallery shows must not keep the others from being served
                logger.exception("gallery %s cannot be opened", name, extra={"gallery": name})

    def hide(self, error: CrossbatchError) -> CrossbatchError:
        """Take the folder's path, which a caller need not know, out of an error; the gallery's name stays."""
        if self.directory.path.is_absolute():
            text = self._path.sub(lambda found: "" if found[1] else "the server's folder", str(error))
            error.args = (text,)
        return error

    def close(self) -> None:
        """Close the galleries."""
        self.directory.close()

    def _named(self, name: str, work: "Callable[[Gallery], T]") -> T:
        try:
            return self.directory.using(name, work)
        except CrossbatchError as error:
            self.hide(error)
            raise


def _lost(gallery: "Gallery", before: Sequence[ModelInstances], after: Sequence[ModelInstances]) -> str:
    """Name the model that fits a gallery before, where none does after; empty otherwise."""
    if fits(gallery, after):
        return ""
    return next((each.name for each in before if fits(gallery, [each])), "")


class _Build:
    """A rebuild: how far it is, and whether anybody waits for it still."""

    def __init__(self, call: Call) -> None:
        self.reached = ("wait", 0, 0)
        self.changed = threading.Event()
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        self.left = False
        self._call = call

    def advance(self, stage: str, done: int, total: int) -> None:
        """Note how far it is; raises, which ends the work, when nobody waits for it any more."""
        if self.left:
            raise Cancelled("Nobody waits for the index any more.")
        self._call.check()
        if self.reached != (stage, done, total):
            self.reached = (stage, done, total)
            self.changed.set()
