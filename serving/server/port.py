"""A port that is ours before anything listens on it."""

import socket
from contextlib import suppress

from serving.errors import Unavailable
from serving.rpc.address import check_address
from serving.settings import Settings

__all__ = ["Port"]


class Port:
    """Bound and not listening while models load: connections are refused, and so is every other server.

    Where 0.0.0.0 is meant, the port of IPv6 is held too, for as long as the server lives: gRPC would listen
    on `[::]` in its place, which a firewall that knows IPv4 alone leaves open.
    """

    def __init__(self, settings: Settings) -> None:
        """Take the port, which several workers may listen on while it is held; `number` tells which it is.

        Raises:
            BadSetting: The host may not be used.
            Unavailable: The port is in use.
        """
        host, port, shared = settings.host, settings.port, settings.workers > 1
        encrypted = settings.tls_certificate is not None
        check_address(host, port, insecure=settings.insecure, encrypted=encrypted)
        self._sockets: list[socket.socket] = []
        self._barred: list[socket.socket] = []
        self.number = port
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, place in places:
            try:
                self._bind(socket.socket(family, kind, protocol), (place[0], self.number, *place[2:]), shared)
            except OSError as error:
                if not self._sockets:
                    reason = f"Port {port} on {host} cannot be used ({error.strerror})"
                    raise Unavailable(f"{reason}; choose another with --port.") from error
                # As gRPC does: of the addresses that a name has, one may be of a family that is turned off.
        if {place[4][0] for place in places} == {"0.0.0.0"}:  # noqa: S104 - asked, not bound
            self._bar_ipv6()

    def hand_over(self) -> None:
        """Let the server listen; what it may not listen on stays held until `close`."""
        for each in self._sockets:
            each.close()

    def close(self) -> None:
        """Let go of the port."""
        for each in (*self._sockets, *self._barred):
            each.close()

    def _bar_ipv6(self) -> None:
        """Hold the port on IPv6, so that gRPC finds it taken and falls back to IPv4 alone."""
        with suppress(OSError):  # where there is no IPv6, or another has the port there, gRPC has it neither
            each = socket.socket(socket.AF_INET6)
            self._barred.append(each)
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("::", self.number))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)

    def _bind(self, each: socket.socket, place: tuple[str | int, ...], shared: bool) -> None:
        try:
            # To bind in spite of connections that a server before us closed a minute ago.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind(place)
            # From now on another's SO_REUSEADDR must not pass; SO_REUSEPORT does, for processes of this user.
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError:
            each.close()
            raise
        self.number = each.getsockname()[1]
        self._sockets.append(each)
