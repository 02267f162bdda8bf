"""The galleries as calls see them: opened by name, with the model that fits, indexed anew."""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TypeVar

from serving.cores import in_daemon
from serving.engine.instances import ModelInstances, permit
from serving.engine.models import ModelRegistry, first_fitting
from serving.errors import Cancelled, CrossbatchError, Mismatch, ModelMismatch, Overloaded
from serving.gallery.place import AnyGallery, Galleries
from serving.gallery.store.schema import Meta
from serving.observability.call import Call

__all__ = ["TRIES", "GalleryExecutor"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRIES = 3  # a switch to another model in the middle of each of so many tries is no accident
READERS, WRITERS = 8, 4
"""Most calls that read, and that write, galleries at once: more would only fight for the interpreter, each
with a connection of its own to SQLite; and no search waits for a disk to confirm a write."""
MOST_BUILDS = 2  # most rebuilds at once; each takes every core, and memory for all vectors of its gallery
MOST_UPKEEP = 32  # most switches, rollbacks and removals at once: each may have to wait for a lock
MOST_NAMED = 10  # most galleries that a message names
STEP_SECONDS = 0.25  # between two records of how far a rebuild is


class GalleryExecutor:
    """Works on a folder of galleries, in the threads that ask for it; what it raises names no path."""

    def __init__(self, directory: Galleries, models: ModelRegistry) -> None:
        """Keep the folder, an absolute path so that it is known in a message, and the models."""
        self.directory = directory
        self._models = models
        place = re.escape(str(directory.path).split("://")[-1])
        self._called = "the server's folder" if isinstance(directory.path, Path) else "its address"
        self._path = re.compile(rf"ipv[46]:\S+:\d+|(?:milvuss?://)?{place}(/|(?![\w.-]))")
        self._readers = threading.BoundedSemaphore(READERS)
        self._writers = threading.BoundedSemaphore(WRITERS)
        self._builds = threading.BoundedSemaphore(MOST_BUILDS)
        self._upkeep = threading.BoundedSemaphore(MOST_UPKEEP)

    def using(
        self,
        name: str,
        work: Callable[[AnyGallery, ModelInstances], T],
        call: Call,
        *,
        model: str | ModelInstances = "",
        writes: bool = False,
    ) -> T:
        """Work on the gallery that has a name now, with the model that fits it.

        The work is begun anew where another gallery took the name meanwhile, so that a switch fails no call.
        It is this very model that must fit, or the one of that name, or any that is served.
        """

        def fitted(gallery: AnyGallery) -> T:
            if isinstance(model, str):
                return work(gallery, self._models.fitting(gallery, model))
            gallery.check_model(model.spec)
            return work(gallery, model)

        with permit(self._writers if writes else self._readers, call):
            return self._named(name, fitted)

    def with_model(self, name: str, work: Callable[[Meta, ModelInstances], T], *, model: str = "") -> T:
        """Do work with the model that fits a gallery, held meanwhile.

        The work is begun anew if it finds, as `using` this very model does, that the gallery's name has gone
        to one of another since: it must not have stored anything then.
        """
        left = TRIES
        while True:
            left -= 1
            with ExitStack() as held:
                meta, instances = self._named(
                    name,
                    lambda gallery: (gallery.meta, held.enter_context(self._models.holding(model, gallery))),
                )
                try:
                    return work(meta, instances)
                except ModelMismatch:
                    if not left:
                        raise

    def upkeep(self, work: Callable[[], T]) -> T:
        """Change a gallery as a whole (switch, roll back, remove); raises Overloaded where too many do."""
        if not self._upkeep.acquire(blocking=False):
            raise Overloaded(f"{MOST_UPKEEP} changes of galleries are under way, the most; try again later.")
        try:
            with self.naming_no_path():
                return work()
        finally:
            self._upkeep.release()

    def building(
        self, name: str, index: str | None, recall: float | None, call: Call
    ) -> Iterator[tuple[str, int, int]]:
        """Make the index of a gallery anew, of the type and recall wanted from now on, or as before (None).

        Yields several times a second the stage, what is done of it and its total; leaving the iterator breaks
        the work off. It is done in a daemon thread: a step of FAISS may take minutes and cannot be broken
        off, and what is made aside is thrown away when the process ends.
        """
        if not self._builds.acquire(blocking=False):
            raise Overloaded(
                f"{MOST_BUILDS} indexes are being made, the most at once; try again later.", retry_after=5.0
            )
        reached, left = ("wait", 0, 0), False

        def advance(stage: str, done: int, total: int) -> None:
            nonlocal reached
            reached = (stage, done, total)
            if left:
                raise Cancelled("Nobody waits for the index any more.")
            call.check()

        def rebuild() -> None:
            self._named(name, lambda gallery: gallery.rebuild(index, recall, progress=advance))

        try:
            build = in_daemon(partial(copy_context().run, rebuild))  # with the request id of log lines
        except RuntimeError:  # no thread can be started
            self._builds.release()
            raise
        build.add_done_callback(lambda _: self._builds.release())
        try:
            while not build.done():
                call.check()
                yield reached
                wait([build], STEP_SECONDS)
        finally:
            left = True
        build.result()

    def check_kept(self, before: Sequence[ModelInstances], after: Sequence[ModelInstances]) -> None:
        """Raise Mismatch if a gallery that one of the models fits before is left without one after."""

        def lost_model(gallery: AnyGallery) -> str:
            try:
                first_fitting(gallery, after)
            except ModelMismatch:
                with suppress(ModelMismatch):
                    return first_fitting(gallery, before).name
            return ""

        models = self._each(lost_model)
        lost = [f"{name} (of the model {model})" for name, model in models.items() if model]
        if lost:
            more = f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
            raise Mismatch(
                f"no model would be served that fits {', '.join(lost[:MOST_NAMED])}{more}; load the new "
                "model beside the old one under another name, index a gallery with it, switch to that and "
                "drop the one before, and only then remove the old model"
            )

    def report(self) -> None:
        """Open each gallery, so that one that cannot be used shows in the log and not only in a call."""
        place, count = self.directory.path, len(self.directory.names())
        if isinstance(place, Path) and not place.is_dir():
            logger.warning("there is no folder %s; it is made with the first gallery", place)
        logger.info("galleries in %s: %d", place, count, extra={"galleries": count})
        self._each(self._models.fitting, told=True)

    @contextmanager
    def naming_no_path(self) -> Iterator[None]:
        """Take the folder's path, which a caller need not know, out of an error; the gallery's name stays."""
        try:
            yield
        except CrossbatchError as error:
            error.args = (self._path.sub(lambda at: "" if at[1] else self._called, str(error)),)
            raise

    def _named(self, name: str, work: Callable[[AnyGallery], T]) -> T:
        with self.naming_no_path():
            return self.directory.using(name, work)

    def _each(self, work: Callable[[AnyGallery], T], *, told: bool = False) -> dict[str, T]:
        """Do some work with each gallery that can be used; one that cannot must not harm the others."""
        found = {}
        for name in self.directory.names():
            try:
                found[name] = self._named(name, work)
            except CrossbatchError as error:
                if told:
                    logger.warning("gallery %s cannot be used: %s", name, error, extra={"gallery": name})
            except Exception:  # a bug
                logger.exception("gallery %s cannot be opened", name, extra={"gallery": name})
        return found
