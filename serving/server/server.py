"""Models and a folder of galleries behind gRPC: every part put together, started and stopped."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.gallery_service_pb2_grpc import add_GalleryServiceServicer_to_server
from protos.model_service_pb2_grpc import add_ModelServiceServicer_to_server
from protos.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from protos.retrieval_service_pb2_grpc import add_RetrievalServiceServicer_to_server
from serving.cores import in_daemon, usable_cores
from serving.engine.galleries import GalleryExecutor
from serving.engine.instances import InstanceLimits
from serving.engine.models import Change, ModelRegistry
from serving.engine.repository import ModelRepository
from serving.errors import Draining, Unavailable
from serving.gallery.place import Galleries, galleries_at
from serving.model.encoder import Encoder
from serving.observability.access_log import AccessLog, AuditLog
from serving.observability.call import Call
from serving.observability.metrics import Metrics, served_metrics
from serving.observability.tracing import tracer_of
from serving.rpc.address import barred_ipv6, check_host, held_port, written_address
from serving.rpc.admission import Admission
from serving.rpc.auth import Authenticator
from serving.rpc.interceptor import CallInterceptor
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.services.galleries import GalleryCalls
from serving.rpc.services.inference import InferenceCalls
from serving.rpc.services.models import ModelCalls
from serving.rpc.services.retrieval import RetrievalCalls
from serving.rpc.tls import server_credentials
from serving.settings import Settings

__all__ = ["SERVICES", "Server"]

logger = logging.getLogger(__name__)

SERVICES = (
    "crossbatch.v1.RetrievalService",
    "crossbatch.v1.GalleryService",
    "crossbatch.v1.ModelService",
    "inference.GRPCInferenceService",
)
MOST_THREADS = 2_048  # most calls that are worked on or wait inside; a thread that waits takes some 50 KB
SPARE_THREADS = 64  # beside those that hold permits, for calls that are refused, arrive or take none
MOST_WATCHERS = 256  # most clients that watch the health of the server at once; others wait
FLUSH_SECONDS = 0.5  # for the last replies to leave
MOST_BATCH, CORE_PIXELS = 32, 1 << 17
"""Most images in a batch where --max-batch says nothing, and on one core most pixels: its cache is small."""


class Server:
    """All services on one port."""

    def __init__(
        self,
        settings: Settings,
        *,
        sources: ModelRepository | None = None,
        directory: Galleries | None = None,
        worker: int = 0,
        asked_to_reload: Callable[[], object] = lambda: None,
    ) -> None:
        """Put the parts together; nothing runs yet. Models and galleries are by default the settings'.

        `worker` is the number of this process among its like, 0 for one that is alone. `asked_to_reload` is
        called when a client let this process load anew, of which its like know nothing.
        """
        self.address = ""
        self.metrics_address = ""
        self.failed = threading.Event()
        self._settings, self._worker, self._asked_to_reload = settings, worker, asked_to_reload
        self._metrics = Metrics(worker)
        self._tracer = tracer_of(settings.trace)
        self._credentials = server_credentials(settings)
        self.admission = Admission(
            settings.max_in_flight,
            most_a_client=settings.max_in_flight_per_client,
            refused=self._metrics.refused,
        )
        sources = ModelRepository(settings) if sources is None else sources
        if directory is None:
            place = settings.galleries
            place = place.absolute() if isinstance(place, Path) else place
            directory = galleries_at(place, device=settings.search_device)
        self.models = ModelRegistry(
            sources, partial(_limits, settings), ran=self._metrics.batch, failed=self._fail
        )
        self.galleries = GalleryExecutor(directory, self.models)
        authenticator = Authenticator(settings.keys)
        access_log = AccessLog(
            self._metrics, AuditLog(settings.audit_log), self._tracer, every=settings.log_calls == "all"
        )
        self.interceptor = CallInterceptor(authenticator, self.admission, access_log)
        # A thread for each watcher: without, one that leaves while it is told of a change locks gRPC's own
        # thread and the change for ever.
        self._health = health.HealthServicer(
            experimental_non_blocking=False,
            experimental_thread_pool=ThreadPoolExecutor(MOST_WATCHERS, "watch"),
        )
        self._ready = threading.Event()
        self._stops = ExitStack()
        self._stops.callback(authenticator.close)
        self._grpc: grpc.Server | None = None

    def start(self) -> None:
        """Take the port, load and warm up the models, look at the galleries; only then listen, and answer."""
        host, port = self._settings.host, self._settings.port
        try:
            if self._settings.workers > 1:  # their supervisor holds the port
                self._load()
                self._listen(port)
                return
            check_host(host, insecure=self._settings.insecure, encrypted=self._credentials is not None)
            with held_port(host, port) as port:
                self._load()
            with barred_ipv6(host, port):
                self._listen(port)
        except BaseException:
            self._stops.close()
            raise

    def stop(self, grace: float) -> None:
        """Say NOT_SERVING, refuse new work, and end when what runs is done or `grace` seconds are over."""
        self._ready.clear()
        self._health.enter_graceful_shutdown()
        time.sleep(self._settings.drain_delay)
        deadline = time.monotonic() + grace
        self.interceptor.drain()
        if not self.interceptor.wait_idle(grace):
            self.interceptor.give_up()
            self.interceptor.wait_idle(FLUSH_SECONDS)
        if self._grpc is not None:
            self._grpc.stop(FLUSH_SECONDS).wait()
        self._stops.close()
        self.models.stop()
        self.galleries.directory.close()
        if self._tracer is not None:
            self._tracer.close(max(FLUSH_SECONDS, deadline - time.monotonic()))

    @property
    def is_loading(self) -> bool:
        """Whether models are being loaded, which cannot be broken off."""
        return self.models.is_loading

    def reload(self) -> Change:
        """Look at the model files and the galleries again; if it fails, everything stays as it was."""
        change = self.models.reload(self.galleries.check_kept)
        self.galleries.report()
        logger.info("loaded anew", extra={"loaded": change.loaded, "removed": change.removed})
        return change

    def _reload_by_call(self, call: Call) -> Change:
        """Reload in a thread that a stop does not wait for, as a load cannot be broken off."""

        def reload() -> Change:
            change = self.reload()
            self._asked_to_reload()
            return change

        reloading = in_daemon(reload)
        while not wait([reloading], 0.1).done:
            call.check()
            if self.admission.draining:
                raise Draining("The server is stopping and loads nothing any more; try another one.")
        return reloading.result()

    def _load(self) -> None:
        settings, metrics = self._settings, self._metrics
        if settings.metrics_port is not None:
            if not self._worker:  # or else the supervisor serves those of all workers
                place = (settings.metrics_host, settings.metrics_port)
                self.metrics_address = self._stops.enter_context(served_metrics(*place, metrics.registry))
            seen = (self.admission, self.models, self.galleries.directory)
            self._stops.callback(metrics.keep_fresh(*seen))
        self.models.reload()
        self.galleries.report()

    def _listen(self, number: int) -> None:
        settings = self._settings
        address = written_address(settings.host, number)
        threads = min(settings.max_in_flight, MOST_THREADS) + SPARE_THREADS
        server = self._grpc = grpc.server(
            ThreadPoolExecutor(threads, "call"),
            interceptors=[self.interceptor],
            options=_channel_options(settings),
            maximum_concurrent_rpcs=2 * threads,
        )
        self._add_services(server)
        if not settings.keys and not settings.tls_client_ca and (settings.insecure or self._credentials):
            logger.warning("whoever reaches %s may read and write; --keys asks for API keys", address)
        try:
            if self._credentials is not None:
                number = server.add_secure_port(address, self._credentials)
            else:
                number = server.add_insecure_port(address)
        except RuntimeError as error:
            raise Unavailable(f"{address} cannot be used; choose another port with --port.") from error
        self._ready.set()
        server.start()
        for service in ("", *SERVICES):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self.address = written_address(settings.host, number)

    def _add_services(self, server: grpc.Server) -> None:
        models, parts = self.models, (self.models, self.galleries, self.admission)
        inference = InferenceCalls(models, self.admission, self._ready.is_set)
        add_RetrievalServiceServicer_to_server(RetrievalCalls(*parts), server)
        add_GalleryServiceServicer_to_server(GalleryCalls(*parts), server)
        add_ModelServiceServicer_to_server(ModelCalls(models, self._reload_by_call), server)
        add_GRPCInferenceServiceServicer_to_server(inference, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    def _fail(self) -> None:
        """Say NOT_SERVING from now on, since no image can be embedded any more."""
        self.failed.set()
        self._ready.clear()
        self._health.enter_graceful_shutdown()


def _limits(settings: Settings, encoder: Encoder) -> InstanceLimits:
    """Share the cores: on a CPU each instance runs on one, for a GPU each decodes on one."""
    cores = max(1, usable_cores() // settings.workers)
    fitting = CORE_PIXELS // encoder.spec.image_size**2
    return InstanceLimits(
        instances=(settings.decode_threads if encoder.on_gpu else settings.threads) or cores,
        max_batch=settings.max_batch or (MOST_BATCH if encoder.on_gpu else min(MOST_BATCH, max(1, fitting))),
        capacity=settings.max_in_flight,
        max_wait=settings.max_wait_ms / 1e3,
    )


def _channel_options(settings: Settings) -> list[tuple[str, int]]:
    return [
        # On by default on Linux, where a second server would silently share the port (grpc#10755, #19773).
        ("grpc.so_reuseport", int(settings.workers > 1)),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # The first is what clients are told; past it gRPC refuses some calls at random, past the second all.
        ("grpc.max_metadata_size", 16 * 1024),
        ("grpc.absolute_max_metadata_size", 16 * 1024),
        # A client that has more calls on one connection lets them wait on its side.
        ("grpc.max_concurrent_streams", 1_024),
        ("grpc.http.overload_protection", 0),  # which refuses some of those that wait
        # Whoever connects must speak HTTP/2 (and TLS where it is on) within this time.
        ("grpc.server_handshake_timeout_ms", 20_000),
        # A client that is gone without a word would keep what it holds.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # Clients may keep an idle connection open; gRPC's own default hangs up on them.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        # A connection is one server's for ever (grpc#22036): clients that stay would leave new ones idle. It
        # is ended gently, and what runs on it may go on for an hour.
        ("grpc.max_connection_age_ms", round(settings.max_connection_age * 1e3)),
        ("grpc.max_connection_age_grace_ms", 3_600_000),
    ]
