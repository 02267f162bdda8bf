"""Models and a folder of galleries behind gRPC: every part put together, started and stopped."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import (
    gallery_service_pb2,
    gallery_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    open_inference_pb2,
    open_inference_pb2_grpc,
    retrieval_service_pb2,
    retrieval_service_pb2_grpc,
)
from serving.cores import usable_cores
from serving.engine.fleet import Change, Fleet
from serving.engine.library import Sources
from serving.engine.pipeline import Bounds, Pipeline
from serving.engine.plan import Kind, Plan
from serving.engine.reloads import Reloads
from serving.engine.shelf import Shelf
from serving.errors import CrossbatchError, Unavailable
from serving.observability.audit import Audit
from serving.rpc.access import Access
from serving.rpc.address import written_address
from serving.rpc.admission import Admission
from serving.rpc.boundary import Boundary
from serving.rpc.certificates import Certificates
from serving.rpc.fuse import Fuse
from serving.rpc.services import galleries as gallery_calls
from serving.rpc.services import inference as inference_calls
from serving.rpc.services import retrieval as retrieval_calls
from serving.rpc.services.galleries import Galleries
from serving.rpc.services.health import Health
from serving.rpc.services.inference import Inference
from serving.rpc.services.models import Models
from serving.rpc.services.retrieval import Retrieval
from serving.server.channel import channel_options
from serving.server.port import Port
from serving.server.unregistered import Unregistered
from serving.server.watch import Watch
from serving.settings import Settings

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.gallery.directory import GalleryDirectory

__all__ = ["SERVICES", "Server"]

logger = logging.getLogger(__name__)

SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (retrieval_service_pb2, "RetrievalService"),
        (gallery_service_pb2, "GalleryService"),
        (model_service_pb2, "ModelService"),
        (open_inference_pb2, "GRPCInferenceService"),
    )
)

READERS = {**gallery_calls.READERS, **retrieval_calls.READERS, **inference_calls.READERS}

# Each call that works holds a permit; as many again may be arriving, leaving or refused.
CALLS_PER_PERMIT = 2
# Watchers of the health service never hang up, so the last replies get this long to leave and no longer.
FLUSH_SECONDS = 0.5


class Server:
    """All services on one port. Belongs to the event loop in which `start` was awaited."""

    def __init__(
        self,
        sources: Sources,
        galleries: "GalleryDirectory",
        settings: Settings,
        *,
        watch: Watch | None = None,
        plans: Mapping[Kind, Plan] | None = None,
    ) -> None:
        """Put the parts together; nothing runs yet.

        Args:
            sources: Where the models are.
            galleries: The folder of galleries; an absolute path.
            settings: Everything else.
            watch: Its metrics and traces; made by the settings when not given.
            plans: By which models are run that others have tried.

        Raises:
            BadSetting: if traces are asked for that cannot be sent.
            ValueError: if a limit makes no sense.
            CrossbatchError: if the keys, certificates or the audit log cannot be used.
        """
        self.address = ""
        self.failed = asyncio.Event()
        self.asked_to_reload: Callable[[], None] = lambda: None
        self._settings = settings
        self._watch = watch or Watch(settings)
        self._certificates = Certificates.of(settings)
        self._audit = Audit(settings.audit_log)
        self._admission = Admission(settings.max_in_flight, most_a_client=settings.max_in_flight_per_client)
        self._fleet = Fleet(
            sources,
            Bounds(
                max_batch=settings.max_batch,
                max_wait=settings.max_wait_ms / 1e3,
                capacity=settings.max_in_flight,
            ),
            decode_threads=settings.decode_threads or max(1, usable_cores() // settings.workers),
            metrics=self._watch.metrics,
            failed=self._failed,
            plans=plans,
        )
        self._reloads = Reloads(self._load_anew)
        self._asked_by_call = False
        self._shelf = Shelf(galleries, self._fleet, most=settings.max_in_flight)
        self._fuse = Fuse(CALLS_PER_PERMIT * settings.max_in_flight, self._admission.refusals)
        self._boundary = Boundary(
            self._admission,
            Access(settings.keys),
            self._audit,
            self._watch.metrics,
            READERS,
            fuse=self._fuse,
            tracer=self._watch.tracer,
        )
        self._health = Health()
        self._grpc: grpc.aio.Server | None = None
        self._port: Port | None = None
        self._telling: asyncio.Task[None] | None = None

    @property
    def metrics_address(self) -> str:
        """Where Prometheus reads the metrics, as `host:port`; empty when not here."""
        return self._watch.address

    def plans(self) -> Mapping[Kind, Plan]:
        """Return how each model is run."""
        return self._fleet.plans()

    async def start(self) -> None:
        """Take the port, load and warm up the models, look at the galleries; only then listen, and answer.

        Where there are several workers, their supervisor has the port and each of them listens on it.

        Raises:
            BadSetting: if the host may not be used.
            Unavailable: if the port is in use.
            CrossbatchError: if a model cannot be served.
        """
        try:
            await self._start()
        except BaseException:
            if self._port is not None:
                self._port.close()
            await asyncio.to_thread(self._watch.stop, 0.0)  # it answers since before the models were loaded
            raise

    async def _start(self) -> None:
        host, number = self._settings.host, self._settings.port
        if self._settings.workers == 1:
            self._port = await asyncio.to_thread(Port, self._settings)
        try:
            await asyncio.to_thread(self._watch.start, self._fleet, self._admission, self._shelf.galleries)
            await self._fleet.start()
            await asyncio.to_thread(self._report_galleries)
        finally:
            if self._port is not None:
                number = self._port.number
                self._port.hand_over()
        self._grpc = grpc.aio.server(interceptors=[self._boundary], options=channel_options(self._settings))
        self._add_services(self._grpc)
        try:
            number = self._open(self._grpc, written_address(host, number))
        except RuntimeError as error:
            raise Unavailable(
                f"Port {number} on {host} cannot be used; choose another with --port."
            ) from error
        await self._grpc.start()
        for service in ("", *SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self.address = written_address(host, number)

    async def stop(self, grace: float) -> None:
        """Say NOT_SERVING, refuse new work, finish what runs, and end.

        Args:
            grace: Seconds that running calls have, after the delay that is set; those that are not done by
                then are cancelled.

        Raises:
            CrossbatchError: if a gallery cannot be closed.
        """
        await self._health.enter_graceful_shutdown()
        await asyncio.sleep(self._settings.drain_delay)
        deadline = time.monotonic() + grace
        self._boundary.drain()
        self._reloads.close()
        # Not by the clock: the loop's own may be a moment ahead, and end the wait before the deadline.
        idle = await self._boundary.wait_idle(deadline - time.monotonic())
        flush = min(FLUSH_SECONDS, max(0.0, deadline - time.monotonic()))
        if not idle:
            self._boundary.give_up()
            flush = FLUSH_SECONDS  # for what they are told, which takes no longer than it needs
            await self._boundary.wait_idle(flush)
        if self._grpc is not None:
            await self._grpc.stop(flush)
        if self._port is not None:
            self._port.close()
        await self._reloads.end()
        await self._fleet.stop()
        await asyncio.to_thread(self._shelf.close)
        await asyncio.to_thread(self._audit.close)
        await asyncio.to_thread(self._watch.stop, max(FLUSH_SECONDS, deadline - time.monotonic()))

    def _open(self, server: grpc.aio.Server, address: str) -> int:
        known = self._settings.keys or self._settings.tls_client_ca
        if not known and (self._settings.insecure or self._certificates):
            logger.warning("whoever reaches %s may read and write; --keys asks for API keys", address)
        if self._certificates:
            return server.add_secure_port(address, self._certificates.credentials())
        return server.add_insecure_port(address)

    async def reload(self) -> Change:
        """Look at the model files and the folder of galleries again; no call fails for it.

        Who asks while one waits for another to end shares the one that waits.

        Returns:
            Which models are served since, and which no more.

        Raises:
            Draining: if the server is stopping.
            CrossbatchError: if a model cannot be served, or a gallery would lose the last one that fits it;
                then everything stays as it was.
        """
        return await self._reloads.ask()

    async def _reload_by_call(self) -> Change:
        """Reload as a client asks for; he may mean other processes too, which saw nothing of his call."""
        self._asked_by_call = True
        return await self.reload()

    async def _load_anew(self) -> Change:
        by_call, self._asked_by_call = self._asked_by_call, False
        change = await self._fleet.reload(self._agreed)
        await asyncio.to_thread(self._report_galleries)
        logger.info("loaded anew", extra={"loaded": change.loaded, "removed": change.removed})
        if by_call:
            self.asked_to_reload()
        return change

    async def _agreed(self, before: Sequence[Pipeline], after: Sequence[Pipeline]) -> None:
        """Refuse to take from a gallery the last model that fits it: each call on it would fail."""
        await asyncio.to_thread(self._shelf.check_kept, before, after)

    def _add_services(self, server: grpc.aio.Server) -> None:
        parts, quick = (self._fleet, self._shelf, self._admission), Unregistered(server)
        retrieval_service_pb2_grpc.add_RetrievalServiceServicer_to_server(Retrieval(*parts), quick)
        gallery_service_pb2_grpc.add_GalleryServiceServicer_to_server(Galleries(*parts), quick)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(
            Models(self._fleet, self._reload_by_call), quick
        )
        inference = Inference(self._fleet, self._admission, self._health)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(inference, quick)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, quick)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)  # which has a look at what it is given

    def _failed(self) -> None:
        """Say NOT_SERVING from now on, since no image can be embedded any more."""
        self.failed.set()
        self._telling = asyncio.create_task(self._health.enter_graceful_shutdown())

    def _report_galleries(self) -> None:
        """Open each gallery, so that one that cannot be used shows in the log and not only in a call."""
        folder, names = self._shelf.galleries.path, self._shelf.galleries.names()
        if not folder.is_dir():
            logger.warning("there is no folder %s; it is made with the first gallery", folder)
        logger.info("galleries in %s: %d", folder, len(names), extra={"galleries": len(names)})
        for name in names:
            try:
                self._shelf.using(name, lambda *_: None)
            except CrossbatchError as error:
                logger.warning("gallery %s cannot be used: %s", name, error, extra={"gallery": name})
            except Exception:  # a bug that one gallery shows must not keep the others from being served
                logger.exception("gallery %s cannot be opened", name, extra={"gallery": name})
