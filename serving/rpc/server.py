"""The serve command: a model and a folder of galleries behind gRPC, from start to drained stop."""

import asyncio
import logging
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import BaseModel, ConfigDict, Field

from protos import (
    gallery_service_pb2,
    gallery_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    retrieval_service_pb2,
    retrieval_service_pb2_grpc,
)
from serving.cores import usable_cores
from serving.errors import CrossbatchError, Unavailable
from serving.rpc.address import check_address, written_address
from serving.rpc.admission import Admission
from serving.rpc.boundary import Boundary
from serving.rpc.galleries import READERS, Galleries
from serving.rpc.limits import DEFAULT_PORT, MAX_INPUTS, MAX_MESSAGE_BYTES
from serving.rpc.models import Models
from serving.rpc.pipeline import Pipeline
from serving.rpc.retrieval import Retrieval
from serving.rpc.shelf import Shelf
from serving.telemetry import configure_logs

if TYPE_CHECKING:  # both bring an engine, which whoever imports only the settings does not need
    from serving.gallery.folder.directory import GalleryDirectory
    from serving.model.encoder import Encoder

__all__ = ["Server", "Settings", "render", "run"]

logger = logging.getLogger(__name__)

SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (retrieval_service_pb2, "RetrievalService"),
        (gallery_service_pb2, "GalleryService"),
        (model_service_pb2, "ModelService"),
    )
)

# Each call that works holds a permit; as many again may be arriving, leaving, refused or about health.
CALLS_PER_PERMIT = 2
# Watchers of the health service never hang up, so the last replies get this long to leave and no longer.
FLUSH_SECONDS = 0.5


class Settings(BaseModel):
    """What `crossbatch serve` can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path = Field(description="ONNX file written by `crossbatch export`.")
    galleries: Path = Field(description="Folder that holds the galleries; each is a folder in it.")
    host: str = Field(default="127.0.0.1", description="Address to listen on; loopback unless --insecure.")
    port: int = Field(
        default=DEFAULT_PORT, ge=0, le=65_535, description="Port to listen on; 0 for a free one."
    )
    insecure: bool = Field(default=False, description="Allow plain text to and from other machines.")
    device: Literal["cpu", "cuda"] = Field(
        default="cpu", description="What runs the model; a GPU must then be there."
    )
    search_device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description="Where galleries are searched; a GPU, which must then be there, compares every vector.",
    )
    threads: int = Field(
        default=0, ge=0, le=1_024, description="Threads of one run of the model; 0 takes every core."
    )
    decode_threads: int = Field(
        default=0, ge=0, le=1_024, description="Threads that decode images; 0 takes one a core."
    )
    max_batch: int = Field(default=32, ge=1, le=1_024, description="Most images in one run of the model.")
    max_wait_ms: float = Field(
        default=2.0,
        ge=0,
        le=1_000,
        description="Longest time in milliseconds that an image waits for others to join it.",
    )
    max_in_flight: int = Field(
        default=512,
        ge=MAX_INPUTS,
        le=65_536,
        description="Most images, queries and items on their way at once; more are refused.",
    )
    grace: float = Field(
        default=10.0,
        ge=0,
        le=3_600,
        description="Seconds that calls have to finish after SIGTERM or Ctrl-C.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least severe log line that is written to standard error."
    )


class Server:
    """All services on one port. Belongs to the event loop in which `start` was awaited."""

    def __init__(self, encoder: "Encoder", galleries: "GalleryDirectory", settings: Settings) -> None:
        """Put the parts together; nothing runs yet.

        Raises:
            ValueError: if a limit makes no sense.
        """
        self.address = ""
        self._settings = settings
        self._admission = Admission(settings.max_in_flight)
        self._pipeline = Pipeline(
            encoder,
            decode_threads=settings.decode_threads or usable_cores(),
            max_batch=settings.max_batch,
            max_wait=settings.max_wait_ms / 1e3,
            capacity=settings.max_in_flight,
            failed=self._failed,
        )
        self._shelf = Shelf(galleries, encoder.spec, most=settings.max_in_flight)
        self._boundary = Boundary(self._admission, READERS)
        self._health = health.aio.HealthServicer()
        self._grpc: grpc.aio.Server | None = None
        self._telling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take the port, warm the model up, look at the galleries, then answer.

        Raises:
            BadSetting: if the host may not be used.
            Unavailable: if the port is in use.
            CrossbatchError: if the model cannot be run.
        """
        host, port = self._settings.host, self._settings.port
        await asyncio.to_thread(check_address, host, port, insecure=self._settings.insecure)
        self._grpc = grpc.aio.server(
            interceptors=[self._boundary],
            maximum_concurrent_rpcs=CALLS_PER_PERMIT * self._settings.max_in_flight,
            options=[
                # On by default on Linux, where a second server would silently share the port.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                # Allows clients to keep an idle connection open; gRPC's own default hangs up on them.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            ],
        )
        self._add_services(self._grpc)
        try:
            port = self._grpc.add_insecure_port(written_address(host, port))
        except RuntimeError as error:
            raise Unavailable(f"Port {port} on {host} cannot be used; choose another with --port.") from error
        await self._pipeline.start()
        await asyncio.to_thread(self._report_galleries)
        await self._grpc.start()
        for service in ("", *SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self.address = written_address(host, port)

    async def stop(self, grace: float) -> None:
        """Say NOT_SERVING, refuse new work, finish what runs, and end.

        Args:
            grace: Seconds that running calls have; those that are not done by then are cancelled.

        Raises:
            CrossbatchError: if a gallery cannot be closed.
        """
        deadline = time.monotonic() + grace
        self._admission.draining = True
        await self._health.enter_graceful_shutdown()
        await self._boundary.wait_idle(deadline - time.monotonic())
        if self._grpc is not None:
            await self._grpc.stop(min(FLUSH_SECONDS, max(0.0, deadline - time.monotonic())))
        await self._pipeline.stop()
        await asyncio.to_thread(self._shelf.close)

    def _add_services(self, server: grpc.aio.Server) -> None:
        parts = (self._pipeline, self._shelf, self._admission)
        retrieval_service_pb2_grpc.add_RetrievalServiceServicer_to_server(Retrieval(*parts), server)
        gallery_service_pb2_grpc.add_GalleryServiceServicer_to_server(Galleries(*parts), server)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(Models(self._shelf.spec), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    def _failed(self) -> None:
        """Say NOT_SERVING from now on, since no image can be embedded any more."""
        self._telling = asyncio.create_task(self._health.enter_graceful_shutdown())

    def _report_galleries(self) -> None:
        """Open each gallery, so that one that cannot be used shows in the log and not only in a call."""
        for name in self._shelf.galleries.names():
            try:
                self._shelf.check(name)
            except CrossbatchError as error:
                logger.warning("gallery %s cannot be used: %s", name, error, extra={"gallery": name})
            except Exception:  # a bug that one gallery shows must not keep the others from being served
                logger.exception("gallery %s cannot be opened", name, extra={"gallery": name})


def run(settings: Settings) -> dict[str, Any]:
    """Serve until SIGTERM or Ctrl-C.

    Returns:
        The address that was served and for how many seconds.

    Raises:
        CrossbatchError: if the model or the folder cannot be used, or the port is taken.
    """
    from serving.gallery.folder.directory import GalleryDirectory
    from serving.model.encoder import Encoder

    configure_logs(settings.log_level)
    # Before the seconds that a model takes to load.
    check_address(settings.host, settings.port, insecure=settings.insecure)
    galleries = GalleryDirectory(settings.galleries.absolute(), device=settings.search_device)
    encoder = Encoder(settings.model, threads=settings.threads, device=settings.device)
    if not settings.galleries.is_dir():
        logger.warning("there is no folder %s yet; it is made with the first gallery", settings.galleries)
    return asyncio.run(_serve(Server(encoder, galleries, settings), settings.grace))


def render(result: dict[str, Any]) -> str:
    """Say in one line what was served."""
    return f"served {result['address']} for {result['seconds']:.0f} s"


async def _serve(server: Server, grace: float) -> dict[str, Any]:
    told_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told_to_stop.set)
    await server.start()
    began = time.monotonic()
    # Scripts that chose port 0, or that wait for the start, read this line.
    sys.stdout.write(f"serving on {server.address}\n")
    sys.stdout.flush()
    logger.info("serving on %s", server.address, extra={"address": server.address})
    await told_to_stop.wait()
    logger.info("draining for up to %g s", grace)
    await server.stop(grace)
    seconds = time.monotonic() - began
    logger.info("stopped after %.0f s", seconds)
    return {"address": server.address, "seconds": round(seconds, 3)}
