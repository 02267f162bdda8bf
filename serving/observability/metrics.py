"""What Prometheus reads of a server: counters that calls add to, and gauges that are set once a second."""

import logging
import platform
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from serving.errors import ModelMismatch, Unavailable
from serving.observability.call import STAGES, Call
from serving.observability.logs import dropped_lines
from serving.rpc.address import written_address
from serving.rpc.admission import LIMITS, Admission

if TYPE_CHECKING:  # they bring an engine, which whoever imports only the settings does not need
    from serving.engine.instances import ModelInstances
    from serving.gallery.directory import GalleryDirectory
    from serving.gallery.gallery import Gallery, GalleryInfo

__all__ = ["MOST_GALLERIES", "OTHERS", "Metrics", "keep_fresh", "serve_metrics"]

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0

CALL_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
STAGE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
BATCH_IMAGES = tuple(float(2**i) for i in range(11))
MOST_GALLERIES = 100
"""Galleries that are told one by one; the others are told together."""
OTHERS = "(others)"  # no gallery can be called that
GONE = float("nan")

_GALLERY: tuple[tuple[str, str, "Callable[[GalleryInfo], float]"], ...] = (
    ("items", "Items in a gallery.", lambda info: info.items),
    ("fresh_items", "Items newer than the index, which are compared one by one.", lambda info: info.fresh),
    ("deleted_items", "Vectors held though their items were deleted or replaced.", lambda info: info.deleted),
    ("generation", "How often an index was published.", lambda info: info.generation),
    ("index_recall", "Measured recall at 10 of the index, between 0 and 1.", lambda info: info.recall),
    ("index_bytes", "Size of the index.", lambda info: info.index_bytes),
    ("store_bytes", "Size of the items on disk.", lambda info: info.store_bytes),
)
_SUMMED = {"items", "fresh_items", "deleted_items", "index_bytes", "store_bytes"}


class Metrics:
    """Counts and measures: in memory or, in a worker, in the folder of prometheus_client's multiprocess mode.

    Labels are names of RPCs, codes, models, stages and galleries: all few and known.
    """

    def __init__(self, worker: int = 0) -> None:
        """Make the metrics, all at nought.

        Args:
            worker: The number of this process among its like.
        """
        # As several workers have none either.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._worker = str(worker)
        self._told: dict[str, tuple[str, str, str] | None] = {}  # the galleries, as told last
        self._dropped = self._cpu = 0.0
        self._duration = self._histogram(
            "call_duration_seconds",
            "Time from a call's coming in to its reply.",
            ("rpc", "code"),
            CALL_SECONDS,
        )
        self._errors = self._counter(
            "call_errors",
            "Calls that ended with an error, by the reason that the caller reads in its ErrorInfo.",
            ("rpc", "reason"),
        )
        self._inputs = self._counter("inputs", "Images, queries and items admitted.", ("rpc",))
        self._given_up = self._counter(
            "inputs_given_up", "Inputs of calls that nobody waited for any more.", ("reason",)
        )
        self._refusals = self._counter(
            "admission_refusals", "Calls refused for a limit on what is in flight.", ("worker", "limit")
        )
        self._stage = self._histogram(
            "stage_duration_seconds",
            "Time that the slowest input of a call spent in a stage.",
            ("stage",),
            STAGE_SECONDS,
        )
        self._batch = self._histogram("batch_images", "Images in a run of a model.", ("model",), BATCH_IMAGES)
        self._run = self._histogram(
            "model_run_duration_seconds", "Time of a run of a model.", ("model",), STAGE_SECONDS
        )
        self._embedded = self._counter("images_embedded", "Images that a model has embedded.", ("model",))
        self._lines = self._counter("log_lines_dropped", "Log lines lost by a slow reader.", ("worker",))
        self._cpu_seconds = self._counter(
            "worker_cpu_seconds", "Processor time that a worker has used.", ("worker",)
        )
        self._in_flight = self._gauge("calls_in_flight", "Calls not answered yet.", ("worker", "rpc"))
        self._of_worker = {
            name: self._gauge(name, text, ("worker",))
            for name, text in (
                ("inputs_in_flight", "Images, queries and items admitted and not answered yet."),
                ("inputs_in_flight_limit", "Most of them; more are refused."),
                ("request_bytes_in_flight", "Bytes of the messages of calls in flight."),
                ("request_bytes_in_flight_limit", "Most of them; more are refused."),
                ("worker_resident_memory_bytes", "Memory that a worker holds."),
                ("worker_open_fds", "Files and sockets that a worker has open."),
                ("worker_max_fds", "Most files and sockets that a worker may have open."),
                ("worker_threads", "Threads of a worker that Python knows."),
                ("worker_start_time_seconds", "When a worker was started, in seconds since 1970."),
            )
        }
        self._waiting = self._gauge("queue_images", "Images that wait for a model.", ("worker", "model"))
        self._model = self._gauge(
            "model_info",
            "A model that is served; 1.",
            ("model", "fingerprint", "precision", "dimension"),
            "livemax",
        )
        usable = "1, or 0 for a gallery that is damaged or that no served model fits."
        # Where one worker cannot use what another can, that it is broken is what matters.
        self._usable = self._gauge("gallery_usable", usable, ("gallery",), "livemin")
        self._of_gallery = {
            name: self._gauge(f"gallery_{name}", text, ("gallery",), "livemax") for name, text, _ in _GALLERY
        }
        self._info = self._gauge(
            "gallery_info",
            "The index type of a gallery, and the model that it belongs to; 1.",
            ("gallery", "index_type", "model"),
            "livemax",
        )
        build = self._gauge("build_info", "The version that runs; 1.", ("version", "python"), "livemax")
        build.labels(version("crossbatch"), platform.python_version()).set(1)
        for reason in ("expired", "cancelled"):  # told from the start, or a rate misses the first one
            self._given_up.labels(reason)
        for limit in LIMITS:
            self._refusals.labels(self._worker, limit)
        self._process = prometheus_client.ProcessCollector(registry=None)

    def began(self, call: Call) -> None:
        """Note that a call has come in."""
        self._in_flight.labels(self._worker, call.rpc).inc()

    def ended(self, call: Call, code: str, seconds: float, *, reason: str = "") -> None:
        """Note that it has ended, and all that was learned of it.

        Args:
            call: It.
            code: Name of its status.
            seconds: How long it took.
            reason: Of its error, as the caller reads it; empty when it went well.
        """
        self._in_flight.labels(self._worker, call.rpc).dec()
        self._duration.labels(call.rpc, code).observe(seconds)
        if call.inputs:
            self._inputs.labels(call.rpc).inc(call.inputs)
        if reason:
            self._errors.labels(call.rpc, reason).inc()
        if code in ("DEADLINE_EXCEEDED", "CANCELLED"):
            self._given_up.labels("cancelled" if code == "CANCELLED" else "expired").inc(call.inputs)
        for stage in STAGES:
            if took := getattr(call.stages, stage):  # it came to that stage
                self._stage.labels(stage).observe(took)

    def refused(self, limit: str) -> None:
        """Note that a call was refused for a limit of `Admission`."""
        self._refusals.labels(self._worker, limit).inc()

    def batch(self, model: str, size: int, seconds: float) -> None:
        """Note one run of a model on so many images."""
        self._batch.labels(model).observe(size)
        self._run.labels(model).observe(seconds)
        self._embedded.labels(model).inc(size)

    def refresh(
        self,
        admission: Admission,
        models: "Sequence[ModelInstances]",
        galleries: "GalleryDirectory",
    ) -> None:
        """Set the gauges to how the server stands now; blocks on the galleries' disk."""
        self._refresh_worker(admission)
        for model in models:
            spec = model.spec
            self._waiting.labels(self._worker, model.name).set(model.waiting)
            self._model.labels(model.name, spec.fingerprint, spec.precision, spec.dimension).set(1)
        self._refresh_galleries(models, galleries)

    def _refresh_worker(self, admission: Admission) -> None:
        found = {each.name: each.value for family in self._process.collect() for each in family.samples}
        told = {
            "inputs_in_flight": admission.inputs,
            "inputs_in_flight_limit": admission.most_inputs,
            "request_bytes_in_flight": admission.bytes,
            "request_bytes_in_flight_limit": admission.most_bytes,
            "worker_threads": threading.active_count(),
            **{f"worker_{name.removeprefix('process_')}": value for name, value in found.items()},
        }
        for name, gauge in self._of_worker.items():
            if name in told:
                gauge.labels(self._worker).set(told[name])
        cpu, dropped = told.get("worker_cpu_seconds_total", 0.0), dropped_lines()
        self._cpu_seconds.labels(self._worker).inc(cpu - self._cpu)
        self._lines.labels(self._worker).inc(dropped - self._dropped)
        self._cpu, self._dropped = cpu, dropped

    def _refresh_galleries(self, models: "Sequence[ModelInstances]", galleries: "GalleryDirectory") -> None:
        infos: dict[str, GalleryInfo | None] = {}
        for name in sorted(galleries.open_names()):
            try:
                infos[name] = galleries.using(
                    name,
                    partial(_usable_info, models=models),
                )
            except Exception:  # whatever it is, the calls to that gallery say it; here it must hide no other
                infos[name] = None
        shown = dict(list(infos.items())[:MOST_GALLERIES])
        rest = [info for name, info in infos.items() if name not in shown and info is not None]
        labels = {
            name: None if info is None else (name, info.index_type, info.model_name)
            for name, info in shown.items()
        }
        for name, told in self._told.items():  # several processes cannot remove what they told, only unsay it
            if told is not None and told != labels.get(name):
                self._info.labels(*told).set(GONE)
            if name not in labels:
                for gauge in (self._usable, *self._of_gallery.values()):
                    gauge.labels(name).set(GONE)
        self._told = labels
        for name, told in labels.items():
            self._usable.labels(name).set(told is not None)
            if told is not None:
                self._info.labels(*told).set(1)
        for metric, _, value in _GALLERY:
            for name, info in shown.items():
                self._of_gallery[metric].labels(name).set(0 if info is None else value(info))
            if rest and metric in _SUMMED:
                self._of_gallery[metric].labels(OTHERS).set(sum(value(info) for info in rest))

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"crossbatch_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
        return Histogram(f"crossbatch_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Sequence[str], mode: Any = "livesum") -> Gauge:
        return Gauge(f"crossbatch_{name}", text, labels, registry=self.registry, multiprocess_mode=mode)


def _usable_info(gallery: "Gallery", *, models: "Sequence[ModelInstances]") -> "GalleryInfo | None":
    """What a gallery tells of itself; None where no model fits it."""
    for model in models:
        with suppress(ModelMismatch):
            gallery.check_model(model.spec)
            return gallery.info()
    return None


def keep_fresh(refresh: Callable[[], None]) -> Callable[[], None]:
    """Call `Metrics.refresh` once a second, in a thread of its own; return what ends that."""
    stopped = threading.Event()

    def work() -> None:
        while True:
            try:
                refresh()
            except Exception:  # a disk that fails; the next time may do
                logger.exception("the metrics could not be refreshed")
            if stopped.wait(REFRESH_SECONDS):
                return

    threading.Thread(target=work, name="metrics", daemon=True).start()
    return stopped.set


def serve_metrics(
    host: str, port: int, *, registry: CollectorRegistry | None = None, folder: Path | None = None
) -> tuple[str, Callable[[], None]]:
    """Serve metrics at /metrics, in threads of its own.

    Args:
        host: Address to listen on.
        port: 0 for a free one.
        registry: What is served by a process alone.
        folder: Where the workers of a supervisor keep theirs, which are served together.

    Returns:
        The address as `host:port`, and what ends the serving.

    Raises:
        Unavailable: if it cannot listen there.
    """
    if registry is None:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    try:
        server, thread = prometheus_client.start_http_server(port, host, registry)
    except OSError as error:
        raise Unavailable(
            f"Metrics cannot be served on {written_address(host, port)} ({error.strerror or error}); "
            "choose another --metrics-port or --metrics-host."
        ) from error
    address = written_address(host, server.server_port)
    logger.info("metrics on http://%s/metrics", address, extra={"address": address})

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return address, stop
