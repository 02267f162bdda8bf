"""The way to a server, or to several alike: address, TLS, keys, gRPC's own retries; what a failure means."""

import asyncio
import json
import os
import re
import threading
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status

from protos import gallery_service_pb2_grpc, model_service_pb2_grpc, retrieval_service_pb2_grpc
from serving.errors import CrossbatchError, DeadlineExceeded, InvalidArgument, Unavailable, cause_of
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.status import from_status

__all__ = ["CLOSED", "MOST_RETRIES", "Connection", "Pem", "credentials_of", "status_of"]

Pem: TypeAlias = bytes | str | Path
"""Certificates or a private key in PEM: the bytes, or where they lie."""
MOST_RETRIES = 4  # gRPC makes no more tries after the first
CLOSED = "The client has been closed; make another one."

_ADDRESS = re.compile(r"(dns|unix|unix-abstract|ipv4|ipv6|xds):.+|([^\s:/@\[\]]+|\[[\w:.%]+\]):[0-9]{1,5}")
_LOOPBACK = re.compile(
    r"unix(-abstract)?:.+|localhost:\d+|(ipv4:)?127(\.\d+){3}:\d+(,127(\.\d+){3}:\d+)*"
    r"|(ipv6:)?\[::1\]:\d+(,\[::1\]:\d+)*"
)
_SEVERAL = ("dns:", "ipv4:", "ipv6:")  # what may be the address of several servers
_TLS_FAULTS = {  # what gRPC says of a connection, and what it means
    "WRONG_VERSION_NUMBER|HTTP_REQUEST": "speaks no TLS; leave out tls=True, ca=... and certificate=...",
    "CERTIFICATE_VERIFY_FAILED|BAD_SIGNATURE": "has an untrusted certificate; give its authority by ca=...",
    "Hostname Verification|Peer name": "has a certificate for another host name; call it by that name",
}
_STUBS = (
    retrieval_service_pb2_grpc.RetrievalServiceStub,
    gallery_service_pb2_grpc.GalleryServiceStub,
    model_service_pb2_grpc.ModelServiceStub,
    health_pb2_grpc.HealthStub,
)


class Connection:
    """Channels to one address, which share connections and differ in what gRPC tries again by itself."""

    def __init__(self, api: Any, address: str, credentials: Any, patience: float) -> None:
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise InvalidArgument(
                f"The address {address!r:.200} is not HOST:PORT; write it as 127.0.0.1:50051, "
                "shop.example:443 or [::1]:50051, without http://."
            )
        self.address, self.answered, self.closed = address, False, False
        self._api, self._credentials, self._patience = api, credentials, patience
        self._channels: dict[Any, tuple[Any, dict[str, Any]]] = {}
        self._process, self._lock = os.getpid(), threading.Lock()

    def key_header(self, api_key: str | None, insecure: bool) -> dict[str, str]:
        """Make the header that brings an API key, if there is one and it may travel to the server."""
        if api_key is None:
            return {}
        if not isinstance(api_key, str) or not re.fullmatch("[!-~]+", api_key):
            raise InvalidArgument("The API key must be a string of visible ASCII characters without spaces.")
        if not (self._credentials or insecure or _LOOPBACK.fullmatch(self.address)):
            raise InvalidArgument(
                f"The API key would travel to {self.address} in plain text; use TLS by tls=True or ca=..., "
                "or say insecure=True if the network is trusted."
            )
        return {"authorization": f"Bearer {api_key}"}

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

    def error_of(self, failure: Any, timeout: float, request_id: str) -> CrossbatchError:
        """Say what a failed call means: an error of the class that the server named, or the nearest one."""
        error = self._meaning_of(failure, timeout)
        error.code, trailing = failure.code().name, failure.trailing_metadata() or ()
        error.request_id = next((str(value) for key, value in trailing if key == "x-request-id"), request_id)
        error.add_note(f"request id {error.request_id}, {error.code}")
        return error

    def _meaning_of(self, failure: Any, timeout: float) -> CrossbatchError:
        code, details, there = failure.code(), failure.details() or "", f"The server at {self.address}"
        status = status_of(failure)
        if status.details:
            self.answered = True
            return from_status(status)
        # From here on it is gRPC that speaks, not the server.
        if self.closed:
            return InvalidArgument(CLOSED)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{there} did not answer within {timeout:g} s.")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return Unavailable(f"{there} does not know this call; it is no crossbatch server, or an old one.")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
            return InvalidArgument(f"The message is larger than {MAX_MESSAGE_BYTES:,} bytes; split the call.")
        if code is not grpc.StatusCode.UNAVAILABLE:
            return from_status(status_pb2.Status(code=code.value[0], message=details))
        for words, meaning in _TLS_FAULTS.items():
            if re.search(words, details):
                return Unavailable(f"{there} {meaning} ({details}).")
        return Unavailable(
            f"No server answers at {self.address} ({details}); start one with `crossbatch serve`, or give "
            "its address, and ca=... or tls=True if it speaks TLS."
        )

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
        method = {"name": [{}], **({"retryPolicy": policy} if retries else {})}
        config: dict[str, Any] = {"methodConfig": [method]}
        if self.address.startswith(_SEVERAL):  # HOST:PORT is one server, though localhost has two addresses
            config["loadBalancingConfig"] = [{"round_robin": {}}]
        options = {
            "service_config": json.dumps(config),
            "per_rpc_retry_buffer_size": MAX_MESSAGE_BYTES,
            # gRPC's own 4 MiB refuse large replies; the server sets the same.
            "max_receive_message_length": MAX_MESSAGE_BYTES,
            "max_send_message_length": MAX_MESSAGE_BYTES,
            "initial_reconnect_backoff_ms": 100,
            "min_reconnect_backoff_ms": 100,
            "max_reconnect_backoff_ms": 1_000,
            # gRPC's own 30 s outlast a rollout, after which no address that it knows is left.
            "dns_min_time_between_resolutions_ms": 1_000,
            # A server that vanished without a word is noticed while a call waits for it.
            "keepalive_time_ms": 30_000,
            "keepalive_timeout_ms": 10_000,
            # A proxy of the environment leads out of this machine, and never back to it.
            "enable_http_proxy": 0 if _LOOPBACK.fullmatch(self.address) else 1,
        }
        given = [(f"grpc.{name}", value) for name, value in options.items()]
        if self._credentials is None:
            return self._api.insecure_channel(self.address, options=given)
        return self._api.secure_channel(self.address, self._credentials, options=given)


def credentials_of(tls: bool, ca: Pem | None, certificate: Pem | None, private_key: Pem | None) -> Any:
    """Make what TLS needs of what a client was given; None where it is to speak plain text."""
    if (certificate is None) != (private_key is None):
        raise InvalidArgument("certificate=... and private_key=... belong together; give both, or neither.")
    if not tls and ca is None and certificate is None:
        return None
    read = []
    for name, pem in (("ca", ca), ("private_key", private_key), ("certificate", certificate)):
        try:
            read.append(pem if pem is None or isinstance(pem, bytes) else Path(pem).read_bytes())
        except (OSError, ValueError, TypeError) as error:
            told = f"{name}=... cannot be read from {str(pem)!r} ({cause_of(error)}); check its path."
            raise InvalidArgument(told) from error
        if read[-1] is not None and b"-----BEGIN" not in read[-1]:
            raise InvalidArgument(f"{name}=... is no PEM; give the text that begins with -----BEGIN.")
    return grpc.ssl_channel_credentials(*read)


def status_of(failure: Any) -> status_pb2.Status:
    """Read the rich status of a failed call; empty when there is none, or it contradicts the code."""
    try:
        return rpc_status.from_call(failure) or status_pb2.Status()
    except (ValueError, AttributeError):
        return status_pb2.Status()
