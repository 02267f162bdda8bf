"""What Prometheus reads of a server: counters that calls add to, and gauges that are set once a second."""

import logging
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serving.errors import Unavailable
from serving.observability.call import Call
from serving.observability.logs import dropped_lines
from serving.rpc.address import written_address
from serving.rpc.admission import LIMITS, Admission

if TYPE_CHECKING:  # they bring an engine, which whoever imports only the settings does not need
    from serving.engine.models import ModelRegistry
    from serving.gallery.gallery import GalleryStatus
    from serving.gallery.place import AnyGallery, Galleries

__all__ = ["Metrics", "served_metrics"]

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
GONE = float("nan")  # several processes cannot remove what they told, only unsay it

Told: TypeAlias = dict[tuple[str, ...], float]
"""What gauges are set to, by name and labels."""

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
model_info | max | model, fingerprint, precision, dimension, provider | A model that is served; 1.
gallery_usable | max | gallery | 1, or 0 for a gallery that is damaged or that no served model fits.
gallery_items | max | gallery | Items in a gallery.
gallery_fresh_items | max | gallery | Items newer than the index, which are compared one by one.
gallery_deleted_items | max | gallery | Vectors held though their items were deleted or replaced.
gallery_generation | max | gallery | How often an index was published.
gallery_index_recall | max | gallery | Measured recall at 10 of the index, between 0 and 1.
gallery_index_bytes | max | gallery | Size of the index.
gallery_store_bytes | max | gallery | Size of the items on disk.
gallery_lag_seconds | max | gallery | Age of what a followed gallery was last known to equal.
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

OF_GALLERY = {  # from which attribute of its status each is set
    "gallery_items": "items",
    "gallery_fresh_items": "fresh",
    "gallery_deleted_items": "deleted",
    "gallery_index_bytes": "index_bytes",
    "gallery_store_bytes": "store_bytes",
    "gallery_generation": "generation",
    "gallery_index_recall": "recall",
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
        self._made: dict[str, Any] = {}
        for line in TABLE.strip().splitlines():
            name, kind, labels, text = line.split(" | ")
            made = KINDS[kind](f"crossbatch_{name}", text, labels.split(", "), registry=self.registry)
            self._made[name] = made
        # Kept, as prometheus_client takes 1 µs to find it.
        self._of: Callable[..., Any] = cache(lambda name, *labels: self._made[name].labels(*labels))
        self._told: Told = {}
        self._counted: dict[str, float] = {}
        self._of("build_info", version("crossbatch"), platform.python_version()).set(1)
        for reason in ("expired", "cancelled"):  # told from the start, or a rate misses the first one
            self._of("inputs_given_up", reason)
        for limit in LIMITS:
            self._of("admission_refusals", self._worker, limit)
        self._process = prometheus_client.ProcessCollector(registry=None)

    def began(self, call: Call) -> None:
        """Note that a call has come in."""
        self._of("calls_in_flight", self._worker, call.rpc).inc()

    def ended(self, call: Call, code: str, seconds: float, *, reason: str = "") -> None:
        """Note that it has ended after so long with a status of this name, and all that was learned of it."""
        self._of("calls_in_flight", self._worker, call.rpc).dec()
        self._of("call_duration_seconds", call.rpc, code).observe(seconds)
        if call.inputs:
            self._of("inputs", call.rpc).inc(call.inputs)
        if reason:
            self._of("call_errors", call.rpc, reason).inc()
        if code in ("DEADLINE_EXCEEDED", "CANCELLED"):
            why = "cancelled" if code == "CANCELLED" else "expired"
            self._of("inputs_given_up", why).inc(call.inputs)
        for stage, (_, took) in call.stages.copy().items():
            self._of("stage_duration_seconds", stage).observe(took)

    def refused(self, limit: str) -> None:
        """Note that a call was refused for a limit of `Admission`."""
        self._of("admission_refusals", self._worker, limit).inc()

    def batch(self, model: str, size: int, seconds: float) -> None:
        """Note one run of a model on so many images."""
        self._of("batch_images", model).observe(size)
        self._of("model_run_duration_seconds", model).observe(seconds)
        self._of("images_embedded", model).inc(size)

    def keep_fresh(
        self, admission: Admission, models: "ModelRegistry", galleries: "Galleries"
    ) -> Callable[[], None]:
        """Set the gauges once a second, in a thread of its own, to how these stand; return what ends that."""
        stopped = threading.Event()

        def work() -> None:
            while not stopped.is_set():
                try:
                    self._refresh(admission, models, galleries)
                except Exception:  # a disk that fails; the next time may do
                    logger.exception("the metrics could not be refreshed")
                stopped.wait(REFRESH_SECONDS)

        threading.Thread(target=work, name="metrics", daemon=True).start()
        return stopped.set

    def _refresh(self, admission: Admission, models: "ModelRegistry", galleries: "Galleries") -> None:
        worker = self._worker
        now: Told = {
            ("inputs_in_flight", worker): admission.inputs,
            ("inputs_in_flight_limit", worker): admission.most_inputs,
            ("request_bytes_in_flight", worker): admission.bytes,
            ("request_bytes_in_flight_limit", worker): admission.most_bytes,
            ("worker_threads", worker): threading.active_count(),
        }
        for family in self._process.collect():
            for sample in family.samples:
                name = f"worker_{sample.name.removeprefix('process_')}"
                if name in self._made:
                    now[name, worker] = sample.value
        for model in models.all():
            spec = model.spec
            now["queue_images", worker, model.name] = model.waiting
            facts = (spec.fingerprint, spec.precision, str(spec.dimension), model.encoder.provider)
            now["model_info", model.name, *facts] = 1
        for each, value in now.items():  # before galleries are asked, which a Milvus that is down makes wait
            self._of(*each).set(value)
        for name in galleries.open_names():
            now |= _of_gallery(name, models, galleries)
        for each in self._told | now:
            self._of(*each).set(now.get(each, GONE))
        self._told = now
        counted = {"worker_cpu_seconds": time.process_time(), "log_lines_dropped": float(dropped_lines())}
        for name, total in counted.items():
            self._of(name, worker).inc(max(0.0, total - self._counted.get(name, 0.0)))
        self._counted = counted


def _of_gallery(name: str, models: "ModelRegistry", galleries: "Galleries") -> Told:
    """What an open gallery tells of itself; noughts where it is of no use."""

    def usable(gallery: "AnyGallery") -> "GalleryStatus":
        models.fitting(gallery)
        return gallery.info()

    info: GalleryStatus | None = None
    with suppress(Exception):  # whatever it is, the calls to that gallery say it
        info = galleries.using(name, usable)
    told: Told = {(metric, name): getattr(info, of, 0) for metric, of in OF_GALLERY.items()}
    told["gallery_usable", name] = info is not None
    if info is not None:
        told["gallery_info", name, info.index_type, info.model_name] = 1
        if info.lag_seconds is not None:
            told["gallery_lag_seconds", name] = info.lag_seconds
    return told


@contextmanager
def served_metrics(host: str, port: int, registry: CollectorRegistry) -> Iterator[str]:
    """Serve metrics at /metrics while the block runs, in threads of its own; yields the address."""
    try:
        server, _ = prometheus_client.start_http_server(port, host, registry)
    except OSError as error:
        raise Unavailable(
            f"Metrics cannot be served on {written_address(host, port)} ({error.strerror or error}); "
            "choose another --metrics-port or --metrics-host."
        ) from error
    address = written_address(host, server.server_port)
    logger.info("metrics on http://%s/metrics", address, extra={"address": address})
    with server:
        try:
            yield address
        finally:
            server.shutdown()
