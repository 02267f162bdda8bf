"""What calls were to end with and what they ended with."""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio

__all__ = ["Tally"]

Reply = TypeVar("Reply")


@dataclass
class Tally:
    """Counts calls by what they do; whatever was not expected is kept in words."""

    codes: Counter[str] = field(default_factory=Counter)
    """By the name of the work and of the status."""
    unexpected: Counter[str] = field(default_factory=Counter)

    async def take(self, work: str, call: Awaitable[Reply], expected: str = "OK") -> Reply | None:
        """Wait for a call; returns its reply, or None where it failed.

        Args:
            work: What it does.
            call: Of gRPC.
            expected: Name of the status that it is to end with.
        """
        reply, code, text = None, "OK", ""
        try:
            reply = await call
        except grpc.aio.AioRpcError as error:
            code, text = error.code().name, error.details() or ""
        except asyncio.CancelledError:
            code = "CANCELLED"
        self.codes[f"{work} {code}"] += 1
        if code != expected:
            # Figures and names made for the occasion would make each message one of a kind.
            text = re.sub(r"\d+|\b[0-9a-f]{12,}\b", "#", text[:200])
            self.unexpected[f"{work} ended with {code}, not {expected}: {text}"] += 1
        return reply

    def expect(self, work: str, right: bool, text: Any) -> None:
        """Note what an answer should have held and did not."""
        if not right:
            self.unexpected[f"{work}: {str(text)[:200]}"] += 1

    def lines(self) -> list[str]:
        """Return what is known, a line each."""
        lines = [f"  {name}: {count:,}" for name, count in sorted(self.codes.items())]
        return lines + [
            f"  UNEXPECTED, {count:,} times: {text}" for text, count in self.unexpected.most_common()
        ]
