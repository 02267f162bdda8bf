"""What the server costs beside the model itself: `python benchmarks/load.py MODEL.onnx IMAGES`.

`crossbatch serve` runs as a user would start it. A client, a process of its own, keeps 1, 8, 32 and 128 calls
in flight, each with one encoded image as it lies in the folder IMAGES. It takes turns with a plain loop in
this process that decodes the same images and runs ONNX Runtime on them with the same number of threads, in
the batch and the order that a trial found fastest; a round in which the plain loop before and after differ by
more than 10 % is left out. Figures are medians of the rounds. Client and server share the processors, unless
--pin gives the client one of its own; its share is in the table.

Bounds, with ResNet-50 at 224 px: 0.95 of the plain loop at 32 and 128 in flight, 0.90 at 8; with one in
flight the latency of the plain loop and 2 ms. Then searches by vector, 60,000 items of the model's dimension
drawn about class centres: p50 of the gallery's FAISS file searched in this process and 1 ms. Then overload:
three times the peak of a closed loop, of which 0.95 must really be offered, 0.95 of the peak is to be
answered, and all else refused, 99 % of it within 20 ms; then the same with callers who wait for a quarter of
a second only, where the images that the model ran and nobody got are counted if the server has metrics: their
time may have run out during the run, not before it. Given --int8, the images a second of that file over those
of MODEL at 32 in flight. The exit status is 1 where a bound was not met, or could not be measured, as where
nothing was refused.
"""

import argparse
import math
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.driving import messages, vectors
from benchmarks.driving.bounds import Bounds
from benchmarks.driving.client import Client, Target
from benchmarks.driving.figures import median, write_csv
from benchmarks.driving.log import tell
from benchmarks.driving.overload import LEAST_GOODPUT, LEAST_OFFERED, MOST_REFUSAL_MS, strain
from benchmarks.driving.plain import Plain
from benchmarks.driving.rounds import LEAST_RATIO, MOST_EXTRA_MS, Level, Rounds, table
from benchmarks.driving.served import Failed, Served, crossbatch
from serving.client.client import Client as PythonClient
from serving.cores import usable_cores
from serving.model.encoder import Encoder

__all__ = ["IN_FLIGHT", "check", "main", "pictures"]

IN_FLIGHT = (1, 8, 32, 128)
_SUFFIXES = {".jpg", ".jpeg"}
_LEAST_INT8 = 3.0
_TOLERANCE = 1e-4
_PATIENCE, _HASTE = 30.0, 0.25  # seconds that callers wait under overload


def pictures(folder: Path, count: int) -> list[bytes]:
    """Return the bytes of so many JPEGs of a folder and the folders in it, the same ones each time.

    Raises:
        Failed: There is none.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise Failed(f"there is no JPEG in {folder}")
    return [path.read_bytes() for path in random.Random(0).sample(paths, min(count, len(paths)))]


def check(address: str, plain: Plain) -> None:
    """Prove that a server gives the embeddings of the plain loop.

    Raises:
        Failed: It does not.
    """
    some = plain.images[:8]
    with PythonClient(address, timeout=60) as client:
        apart = np.abs(np.stack(list(client.embed(some))) - plain.embed(some)).max()
    if not apart <= _TOLERANCE:
        raise Failed(f"embeddings of the server differ from those of the plain loop by {apart:.2g}")


class Load:
    """One run of the benchmark."""

    def __init__(self, given: argparse.Namespace, work: Path) -> None:
        """Load the model, look at the images, and find the fastest plain loop.

        Args:
            given: The words of the command line.
            work: Folder for all that is written.
        """
        self._given = given
        self._work = work
        self._galleries = work / "galleries"
        self._images = pictures(given.images, given.count)
        self._requests = messages.write(work / "embeds", [messages.embed([each]) for each in self._images])
        self._bounds = Bounds()
        self.rows: list[dict[str, object]] = []
        """What is kept of each round."""

    def run(self) -> int:
        """Measure what was not left out, and print it.

        Returns:
            1 where a bound was not met, or could not be measured.
        """
        given = self._given
        cores = frozenset([max(os.sched_getaffinity(0))]) if given.pin else None
        encoder = Encoder(given.model, threads=given.threads)
        queries = None
        if "search" not in given.skip:
            tell(f"filling a gallery with {given.vectors:,} vectors")
            queries = vectors.fill(
                self._galleries, encoder.spec, self._work, count=given.vectors, queries=given.queries
            )
        with (
            Plain(encoder, self._images, threads=given.threads) as plain,
            self._serve(given.model) as served,
            Client(cores) as client,
        ):
            check(served.address, plain)
            target = Target(served.address, messages.EMBED, self._requests, given.connections)
            if "embed" not in given.skip:
                plain.tune(given.seconds / 4)
                order = "decodes ahead" if plain.ahead else "decodes, then encodes"
                print(f"plain loop: {plain.batch} images a batch, {order}; {given.threads} threads\n")
                self._embed(client, plain, {"crossbatch": target}, served)
            if queries is not None:
                index = vectors.bare(self._galleries)
                self._search(
                    vectors.compare(
                        client,
                        served.address,
                        index,
                        queries,
                        self._work,
                        rounds=given.rounds,
                        seconds=given.seconds,
                    )
                )
            if "overload" not in given.skip:
                self._overload(client, target, served)
            print(f"\nmemory of the server at the end: {served.own_memory() / 1e6:.0f} MB")
        return self._bounds.status

    def _serve(self, model: Path) -> Served:
        given = self._given
        words = ["--threads", str(given.threads), *given.serve.split()]
        if given.metrics:
            words += ["--metrics-port", str(given.metrics)]
        served = crossbatch(model, self._galleries, self._work / "server.log", *words)
        tell(f"serving {model.name} on {served.address}")
        return served

    def _embed(self, client: Client, plain: Plain, targets: dict[str, Target], served: Served) -> None:
        """Embed at each level, with the int8 file beside it where one is given."""
        given = self._given
        rounds = Rounds(
            client, plain, rounds=given.rounds, seconds=given.seconds, cores=usable_cores(), tell=tell
        )
        levels = rounds.play(targets, given.in_flight)
        print(table(levels) + "\n")
        self._hold(levels)
        self._keep("embed", [row for level in levels for row in level.rows()])
        if given.int8 is not None:
            with self._serve(given.int8) as other:
                both = targets | {"int8": Target(other.address, messages.EMBED, self._requests)}
                fp32, int8 = rounds.play(both, [32])
            print(table([fp32, int8]) + "\n")
            ratio = median([b / a for a, b in zip(fp32.per_second, int8.per_second, strict=False)])
            self._bounds.hold("int8 over fp32, images/s at 32 in flight", ratio, _LEAST_INT8)
            self._keep("int8", int8.rows())

    def _keep(self, what: str, rows: Iterable[Mapping[str, object]]) -> None:
        about = {"model": self._given.model.stem, "threads": self._given.threads, "what": what}
        self.rows += [about | row for row in rows]

    def _hold(self, levels: Sequence[Level]) -> None:
        for level in levels:
            if level.in_flight in LEAST_RATIO:
                what = f"ratio to the plain loop, {level.in_flight} in flight"
                self._bounds.hold(what, median(level.ratios), LEAST_RATIO[level.in_flight])
            if level.in_flight == 1:
                what = f"latency beyond the plain loop's {median(level.plain_ms):.1f} ms, one in flight"
                self._bounds.hold(what, median(level.extra_ms), MOST_EXTRA_MS, most=True, unit=" ms")

    def _search(self, found: Sequence[tuple[float, float]]) -> None:
        alone, ours = median([each for each, _ in found]), median([each for _, each in found])
        extra = median([ours - alone for alone, ours in found])
        size = f"{self._given.vectors:,} items"
        print(f"\nsearch by vector, {size}, k=10: FAISS {alone:.3f} ms, through gRPC {ours:.3f} ms (p50)\n")
        self._bounds.hold("latency beyond FAISS alone", extra, vectors.MOST_EXTRA_MS, most=True, unit=" ms")
        self._keep(
            "search", [{"faiss_ms": alone, "p50_ms": ours, "extra_ms": ours - alone} for alone, ours in found]
        )

    def _overload(self, client: Client, target: Target, served: Served) -> None:
        given = self._given
        metrics = f"http://127.0.0.1:{given.metrics}/metrics" if given.metrics else ""
        seen = []
        for timeout, seconds in ((_PATIENCE, given.overload_seconds), (_HASTE, given.overload_seconds / 4)):
            one = strain(
                client,
                target,
                times=given.times,
                in_flight=max(given.in_flight),
                seconds=seconds,
                timeout=timeout,
                cores=usable_cores(),
                metrics=metrics,
            )
            print(f"\noverload, callers who wait for {timeout:g} s: {one}")
            if not served.alive:
                raise Failed("the server ended under load")
            seen.append(one)
        patient, hasty = seen
        self._keep("overload", [patient.row()])
        self._keep("hasty overload", [hasty.row()])
        print()
        hold, peak = self._bounds.hold, patient.peak or math.nan
        hold("offered over the peak", patient.offered / peak, LEAST_OFFERED * given.times)
        hold("goodput over the peak", patient.goodput / peak, LEAST_GOODPUT)
        hold("p99 of refusals", patient.refusal_p99_ms, MOST_REFUSAL_MS, most=True, unit=" ms")
        hold("calls neither answered nor refused", patient.unexpected, 0, most=True)
        for said, count in patient.said:
            print(f"  - {count} times {said}")
        if not math.isnan(hasty.wasted):
            print(f"- images of hasty callers that were run and not answered: {hasty.wasted:.0f}")


def main(words: Sequence[str]) -> int:
    """Measure and print; returns 1 where a bound was not met, or could not be measured."""
    given = _parser().parse_args(words)
    with tempfile.TemporaryDirectory(dir=given.work) as temporary:
        load = Load(given, Path(temporary))
        try:
            return load.run()
        except Failed as error:
            raise SystemExit(str(error)) from error
        finally:
            if given.csv:
                write_csv(given.csv, load.rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path, help="folder of JPEGs, or of folders of them")
    parser.add_argument("--int8", type=Path, help="the same model in int8")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of a run of the model, of all")
    parser.add_argument("--in-flight", type=int, nargs="+", default=IN_FLIGHT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--count", type=int, default=512, help="images that are sent")
    parser.add_argument("--connections", type=int, default=1, help="of the client; more for --workers")
    parser.add_argument("--vectors", type=int, default=60_000, help="items of the gallery that is searched")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--times", type=float, default=3.0, help="the peak, offered for the overload")
    parser.add_argument("--overload-seconds", type=float, default=20.0)
    parser.add_argument("--skip", nargs="*", choices=("embed", "search", "overload"), default=[])
    parser.add_argument("--metrics", type=int, default=0, help="port that the server's metrics shall have")
    parser.add_argument("--serve", default="", help="further words of `crossbatch serve`, in one")
    parser.add_argument("--pin", action="store_true", help="give the client the last core")
    parser.add_argument("--work", type=Path, help="folder for what is written; a temporary one if not given")
    parser.add_argument("--csv", type=Path, help="file that all rounds are added to")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
