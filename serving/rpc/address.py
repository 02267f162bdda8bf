"""The address that a server listens on: loopback unless asked otherwise, held before anything listens."""

import errno
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from serving.errors import BadSetting, CrossbatchError, Unavailable

__all__ = ["barred_ipv6", "check_host", "held_port", "held_socket", "is_loopback", "written_address"]


def check_host(host: str, *, insecure: bool, encrypted: bool = False, flags: str = "--") -> None:
    """Refuse a host that is unknown, or one off loopback without leave: `insecure`, or TLS.

    Messages name the settings `host` and `port` with `flags` before them, here and below.
    """
    try:
        local = is_loopback(host)
    except (OSError, ValueError) as error:  # a ValueError tells of a name that no host can have
        reason = error.strerror if isinstance(error, OSError) else "no host can be called that"
        raise BadSetting(
            f"The host {host!r} is not known ({reason}); give {flags}host an address."
        ) from error
    if not (insecure or encrypted or local):
        raise BadSetting(
            f"The host {host} can be reached from other machines and the traffic is plain text; "
            "give --tls-certificate and --tls-key, add --insecure if the network is trusted, "
            "or listen on 127.0.0.1."
        )


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine alone."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    # A scope such as %eth0 is no part of the address itself.
    addresses = [str(place[4][0]).split("%")[0] for place in found]
    return all(ipaddress.ip_address(each).is_loopback for each in addresses)


@contextmanager
def held_port(host: str, port: int, *, shared: bool = False) -> Iterator[int]:
    """Hold a port while the block runs, without listening: connections and other servers are refused.

    Where it is `shared`, workers of ours may listen on it. Yields its number, a free one's for 0.
    """
    with held_socket(host, port) as held:
        if shared:  # only now, or else it might be another's, who shares it
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield int(held.getsockname()[1])


@contextmanager
def held_socket(host: str, port: int, *, flags: str = "--") -> Iterator[socket.socket]:
    """Hold a port in the same way by a socket that may listen later; it is closed at the end."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as held:
        try:
            _bind(held, place)
        except OSError as error:
            raise _explained(error, host, port, flags) from error
        yield held


@contextmanager
def barred_ipv6(host: str, port: int) -> Iterator[None]:
    """Where 0.0.0.0 is meant, hold the port of IPv6: gRPC would listen on `[::]`, past a firewall of IPv4."""
    with ExitStack() as stack:
        if host == "0.0.0.0":  # noqa: S104 - asked, not bound
            with suppress(OSError):  # there is no IPv6, or another has the port there: gRPC has it neither
                held = stack.enter_context(socket.socket(socket.AF_INET6))
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                _bind(held, ("::", port))
        yield


def written_address(host: str, port: int) -> str:
    """Write an address as gRPC reads it: `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(held: socket.socket, place: tuple[Any, ...]) -> None:
    # To bind in spite of connections that a server before us closed a minute ago; then no other may bind it.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(place)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def _explained(error: OSError, host: str, port: int, flags: str) -> CrossbatchError:
    what, other = f"Port {port} on {host}", f"choose another with {flags}port."
    if error.errno == errno.EADDRINUSE:
        return Unavailable(f"{what} is in use; stop the program that holds it, or {other}")
    if error.errno == errno.EADDRNOTAVAIL:
        return BadSetting(f"The host {host} is not an address of this machine; give {flags}host one that is.")
    return Unavailable(f"{what} cannot be used ({error.strerror}); {other}")
