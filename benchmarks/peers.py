r"""The same model in crossbatch, Triton and MLServer, each as its user would run it, by turns in one run.

    python benchmarks/peers.py MODEL.onnx IMAGES --triton-python TRITON/bin/python \
        --mlserver-python ML/bin/python

Each server runs the same ONNX file with the same number of threads and the same ONNX Runtime options; the
peers get a copy that has no other outputs than the embeddings, as ONNX Runtime would compute those too. All
are asked by the same client, a process of its own, with 1, 8, 32 and 128 calls of one image in flight. Triton
and MLServer get encoded images, which their model function decodes with crossbatch's own preprocessing in as
many threads, and in rows of their own what their users mostly send: pixels, decoded by nobody, which spares
them that work and costs more bytes. Of each, the best of a few sizes of batch and waits is taken, found by a
trial before. Before anything is timed, each must answer with the embeddings of the plain loop. Rounds, the
plain loop and the figures are as in benchmarks/load.py; all servers stay up, and those that wait take no
processor time.

Bound: ahead of both at 1, 8, 32 and 128 in flight, encoded images against encoded images. The exit status is
1 where it was not met, or where a peer whose environment was given could not take part.

Each peer has an environment of its own:

    python3.11 -m venv TRITON && TRITON/bin/pip install nvidia-pytriton==0.7.0 'numpy<2' onnxruntime pillow
    python3.11 -m venv ML && ML/bin/pip install mlserver==1.7.1 onnxruntime pillow

Traps. pytriton 0.7.0 wants numpy below 2, and comes with Triton 2.51, which has the Python backend only: ONNX
Runtime runs in the function that is bound. Triton's stub loads libpython3.11 of the system: where that is of
another patch release than the environment's, it fails with `'_thread.RLock' object has no attribute
'_recursion_count'`. So this starts it with the interpreter's own lib folder in LD_LIBRARY_PATH, which needs
an interpreter built with a shared library; one in /usr/bin needs nothing. Triton is stopped by SIGTERM, as a
job in the background ignores SIGINT. MLServer installs on Python below 3.13. `parallel_workers` is 0 in most
trials, as each worker loads the model again and copies each image between processes. Pillow must be the
version of crossbatch's environment, or the pixels of the three differ.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.driving import messages
from benchmarks.driving.bounds import NOT_MET, Bounds
from benchmarks.driving.client import Client, Target
from benchmarks.driving.figures import median, write_csv
from benchmarks.driving.log import tell
from benchmarks.driving.plain import Plain
from benchmarks.driving.rounds import Level, Rounds, table
from benchmarks.driving.served import Failed, crossbatch
from benchmarks.load import check as check_own
from benchmarks.load import pictures
from benchmarks.rivals.onnx_model import Order
from benchmarks.rivals.rival import SETTINGS, Rival, check, requests, start, tuned
from serving.cores import usable_cores
from serving.model.encoder import Encoder
from serving.model.spec import keep_outputs, read_model

__all__ = ["IN_FLIGHT", "OURS", "compared", "main"]

IN_FLIGHT = (1, 8, 32, 128)
OURS = "crossbatch"


def compared(levels: Sequence[Level]) -> list[str]:
    """Return a line for each peer at each level: how far ahead crossbatch is, by ratios to the plain loop."""
    lines = []
    ours = {level.in_flight: median(level.ratios) for level in levels if level.server == OURS}
    for level in levels:
        if level.server == OURS:
            continue
        times = ours[level.in_flight] / median(level.ratios)
        met = "met" if times > 1 else NOT_MET
        verdict = f": {met}" if level.server.endswith(", images") else " (it decodes nothing)"
        lines.append(f"- {level.in_flight} in flight: {times:.2f} times {level.server}{verdict}")
    return lines


def main(words: Sequence[str]) -> int:
    """Print the table; returns 1 where the bound was not met, or could not be measured."""
    bounds = Bounds()
    given = _parser().parse_args(words)
    with tempfile.TemporaryDirectory(dir=given.work) as temporary, ExitStack() as stack:
        try:
            rows = _measure(given, Path(temporary), stack, bounds)
        except Failed as error:
            raise SystemExit(str(error)) from error
    if given.csv:
        write_csv(given.csv, rows)
    return bounds.status


def _measure(
    given: argparse.Namespace, work: Path, stack: ExitStack, bounds: Bounds
) -> list[dict[str, object]]:
    images = pictures(given.images, given.count)
    encoder = Encoder(given.model, threads=given.threads)
    plain = stack.enter_context(Plain(encoder, images, threads=given.threads))
    client = stack.enter_context(Client())
    pruned = work / "embeddings.onnx"
    pruned.write_bytes(keep_outputs(read_model(given.model)[0], ["embeddings"]))
    found = {}
    for rival in _rivals(given, encoder, pruned):
        log = work / f"{rival.title}.log"
        try:
            asked = requests(rival.order, images, plain)
            with start(rival, log) as served:
                check(served.address, asked[:8], plain.embed(images[:8]))
            path = messages.write(work / f"{rival.title}.requests", asked)
            best = tuned(rival, client, path, log, in_flight=given.in_flight, seconds=given.seconds / 2)
            served = stack.enter_context(start(best, log))
        except Failed as error:
            bounds.note(f"- {rival.title} takes no part: {error}: {NOT_MET}")
            continue
        print(f"- {best.title}: {best.setting}")
        found[best.title] = Target(served.address, messages.INFER, path)
    own = stack.enter_context(
        crossbatch(given.model, work / "galleries", work / "own.log", "--threads", str(given.threads))
    )
    check_own(own.address, plain)
    path = messages.write(work / "own.requests", [messages.embed([each]) for each in images])
    targets = {OURS: Target(own.address, messages.EMBED, path), **found}
    plain.tune(given.seconds / 4)
    print(f"- plain loop: {plain.batch} images a batch; {given.threads} threads\n", flush=True)
    rounds = Rounds(
        client, plain, rounds=given.rounds, seconds=given.seconds, cores=usable_cores(), tell=tell
    )
    levels = rounds.play(targets, given.in_flight)
    print(table(levels) + "\n")
    for line in compared(levels):
        bounds.note(line)
    about = {"model": given.model.stem, "threads": given.threads}
    return [about | row for level in levels for row in level.rows()]


def _rivals(given: argparse.Namespace, encoder: Encoder, model: Path) -> list[Rival]:
    """Return the peers that there is an environment for, each with images and with pixels."""
    spec = encoder.spec
    order = Order(
        model=str(model),
        threads=given.threads,
        size=spec.image_size,
        crop_fraction=spec.crop_fraction,
        resampling=spec.resampling,
        encoded=True,
        max_batch=32,
        delay_ms=2.0,
    )
    pythons = {"triton": given.triton_python, "mlserver": given.mlserver_python}
    kinds = [kind for kind in SETTINGS if pythons[kind] is not None]
    return [
        Rival(kind, pythons[kind].absolute(), replace(order, encoded=encoded))
        for kind in kinds
        for encoded in ((True,) if given.images_only else (True, False))
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path, help="folder of JPEGs, or of folders of them")
    parser.add_argument("--triton-python", type=Path, help="interpreter that has pytriton and onnxruntime")
    parser.add_argument("--mlserver-python", type=Path, help="interpreter that has mlserver and onnxruntime")
    parser.add_argument("--images-only", action="store_true", help="leave out peers that get pixels")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of a run of the model, of all")
    parser.add_argument("--in-flight", type=int, nargs="+", default=IN_FLIGHT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn; half in the trials before")
    parser.add_argument("--count", type=int, default=512, help="images that are sent")
    parser.add_argument("--work", type=Path, help="folder for what is written; a temporary one if not given")
    parser.add_argument("--csv", type=Path, help="file that all rounds are added to")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
