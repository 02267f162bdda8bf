"""The demo command: the whole path on a catalogue that it draws itself, by the commands a user would type."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from serving.errors import AlreadyExists, CrossbatchError
from training.data.drawing import draw_catalogue, draw_product

__all__ = ["Settings", "render", "run", "stay"]

_GALLERY = "products"
_WEB = ("starlette", "uvicorn")  # what the page needs


class Settings(BaseModel):
    """Train, export, index, serve and search a small catalogue that is drawn on the spot."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    out: Path = Field(
        Path("runs/demo"), description="folder for pictures, runs, model and gallery; made anew each time"
    )
    classes: int = Field(200, ge=8, le=2000, description="products to draw; the first half is trained on")
    images: int = Field(24, ge=4, description="pictures of each product")
    epochs: int | None = Field(None, ge=1, description="epochs of training; the recipe's own by default")
    seed: int = Field(0, ge=0, description="seed of the pictures and of the training")
    page: bool = Field(
        True,
        description="end by serving the catalogue and opening its page, until Ctrl-C, where standard output "
        "is a terminal",
    )


def run(settings: Settings) -> dict[str, Any]:
    """Walk one made-up catalogue through every command; gives `metrics`, `query`, `hits` and `seconds`."""
    started = time.monotonic()
    for package in ("torch", "onnxruntime", "faiss"):  # now, and not when the step comes that needs it
        if find_spec(package) is None:
            raise ModuleNotFoundError(name=package)
    out = settings.out.absolute()
    _make_room(out)
    pictures, model, galleries = out / "pictures", out / "model.onnx", out / "galleries"

    _tell(f"1. Drawing {settings.classes} products, {settings.images} pictures of each, into {pictures}")
    products = draw_catalogue(pictures, classes=settings.classes, images=settings.images, seed=settings.seed)
    # A picture that no part of the system will see before it is asked for, of a product from the unseen half.
    wanted = len(products) * 3 // 4
    query = out / "query.jpg"
    draw_product(products[wanted], np.random.default_rng([settings.seed, wanted, 1])).save(query, quality=92)

    trained = out / "run"
    _tell("2. Training on the first half of the products")
    words = ["--set", f"seed={settings.seed}"]
    words += ["--set", f"epochs={settings.epochs}"] if settings.epochs else []
    _crossbatch("train", "demo", "--data", pictures, "--out", trained, *words)
    _tell("3. Measuring the other half, which no training has seen, untrained as well")
    measured = _crossbatch("evaluate", trained, "--data", pictures)
    _tell("4. Exporting to ONNX, and checking the file against the trained network")
    _crossbatch("export", trained, model, "--data", pictures)
    _tell("5. Indexing the unseen products into a gallery")
    words = ["--split", "test", "--thumbnails", "--map", "pca"]
    _crossbatch("index", "--model", model, "--data", pictures, *words, galleries / _GALLERY)
    _tell("6. Serving it, and searching for a new picture of an unseen product")
    with _server(model, galleries) as (_, (address,)):
        found = _crossbatch("search", query, "--gallery", _GALLERY, "--address", address, "-k", "5")
    return {
        "metrics": {"trained": measured, "untrained": measured["untrained"]},
        "query": {"photo": str(query), "product": "-".join(products[wanted])},
        "hits": found["hits"],
        "seconds": round(time.monotonic() - started, 1),
        "out": str(out),
        "page": settings.page,
    }


def render(result: dict[str, Any]) -> str:
    """Tell what the demo found, as a table of systems and a list of neighbours."""
    lines = ["", "Retrieval among products that no training has seen (percent):", ""]
    lines.append(f"  {'':<12} {'R@1':>6} {'MAP@R':>6}")
    for system, found in result["metrics"].items():
        lines.append(f"  {system:<12} {100 * found['recall_at']['1']:6.1f} {100 * found['map_at_r']:6.1f}")
    lines += ["", f"Nearest neighbours of a new picture of {result['query']['product']}:", ""]
    lines.append(f"  {'score':>6}  product")
    lines += [f"  {hit['score']:6.3f}  {hit['label']}" for hit in result["hits"]]
    lines += [
        "",
        f"Done in {result['seconds']:.0f} s. To go on asking:",
        f"  {_program()} serve --model {result['out']}/model.onnx --galleries {result['out']}/galleries",
        f"  {_program()} search {result['query']['photo']} --gallery {_GALLERY}",
    ]
    return "\n".join(lines)


def stay(result: dict[str, Any]) -> None:
    """Serve the catalogue with its page until Ctrl-C; not where nobody looks, as in a script."""
    if not (result["page"] and sys.stdout.isatty()):
        return
    if not all(map(find_spec, _WEB)):
        _tell(
            "To see the catalogue on a page: pip install 'crossbatch[web]', then serve it by --web-port 8080."
        )
        return
    out = Path(result["out"])
    words = ("--web-port", "0", "--log-level", "WARNING")
    with _server(out / "model.onnx", out / "galleries", *words) as (server, places):
        print(f"\nThe catalogue is on {places[1]} (gRPC on {places[0]}); Ctrl-C ends it.", flush=True)  # noqa: T201
        with suppress(KeyboardInterrupt):
            # On Linux without a desktop, a browser for text would take the terminal.
            if sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"} & os.environ.keys():
                webbrowser.open(places[1])
            server.wait()


def _program() -> str:
    """Return how this `crossbatch` is called from here: by name, or by path where the name finds none."""
    ours = Path(sys.executable).with_name("crossbatch")
    other = ours.exists() and shutil.which("crossbatch") != str(ours)
    return os.path.relpath(ours) if other else "crossbatch"


def _make_room(out: Path) -> None:
    """Empty `out`, but only when it is one of ours."""
    marker = out / ".crossbatch-demo"
    if out.exists() and any(out.iterdir()):
        if not marker.exists():
            raise AlreadyExists(f"{out} holds files that are not the demo's: choose another by --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _crossbatch(*words: str | Path) -> dict[str, Any]:
    """Run one command as a user would, its progress on our standard error; return its JSON result."""
    done = subprocess.run(_command(words), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise CrossbatchError(f"The demo stopped: `crossbatch {words[0]}` ended with {done.returncode}.")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@contextmanager
def _server(model: Path, galleries: Path, *more: str) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """Serve on free ports of the loopback until the block ends; yields the address, and that of the page."""
    words: list[str | Path] = ["serve", "--model", model, "--galleries", galleries, *more]
    words += ["--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(_command(words), stdout=subprocess.PIPE, text=True) as server:
        try:
            places: list[str] = []
            for line in server.stdout or ():
                places += re.findall(r"(?:https?://)?127\.0\.0\.1:\d+/?", line)
                if len(places) == 1 + ("--web-port" in more):
                    yield server, places
                    return
            raise CrossbatchError(f"The demo stopped: `crossbatch serve` ended with {server.wait()}.")
        finally:
            server.terminate()


def _command(words: Sequence[str | Path]) -> list[str]:
    return [sys.executable, "-m", "crossbatch", *map(str, words), "--json"]


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
