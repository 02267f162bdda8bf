"""What only a GPU can show: `python benchmarks/gpu_check.py [--device cpu --short]`, under eight minutes.

Trains on drawn images in each precision, cuts a run and resumes it, exports one, and compares what the GPU
computes with what the CPU does. Prints a line a check; the exit status is 1 where one fails, and 2 where the
device is not there. A check for which something is missing (ONNX Runtime's provider, say) is left out, and
told. On a CPU the same checks run, to see that they do: it is timed, but its cost is not judged when short.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.train_step import CASES, measure
from serving.errors import cause_of
from serving.model.encoder import Encoder
from training import export, train
from training.data.drawing import draw_catalogue
from training.loop.logbook import read_history
from training.losses.loss import build_loss
from training.method.cross_batch import cross_batch_loss
from training.method.prototypes import fit_prototypes

__all__ = ["Line", "main"]

ROOT = Path(__file__).resolve().parent.parent
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
LIMIT = 480
"""Seconds that all may take."""
_SAME = 1e-4
"""Largest difference of float32 results between devices, as a share."""
_ROWS = 0.05
"""And of the losses of a resumed run's epochs, since sums on a GPU are taken in no fixed order."""
_RUNTIMES = 1e-4
"""Largest difference of a component of an embedding between ONNX Runtime's providers."""
_LOSSES = ("loss", "dml", "xml")


class Line(NamedTuple):
    """What a check found."""

    name: str
    passed: bool | None
    """None where it could not be made."""
    told: str


@dataclass(frozen=True)
class Bench:
    """What is checked, and where the files go."""

    device: str
    short: bool
    folder: Path

    @property
    def data(self) -> Path:
        """The drawn images."""
        return self.folder / "pictures"

    def settings(self, name: str, *more: str) -> train.Settings:
        """Give the training of a run on the drawn images."""
        size = ["epochs=3", "batches_per_epoch=4", "image_size=16", "dimension=16", "classes_per_batch=4"]
        given = [*(size if self.short else []), "xml_weight=0.1", "assignment_scale=40", "threads=1", *more]
        out = self.folder / name
        return train.Settings(recipe="demo", data=self.data, out=out, device=self.device, set=given)


def check_training(bench: Bench) -> Iterator[Line]:
    """Train a small network in each precision."""
    for precision in PRECISIONS:
        train.run(bench.settings(precision, f"precision={precision}"))
        losses = [row["loss"] for row in read_history(bench.folder / precision) if "loss" in row]
        epochs = 3 if bench.short else 8
        finite = len(losses) == epochs  # the history passes over what is no number
        told = f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} of {epochs} epochs"
        yield Line(f"training, {precision}", finite and losses[-1] < losses[0], told)


def check_steps(bench: Bench) -> Iterator[Line]:
    """Take steps of a large network in each precision, and see what the term costs in them."""
    case = CASES["small" if bench.short else "full"][0]
    for precision in PRECISIONS:
        recipe = case.recipe.model_copy(update={"precision": precision})
        cost = measure(recipe, 3 if bench.short else 30, device=bench.device)
        told = f"loss {cost.first:.4f} to {cost.loss:.4f}, {case.name}"
        yield Line(f"steps, {precision}", bool(np.isfinite(cost.loss)) and cost.loss < cost.first, told)
        low, middle, high = (100 * share for share in cost.quartiles)
        told = (
            f"{middle:+.2f} % of {1e3 * cost.seconds[0]:.1f} ms (quartiles {low:+.2f} to {high:+.2f});"
            f" bound {100 * case.bound:.0f} %"
        )
        passed = None if bench.short else cost.quartiles[1] <= case.bound
        yield Line(f"cost of the term, {precision}", passed, told)


def check_term(bench: Bench) -> Iterator[Line]:
    """Compute the term and its gradient under autocast, and without on the CPU."""
    loss = build_loss("contrastive", classes=16, dimension=512)
    labels = torch.arange(16).repeat_interleave(4)
    for prototypes in (8, 64, 128):  # by the primal form, and by the dual one
        histograms, embeddings = _drawn(64, prototypes)

        def term(device: str, precision: torch.dtype | None, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            z, y = (each.detach().to(device).requires_grad_() for each in (z, y))
            with torch.autocast(torch.device(device).type, precision, enabled=precision is not None):
                found = cross_batch_loss(
                    z, y, labels.to(device), loss, generator=torch.Generator().manual_seed(0)
                )
            gradient = torch.cat([each.flatten() for each in torch.autograd.grad(found, (z, y))])
            return found.detach().cpu(), gradient.cpu()

        value, gradient = term("cpu", None, histograms, embeddings)
        for precision in (torch.bfloat16, torch.float16):
            found, slope = term(bench.device, precision, histograms, embeddings)
            away = max(_away(found, value), _away(slope, gradient))
            told = f"L_XML {found:.6f}, {value:.6f} on the CPU; it and its gradient {away:.1e} apart"
            passed = found.dtype == torch.float32 and away <= _SAME
            yield Line(f"term under {str(precision)[6:]}, m = {prototypes}", passed, told)


def check_fit(bench: Bench) -> Iterator[Line]:
    """Fit prototypes under autocast, against float64 on the CPU."""
    for prototypes in (64, 128):
        for images in (32, 256):  # the dual system, and the primal one
            histograms, embeddings = _drawn(images, prototypes)
            exact = fit_prototypes(histograms.double(), embeddings.double())
            with torch.autocast(bench.device, torch.bfloat16):
                found = fit_prototypes(histograms.to(bench.device), embeddings.to(bench.device)).cpu()
            away = _away(found.double(), exact)
            passed = bool(torch.isfinite(found).all()) and away <= _SAME
            yield Line(f"fit, m = {prototypes}, B = {images}", passed, f"{away:.1e} from float64, d = 512")


def check_resuming(bench: Bench) -> Iterator[Line]:
    """Kill a training after its first epoch, and resume it."""
    whole, cut = (bench.settings(name, "seed=1") for name in ("whole", "cut"))
    train.run(whole)
    words = ["--data", str(cut.data), "--out", str(cut.out), "--device", bench.device]
    given = [word for each in cut.set for word in ("--set", each)]
    command = [sys.executable, "-m", "crossbatch", "train", "demo", *words, *given]
    assert cut.out is not None
    assert whole.out is not None
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and len(_losses(cut.out)) < 1:
            time.sleep(0.005)
        process.kill()
    done = len(_losses(cut.out))
    train.run(train.Settings(out=cut.out, device=cut.device, resume=True))
    first, second = _losses(whole.out), _losses(cut.out)
    same = first.shape == second.shape
    away = float(np.abs(second / first - 1).max()) if same else float("nan")
    told = f"killed after epoch {done} of {len(first)}; losses of its epochs {away:.1e} apart"
    yield Line("a run that was killed", 0 < done < len(first) and away <= _ROWS, told)


def check_export(bench: Bench) -> Iterator[Line]:
    """Export what the device has trained, and run it by each of ONNX Runtime's providers."""
    model = bench.folder / "model.onnx"
    found = export.run(export.Settings(run_dir=bench.folder / PRECISIONS[0], model=model))
    yield Line("export", True, f"{found['difference']:.1e} from torch on {found['images']} images")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        yield Line("ONNX Runtime on the GPU", None, "onnxruntime-gpu is not installed")
        return
    encoder = Encoder(model)
    files = sorted(bench.data.rglob("*.jpg"))[:32]
    images = np.stack([encoder.preprocess(file.read_bytes()) for file in files])
    away = float(np.abs(Encoder(model, provider="cuda").encode(images) - encoder.encode(images)).max())
    yield Line("ONNX Runtime on the GPU", away <= _RUNTIMES, f"{away:.1e} from the CPU's")


CHECKS: tuple[Callable[[Bench], Iterator[Line]], ...] = (
    check_fit, check_term, check_steps, check_training, check_resuming, check_export,
)  # fmt: skip


def _drawn(images: int, prototypes: int) -> tuple[Tensor, Tensor]:
    """Draw histograms (B, m) that differ, and embeddings (B, 512)."""
    generator = torch.Generator().manual_seed(0)
    scores = 4 * torch.randn(images, prototypes, generator=generator)
    return scores.softmax(dim=1), torch.randn(images, 512, generator=generator)


def _away(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _losses(folder: Path) -> np.ndarray:
    """Give the losses of the epochs so far, (epochs, 3)."""
    rows = [row for row in read_history(folder) if "loss" in row]
    return np.array([[row[name] for name in _LOSSES] for row in rows])


def checked(bench: Bench, check: Callable[[Bench], Iterator[Line]]) -> Iterator[Line]:
    """Make a check; one that breaks off has failed, and says why."""
    try:
        yield from check(bench)
    except Exception as error:
        yield Line(check.__name__.replace("_", " "), False, f"{type(error).__name__}: {cause_of(error)}")


def main(words: Sequence[str] | None = None) -> int:
    """Make all checks, and say how they went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--short", action="store_true", help="small networks and few steps")
    options = parser.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU: mend its driver or the CUDA of this torch, or check --device cpu")
    started = time.monotonic()
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, {where}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.device, options.short, Path(folder))
        count = 12 if options.short else 100
        draw_catalogue(bench.data, classes=count, images=6 if options.short else 12, size=40)
        for check in CHECKS:
            for line in checked(bench, check):
                _tell(line)
                failed += line.passed is False
    seconds = time.monotonic() - started
    line = Line("time", seconds <= LIMIT, f"{seconds:.0f} s of {LIMIT}")
    _tell(line)
    failed += line.passed is False
    return int(failed > 0)


def _tell(line: Line) -> None:
    verdict = {True: "PASS", False: "FAIL", None: "left out"}[line.passed]
    print(f"{verdict:<8}  {line.name:<32}  {line.told}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
