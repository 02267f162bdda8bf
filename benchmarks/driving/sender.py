"""The process that sends requests: `python -m benchmarks.driving.sender`.

It reads a request a line on standard input, as JSON, does it and answers by a line, until standard input
ends. Messages are sent as the bytes that they were made as, and replies are not unpacked, so that it takes as
little of the processor as it can; what it took is in every answer.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.driving.figures import percentile
from benchmarks.driving.messages import read

__all__ = ["main"]

_LONGEST = 1 << 28
_MOST_WAITING = 20_000  # calls of an open loop that have no answer yet


@dataclass
class _Tally:
    """What became of the calls."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """How long each took, by the name of its status."""
    messages: Counter[str] = field(default_factory=Counter)
    """What those said that failed, by status and the beginning of the text."""

    def note(self, code: str, seconds: float, text: str = "") -> None:
        self.seconds.setdefault(code, []).append(seconds)
        if code != "OK":
            self.messages[f"{code}: {text[:120]}"] += 1

    def told(self, took: float, whole: float, cpu: float) -> dict[str, Any]:
        """Return the figures of one run: latencies in milliseconds."""
        return {
            "seconds": took,
            "whole_seconds": whole,
            "cpu_seconds": cpu,
            "codes": {code: len(each) for code, each in self.seconds.items()},
            "latency_ms": {
                code: {f"p{percent}": 1e3 * percentile(each, percent) for percent in (50, 95, 99)}
                for code, each in self.seconds.items()
            },
            "said": self.messages.most_common(5),
        }


class _Sender:
    """Sends the messages of a file to one method, in turn."""

    def __init__(
        self, address: str, method: str, messages: Sequence[bytes], *, connections: int, deadline: float
    ) -> None:
        options = [
            ("grpc.max_receive_message_length", _LONGEST),
            ("grpc.max_send_message_length", _LONGEST),
            ("grpc.use_local_subchannel_pool", 1),  # or all channels would share one connection
        ]
        self._channels = [grpc.aio.insecure_channel(address, options) for _ in range(connections)]
        self._calls = [channel.unary_unary(method) for channel in self._channels]
        self._messages = messages
        self._deadline = deadline
        self._next = 0

    async def send(self, tally: _Tally) -> None:
        number = self._next
        self._next += 1
        call = self._calls[number % len(self._calls)]
        message = self._messages[number % len(self._messages)]
        began = time.perf_counter()
        try:
            await call(message, timeout=self._deadline)
        except grpc.aio.AioRpcError as error:
            tally.note(error.code().name, time.perf_counter() - began, error.details() or "")
        else:
            tally.note("OK", time.perf_counter() - began)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


async def _closed(sender: _Sender, tally: _Tally, *, in_flight: int, seconds: float) -> float:
    """Keep so many calls in flight; returns the seconds until the last one had ended."""
    began = time.perf_counter()
    until = began + seconds

    async def one() -> None:
        while time.perf_counter() < until:
            await sender.send(tally)

    await asyncio.gather(*(one() for _ in range(in_flight)))
    return time.perf_counter() - began


async def _open(sender: _Sender, tally: _Tally, *, rate: float, seconds: float) -> float:
    """Send at a rate, whatever becomes of the calls, at random times; returns the seconds that it sent."""
    times = random.Random(0)
    waiting: set[asyncio.Task[None]] = set()
    began = due = time.perf_counter()
    while (now := time.perf_counter()) < began + seconds:
        if now < due or len(waiting) >= _MOST_WAITING:
            await asyncio.sleep(max(0.0005, due - now))
            continue
        due += times.expovariate(rate)
        task = asyncio.create_task(sender.send(tally))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        await asyncio.sleep(0)
    took = time.perf_counter() - began
    while waiting:
        await asyncio.wait(set(waiting))
    return took


async def _run(order: dict[str, Any]) -> dict[str, Any]:
    """Do what one line asks for: `loop` is "closed" or "open"."""
    sender = _Sender(
        order["address"],
        order["method"],
        read(Path(order["messages"])),
        connections=order["connections"],
        deadline=order["timeout"],
    )
    tally = _Tally()
    try:
        began, used = time.perf_counter(), time.process_time()
        loop = _closed if order["loop"] == "closed" else _open
        took = await loop(sender, tally, **order["how"])
        return tally.told(took, time.perf_counter() - began, time.process_time() - used)
    finally:
        await sender.close()


def main() -> None:
    """Answer line by line."""
    for line in sys.stdin:
        answer = asyncio.run(_run(json.loads(line)))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
