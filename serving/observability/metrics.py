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
    from serving.gallery.gallery import Gallery, GalleryStatus

__all__ = ["MOST_GALLERIES", "OTHERS", "Metrics", "keep_fresh", "serve_metrics"]

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
MOST_GALLERIES = 100
"""Galleries that are told one by one; the others are told together."""
OTHERS = "(others)"  # no gallery can be called that
GONE = float("nan")  # several processes cannot remove what they told, only unsay it

CALL_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
STAGE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

KINDS: dict[str, Callable[..., Any]] = {
    "count": Counter,
    "sum": partial(Gauge, multiprocess_mode="livesum"),
    "max": partial(Gauge, multiprocess_mode="livemax"),
    "calls": partial(Histogram, buckets=CALL_SECONDS),
    "stages": partial(Histogram, buckets=STAGE_SECONDS),
    "images": partial(Histogram, buckets=[2.0**i for i in range(11)]),
}
# Name without `crossbatch_`, kind, labels and text of each.
TABLE = """
call_duration_seconds | calls | rpc, code | Time from a call's coming in to its reply.
call_errors | count | rpc, reason | Calls that ended with an error, by the reason in its ErrorInfo.
calls_in_flight | sum | worker, rpc | Calls not answered yet.
inputs | count | rpc | Images, queries and items admitted.
inputs_given_up | count | reason | Inputs of calls that nobody waited for any more.
admission_refusals | count | worker, limit | Calls refused for a limit on what is in flight.
stage_duration_seconds | stages | stage | Time that the slowest input of a call spent in a stage.
queue_images | sum | worker, model | Images that wait for a model.
batch_images | images | model | Images in a run of a model.
model_run_duration_seconds | stages | model | Time of a run of a model.
images_embedded | count | model | Images that a model has embedded.
model_info | max | model, fingerprint, precision, dimension | A model that is served; 1.
gallery_usable | max | gallery | 1, or 0 for a gallery that is damaged or that no served model fits.
gallery_items | max | gallery | Items in a gallery.
gallery_fresh_items | max | gallery | Items newer than the index, which are compared one by one.
gallery_deleted_items | max | gallery | Vectors held though their items were deleted or replaced.
gallery_generation | max | gallery | How often an index was published.
gallery_index_recall | max | gallery | Measured recall at 10 of the index, between 0 and 1.
gallery_index_bytes | max | gallery | Size of the index.
gallery_store_bytes | max | gallery | Size of the items on disk.
gallery_info | max | gallery, index_type, model | The index type of a gallery, and its model; 1.
inputs_in_flight | sum | worker | Images, queries and items admitted and not answered yet.
inputs_in_flight_limit | sum | worker | Most of them; more are refused.
request_bytes_in_flight | sum | worker | Bytes of the messages of calls in flight.
request_bytes_in_flight_limit | sum | worker | Most of them; more are refused.
worker_cpu_seconds | count | worker | Processor time that a worker has used.
worker_resident_memory_bytes | sum | worker | Memory that a worker holds.
worker_open_fds | sum | worker | Files and sockets that a worker has open.
worker_max_fds | sum | worker | Most files and sockets that a worker may have open.
worker_threads | sum | worker | Threads of a worker that Python knows.
worker_start_time_seconds | sum | worker | When a worker was started, in seconds since 1970.
log_lines_dropped | count | worker | Log lines lost by a slow reader.
build_info | max | version, python | The version that runs; 1.
"""

_OF_GALLERY: "dict[str, Callable[[GalleryStatus], float]]" = {
    "gallery_items": lambda info: info.items,
    "gallery_fresh_items": lambda info: info.fresh,
    "gallery_deleted_items": lambda info: info.deleted,
    "gallery_index_bytes": lambda info: info.index_bytes,
    "gallery_store_bytes": lambda info: info.store_bytes,
    "gallery_generation": lambda info: info.generation,
    "gallery_index_recall": lambda info: info.recall,
}


class Metrics:
    """Counts and measures: in memory or, in a worker, in the folder of prometheus_client's multiprocess mode.

    Labels are names of RPCs, codes, models, stages and galleries: all few and known.
    """

    def __init__(self, worker: int = 0) -> None:
        """Make the metrics, all at nought, of the worker of this number among its like."""
        # As several workers have none either.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._worker = str(worker)
        self._of: dict[str, Any] = {}
        for line in TABLE.strip().splitlines():
            name, kind, labels, text = line.split(" | ")
            made = KINDS[kind](f"crossbatch_{name}", text, labels.split(", "), registry=self.registry)
            self._of[name] = made
        self._galleries: set[tuple[str, tuple[str, ...]]] = set()  # metrics and labels, as told last
        self._told = {"worker_cpu_seconds": 0.0, "log_lines_dropped": 0.0}
        self._of["build_info"].labels(version("crossbatch"), platform.python_version()).set(1)
        for reason in ("expired", "cancelled"):  # told from the start, or a rate misses the first one
            self._of["inputs_given_up"].labels(reason)
        for limit in LIMITS:
            self._of["admission_refusals"].labels(self._worker, limit)
        self._process = prometheus_client.ProcessCollector(registry=None)

    def began(self, call: Call) -> None:
        """Note that a call has come in."""
        self._of["calls_in_flight"].labels(self._worker, call.rpc).inc()

    def ended(self, call: Call, code: str, seconds: float, *, reason: str = "") -> None:
        """Note that it has ended after so long with a status of this name, and all that was learned of it."""
        self._of["calls_in_flight"].labels(self._worker, call.rpc).dec()
        self._of["call_duration_seconds"].labels(call.rpc, code).observe(seconds)
        if call.inputs:
            self._of["inputs"].labels(call.rpc).inc(call.inputs)
        if reason:
            self._of["call_errors"].labels(call.rpc, reason).inc()
        if code in ("DEADLINE_EXCEEDED", "CANCELLED"):
            why = "cancelled" if code == "CANCELLED" else "expired"
            self._of["inputs_given_up"].labels(why).inc(call.inputs)
        for stage in STAGES:
            if took := getattr(call.stages, stage):  # it came to that stage
                self._of["stage_duration_seconds"].labels(stage).observe(took)

    def refused(self, limit: str) -> None:
        """Note that a call was refused for a limit of `Admission`."""
        self._of["admission_refusals"].labels(self._worker, limit).inc()

    def batch(self, model: str, size: int, seconds: float) -> None:
        """Note one run of a model on so many images."""
        self._of["batch_images"].labels(model).observe(size)
        self._of["model_run_duration_seconds"].labels(model).observe(seconds)
        self._of["images_embedded"].labels(model).inc(size)

    def refresh(
        self, admission: Admission, models: "Sequence[ModelInstances]", galleries: "GalleryDirectory"
    ) -> None:
        """Set the gauges to how the server stands now; blocks on the galleries' disk."""
        process = {each.name: each.value for family in self._process.collect() for each in family.samples}
        found = {
            "inputs_in_flight": admission.inputs,
            "inputs_in_flight_limit": admission.most_inputs,
            "request_bytes_in_flight": admission.bytes,
            "request_bytes_in_flight_limit": admission.most_bytes,
            "worker_threads": threading.active_count(),
            **{f"worker_{name.removeprefix('process_')}": value for name, value in process.items()},
        }
        for name in found.keys() & self._of.keys():
            self._of[name].labels(self._worker).set(found[name])
        now = {
            "worker_cpu_seconds": found.get("worker_cpu_seconds_total", 0.0),
            "log_lines_dropped": dropped_lines(),
        }
        for name, value in now.items():
            self._of[name].labels(self._worker).inc(max(0.0, value - self._told[name]))
        self._told = now
        for model in models:
            spec = model.spec
            self._of["queue_images"].labels(self._worker, model.name).set(model.waiting)
            self._of["model_info"].labels(model.name, spec.fingerprint, spec.precision, spec.dimension).set(1)
        self._refresh_galleries(models, galleries)

    def _refresh_galleries(self, models: "Sequence[ModelInstances]", galleries: "GalleryDirectory") -> None:
        infos: dict[str, GalleryStatus | None] = {}
        for name in sorted(galleries.open_names()):
            infos[name] = None
            with suppress(Exception):  # whatever it is, the calls to that gallery say it
                infos[name] = galleries.using(name, partial(_usable_info, models=models))
        now: dict[tuple[str, tuple[str, ...]], float] = {}
        for name, info in list(infos.items())[:MOST_GALLERIES]:
            del infos[name]
            now["gallery_usable", (name,)] = info is not None
            if info is not None:
                now["gallery_info", (name, info.index_type, info.model_name)] = 1
            for metric, value in _OF_GALLERY.items():
                now[metric, (name,)] = 0 if info is None else value(info)
        if rest := [info for info in infos.values() if info is not None]:
            for metric in _OF_GALLERY.keys() - {"gallery_generation", "gallery_index_recall"}:
                now[metric, (OTHERS,)] = sum(map(_OF_GALLERY[metric], rest))
        for metric, labels in self._galleries - now.keys():
            self._of[metric].labels(*labels).set(GONE)
        for (metric, labels), told in now.items():
            self._of[metric].labels(*labels).set(told)
        self._galleries = set(now)


def _usable_info(gallery: "Gallery", *, models: "Sequence[ModelInstances]") -> "GalleryStatus | None":
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
    """Serve metrics at /metrics, in threads of its own: those of a registry, or of all workers in a folder.

    Returns:
        The address as `host:port`, and what ends the serving.

    Raises:
        Unavailable: It cannot listen there.
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
