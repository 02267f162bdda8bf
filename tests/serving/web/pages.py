"""A page before a server in this process, and what a browser or another program asks of it."""

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serving.gallery.directory import GalleryDirectory
from serving.server.server import Server
from serving.settings import Settings
from serving.web.app import Page
from tests.serving.rpc_fakes import FakeEncoder, serving

JSON = {"content-type": "application/json"}


class Browser:
    """Asks one page."""

    def __init__(self, address: str, trust: bytes | None = None, server: Server | None = None) -> None:
        self.server = server
        self.place = urlsplit(address)
        self.context = None if trust is None else ssl.create_default_context(cadata=trust.decode())

    @property
    def port(self) -> int:
        return self.place.port or 0

    def running(self) -> int:
        """How many inputs the server works on."""
        assert self.server is not None
        return self.server.admission.inputs

    def connect(self) -> http.client.HTTPConnection:
        host, port = str(self.place.hostname), self.place.port
        if self.context is None:
            return http.client.HTTPConnection(host, port, timeout=20)
        return http.client.HTTPSConnection(host, port, timeout=20, context=self.context)

    def ask(
        self, verb: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request as it is written here; gives the status, the headers and the body of the reply."""
        connection = self.connect()
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(verb, path, body, sent)
            reply = connection.getresponse()
            return reply.status, {key.lower(): value for key, value in reply.getheaders()}, reply.read()
        finally:
            connection.close()

    def call(self, verb: str, path: str, message: Any = None, **headers: str) -> tuple[int, Any]:
        """Make a call with a message that becomes JSON; gives the status and what the reply says."""
        body = None if message is None else json.dumps(message).encode()
        more = {} if message is None else {"content_type": "application/json"}
        status, _, reply = self.ask(verb, path, body, **more, **headers)
        return status, json.loads(reply)

    def ok(self, verb: str, path: str, message: Any = None, **headers: str) -> Any:
        status, told = self.call(verb, path, message, **headers)
        assert status == 200, told
        return told

    def refused(self, status: int, verb: str, path: str, message: Any = None, **headers: str) -> str:
        """Make a call that is refused; gives the message."""
        found, told = self.call(verb, path, message, **headers)
        assert found == status, told
        assert told["details"][0]["@type"] == "type.googleapis.com/google.rpc.ErrorInfo"
        return str(told["message"])


@contextmanager
def paged(
    galleries: Path, encoder: Any = None, trust: bytes | None = None, **given: Any
) -> Iterator[Browser]:
    """A server of one encoder and its page."""
    wanted = {"model": ["m"], "galleries": "g", "web_port": 0} | given
    with (
        Page(Settings.model_validate(wanted)) as page,
        serving(encoder or FakeEncoder(), GalleryDirectory(galleries), **given) as server,
    ):
        page.start(server.address)
        yield Browser(page.address, trust, server)
        page.stop()
