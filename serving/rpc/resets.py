"""How a call, or a whole connection, is ended from our side, for which grpc.aio has no call."""

import asyncio
import gc
import os
import socket
from collections.abc import Iterable, Set
from contextlib import suppress
from typing import Any

__all__ = ["hang_up", "owners"]

KEEPS_CALL = "_schedule_rpc_coro"
DEPTH = 3  # from that coroutine to the task of its call


def owners(tasks: "Set[asyncio.Task[Any]]") -> "dict[asyncio.Task[Any], asyncio.Task[Any]]":
    """Find, for the tasks of calls, those by which gRPC waits for the client to leave.

    gRPC resets a call, and frees what it holds of it, once nothing in Python refers to it any more: when both
    tasks are cancelled. (The newest call of all has to wait for another to come in, and the very first of a
    process for its connection's end.) One whose own task alone is cancelled stays, with its reply, until the
    client ends it.

    Args:
        tasks: That calls of the running loop are worked for in.

    Returns:
        The other task of each; none where this gRPC does it otherwise.
    """
    found: dict[asyncio.Task[Any], asyncio.Task[Any]] = {}
    for owner in asyncio.all_tasks():
        coroutine = owner.get_coro()
        if getattr(coroutine, "__name__", "") != KEEPS_CALL:
            continue
        held: list[Any] = [coroutine]
        for _ in range(DEPTH):
            held = [each for each in gc.get_referents(*held) if not isinstance(each, type)]
            for each in held:
                if isinstance(each, asyncio.Task) and each in tasks:
                    found[each] = owner
    return found


def hang_up(peers: Iterable[str]) -> None:
    """Shut the connections with these peers; gRPC takes it as their own end.

    Args:
        peers: As gRPC writes them.
    """
    wanted = set(peers)
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            # A copy, or the number might be another file's by the time that it is shut.
            copy = os.dup(int(name))
            try:
                connection = socket.socket(fileno=copy)
            except OSError:  # of another kind
                os.close(copy)
                continue
            with connection:
                if _written(connection.getpeername()) in wanted:
                    connection.shutdown(socket.SHUT_RDWR)


def _written(address: object) -> str | None:
    """An address as gRPC writes it; None for a socket that is neither of IPv4 nor of IPv6.

    Such as those by which the event loop wakes itself: their address is empty, as is that of a call that gRPC
    knows no more.
    """
    if not isinstance(address, tuple):
        return None
    host, port = str(address[0]), address[1]
    if ":" not in host:
        return f"ipv4:{host}:{port}"
    if host.startswith("::ffff:") and "." in host:
        return f"ipv4:{host[7:]}:{port}"
    return f"ipv6:%5B{host.replace('%', '%25')}%5D:{port}"
