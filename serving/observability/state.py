"""How a server stands at this moment, as plain values that one process can tell another."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import prometheus_client

from serving.engine.fleet import Fleet, fits
from serving.errors import CrossbatchError
from serving.observability.logs import dropped_lines
from serving.rpc.admission import Admission

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.gallery.directory import GalleryDirectory

__all__ = ["GalleryState", "ModelState", "State", "Watcher"]

GALLERY_SECONDS = 5.0  # for so long, what was found of the galleries is told again
PATIENCE = 1.0  # seconds that a scrape waits for the galleries; it then tells what was found before


@dataclass(frozen=True, slots=True)
class GalleryState:
    """One gallery that is open; where it is damaged or no model fits it, all but its name is nought."""

    name: str
    usable: bool = False
    items: int = 0
    fresh: int = 0
    deleted: int = 0
    generation: int = 0
    recall: float = 0.0
    index_bytes: int = 0
    store_bytes: int = 0
    index_type: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model that is served, and how many decoded images wait for it."""

    name: str
    fingerprint: str
    precision: str
    dimension: int
    waiting: int


@dataclass(frozen=True, slots=True)
class State:
    """One worker with all it has."""

    worker: int
    calls: dict[str, int]
    inputs: int
    most_inputs: int
    bytes: int
    most_bytes: int
    refusals: dict[str, int]
    decoding: int
    lines_dropped: int
    process: dict[str, float]
    models: list[ModelState] = field(default_factory=list)
    galleries: list[GalleryState] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def of_json(cls, told: dict[str, Any]) -> "State":
        """Read what `as_json` gave."""
        models = [ModelState(**each) for each in told["models"]]
        return cls(
            **told | {"models": models, "galleries": [GalleryState(**each) for each in told["galleries"]]}
        )


class Watcher:
    """Looks at the parts of a server; every method serves any thread.

    The galleries are looked at in a thread of its own, since they lie on a disk: neither a slow one nor a
    damaged gallery keeps the rest from being told.
    """

    def __init__(
        self,
        worker: int,
        fleet: Fleet,
        admission: Admission,
        galleries: "GalleryDirectory",
        calls: Callable[[], dict[str, int]],
    ) -> None:
        """Keep the parts.

        Args:
            worker: The number of this process.
            fleet: The models.
            admission: What is in flight.
            galleries: Of which the open ones are told.
            calls: Gives those in flight by RPC.
        """
        self._worker = worker
        self._fleet = fleet
        self._admission = admission
        self._galleries = galleries
        self._calls = calls
        self._process = prometheus_client.ProcessCollector(registry=None)
        self._guard = threading.Lock()
        self._found: list[GalleryState] = []
        self._found_at = float("-inf")
        self._looking: threading.Thread | None = None

    def look(self) -> State:
        """Tell how the server stands; blocks for a second at most."""
        admission = self._admission
        return State(
            worker=self._worker,
            calls=dict(self._calls()),
            inputs=admission.inputs,
            most_inputs=admission.most_inputs,
            bytes=admission.bytes,
            most_bytes=admission.most_bytes,
            refusals=dict(admission.refusals),
            decoding=len(self._fleet.threads.decode),
            lines_dropped=dropped_lines(),
            process=self._process_values(),
            models=[
                ModelState(
                    pipeline.name,
                    pipeline.spec.fingerprint,
                    pipeline.spec.precision,
                    pipeline.spec.dimension,
                    len(pipeline.batcher),
                )
                for pipeline in self._fleet.all()
            ],
            galleries=self._open_galleries(),
        )

    def _open_galleries(self) -> list[GalleryState]:
        with self._guard:
            looking = self._looking
            if looking is None and time.monotonic() - self._found_at >= GALLERY_SECONDS:
                looking = threading.Thread(target=self._look_at_galleries, name="watch", daemon=True)
                self._looking = looking
                looking.start()
        if looking is not None:
            looking.join(PATIENCE)
        return self._found

    def _look_at_galleries(self) -> None:
        try:
            with suppress(CrossbatchError):  # the folder cannot be read; what was found before stands
                found = [self._look_at(name) for name in self._galleries.open_names()]
                self._found = [each for each in found if each is not None]
        finally:
            with self._guard:
                self._found_at = time.monotonic()
                self._looking = None

    def _look_at(self, name: str) -> GalleryState | None:
        try:
            info, fitted = self._galleries.using(
                name, lambda gallery: (gallery.info(), fits(gallery, self._fleet.all()))
            )
        except Exception:  # whatever it is, the calls to that gallery say it; here it must hide no other
            return GalleryState(name) if name in self._galleries.names() else None
        if not fitted:
            return GalleryState(name)
        return GalleryState(
            name=name,
            usable=True,
            items=info.items,
            fresh=info.fresh,
            deleted=info.deleted,
            generation=info.generation,
            recall=info.recall,
            index_bytes=info.index_bytes,
            store_bytes=info.store_bytes,
            index_type=info.index_type,
            model=info.model_name,
        )

    def _process_values(self) -> dict[str, float]:
        """The library's own metrics of the process, by name without its prefix; none off Linux."""
        samples = [sample for family in self._process.collect() for sample in family.samples]
        return {each.name.removeprefix("process_"): each.value for each in samples} | {
            "pid": float(os.getpid()),
            "threads": float(threading.active_count()),
        }
