"""How both clients reach a server: channels, TLS and keys, retries by gRPC, and what a failed call means."""

import asyncio
import copy
import json
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Generic, Self, TypeAlias, TypeVar

import grpc
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status

from protos import gallery_service_pb2_grpc, model_service_pb2_grpc, retrieval_service_pb2_grpc
from serving.errors import CrossbatchError, DeadlineExceeded, InvalidArgument, Unavailable
from serving.rpc.limits import DEFAULT_PORT, MAX_MESSAGE_BYTES
from serving.rpc.status import Violation, from_status, violations_of

__all__ = ["CLOSED", "BaseClient", "Request", "faults_of"]

T = TypeVar("T")
Pem: TypeAlias = bytes | str | Path
"""Certificates or a private key in PEM: the bytes, or where they lie."""
MOST_RETRIES = 4  # gRPC makes no more tries after the first
CLOSED = "The client has been closed; make another one."

_LOOPBACK = re.compile(r"unix:|unix-abstract:|(ipv4:)?127(\.\d+){3}:|localhost:|(ipv6:)?\[::1\]:")
_ADDRESS = re.compile(r"(dns|unix|unix-abstract|ipv4|ipv6|xds):.+|([^\s:/@\[\]]+|\[[\w:.%]+\]):[0-9]{1,5}")
_HEADER = re.compile(r"(?!(grpc-.*|.*-bin|authorization|x-request-id|content-type|te|host)$)[0-9a-z_.-]+")
_STUBS = (
    retrieval_service_pb2_grpc.RetrievalServiceStub,
    gallery_service_pb2_grpc.GalleryServiceStub,
    model_service_pb2_grpc.ModelServiceStub,
    health_pb2_grpc.HealthStub,
)


@dataclass(slots=True)
class Request(Generic[T]):
    """One call, made again after a lost reply if it is `repeatable`; `timeout` is the client's when None.

    `id` is made by the client when it is empty.
    """

    method: str
    message: Any
    read: Callable[[Any], T]
    repeatable: bool = True
    timeout: float | None = None
    id: str = ""


class Connection:
    """Channels to one server, which share a connection and differ in what gRPC tries again by itself."""

    def __init__(self, api: Any, address: str, credentials: Any, patience: float) -> None:
        self.address, self.answered, self.closed = address, False, False
        self._api, self._credentials, self._patience = api, credentials, patience
        self._channels: dict[Any, tuple[Any, dict[str, Any]]] = {}
        self._process, self._lock = os.getpid(), threading.Lock()

    def method(self, name: str, retries: int, repeatable: bool) -> Any:
        """Look up a method of the server, called with these retries."""
        if self.closed:
            raise InvalidArgument(CLOSED)
        if os.getpid() != self._process:
            raise InvalidArgument("The client was made before a fork of this process; make a client in each.")
        # A channel of grpc.aio belongs to one event loop.
        loop = asyncio.get_running_loop() if self._api is grpc.aio else None
        key = (loop, min(retries, MOST_RETRIES), repeatable)
        with self._lock:
            if key not in self._channels:
                for ended in [each for each in self._channels if each[0] and each[0].is_closed()]:
                    del self._channels[ended]
                channel = self._channel(*key[1:])
                methods = {name: each for stub in _STUBS for name, each in vars(stub(channel)).items()}
                self._channels[key] = channel, methods
            return self._channels[key][1][name]

    def close(self) -> list[Any]:
        """Begin no call any more; gives the channels that are to be closed."""
        self.closed = True
        return [channel for channel, _ in self._channels.values()] if os.getpid() == self._process else []

    def _channel(self, retries: int, repeatable: bool) -> Any:
        pause = min(self._patience, 10.0) / 100  # all four pauses together are 40 % of the timeout
        policy = {
            "maxAttempts": retries + 1,
            "initialBackoff": f"{pause:.9f}s",
            "maxBackoff": f"{27 * pause:.9f}s",
            "backoffMultiplier": 3,
            # A refused call was not carried out; what came of one whose connection broke, nobody knows.
            "retryableStatusCodes": ["RESOURCE_EXHAUSTED", *["UNAVAILABLE"] * repeatable],
        }
        config = {"methodConfig": [{"name": [{}], **({"retryPolicy": policy} if retries else {})}]}
        options = {
            "service_config": json.dumps(config),
            "per_rpc_retry_buffer_size": MAX_MESSAGE_BYTES,
            # gRPC's own 4 MiB refuse large replies; the server sets the same.
            "max_receive_message_length": MAX_MESSAGE_BYTES,
            "max_send_message_length": MAX_MESSAGE_BYTES,
            "initial_reconnect_backoff_ms": 100,
            "min_reconnect_backoff_ms": 100,
            "max_reconnect_backoff_ms": 1_000,
            # A server that vanished without a word is noticed while a call waits for it.
            "keepalive_time_ms": 30_000,
            "keepalive_timeout_ms": 10_000,
            # A proxy of the environment leads out of this machine, and never back to it.
            "enable_http_proxy": 0 if _LOOPBACK.match(self.address) else 1,
        }
        given = [(f"grpc.{name}", value) for name, value in options.items()]
        if self._credentials is None:
            return self._api.insecure_channel(self.address, options=given)
        return self._api.secure_channel(self.address, self._credentials, options=given)


class BaseClient:
    """A connection to one server, taken by the first call and kept for all that follow."""

    _api: Any = grpc

    def __init__(
        self,
        address: str = f"127.0.0.1:{DEFAULT_PORT}",
        *,
        timeout: float = 10.0,
        retries: int = MOST_RETRIES,
        api_key: str | None = None,
        tls: bool = False,
        ca: Pem | None = None,
        certificate: Pem | None = None,
        private_key: Pem | None = None,
        insecure: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Keep the address, HOST:PORT or a target in gRPC's own spelling; the first call connects.

        `timeout` is in seconds, for each call with its retries. `ca` are the authorities that TLS trusts in
        place of the system's (`tls`), `certificate` and `private_key` are shown to a server that wants them.
        `insecure` lets the API key leave this machine in plain text. `metadata` are headers of each call.
        What makes no sense, and a file that cannot be read, is an InvalidArgument.
        """
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise InvalidArgument(
                f"The address {address!r:.200} is not HOST:PORT; write it as 127.0.0.1:50051, "
                "shop.example:443 or [::1]:50051, without http://."
            )
        if (certificate is None) != (private_key is None):
            raise InvalidArgument(
                "certificate=... and private_key=... belong together; give both, or neither."
            )
        credentials = None
        if tls or ca is not None or certificate is not None:
            pems = (_pem(ca, "ca"), _pem(private_key, "private_key"), _pem(certificate, "certificate"))
            credentials = grpc.ssl_channel_credentials(*pems)
        if api_key is not None and not (isinstance(api_key, str) and re.fullmatch("[!-~]+", api_key)):
            raise InvalidArgument("The API key must be a string of visible ASCII characters without spaces.")
        if api_key is not None and not (credentials or insecure or _LOOPBACK.match(address)):
            raise InvalidArgument(
                f"The API key would travel to {address} in plain text; use TLS by tls=True or ca=..., or say "
                "insecure=True if the network is trusted."
            )
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._owner = True
        self._set(timeout, retries, metadata, "")
        self._connection = Connection(self._api, address, credentials, timeout)

    def with_options(
        self,
        *,
        timeout: float | None = None,
        retries: int | None = None,
        metadata: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> Self:
        """Make a client with other options on the same connection, which costs next to nothing.

        What is None stays as it was, and metadata is added to what there is. Calls send `request_id`, at most
        64 visible ASCII characters, as `x-request-id`; "" makes one for each again. Closing the copy leaves
        the connection open.
        """
        client = copy.copy(self)
        client._owner = False
        client._set(
            self._timeout if timeout is None else timeout,
            self._retries if retries is None else retries,
            metadata,
            self._request_id if request_id is None else request_id,
        )
        return client

    @property
    def address(self) -> str:
        """Where the server is."""
        return self._connection.address

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    def _set(self, timeout: float, retries: int, metadata: Mapping[str, str] | None, request_id: str) -> None:
        numbers = isinstance(timeout, Real) and isinstance(retries, int)
        if not numbers or not 0 < timeout <= 86_400 or retries < 0:
            raise InvalidArgument(
                f"timeout={timeout!r}, retries={retries!r} cannot make a call; the timeout must be above 0 "
                "and at most 86,400 seconds, and retries 0 or more."
            )
        if not isinstance(request_id, str) or not re.fullmatch("[!-~]{0,64}", request_id):
            raise InvalidArgument(
                f"request_id cannot be {request_id!r:.100}; it must be at most 64 visible ASCII characters."
            )
        headers = {} if metadata is None else metadata
        if not isinstance(headers, Mapping) or not all(map(_is_header, headers.items())):
            # The values are in no message: they may be secrets, and messages end in logs.
            raise InvalidArgument(
                "metadata must be a mapping of strings: keys of lower-case letters, digits, '-', '_' and "
                "'.', none of gRPC's or the client's own, and values of printable ASCII characters."
            )
        self._timeout, self._retries, self._request_id = timeout, retries, request_id
        self._headers = {**self._headers, **headers}

    def _new_id(self) -> str:
        return self._request_id or uuid.uuid4().hex[:16]

    def _begin(self, request: Request[Any], how: str = "__call__") -> Any:
        """Make a call as gRPC has it: its reply, or what to wait for; `how` may be "future"."""
        request.id = request.id or self._new_id()
        method = self._connection.method(request.method, self._retries, request.repeatable)
        return getattr(method, how)(
            request.message,
            timeout=self._timeout if request.timeout is None else request.timeout,
            metadata=(*self._headers.items(), ("x-request-id", request.id)),
            # A server that has answered may be starting again, and is waited for; not for an hour, though, by
            # long work that has a time of its own.
            wait_for_ready=self._connection.answered and self._retries > 0 and request.timeout is None,
        )

    def _read(self, request: Request[T], reply: Any) -> T:
        self._connection.answered = True
        return request.read(reply)

    def _error(self, failure: Any, request: Request[Any]) -> CrossbatchError:
        """Say what a failed call means: an error of the class that the server named, or the nearest one."""
        timeout = self._timeout if request.timeout is None else request.timeout
        error = _meaning_of(failure, self._connection, timeout)
        error.code, trailing = failure.code().name, failure.trailing_metadata() or ()
        error.request_id = next((str(value) for key, value in trailing if key == "x-request-id"), request.id)
        error.add_note(f"request id {error.request_id}, {error.code}")
        return error


def _is_header(pair: tuple[str, str]) -> bool:
    strings = all(isinstance(each, str) for each in pair)
    return strings and bool(_HEADER.fullmatch(pair[0]) and re.fullmatch("[ -~]*", pair[1]))


def faults_of(error: CrossbatchError) -> tuple[Violation, ...]:
    """Read from the error of a call which fields the server complained about."""
    status = _status_of(error.__cause__)
    return () if status is None else violations_of(status)


def _pem(given: Pem | None, what: str) -> bytes | None:
    if given is None or isinstance(given, bytes):
        return given
    try:
        return Path(given).read_bytes()
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"{what}={str(given)!r} cannot be read ({reason}); check its path.") from error


_FAULTS = {  # what gRPC says, and what it means
    "WRONG_VERSION_NUMBER|HTTP_REQUEST|WRONG_SSL_VERSION": """
        seems to speak no TLS, and you do; leave out tls=True, ca=... and certificate=...""",
    "CERTIFICATE_VERIFY_FAILED|BAD_SIGNATURE|certificate signature failure": """
        shows a certificate that is not trusted; give its authority by ca=..., and see that it is valid""",
    "Hostname Verification|Peer name": """
        shows a certificate for another host name; call it by a name that its certificate has""",
    "create security handshaker": """
        was not asked, as gRPC cannot use what it was given: ca=..., certificate=... and private_key=... must
        be PEM, the latter two belong together, and the key not be encrypted""",
    "failed to connect.*(Socket closed|onnection reset|roken pipe|EOF)": """
        hangs up before it answers; if it speaks TLS, give its authority by ca=..., or tls=True for the
        system's; if it wants a client certificate, give one that it trusts by certificate=... and
        private_key=...""",
}


def _meaning_of(failure: Any, connection: Connection, timeout: float) -> CrossbatchError:
    code, details, there = failure.code(), failure.details() or "", f"The server at {connection.address}"
    status = _status_of(failure)
    if status is not None and status.details:
        connection.answered = True
        return from_status(status)
    # From here on it is gRPC that speaks, not the server.
    if connection.closed:
        return InvalidArgument(CLOSED)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{there} did not answer within {timeout:g} s.")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable(f"{there} does not know this call; it is no crossbatch server, or an older one.")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return InvalidArgument(f"The message is larger than {MAX_MESSAGE_BYTES:,} bytes; split the call.")
    if code is not grpc.StatusCode.UNAVAILABLE:
        return from_status(status_pb2.Status(code=code.value[0], message=details))
    for words, meaning in _FAULTS.items():
        if re.search(words, details):
            return Unavailable(f"{there} {' '.join(meaning.split())} ({details}).")
    return Unavailable(
        f"No server answers at {connection.address} ({details}); start one with `crossbatch serve`, or give "
        "its address."
    )


def _status_of(failure: Any) -> status_pb2.Status | None:
    """The rich status of a failed call; None when there is none, or it contradicts the code."""
    try:
        return rpc_status.from_call(failure)
    except (ValueError, AttributeError):
        return None
