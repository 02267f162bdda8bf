"""Indexing broken off by signals at any moment, in a process of its own: the next run goes on."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.pictures import encoded
from tests.serving.indexed import counts, index, opened
from tests.tiny_model import write_tiny_model

COUNT = 120


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    noise = np.random.default_rng(0).integers(0, 256, (640, 640, 3), np.uint8)  # takes its time
    data = encoded(noise, "JPEG")
    for number in range(COUNT):
        (root / f"{number:03}.jpg").write_bytes(data)
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model.onnx")


def stored(path: Path) -> int:
    with opened(path) as gallery:
        return gallery.info().items


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_the_next_run_goes_on(
    tmp_path: Path, model: Path, data: Path, number: signal.Signals, status: int
) -> None:
    path = tmp_path / "birds"
    command = [sys.executable, "-m", "crossbatch", "index", "--model", str(model), "--data", str(data)]
    command += ["--batch", "2", "--threads", "1", str(path)]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    ends, before = [], 0
    for wanted in (1, COUNT // 2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while process.poll() is None:
            # Only once this run has stored something: a signal while Python itself starts is not ours.
            if (path / "gallery.sqlite").is_file() and stored(path) >= max(wanted, before + 1):
                process.send_signal(number)
                break
            time.sleep(0.01)
        _, errors = process.communicate(timeout=30)
        assert "Traceback" not in errors
        ends.append(process.returncode)
        assert stored(path) >= max(before, wanted)
        before = stored(path)
    assert status in ends
    expected = {"stored": COUNT - before, "unchanged": before}
    assert counts(index(model, data, path, batch=64)) == {name: n for name, n in expected.items() if n}
    assert stored(path) == COUNT
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(".")]
