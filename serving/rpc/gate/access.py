"""Who calls, and what he may do."""

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["ANYBODY", "Access", "Identity", "Role", "identity"]

Role: TypeAlias = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls: the name of his API key, empty where none is needed."""

    name: str = ""
    role: Role = "write"


ANYBODY = Identity()

identity: ContextVar[Identity] = ContextVar("identity", default=ANYBODY)
"""Who made the call that the running task works for."""


class Access:
    """Lets calls in, or does not."""

    def check(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Identity:
        """Find out who calls, and whether he may.

        Args:
            method: As gRPC writes it, with the slash before it: `/crossbatch.v1.RetrievalService/Search`.
            metadata: Of the call.

        Raises:
            Unauthenticated: if the call brings no key, or one that is not known.
            PermissionDenied: if the key's role does not allow the call.
        """
        return ANYBODY
