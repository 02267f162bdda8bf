"""How all workers stand, as Prometheus reads it."""

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.observability.state import GalleryState, State

__all__ = ["MOST_GALLERIES", "OTHERS", "Gauges"]

MOST_GALLERIES = 100
OTHERS = "(others)"  # no gallery can be called that

_WORKER: tuple[tuple[str, str, Callable[[State], float]], ...] = (
    ("inputs_in_flight", "Images, queries and items admitted and not answered yet.", lambda s: s.inputs),
    ("inputs_in_flight_limit", "Most of them; more are refused.", lambda s: s.most_inputs),
    ("request_bytes_in_flight", "Bytes of the messages of calls in flight.", lambda s: s.bytes),
    ("request_bytes_in_flight_limit", "Most of them; more are refused.", lambda s: s.most_bytes),
    ("decoding_images", "Images that are being decoded or wait for that.", lambda s: s.decoding),
)
_PROCESS = (
    ("resident_memory_bytes", "Memory that a worker holds."),
    ("open_fds", "Files and sockets that a worker has open."),
    ("max_fds", "Most files and sockets that a worker may have open."),
    ("threads", "Threads of a worker that Python knows."),
    ("start_time_seconds", "When a worker was started, in seconds since 1970."),
)
_GALLERY: tuple[tuple[str, str, Callable[[GalleryState], float]], ...] = (
    ("usable", "1, or 0 for a gallery that is damaged or that no served model fits.", lambda g: g.usable),
    ("items", "Items in a gallery.", lambda g: g.items),
    ("fresh_items", "Items newer than the index, which are compared one by one.", lambda g: g.fresh),
    ("deleted_items", "Vectors held though their items were deleted or replaced.", lambda g: g.deleted),
    ("generation", "How often an index was published.", lambda g: g.generation),
    ("index_recall", "Measured recall at 10 of the index, between 0 and 1.", lambda g: g.recall),
    ("index_bytes", "Size of the index.", lambda g: g.index_bytes),
    ("store_bytes", "Size of the items on disk.", lambda g: g.store_bytes),
)
_SUMMED = {"items", "fresh_items", "deleted_items", "index_bytes", "store_bytes"}


class Gauges(Collector):
    """Made anew at each scrape; what cannot be told leaves the rest whole."""

    def __init__(self, look: Callable[[], Sequence[State]]) -> None:
        """Keep where the states come from."""
        self._look = look

    def describe(self) -> Iterable[Metric]:
        """Say nothing, so that a registry asks no server that has not started."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Give every metric; those of galleries once, however many workers have them open."""
        states = self._look()
        build = (version("crossbatch"), platform.python_version())
        yield _gauge("build_info", "The version that runs; 1.", ("version", "python"), [(build, 1.0)])
        yield from _of_workers(states)
        yield from _of_models(states)
        yield from _of_galleries(states)


def _of_workers(states: Sequence[State]) -> Iterator[Metric]:
    yield _gauge(
        "calls_in_flight",
        "Calls that are not answered yet.",
        ("worker", "rpc"),
        [((str(each.worker), rpc), count) for each in states for rpc, count in each.calls.items()],
    )
    for name, text, value in _WORKER:
        yield _gauge(name, text, ("worker",), [((str(each.worker),), value(each)) for each in states])
    yield _counter(
        "admission_refusals",
        "Calls refused for a limit on what is in flight.",
        ("worker", "limit"),
        [((str(each.worker), limit), count) for each in states for limit, count in each.refusals.items()],
    )
    yield _counter(
        "log_lines_dropped",
        "Log lines lost since nobody read them fast enough.",
        ("worker",),
        [((str(each.worker),), each.lines_dropped) for each in states],
    )
    yield _counter(
        "worker_cpu_seconds",
        "Processor time that a worker has used.",
        ("worker",),
        [((str(each.worker),), each.process.get("cpu_seconds_total", 0.0)) for each in states],
    )
    for name, text in _PROCESS:
        values = [((str(each.worker),), each.process[name]) for each in states if name in each.process]
        yield _gauge(f"worker_{name}", text, ("worker",), values)


def _of_models(states: Sequence[State]) -> Iterator[Metric]:
    yield _gauge(
        "queue_images",
        "Decoded images that wait for a model.",
        ("worker", "model"),
        [((str(each.worker), model.name), model.waiting) for each in states for model in each.models],
    )
    known = {
        (model.name, model.fingerprint, model.precision, str(model.dimension)): 1.0
        for each in states
        for model in each.models
    }
    labels = ("model", "fingerprint", "precision", "dimension")
    yield _gauge("model_info", "A model that is served; 1.", labels, known.items())


def _of_galleries(states: Sequence[State]) -> Iterator[Metric]:
    named: dict[str, GalleryState] = {}
    for gallery in (each for state in states for each in state.galleries):
        # Where one worker cannot use what another can, that it is broken is what matters.
        if gallery.name not in named or not gallery.usable:
            named[gallery.name] = gallery
    galleries = [named[name] for name in sorted(named)]
    shown, rest = galleries[:MOST_GALLERIES], galleries[MOST_GALLERIES:]
    for name, text, value in _GALLERY:
        values = [((each.name,), value(each)) for each in shown]
        if rest and name in _SUMMED:
            values.append(((OTHERS,), sum(value(each) for each in rest)))
        yield _gauge(f"gallery_{name}", text, ("gallery",), values)
    infos = [((each.name, each.index_type, each.model), 1.0) for each in shown if each.usable]
    yield _gauge(
        "gallery_info",
        "The index type of a gallery, and the model that it belongs to; 1.",
        ("gallery", "index_type", "model"),
        infos,
    )


def _gauge(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    family = GaugeMetricFamily(f"crossbatch_{name}", text, labels=labels)
    for place, value in values:
        family.add_metric(place, value)
    return family


def _counter(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    family = CounterMetricFamily(f"crossbatch_{name}", text, labels=labels)
    for place, value in values:
        family.add_metric(place, value)
    return family
