"""Where the server listens: loopback unless asked otherwise, and a plain sentence when it cannot."""

import errno
import ipaddress
import socket
from urllib.parse import unquote

from serving.errors import BadSetting, Unavailable

__all__ = ["check_address", "told_peer", "written_address"]


def check_address(host: str, port: int, *, insecure: bool, encrypted: bool = False) -> None:
    """Find out whether a server may and can listen on an address.

    gRPC itself says only that it failed, after lines of its own on standard error.

    Args:
        host: Name or address.
        port: 0 for a free one.
        insecure: Whether plain text off loopback is allowed.
        encrypted: Whether the server speaks TLS.

    Raises:
        BadSetting: if the host is unknown, not of this machine, or off loopback without leave.
        Unavailable: if the port is in use or may not be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # a ValueError tells of a name that no host can have
        reason = error.strerror if isinstance(error, OSError) else "no host can be called that"
        raise BadSetting(f"The host {host!r} is not known ({reason}); give --host an address.") from error
    # A scope such as %eth0 is no part of the address itself.
    addresses = [str(place[4][0]).split("%")[0] for place in found]
    if not (insecure or encrypted) and not all(ipaddress.ip_address(each).is_loopback for each in addresses):
        raise BadSetting(
            f"The host {host} can be reached from other machines and the traffic is plain text; "
            "give --tls-certificate and --tls-key, add --insecure if the network is trusted, "
            "or listen on 127.0.0.1."
        )
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
            probe.listen(1)
        except OSError as error:
            raise _explained(error, host, port) from error


def written_address(host: str, port: int) -> str:
    """Write an address as gRPC reads it: `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def told_peer(peer: str) -> str:
    """Write where a call came from as people do: gRPC has `ipv6:%5B::1%5D:50412` for `[::1]:50412`."""
    kind, _, place = peer.partition(":")
    return unquote(place) if kind in ("ipv4", "ipv6") else peer


def _explained(error: OSError, host: str, port: int) -> BadSetting | Unavailable:
    if error.errno == errno.EADDRINUSE:
        return Unavailable(
            f"Port {port} on {host} is in use; stop the program that holds it, or choose another with --port."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return BadSetting(f"The host {host} is not an address of this machine; give --host one that is.")
    return Unavailable(
        f"Port {port} on {host} cannot be used ({error.strerror}); choose another with --port."
    )
