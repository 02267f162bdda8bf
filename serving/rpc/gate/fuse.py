"""How many calls may be open at once."""

import asyncio
from collections import Counter
from typing import Any, Literal, TypeAlias

from serving.errors import Overloaded

__all__ = ["MOST_CHECKS", "MOST_WATCHERS", "Fuse", "Kind", "kind_of"]

MOST_WATCHERS = 256
"""Most calls at once that last until the client hangs up."""
MOST_CHECKS = 64
"""Most questions at once whether the server is well."""
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
        self._refusals.update(dict.fromkeys(self._most, 0))

    def check(self, kind: Kind) -> None:
        """Find out whether one more may be open.

        Raises:
            Overloaded: if it may not.
        """
        if len(self._open[kind]) >= self._most[kind]:
            self._refusals[kind] += 1
            raise Overloaded(
                f"{self.count(kind)} {kind} are open, the most; try again later.", retry_after=RETRY_SECONDS
            )

    def hold(self, kind: Kind, task: "asyncio.Task[Any]") -> None:
        """Count a call until its task ends: when the last byte has gone out, or the client has."""
        held = self._open[kind]
        held.add(task)
        task.add_done_callback(held.discard)

    def count(self, kind: Kind = "calls") -> int:
        """Tell how many "calls", "watchers" or "checks" are open."""
        return len(self._open[kind])

    def cancel(self) -> None:
        """Give up every call that is open. gRPC tells the clients first, and the work would go on a while."""
        for task in self._open["calls"]:
            task.cancel()


def kind_of(method: str) -> Kind:
    """Tell as what a call, by its full name, is counted."""
    if method == "/grpc.health.v1.Health/Check":
        return "checks"
    return "watchers" if method.startswith("/grpc.") else "calls"
