"""The models that are served, by name."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from serving.engine.library import Source, Sources, served_name
from serving.engine.memory import give_back
from serving.engine.pipeline import Bounds, Pipeline
from serving.engine.plan import Kind, Plan
from serving.engine.workers import Threads
from serving.errors import Draining, Mismatch, ModelMismatch, NotFound

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.gallery.gallery import Gallery
    from serving.observability.metrics import Metrics

__all__ = ["Change", "Fleet", "fits"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """What a reload changed."""

    loaded: tuple[str, ...]
    """Names of the models that are new or of another file than before."""
    removed: tuple[str, ...]
    """Names of those that are served no more."""


class Fleet:
    """Belongs to the event loop in which `start` was awaited; `get` and `fitting` serve any thread."""

    def __init__(
        self,
        sources: Sources,
        bounds: Bounds,
        *,
        decode_threads: int,
        metrics: "Metrics",
        failed: Callable[[], None],
        plans: Mapping[Kind, Plan] | None = None,
    ) -> None:
        """Keep where models are found; nothing is loaded yet.

        Args:
            sources: What there is to serve.
            bounds: Of each pipeline.
            decode_threads: Threads that decode, for all models together.
            metrics: Is told of each run of a model.
            failed: Called in the event loop should a model embed no image any more.
            plans: By which models are run that others have tried.
        """
        self._sources = sources
        self._bounds = bounds
        self._metrics = metrics
        self._failed = failed
        self._plans = plans or {}
        self.threads = Threads(decode_threads, most=bounds.capacity)
        self._served: Mapping[str, _Served] = {}
        self._turn = asyncio.Lock()
        self._stopping = False
        self._retiring: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load every model and warm it up.

        Raises:
            CrossbatchError: if one cannot be served.
        """
        await self.reload()

    async def stop(self) -> None:
        """Finish what was accepted and end the threads; a reload that waits for its turn is refused."""
        self._stopping = True
        async with self._turn:
            for served in self._served.values():
                await served.pipeline.stop()
            for task in list(self._retiring):
                task.cancel()
            if self._retiring:
                await asyncio.wait(list(self._retiring))
        await asyncio.to_thread(self.threads.close)

    async def reload(
        self, agreed: "Callable[[Sequence[Pipeline], Sequence[Pipeline]], Awaitable[None]] | None" = None
    ) -> Change:
        """Look again: load and warm up what is new or another file than before, then serve it, all at once.

        A model that is replaced or gone finishes the calls that hold it, then its memory is free. One whose
        file is the same is not loaded anew. Two reloads take turns.

        Args:
            agreed: Given the pipelines as they are and as they would be; what it raises refuses the reload.

        Returns:
            What is served since, and what no more.

        Raises:
            Draining: if it is stopping.
            CrossbatchError: if a model cannot be served, or it is not agreed; then everything stays as it
                was.
        """
        async with self._turn:
            if self._stopping:
                raise Draining("The server is stopping and loads nothing any more; try another one.")
            known = {served.source: served for served in self._served.values()}
            fresh: dict[str, _Served] = {}
            loaded: list[_Served] = []
            sources = await asyncio.to_thread(self._sources.look)
            _check_names([(source.name, source.place) for source in sources if source.name])
            try:
                for source in sources:
                    served = known.get((source.name, source.stamp))
                    if served is None or served in fresh.values():
                        served = await self._load(source)
                        loaded.append(served)
                    name = served.pipeline.name
                    _check_names([*((each, fresh[each].place) for each in fresh), (name, served.place)])
                    fresh[name] = served
                for served in loaded:  # only now, as to try how each is best run takes seconds
                    await served.pipeline.start()
                    # It is unpacked several times until it runs as it will.
                    await asyncio.to_thread(give_back)
                if agreed is not None:
                    await agreed(self.all(), tuple(served.pipeline for served in fresh.values()))
            except BaseException:
                for served in loaded:
                    await served.pipeline.stop()
                raise
            before, self._served = self._served, fresh
            if (was := next(iter(before), "")) not in ("", first := next(iter(fresh))):
                logger.warning(
                    "calls that name no model mean %s from now on, and meant %s before", first, was
                )
            for served in before.values():
                if served not in fresh.values():
                    self._retire(served)
            return Change(
                tuple(served.pipeline.name for served in loaded),
                tuple(name for name in before if name not in fresh),
            )

    def hide(self, text: str) -> str:
        """Take out of what an error of `reload` tells where the models lie, which a caller need not know."""
        return self._sources.hide(text)

    async def _load(self, source: Source) -> "_Served":
        """Load a model; it is not started yet.

        Raises:
            CrossbatchError: if it cannot be served.
        """
        encoder = await self.threads.load(source.load)
        name = source.name or served_name(encoder.spec)
        pipeline = Pipeline(
            name,
            encoder,
            self.threads,
            self._bounds_of(Kind.of(name, encoder.spec)),
            metrics=self._metrics,
            failed=self._failed,
        )
        return _Served(pipeline, (source.name, source.stamp), source.place)

    def _bounds_of(self, kind: Kind) -> Bounds:
        """Spare a model the trial where one of its kind has had it, since it would take cores from calls."""
        return replace(self._bounds, plan=self.plans().get(kind) or self._plans.get(kind))

    def _retire(self, served: "_Served") -> None:
        """Stop a model when nobody holds it any more, without waiting for that."""

        async def retire(served: "_Served") -> None:
            try:
                await served.free.wait()
            finally:
                await served.pipeline.stop()
            logger.info("model %s has ended", served.pipeline.name)
            del served
            await asyncio.to_thread(give_back)

        task = asyncio.create_task(retire(served), name=f"retire {served.pipeline.name}")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def plans(self) -> Mapping[Kind, Plan]:
        """Return how each model is run, so that others of its kind may be run like it."""
        return {Kind.of(each.name, each.spec): each.plan for each in self.all()}

    def all(self) -> Sequence[Pipeline]:
        """Return the pipelines of all models, the first one first."""
        return tuple(served.pipeline for served in self._served.values())

    def get(self, name: str = "") -> Pipeline:
        """Return the pipeline of a model; the first one's for an empty name.

        Raises:
            NotFound: if no model has that name; names those that are served.
        """
        return self._get(name).pipeline

    def fitting(self, gallery: "Gallery", name: str = "") -> Pipeline:
        """Return the pipeline whose model fits a gallery: the named one, or else the first that does.

        Raises:
            NotFound: if no model has that name.
            ModelMismatch: if none fits; names both sides.
        """
        failures: list[ModelMismatch] = []
        for pipeline in (self.get(name),) if name else self.all():
            try:
                gallery.check_model(pipeline.spec)
            except ModelMismatch as error:
                failures.append(error)
            else:
                return pipeline
        raise failures[0]

    @contextmanager
    def holding(self, name: str = "") -> Iterator[Pipeline]:
        """Use a model while the block runs; should it be replaced meanwhile, it goes when the block ends.

        Raises:
            NotFound: if no model has that name.
        """
        served = self._get(name)
        served.holders += 1
        served.free.clear()
        try:
            yield served.pipeline
        finally:
            served.holders -= 1
            if not served.holders:
                served.free.set()

    def _get(self, name: str) -> "_Served":
        served = self._served  # once, as another thread may replace it
        if not name:
            return next(iter(served.values()))
        if name not in served:
            raise NotFound(f"There is no model {name[:80]!r}; served: {', '.join(served)}.")
        return served[name]


def _check_names(named: Iterable[tuple[str, str]]) -> None:
    """Refuse two models of one name.

    Args:
        named: Names, and the places of their files.

    Raises:
        Mismatch: if two have the same; names both places.
    """
    places: dict[str, str] = {}
    for name, place in named:
        if name in places:
            raise Mismatch(
                f"{places[name]} and {place} would both be served as {name}; give one of them another name "
                "with --model NAME=FILE"
            )
        places[name] = place


def fits(gallery: "Gallery", pipelines: Sequence[Pipeline]) -> bool:
    """Tell whether one of these models can be used with a gallery."""
    return any(_fits(gallery, pipeline) for pipeline in pipelines)


def _fits(gallery: "Gallery", pipeline: Pipeline) -> bool:
    try:
        gallery.check_model(pipeline.spec)
    except ModelMismatch:
        return False
    return True


@dataclass(slots=True, eq=False)
class _Served:
    """A model that is served, or was until now and finishes its calls."""

    pipeline: Pipeline
    source: Hashable
    """What it was loaded from."""
    place: str
    holders: int = 0
    free: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nobody holds it."""

    def __post_init__(self) -> None:
        self.free.set()
