"""The metrics that calls and runs of a model add to, as Prometheus counts them."""

import os
import threading
from pathlib import Path

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, values

from serving.observability.call import STAGES, Call
from serving.observability.metrics import Metrics

__all__ = ["Counters", "share_values"]

CALL_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
STAGE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
BATCH_IMAGES = tuple(float(2**i) for i in range(11))


def share_values(folder: Path | None, worker: int) -> None:
    """Decide where the values of the metrics made from now on are kept; once, before any is made.

    Each worker has files by its number: one that takes the place of a dead one counts on from there, so that
    no total ever falls and the files stay few.

    Args:
        folder: Where the supervisor reads them; None to keep them in memory.
        worker: The number of this one.
    """
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # several workers have none
    if folder is None:
        values.ValueClass = values.MutexValue
    else:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]


class Counters(Metrics):
    """Counts and measures. Their labels are names of RPCs, codes, models, stages: all few and known."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Make the metrics, all at nought."""
        super().__init__()
        self._guard = threading.Lock()  # of the dicts of children, which are made when first needed
        self._duration = Histogram(
            "crossbatch_call_duration_seconds",
            "Time from a call's message being there to its reply.",
            ("rpc", "code"),
            buckets=CALL_SECONDS,
            registry=registry,
        )
        self._errors = Counter(
            "crossbatch_call_errors",
            "Calls that ended with an error, by the reason that the caller reads in its ErrorInfo.",
            ("rpc", "reason"),
            registry=registry,
        )
        self._inputs = Counter(
            "crossbatch_inputs", "Images, queries and items admitted.", ("rpc",), registry=registry
        )
        given_up = Counter(
            "crossbatch_inputs_given_up",
            "Inputs of calls that nobody waited for any more.",
            ("reason",),
            registry=registry,
        )
        self._expired, self._cancelled = given_up.labels("expired"), given_up.labels("cancelled")
        stages = Histogram(
            "crossbatch_stage_duration_seconds",
            "Time that the slowest input of a call spent in a stage.",
            ("stage",),
            buckets=STAGE_SECONDS,
            registry=registry,
        )
        self._stages = [(stage, stages.labels(stage)) for stage in STAGES]
        self._batch = Histogram(
            "crossbatch_batch_images",
            "Images in a run of a model.",
            ("model",),
            buckets=BATCH_IMAGES,
            registry=registry,
        )
        self._run = Histogram(
            "crossbatch_model_run_duration_seconds",
            "Time of a run of a model.",
            ("model",),
            buckets=STAGE_SECONDS,
            registry=registry,
        )
        self._embedded = Counter(
            "crossbatch_images_embedded", "Images that a model has embedded.", ("model",), registry=registry
        )
        # Resolving labels costs more than counting does.
        self._calls: dict[tuple[str, str], Histogram] = {}
        self._failed: dict[tuple[str, str], Counter] = {}
        self._admitted: dict[str, Counter] = {}
        self._models: dict[str, tuple[Histogram, Histogram, Counter]] = {}

    def began(self, call: Call) -> None:
        """Note that a call has come in."""
        self.in_flight[call.rpc] += 1

    def ended(self, call: Call, code: str, seconds: float, *, reason: str = "", late: bool = False) -> None:
        """Note that it has ended, and all that was learned of it."""
        rpc = call.rpc
        self.in_flight[rpc] -= 1
        duration = self._calls.get((rpc, code))
        if duration is None:
            duration = self._calls[rpc, code] = self._duration.labels(rpc, code)
        duration.observe(seconds)
        if call.inputs:
            admitted = self._admitted.get(rpc)
            if admitted is None:
                admitted = self._admitted[rpc] = self._inputs.labels(rpc)
            admitted.inc(call.inputs)
        if reason:
            errors = self._failed.get((rpc, reason))
            if errors is None:
                errors = self._failed[rpc, reason] = self._errors.labels(rpc, reason)
            errors.inc()
        if code == "DEADLINE_EXCEEDED" or (late and code == "CANCELLED"):
            self._expired.inc(call.inputs)
        elif code == "CANCELLED":
            self._cancelled.inc(call.inputs)
        if call.stages is not None:
            for stage, spent in self._stages:
                took = getattr(call.stages, stage)
                if took:  # it came to that stage
                    spent.observe(took)

    def batch(self, model: str, size: int, seconds: float) -> None:
        """Note one run of a model on so many images."""
        children = self._models.get(model)
        if children is None:
            with self._guard:
                children = self._models.setdefault(
                    model,
                    (self._batch.labels(model), self._run.labels(model), self._embedded.labels(model)),
                )
        images, run, embedded = children
        images.observe(size)
        run.observe(seconds)
        embedded.inc(size)
