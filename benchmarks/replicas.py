"""One and three servers behind Envoy, by load: `python benchmarks/replicas.py MODEL.onnx IMAGES --csv FILE`.

Servers of one thread each (`--threads 1`) read one gallery; Envoy has one thread, and is told what
deploy/envoy/replicas.yaml tells it but for ports; one client, a process of its own, sends searches by image.
All of them are on this machine and share its cores: on two, three servers are not three times one, and what
each part takes of the processors stands in every row. The peak is that of a closed loop; then calls come at
random times (Poisson) at shares of it, with a deadline, whatever becomes of those before.

First the parts of a call are timed, of which benchmarks/simulation.py makes its servers: decoding, and the
model by the size of its batch, in processor time of one thread; then searches, one after another by Envoy to
one server: the gallery, and what of the latency is no work (`waiting`); then with eight in flight, as work
costs less where there is more of it, what a call takes of the processors beside these (`handling`), of Envoy
(`proxy`) and of the client (`client`). They go into the file --parts.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc
import numpy as np

from benchmarks.driving import messages, vectors
from benchmarks.driving.client import Client, Target
from benchmarks.driving.figures import median, percentile, write_csv
from benchmarks.driving.log import tell
from benchmarks.driving.proxy import Proxy, proxied
from benchmarks.driving.served import Failed, Served, cpu_of, crossbatch
from benchmarks.load import pictures
from protos import retrieval_service_pb2 as pb
from serving.cores import usable_cores
from serving.model.encoder import Encoder

__all__ = ["DEADLINE", "main"]

DEADLINE: Final = 2.0
"""Seconds that a caller waits."""
_LOADS: Final = (0.3, 0.5, 0.7, 0.8, 0.9, 1.1)
_IN_FLIGHT: Final = 32  # of the closed loop that finds the peak: batches are full with it
_FULL: Final = 8  # images, and calls in flight, with which a server works without a rest
_BATCHES: Final = tuple(range(1, _FULL + 1))
_TICKS: Final = os.sysconf("SC_CLK_TCK")
Row = dict[str, Any]


@dataclass(frozen=True)
class Fleet:
    """Servers and the Envoy before them."""

    servers: Sequence[Served]
    proxy: Proxy

    def cpu(self) -> tuple[float, float, float]:
        """Return the seconds of processor time that the servers, that Envoy and that all have used."""
        fields = Path("/proc/stat").read_text(encoding="utf-8").split(maxsplit=9)[1:9]
        user, nice, system, _idle, _wait, *others = map(int, fields)
        busy = (user + nice + system + sum(others)) / _TICKS
        return sum(each.cpu() for each in self.servers), cpu_of(self.proxy.pid), busy


def main(words: Sequence[str]) -> int:
    """Measure, and write what was found."""
    given = _parser().parse_args(words)
    with tempfile.TemporaryDirectory(dir=given.work) as temporary, Client() as client:
        try:
            _measure(given, Path(temporary), client)
        except Failed as error:
            raise SystemExit(str(error)) from error
    return 0


def _measure(given: argparse.Namespace, work: Path, client: Client) -> None:
    encoder = Encoder(given.model, threads=1)
    images = pictures(given.images, given.count)
    vectors.fill(work / "galleries", encoder.spec, work, count=given.vectors, queries=10)
    asked = [messages.search_image(vectors.GALLERY, image, vectors.K) for image in images]
    file = messages.write(work / "searches", asked)
    about = {
        "model": given.model.stem,
        "items": given.vectors,
        "cores": usable_cores(),
        "machine": _machine(),
    }
    with _fleet(given.model, work, 1) as fleet:
        rows = list(_alone(encoder, images, given.seconds))
        rows += _one_by_one(fleet, asked, given.seconds)
        known = {(row["part"], row["batch"]): row["p50_ms"] / 1e3 for row in rows}
        full = known["encode", _FULL] / _FULL
        inner = known["decode", 1] + full + known["gallery", 1]
        target = Target(fleet.proxy.address, messages.SEARCH, file)
        rows += _shares(fleet, client, target, given.seconds, inner)
    write_csv(given.parts, [about | row for row in rows])
    for count in given.servers:
        with _fleet(given.model, work, count) as fleet:
            target = Target(fleet.proxy.address, messages.SEARCH, file)
            rows = list(_loads(fleet, client, target, given.loads, given.seconds))
        write_csv(given.csv, [about | {"servers": count} | row for row in rows])


def _machine() -> str:
    """Return what the kernel calls the processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


@contextmanager
def _fleet(model: Path, work: Path, count: int) -> Iterator[Fleet]:
    words = ("--threads", "1", "--log-level", "WARNING")
    with ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        starting = [
            pool.submit(crossbatch, model, work / "galleries", work / f"{number}.log", *words)
            for number in range(count)
        ]
        servers = [stack.enter_context(each.result()) for each in starting]
        yield Fleet(servers, stack.enter_context(proxied(work, [each.address for each in servers])))


def _alone(encoder: Encoder, images: Sequence[bytes], seconds: float) -> Iterator[Row]:
    """Time decoding, and the model by the size of its batch, on one thread."""
    yield _part("decode", _timed(encoder.preprocess, images, seconds))
    pixels = [encoder.preprocess(image) for image in images[: _BATCHES[-1]]]
    for batch in _BATCHES:
        run = partial(encoder.encode, threads=1)
        yield _part("encode", _timed(run, [np.stack((pixels * batch)[:batch])], seconds / 2), batch)


def _one_by_one(fleet: Fleet, asked: Sequence[bytes], seconds: float) -> Iterator[Row]:
    """Time searches, one after another, by one server behind Envoy."""
    gallery, latency = list[float](), list[float]()
    with grpc.insecure_channel(fleet.proxy.address) as channel:
        search = channel.unary_unary(messages.SEARCH, response_deserializer=pb.SearchResponse.FromString)
        for message in asked[:20]:
            search(message, timeout=DEADLINE)
        before = sum(fleet.cpu()[:2]) + time.process_time()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            start = time.perf_counter()
            timings = search(asked[len(latency) % len(asked)], timeout=DEADLINE).timings
            latency.append(time.perf_counter() - start)
            gallery.append(timings.gallery_us / 1e6)
        work = (sum(fleet.cpu()[:2]) + time.process_time() - before) / len(latency)
    yield _part("whole call", latency)
    yield _part("gallery", gallery)
    yield _part("waiting", [max(0.0, median(latency) - work)])


def _shares(fleet: Fleet, client: Client, target: Target, seconds: float, inner: float) -> Iterator[Row]:
    """Tell what a call takes of the processors, where `inner` seconds are the model's and the gallery's."""
    before = fleet.cpu()
    told = client.closed(target, in_flight=_FULL, seconds=seconds)
    calls = max(1, told["codes"].get("OK", 0))
    server, proxy, _ = ((now - was) / calls for was, now in zip(before, fleet.cpu(), strict=True))
    yield _part("handling", [max(0.0, server - inner)])
    yield _part("proxy", [proxy])
    yield _part("client", [told["cpu_seconds"] / calls])


def _timed(work: Callable[[Any], Any], given: Sequence[Any], seconds: float) -> list[float]:
    """Return the processor time of each turn of some work, done over and over for so long."""
    taken: list[float] = []
    for each in given[:3]:
        work(each)
    until = time.perf_counter() + seconds
    while not taken or time.perf_counter() < until:
        start = time.thread_time()
        work(given[len(taken) % len(given)])
        taken.append(time.thread_time() - start)
    return taken


def _part(part: str, taken: Sequence[float], batch: int = 1) -> Row:
    mean = 1e3 * sum(taken) / len(taken)
    spread = (sum((1e3 * each - mean) ** 2 for each in taken) / len(taken)) ** 0.5
    p50, p99 = (1e3 * percentile(taken, percent) for percent in (50, 99))
    row = {"part": part, "batch": batch, "mean_ms": mean, "spread_ms": spread, "p50_ms": p50, "p99_ms": p99}
    tell(f"{part}, batch of {batch}: {mean:.3f} ms")
    return row | {"times": len(taken)}


def _loads(
    fleet: Fleet, client: Client, target: Target, loads: Sequence[float], seconds: float
) -> Iterator[Row]:
    """Find the peak, then offer shares of it."""
    client.closed(target, in_flight=_IN_FLIGHT, seconds=seconds / 2)
    closed = client.closed(target, in_flight=_IN_FLIGHT, seconds=seconds)
    peak = closed["codes"].get("OK", 0) / closed["seconds"]
    tell(f"{len(fleet.servers)} servers: {peak:.0f} searches/s with {_IN_FLIGHT} in flight")
    for load in loads:
        before = fleet.cpu()
        answer = client.open(target, rate=load * peak, seconds=seconds, timeout=DEADLINE)
        servers, proxy, busy = (now - was for was, now in zip(before, fleet.cpu(), strict=True))
        others = max(0.0, busy - servers - proxy - answer["cpu_seconds"])
        codes: dict[str, int] = answer["codes"]
        latency, whole = answer["latency_ms"].get("OK", {}), answer["whole_seconds"]
        refused = codes.get("RESOURCE_EXHAUSTED", 0)
        tell(f"{load:g} of the peak: {codes}, {latency}")
        yield {
            "load": load,
            "peak": peak,
            "offered": sum(codes.values()) / answer["seconds"],
            "answered": codes.get("OK", 0) / whole,
            **{f"{name}_ms": latency.get(name) for name in ("p50", "p95", "p99")},
            "refused": refused,
            "failed": sum(codes.values()) - codes.get("OK", 0) - refused,
            "servers_cores": servers / whole,
            "proxy_cores": proxy / whole,
            "client_cores": answer["cpu_seconds"] / whole,
            "other_cores": others / whole,
            "seconds": seconds,
        }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path, help="folder of JPEGs, or of folders of them")
    parser.add_argument("--servers", type=int, nargs="+", default=(1, 3))
    parser.add_argument("--loads", type=float, nargs="+", default=_LOADS, help="shares of the peak")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--count", type=int, default=512, help="images that are sent")
    parser.add_argument("--vectors", type=int, default=20_000, help="items of the gallery that is searched")
    parser.add_argument("--work", type=Path, help="folder for what is written; a temporary one if not given")
    parser.add_argument("--csv", type=Path, required=True, help="file for the loads")
    parser.add_argument("--parts", type=Path, required=True, help="file for the parts of a call")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
