"""The models that are served, by name: loaded, replaced, and ended when no call holds them any more."""

import ctypes
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import clear_frames
from typing import TypeAlias

from serving.engine.instances import InstanceLimits, ModelInstances
from serving.engine.repository import ModelRepository, served_name
from serving.errors import Draining, Mismatch, ModelMismatch, NotFound
from serving.gallery.place import AnyGallery
from serving.model.encoder import Encoder

__all__ = ["Agree", "Change", "ModelRegistry", "first_fitting"]

logger = logging.getLogger(__name__)

Agree: TypeAlias = Callable[[Sequence[ModelInstances], Sequence[ModelInstances]], None]
"""Is given the models as they are and as they would be; what it raises refuses a reload."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a reload changed."""

    loaded: tuple[str, ...]  # names of the models that are new or of another file than before
    removed: tuple[str, ...]  # names of those that are served no more


@dataclass(slots=True, eq=False)
class _Served:
    """A model that is served, or was until now and finishes its calls."""

    instances: ModelInstances
    source: Hashable
    """What it was loaded from."""
    place: str
    holders: int = 0
    retired: bool = False


class ModelRegistry:
    """Loads models and hands them out; every method may be called from several threads at once."""

    def __init__(
        self,
        sources: ModelRepository,
        limits: Callable[[Encoder], InstanceLimits],
        *,
        ran: Callable[[str, int, float], None] = lambda *_: None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Load nothing yet; `limits` tells those of a model, `ran` and `failed` are for each."""
        self._sources, self._limits = sources, limits
        self._ran, self._failed = ran, failed
        self._served: Mapping[str, _Served] = {}  # replaced as a whole
        self._guard = threading.Lock()  # of what is served and who holds it
        self._turn = threading.Lock()
        self._begun = 0
        self._last: Change | Exception = Change((), ())
        self._stopping = False

    def stop(self) -> None:
        """Finish what was accepted and end every model; a load that is under way comes to nothing."""
        with self._guard:
            self._stopping = True
        for served in self._served.values():
            served.instances.stop()

    def reload(self, agree: Agree = lambda *_: None) -> Change:
        """Look again: load and warm up what is new or another file than before, then serve it, all at once.

        A model that is replaced or gone finishes the calls that hold it, then its memory is free. One reload
        runs at once; all who ask meanwhile share the next.

        What it raises leaves everything as it was.
        """
        begun = self._begun
        with self._turn:
            if self._begun == begun:  # or else one that began since has seen all that we are to see
                self._begun += 1
                try:
                    self._last = self._load_anew(agree)
                except Exception as error:
                    clear_frames(error.__traceback__)  # they hold what was loaded
                    self._last = error
            if isinstance(self._last, Exception):
                raise self._last
            return self._last

    @property
    def is_loading(self) -> bool:
        """Whether a reload is under way."""
        return self._turn.locked()

    def hide(self, text: str) -> str:
        """Take out of what an error of `reload` tells where the models lie, which a caller need not know."""
        return self._sources.hide(text)

    def all(self) -> Sequence[ModelInstances]:
        """Return all models, the first one first."""
        return [served.instances for served in self._served.values()]

    def get(self, name: str = "") -> ModelInstances:
        """Return a model by its name here or, where one alone has it, its own; the first for an empty name.

        NotFound names those there are.
        """
        return self._get(name).instances

    def fitting(self, gallery: AnyGallery, name: str = "") -> ModelInstances:
        """Return the first model that fits a gallery, of those that go by a name if one is given.

        A model goes by its own name, too, and for a gallery by the one that this tells. See `first_fitting`.
        """
        named = self._named("" if name == gallery.meta.model_name else name) or [self._get(name)]
        return first_fitting(gallery, [served.instances for served in named])

    @contextmanager
    def holding(self, name: str = "", gallery: AnyGallery | None = None) -> Iterator[ModelInstances]:
        """Use a model, that which fits a gallery if one is given, while the block runs.

        Should it be replaced meanwhile, it goes when the block ends.
        """
        with self._guard:
            served = self._get(self.fitting(gallery, name).name if gallery else name)
            served.holders += 1
        try:
            yield served.instances
        finally:
            with self._guard:
                served.holders -= 1
                if served.retired and not served.holders:
                    _end(served.instances)

    def _get(self, name: str) -> _Served:
        served = self._served  # once, as another thread may replace it
        if not name:
            return next(iter(served.values()))
        if name in served:
            return served[name]
        named = self._named(name)
        if len(named) == 1:
            return named[0]
        if named:
            files = " and ".join(each.instances.name for each in named)
            raise NotFound(f"The name {name!r} is what {files} call themselves; give one of these.")
        raise NotFound(f"There is no model {name[:80]!r}; served: {', '.join(served)}.")

    def _named(self, name: str) -> list[_Served]:
        """Return the models that go by a name, the one that is served by it first; all for an empty one."""
        found = [
            each
            for each in self._served.values()
            if name in ("", each.instances.name, each.instances.spec.name)
        ]
        return sorted(found, key=lambda each: bool(name) and each.instances.name != name)

    def _load_anew(self, agree: Agree) -> Change:
        loaded: list[_Served] = []
        try:
            self._check_open()
            fresh = self._found(loaded)
            for served in loaded:  # only now, when each has a name that is its own
                served.instances.start()
            _trim()
            if list(fresh.values()) != list(self._served.values()):
                agree(self.all(), [served.instances for served in fresh.values()])
            with self._guard:
                self._check_open()
                before, self._served = self._served, fresh
                for served in before.values():
                    served.retired = served not in fresh.values()
                    if served.retired and not served.holders:
                        _end(served.instances)
        except BaseException:
            for served in loaded:
                served.instances.stop()
            raise
        was, first = next(iter(before), ""), next(iter(fresh))
        if was and was != first:
            logger.warning("calls that name no model mean %s from now on, and meant %s before", first, was)
        return Change(
            tuple(served.instances.name for served in loaded),
            tuple(name for name in before if name not in fresh),
        )

    def _found(self, loaded: list[_Served]) -> dict[str, _Served]:
        """Return what is to be served, by name; adds what is new to `loaded`."""
        known = {served.source: served for served in self._served.values()}
        fresh: dict[str, _Served] = {}
        for file in self._sources.look():
            served = known.pop((file.name, file.stamp), None)
            if served is None:
                encoder = file.load()
                name = file.name or served_name(encoder.spec)
                instances = ModelInstances(
                    name, encoder, self._limits(encoder), ran=self._ran, failed=self._failed
                )
                served = _Served(instances, (file.name, file.stamp), file.place)
                loaded.append(served)
            name = served.instances.name
            if name in fresh:
                raise Mismatch(
                    f"{fresh[name].place} and {file.place} would both be served as {name}; give one of them "
                    "another name with --model NAME=FILE"
                )
            fresh[name] = served
        return fresh

    def _check_open(self) -> None:
        if self._stopping:
            raise Draining("The server is stopping and loads nothing any more; try another one.")


def first_fitting(gallery: AnyGallery, models: Sequence[ModelInstances]) -> ModelInstances:
    """Return the first model that fits a gallery; if none does, raise the first one's ModelMismatch."""
    mismatch: ModelMismatch | None = None
    for instances in models:
        try:
            gallery.check_model(instances.spec)
        except ModelMismatch as error:
            mismatch = mismatch or error
        else:
            return instances
    raise mismatch or ModelMismatch("no model is served")


def _end(instances: ModelInstances) -> None:
    """Stop a model in a thread of its own, as that waits for its last batch."""

    def end(instances: ModelInstances) -> None:
        instances.stop()
        logger.info("model %s has ended", instances.name)
        del instances
        _trim()

    threading.Thread(target=end, args=(instances,), name="end model", daemon=True).start()


def _trim() -> None:
    """Give the system what models freed, which glibc keeps wherever something lies behind it.

    After ten reloads of a model of 16 MB a process holds about 200 MB with it and 400 MB without.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none, and need none
    if trim is not None:
        trim(0)
