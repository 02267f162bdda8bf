"""Ports that nobody listens on."""

import socket

__all__ = ["free_ports"]


def free_ports(count: int) -> list[int]:
    """Return so many ports of the loopback that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
