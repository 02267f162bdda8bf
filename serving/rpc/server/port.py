"""A port that is ours before anything listens on it."""

import socket
from contextlib import suppress

from serving.errors import Unavailable
from serving.rpc.address import check_address
from serving.rpc.settings import Settings

__all__ = ["Port"]


class Port:
    """Bound and not listening: connections are refused, and so is every other server that wants the port.

    Models take seconds to load. Would the port listen meanwhile, clients would connect and wait for answers;
    would it be free, another server could take it.
    """

    def __init__(self, settings: Settings) -> None:
        """Take the port; `number` tells which, should any have been meant. Blocks while a name is looked up.

        Args:
            settings: With the host, the port, and whether other machines may reach it; where there are
                several workers, they may listen on it while it is held.

        Raises:
            BadSetting: if the host may not be used.
            Unavailable: if the port is in use.
        """
        host, port, shared = settings.host, settings.port, settings.workers > 1
        encrypted = settings.tls_certificate is not None
        check_address(host, port, insecure=settings.insecure, encrypted=encrypted)
        self._sockets: list[socket.socket] = []
        self.number = port
        for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                self._bind(socket.socket(family, kind, protocol), (place[0], self.number, *place[2:]), shared)
            except OSError as error:
                if not self._sockets:
                    reason = f"Port {port} on {host} cannot be used ({error.strerror})"
                    raise Unavailable(f"{reason}; choose another with --port.") from error
                # As gRPC does: of the addresses that a name has, one may be of a family that is turned off.

    def close(self) -> None:
        """Let go of the port."""
        for each in self._sockets:
            each.close()

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
