"""The page: its files and the gateway as one application, in a thread of the process that serves."""

import asyncio
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import grpc
import uvicorn
from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import Unavailable, cause_of
from serving.gallery.disk import stamp_of
from serving.look import palette
from serving.rpc.address import check_host, held_socket, is_loopback, written_address
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.tls import renewed_context, trusting
from serving.settings import Settings
from serving.web.gateway import Gateway

__all__ = ["Page", "application"]

MOST_CONNECTIONS = 1_024
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
]
END_SECONDS = 1.0  # beyond the grace of calls, for the last replies to leave
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def application(gateway: ASGIApp, hosts: list[str]) -> ASGIApp:
    """Put the page and the gateway together for requests to these hosts, or to `*`."""
    static = StaticFiles(directory=Path(__file__).with_name("static"))

    async def index(request: Request) -> Response:
        return await static.get_response("index.html", request.scope)

    async def colours(_: Request) -> Response:
        return Response(palette(prototypes=True), media_type="text/css")

    files = Starlette(routes=[Route("/", index), Route("/palette.css", colours), Mount("/static", static)])

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        calls = scope["raw_path"].startswith(b"/v1")
        headers = HEADERS | {"cache-control": "no-store" if calls else "no-cache"}

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(key.encode(), value.encode()) for key, value in headers.items()]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        await (gateway if calls else files)(scope, receive, with_headers)

    # Without, a name of another site that is made to mean this machine would make that site's page ours.
    return TrustedHostMiddleware(answer, hosts, www_redirect=False)


class Page:
    """Holds the port of the page, and serves it in a thread once the server itself does."""

    def __init__(self, settings: Settings) -> None:
        """Take the port, and read the certificate; nothing is answered yet."""
        host, port, tls = settings.web_host, settings.web_port or 0, settings.tls_certificate
        self._settings, self._stack = settings, ExitStack()
        check_host(host, insecure=settings.insecure, encrypted=bool(tls), flags="--web-")
        contexts = [renewed_context(tls, settings.tls_key)] if tls and settings.tls_key else []
        self._socket = self._stack.enter_context(held_socket(host, port, flags="--web-"))
        address = written_address(host, self._socket.getsockname()[1])
        self.address = f"{'https' if contexts else 'http'}://{address}/"
        hosts = ["localhost", "127.0.0.1", "[::1]", host, f"[{host}]"] if is_loopback(host) else ["*"]
        self._channels: dict[tuple[int, ...], grpc.aio.Channel] = {}
        config = uvicorn.Config(
            application(Gateway(self._channel), hosts),
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,  # errors go to our logs
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=round(settings.drain_delay + settings.grace + END_SECONDS),
            ssl_context_factory=(lambda *_: contexts[0]) if contexts else None,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="page")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the end, and give the port back."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._stack.close()

    def start(self, server: str) -> None:
        """Serve the page and the calls of the server at this address."""
        self._of = server
        # Connections inherit it, and keep the port for a minute from who starts anew without.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.listen()  # whoever comes before the thread is there waits for it
        self._thread.start()

    def stop(self) -> None:
        """Take no new requests; those that are answered go on for the grace of the settings at most."""
        self._server.should_exit = True

    async def _serve(self) -> None:
        await self._server.serve([self._socket])
        for channel in self._channels.values():
            await channel.close()

    async def _channel(self) -> grpc.aio.Channel:
        """Give the channel to the server; another one from when it has another certificate."""
        certificate = self._settings.tls_certificate
        stamp = stamp_of(certificate) if certificate else ()
        if stamp in self._channels:
            return self._channels[stamp]
        if certificate is None:
            channel = grpc.aio.insecure_channel(self._of, OPTIONS)
        else:
            try:
                credentials, name = await asyncio.to_thread(trusting, self._of, certificate)
            except OSError as error:
                if self._channels:  # the new files are not whole yet
                    return [*self._channels.values()][-1]
                raise Unavailable(f"The server cannot be reached ({cause_of(error)}).") from error
            options = [*OPTIONS, ("grpc.ssl_target_name_override", name)]
            channel = grpc.aio.secure_channel(self._of, credentials, options)
        self._channels[stamp] = channel
        return channel
