"""The models that are served, by name."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from serving.errors import ModelMismatch, NotFound
from serving.rpc.work.library import Sources
from serving.rpc.work.pipeline import Bounds, Pipeline
from serving.rpc.work.workers import Workers

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.gallery.gallery import Gallery

__all__ = ["Fleet"]


class Fleet:
    """Belongs to the event loop in which `start` was awaited; `get` and `fitting` serve any thread."""

    def __init__(
        self, sources: Sources, bounds: Bounds, *, decode_threads: int, failed: Callable[[], None]
    ) -> None:
        """Keep where models are found; nothing is loaded yet.

        Args:
            sources: What there is to serve.
            bounds: Of each pipeline.
            decode_threads: Threads that decode, for all models together.
            failed: Called in the event loop should a model embed no image any more.
        """
        self._sources = sources
        self._bounds = bounds
        self._failed = failed
        self._decoders = Workers("decode", decode_threads, most=bounds.capacity, what="the image was decoded")
        self._pipelines: dict[str, Pipeline] = {}

    async def start(self) -> None:
        """Load every model and warm it up.

        Raises:
            CrossbatchError: if one cannot be served.
        """
        for source in await asyncio.to_thread(self._sources.look):
            encoder = await asyncio.to_thread(source.load)
            pipeline = Pipeline(
                source.name or encoder.spec.name, encoder, self._decoders, self._bounds, self._failed
            )
            await pipeline.start()
            self._pipelines[pipeline.name] = pipeline

    async def stop(self) -> None:
        """Finish what was accepted and end the threads."""
        for pipeline in self._pipelines.values():
            await pipeline.stop()
        await asyncio.to_thread(self._decoders.close)

    def all(self) -> Sequence[Pipeline]:
        """Return the pipelines of all models, the first one first."""
        return tuple(self._pipelines.values())

    def get(self, name: str = "") -> Pipeline:
        """Return the pipeline of a model; the first one's for an empty name.

        Raises:
            NotFound: if no model has that name; names those that are served.
        """
        pipelines = self._pipelines
        if not name:
            return next(iter(pipelines.values()))
        if name not in pipelines:
            raise NotFound(f"There is no model {name[:80]!r}; {', '.join(pipelines)} is served.")
        return pipelines[name]

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
        yield self.get(name)
