"""How the client trusts a server and shows itself to it: TLS, certificates, API keys."""

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Any

import grpc

from serving.client.given import text
from serving.client.pem import Pem, authorities, pair
from serving.errors import InvalidArgument
from serving.rpc.limits import MAX_MESSAGE_BYTES

__all__ = ["Security", "check_address", "is_local", "security_of"]

_OPTIONS: tuple[tuple[str, int], ...] = (
    # gRPC's own 4 MiB refuse large replies; the server sets the same.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),  # ours know of RetryInfo
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A server that vanished without a word is noticed while a call waits for it.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
# gRPC's own spellings of a target; what they hold is gRPC's to judge.
_SCHEMES = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:", "xds:")


@dataclass(frozen=True, slots=True)
class Security:
    """What a channel is made with; credentials are not shown when it is printed."""

    credentials: grpc.ChannelCredentials | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers of each call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def channel(self, address: str) -> Any:
        """Make a channel to an address."""
        # A proxy of the environment leads out of this machine, and never back to it.
        options = [*_OPTIONS, *([("grpc.enable_http_proxy", 0)] if is_local(address) else [])]
        if self.credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self.credentials, options=options)


def security_of(
    address: str,
    *,
    api_key: str | None,
    tls: bool,
    ca: Pem | None,
    certificate: Pem | None,
    private_key: Pem | None,
    insecure: bool,
) -> Security:
    """Read what a client was given.

    Args:
        address: Of the server.
        api_key: Shown with each call.
        tls: Whether to use TLS; it is used, too, if one of the three below is given.
        ca: Authorities that the server's certificate is checked against; those of the system when None.
        certificate: The client's own chain, for a server that wants one.
        private_key: Of that certificate.
        insecure: Whether the key may be sent to another machine in plain text.

    Raises:
        InvalidArgument: if the address or a part is malformed or cannot be read, or the key would travel in
            plain text.
    """
    check_address(address)
    chain, key = pair(certificate, private_key)
    roots = authorities(ca)
    encrypted = bool(tls) or ca is not None or certificate is not None
    if api_key is not None:
        _check_key(api_key)
        if not encrypted and not insecure and not is_local(address):
            raise InvalidArgument(
                f"The API key would travel to {address} in plain text; use TLS by tls=True or ca=..., or say "
                "insecure=True if the network is trusted."
            )
    if not encrypted:
        return Security(None, api_key)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=roots, private_key=key, certificate_chain=chain
    )
    return Security(credentials, api_key)


def check_address(address: str) -> None:
    """Check that an address can be one.

    Raises:
        InvalidArgument: if it is neither HOST:PORT nor a target of gRPC's own spelling.
    """
    text(address, "The address")
    if address.startswith(_SCHEMES):
        return
    host, _, port = address.rpartition(":")
    bracketed = re.fullmatch(r"\[[0-9a-fA-F:.%\w]+\]", host)
    plain = re.fullmatch(r"[^\s:/@\[\]]+", host)
    if not (bracketed or plain) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) <= 65_535:
        raise InvalidArgument(
            f"The address {address[:200]!r} is not HOST:PORT; write it as 127.0.0.1:50051, shop.example:443 "
            "or [::1]:50051, without http://."
        )


def is_local(address: str) -> bool:
    """Whether an address is certain not to leave this machine; a name other than localhost is not."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].removeprefix("ipv4:").removeprefix("ipv6:").strip("[]")
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _check_key(key: str) -> None:
    # The key itself is in no message: messages end in logs.
    if not isinstance(key, str) or not re.fullmatch(r"[!-~]+", key):
        raise InvalidArgument("The API key must be a string of visible ASCII characters without spaces.")
