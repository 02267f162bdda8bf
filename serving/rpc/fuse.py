"""How many calls may be open at once."""

import asyncio
from collections import Counter
from functools import partial
from typing import Any, Literal, TypeAlias

from serving.errors import Overloaded
from serving.rpc.stays import Stays

__all__ = ["MOST_CHECKS", "MOST_WATCHERS", "Fuse", "Kind", "kind_of"]

MOST_WATCHERS = 256
"""Most calls at once that last until the client hangs up."""
MOST_CHECKS = 64
"""Most questions at once whether the server is well."""
MOST_OF_ONE = 0.75
"""Share of them that one key or address may have. Half of the calls are as many as may be worked on at once.
A back-end that is alone has so many, and half as many that come in or go out, and leaves others a quarter."""
RETRY_SECONDS = 1.0

Kind: TypeAlias = Literal["calls", "watchers", "checks"]


class Fuse:
    """Counts calls before anything of their message is read, so that nothing is held for those it refuses.

    Those that last, watchers of health above all, are counted apart, or enough of them would shut out all
    others; and so are checks of health, lest a server that is merely busy be taken for dead. gRPC's own limit
    on calls counts all together.
    """

    def __init__(self, most_calls: int, refusals: "Counter[str] | None" = None) -> None:
        """Set the limit of the calls that end by themselves.

        Args:
            most_calls: Most of them that are coming in, worked on or going out at once.
            refusals: Takes up how many were refused of each kind.
        """
        self._refusals = Counter[str]() if refusals is None else refusals
        self._most: dict[Kind, int] = {"calls": most_calls, "watchers": MOST_WATCHERS, "checks": MOST_CHECKS}
        self._open: dict[Kind, set[asyncio.Task[Any]]] = {kind: set() for kind in self._most}
        self._held: Counter[tuple[Kind, str]] = Counter()
        self.stays = Stays()
        """Of the calls that are counted."""
        self._refusals.update(dict.fromkeys(self._most, 0))

    def check(self, kind: Kind, holder: str = "") -> None:
        """Find out whether one more may be open.

        Args:
            kind: As what it is counted.
            holder: The name of the caller's key, if he showed one.

        Raises:
            Overloaded: if it may not.
        """
        self._check_share(kind, holder)
        if len(self._open[kind]) >= self._most[kind]:
            self._refusals[kind] += 1
            raise Overloaded(
                f"{self.count(kind)} {kind} are open, the most; try again later.", retry_after=RETRY_SECONDS
            )

    def hold(self, kind: Kind, task: "asyncio.Task[Any]") -> None:
        """Count a call until it is gone: when the last byte has gone out, or the client has."""
        held = self._open[kind]
        held.add(task)
        self.stays.begin(task, partial(held.discard, task))

    def claim(self, kind: Kind, holder: str) -> None:
        """Count the call that the running task is to who made it, until it is gone.

        Args:
            kind: As what it is counted.
            holder: The name of his key or, where he showed none, his address.

        Raises:
            Overloaded: if he has his share of those that are open, or he would lock out all others.
        """
        self._check_share(kind, holder)
        key = (kind, holder)
        self._held[key] += 1
        self.stays.when_gone(partial(self._give_back, key))

    def count(self, kind: Kind = "calls") -> int:
        """Tell how many "calls", "watchers" or "checks" are open."""
        return len(self._open[kind])

    def cancel(self) -> None:
        """Give up every call that is open; gRPC would only tell the clients, and the work would go on."""
        for task in self._open["calls"]:
            task.cancel()

    def _check_share(self, kind: Kind, holder: str) -> None:
        most = max(1, int(self._most[kind] * MOST_OF_ONE))
        if self._held[kind, holder] >= most:
            self._refusals[kind] += 1
            raise Overloaded(
                f"{most} {kind} of {holder} are open, his share; try again later.", retry_after=RETRY_SECONDS
            )

    def _give_back(self, key: tuple[Kind, str]) -> None:
        self._held[key] -= 1
        if not self._held[key]:  # names of the past take no room
            del self._held[key]


def kind_of(method: str) -> Kind:
    """Tell as what a call, by its full name, is counted."""
    if method == "/grpc.health.v1.Health/Check":
        return "checks"
    return "watchers" if method.startswith("/grpc.") else "calls"
