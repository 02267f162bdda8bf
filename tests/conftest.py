"""What several tests share: a drawn catalogue, a run trained on it, its model, a gallery, a server."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import crossbatch
from training.data.drawing import draw_catalogue

settings.register_profile("quiet", deadline=None)  # a busy machine is no error
settings.load_profile("quiet")

Serve = Callable[..., str]


@pytest.fixture(scope="session")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 products, 8 pictures of each, 48 px: 12 to train on, 12 unseen."""
    root = tmp_path_factory.mktemp("catalogue")
    draw_catalogue(root, classes=24, images=8, size=48)
    return root


@pytest.fixture(scope="session")
def trained(catalogue: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run on the catalogue."""
    run = tmp_path_factory.mktemp("runs") / "run"
    quick = ("--set", "epochs=2", "--set", "classes_per_batch=8")
    crossbatch_ok("train", "demo", "--data", catalogue, "--out", run, *quick)
    return run


@pytest.fixture(scope="session")
def model(trained: Path, catalogue: Path) -> Path:
    """The ONNX file exported from the run."""
    path = trained.parent / "model.onnx"
    crossbatch_ok("export", trained, path, "--data", catalogue)
    return path


@pytest.fixture(scope="session")
def photo(catalogue: Path) -> Path:
    """A picture of an unseen product."""
    return max(catalogue.rglob("*.jpg"))


@pytest.fixture(scope="session")
def serve(model: Path) -> Iterator[Serve]:
    """A function that serves `model` from a folder of galleries as a user would, and returns the address."""
    running: list[subprocess.Popen[str]] = []

    def start(galleries: Path, *words: str) -> str:
        command = [sys.executable, "-m", "crossbatch", "serve", "--model", str(model)]
        command += ["--galleries", str(galleries), "--port", "0", *words]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        running.append(server)
        for line in server.stdout or ():
            if found := re.search(r"127\.0\.0\.1:\d+", line):
                return found.group()
        raise AssertionError(f"the server ended with {server.wait()}")

    yield start
    for server in running:
        server.terminate()
    for server in running:
        server.communicate(timeout=20)


def crossbatch_ok(*words: str | Path) -> None:
    """Run a command in this process; it must succeed."""
    assert crossbatch.main([*map(str, words), "--json"]) == 0
