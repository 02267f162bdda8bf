"""Where Prometheus reads the metrics: an HTTP server of one page that nobody can hold up."""

import logging
import socket
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from serving.errors import Unavailable
from serving.rpc.address import written_address

__all__ = ["Endpoint", "serve"]

logger = logging.getLogger(__name__)

CONNECTIONS = 16  # at once; one more takes the place of the oldest that has asked for nothing yet
HEAD_SECONDS = 1.0  # that a connection has to ask for something
SECONDS = 10.0  # that it has for everything; it is closed then
PATIENCE = 0.1  # in which one that was hung up on leaves its place


def serve(registry: CollectorRegistry, host: str, port: int) -> "Endpoint":
    """Serve the metrics of a registry at /metrics, in threads of its own.

    Args:
        registry: What is told.
        host: Address to listen on.
        port: 0 for a free one.

    Returns:
        The endpoint, which answers by now.

    Raises:
        Unavailable: if it cannot listen there.
    """
    try:
        place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server = _Server(place[0], place[4], registry)
    except (OSError, ValueError) as error:  # a ValueError tells of a name that no host can have
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Unavailable(
            f"Metrics cannot be served on {written_address(host, port)} ({why}); "
            "choose another --metrics-port or --metrics-host."
        ) from error
    endpoint = Endpoint(server, host)
    logger.info("metrics on http://%s/metrics", endpoint.address, extra={"address": endpoint.address})
    return endpoint


class Endpoint:
    """An HTTP server that runs until it is closed."""

    def __init__(self, server: "_Server", host: str) -> None:
        """Start a thread that accepts connections."""
        self.address = written_address(host, server.server_address[1])
        """As `host:port`, with the port that was chosen."""
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Accept no more, and hang up on whoever is there."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingMixIn, WSGIServer):
    """So many connections at most, each for so long at most: nobody can hold it up by being slow."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False
    request_queue_size = 128  # by default 5, beyond which a connection waits for a second

    def __init__(self, family: int, place: Any, registry: CollectorRegistry) -> None:
        self.address_family = family
        self._free = threading.Semaphore(CONNECTIONS)
        self._silent: dict[socket.socket, threading.Timer] = {}  # oldest first; those that have asked nothing
        self._lock = threading.Lock()  # of the dictionary
        super().__init__(place, _Handler)
        self.set_app(_only_metrics(make_wsgi_app(registry)))

    def server_bind(self) -> None:
        # The base class asks the name service for the host's name, which may take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False) and not self._make_room():
            self.shutdown_request(request)
            return
        try:
            with self._lock:
                self._silent[request] = _hanging_up(request, HEAD_SECONDS)
            super().process_request(request, client_address)
        except BaseException:  # there can be no more threads now
            self.heard(request)
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A limit for each read alone would let a client that sends a byte now and then stay for ever.
        try:
            watch = _hanging_up(request, SECONDS)
            try:
                super().process_request_thread(request, client_address)
            finally:
                watch.cancel()
        finally:
            self.heard(request)
            self._free.release()

    def heard(self, request: socket.socket) -> None:
        """Count a connection no longer among those that have asked for nothing."""
        with self._lock:
            watch = self._silent.pop(request, None)
        if watch is not None:
            watch.cancel()

    def _make_room(self) -> bool:
        """Hang up on the oldest connection that has asked for nothing, and take its place."""
        with self._lock:
            oldest = next(iter(self._silent), None)
        if oldest is None:
            return False
        self.heard(oldest)
        _hang_up(oldest)
        return self._free.acquire(timeout=PATIENCE)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a reader of the metrics went away", exc_info=True)


class _Handler(WSGIRequestHandler):
    server: _Server

    def parse_request(self) -> bool:
        """Read the head, after which there is somebody to answer."""
        asked = super().parse_request()
        self.server.heard(self.connection)
        return asked

    def log_message(self, format: str, *args: object) -> None:
        """Write no line a scrape."""


def _only_metrics(page: Any) -> Any:
    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        if environ["PATH_INFO"] == "/metrics":
            return page(environ, start)
        start("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"The metrics are at /metrics.\n"]

    return answer


def _hanging_up(connection: socket.socket, seconds: float) -> threading.Timer:
    watch = threading.Timer(seconds, _hang_up, (connection,))
    watch.daemon = True
    watch.start()
    return watch


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already
        logger.debug("a connection ended by itself")
