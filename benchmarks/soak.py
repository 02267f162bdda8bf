"""A server under load for a while: `python benchmarks/soak.py MODEL.onnx IMAGES [--minutes 20] [--load 0.7]`.

`crossbatch serve` runs as a process. First the capacity is measured: calls a second of a mixture of searches
by image and by vector, embeddings, upserts, deletes and listings, 32 in flight. Then that mixture is sent at
--load of it for so many minutes, at random times whatever becomes of the calls, while indexes are built anew,
galleries filled, switched, rolled back and deleted, and model files replaced and loaded, by SIGHUP and by
ReloadModels, one by itself and one by another; metrics, health and lists are read. Some calls are bound to
fail, by an unknown gallery or a bad image, and must fail just so.

Bounds: no other call fails, no answer lacks what it should hold, the server logs nothing at ERROR or above
(a reload by SIGHUP that fails leaves no other trace), and its memory (resident, pages of files included)
grows by at most 3 % from the second quarter of the time to the last. The exit status is 1 where one is not
met. Printed and written to --log: memory every ten seconds, every status by its count, and each line of the
server's log at WARNING or above.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc.aio

from benchmarks.driving.figures import median
from benchmarks.driving.ports import free_ports
from benchmarks.driving.served import Failed, Served, crossbatch
from benchmarks.load import pictures
from benchmarks.soaking.tally import Tally
from benchmarks.soaking.traffic import OTHER_MODEL, Traffic
from benchmarks.soaking.upkeep import Upkeep, replace
from serving.model.spec import read_spec

__all__ = ["MOST_GROWTH", "growth", "judge", "main", "severe", "warnings"]

MOST_GROWTH: Final = 0.03
_IN_FLIGHT: Final = 32
_SAMPLES: Final = 120
_LONGEST_STEP: Final = 10.0
_LEAST_STEP: Final = 0.5
_SEVERE: Final = {"ERROR", "CRITICAL"}


@dataclass
class Soak:
    """One run, and what was seen of it."""

    served: Served
    log: TextIO
    tally: Tally = field(default_factory=Tally)
    memory: list[int] = field(default_factory=list)
    own_memory: list[int] = field(default_factory=list)
    capacity: float = 0.0

    async def run(
        self,
        images: Sequence[bytes],
        dimension: int,
        models: list[tuple[Path, list[Path]]],
        metrics: str,
        *,
        load: float,
        seconds: float,
        pauses: float,
    ) -> None:
        """Measure the capacity, then load the server and keep it up.

        Args:
            images: Encoded images.
            dimension: Of the first model's vectors.
            models: Files that are served, each with those that take turns in its place.
            metrics: Address of the server's metrics; empty where it has none.
            load: Share of the capacity.
            seconds: Of the load.
            pauses: Times as long as usual between two works of upkeep.
        """
        options = [("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(self.served.address, options) as channel:
            traffic = Traffic(channel, self.tally, images, dimension)
            await traffic.fill()
            trial = min(10.0, seconds / 6)
            await traffic.closed(_IN_FLIGHT, trial / 2)
            self.capacity = await traffic.closed(_IN_FLIGHT, trial)
            self.say(f"capacity {self.capacity:.0f} calls/s; {load:.0%} of it for {seconds / 60:g} minutes")
            upkeep = Upkeep(channel, self.served, self.tally, traffic, models, metrics)
            done = asyncio.Event()
            works = asyncio.gather(upkeep.work(pauses, done), self._watch(seconds, done))
            await traffic.open(load * self.capacity, seconds)
            done.set()
            await works

    async def _watch(self, seconds: float, done: asyncio.Event) -> None:
        """Look at the memory until `done` is set."""
        step = min(_LONGEST_STEP, max(_LEAST_STEP, seconds / _SAMPLES))
        while not done.is_set():
            self.memory.append(self.served.memory())
            self.own_memory.append(self.served.own_memory())
            calls = sum(self.tally.codes.values())
            wrong = sum(self.tally.unexpected.values())
            self.say(
                f"memory {self.memory[-1] / 1e6:.1f} MB, without files {self.own_memory[-1] / 1e6:.1f} MB; "
                f"{calls:,} calls, {wrong} unexpected"
            )
            if not self.served.alive:
                self.tally.expect("the server", False, "has ended")
                return
            try:
                await asyncio.wait_for(done.wait(), step)
            except TimeoutError:
                continue

    def say(self, what: str) -> None:
        """Print a line and write it to the log."""
        line = f"{time.strftime('%H:%M:%S')} {what}"
        print(line, flush=True)
        self.log.write(line + "\n")
        self.log.flush()


def growth(memory: Sequence[float]) -> float:
    """Return by which share the memory has grown from after the first quarter to the end.

    Compared are the medians of the second and of the last quarter of the samples: loading a model takes twice
    its memory for a moment, so that single samples tell nothing.
    """
    quarter = max(1, len(memory) // 4)
    second = memory[len(memory) // 4 :][:quarter]
    return median(memory[-quarter:]) / median(second) - 1


def warnings(log: Path) -> list[str]:
    """Return the lines of a server's log at WARNING or above, and those that are none of a log."""
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if _level(line) in {"", "WARNING", *_SEVERE}]


def severe(lines: Sequence[str]) -> list[str]:
    """Return which lines of a server's log are at ERROR or above."""
    return [line for line in lines if _level(line) in _SEVERE]


def _level(line: str) -> str:
    """The level of a line of a log; empty for one that is none."""
    try:
        return str(json.loads(line)["level"])
    except (ValueError, TypeError, KeyError):
        return ""


def main(words: Sequence[str]) -> int:
    """Soak; returns 1 where a bound is not met."""
    given = _parser().parse_args(words)
    with tempfile.TemporaryDirectory() as temporary, given.log.open("w") as log:
        try:
            return _soak(given, Path(temporary), log)
        except Failed as error:
            print(f"NOT MET: {error}")
            return 1


def _soak(given: argparse.Namespace, work: Path, log: TextIO) -> int:
    spec = read_spec(given.model)
    images = pictures(given.images, given.count)
    main_model, other_model = work / "main.onnx", work / "other.onnx"
    others = _others(work)
    models = [(main_model, [given.model]), (other_model, others)]
    for path, (first, *_) in models:
        replace(path, first)
    words = ["--model", f"{OTHER_MODEL}={other_model}", "--log-level", "WARNING", *given.serve.split()]
    metrics = ""
    if not given.no_metrics:
        (port,) = free_ports(1)
        words += ["--metrics-port", str(port)]
        metrics = f"http://127.0.0.1:{port}/metrics"
    server_log = work / "server.log"
    with crossbatch(main_model, work / "galleries", server_log, *words) as served:
        soak = Soak(served, log)
        running = soak.run(
            images,
            spec.dimension,
            models,
            metrics,
            load=given.load,
            seconds=60 * given.minutes,
            pauses=given.pauses,
        )
        asyncio.run(running)
        status = served.close()
    soak.tally.expect("the server", status == 0, f"ended with status {status}")
    told = warnings(server_log)
    for line in told:
        soak.say(f"server: {line[:2000]}")
    for line in soak.tally.lines():
        soak.say(line)
    return judge(soak, len(severe(told)))


def judge(soak: Soak, errors: int) -> int:
    """Say whether the bounds were met; returns the exit status.

    Args:
        soak: What was seen.
        errors: Lines of the server's log at ERROR or above.
    """
    wrong = sum(soak.tally.unexpected.values())
    soak.say(f"- calls that did not end as they should: {wrong}: {'NOT MET' if wrong else 'met'}")
    soak.say(f"- lines of the server at ERROR or above: {errors}: {'NOT MET' if errors else 'met'}")
    grown = growth(soak.memory)
    met = grown <= MOST_GROWTH
    soak.say(
        f"- growth of memory after the first quarter: {grown:.1%} (without files "
        f"{growth(soak.own_memory):.1%}), bound {MOST_GROWTH:.0%}: {'met' if met else 'NOT MET'}"
    )
    return int(bool(wrong or errors) or not met)


def _others(work: Path) -> list[Path]:
    """Write two models of a few nodes with different weights, and return where."""
    from onnx import numpy_helper

    from tests.tiny_model import tiny_graph, write_tiny_model

    paths = []
    for number in range(2):
        graph = tiny_graph()
        bias = numpy_helper.to_array(graph.graph.initializer[0]) + number
        graph.graph.initializer[0].CopyFrom(numpy_helper.from_array(bias, graph.graph.initializer[0].name))
        paths.append(write_tiny_model(work / f"other-{number}.onnx", graph))
    return paths


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path, help="folder of JPEGs, or of folders of them")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--load", type=float, default=0.7, help="share of the capacity")
    parser.add_argument("--pauses", type=float, default=1.0, help="between works of upkeep; 1: 1 to 12 s")
    parser.add_argument("--count", type=int, default=512, help="images that are sent")
    parser.add_argument("--serve", default="", help="further words of `crossbatch serve`, in one")
    parser.add_argument("--no-metrics", action="store_true", help="do not ask for metrics")
    parser.add_argument("--log", type=Path, default=Path("soak.log"), help="file for all that is printed")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
