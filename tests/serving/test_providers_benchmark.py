"""The benchmark of providers, in short: all take the same turns, and ratios are those to the CPU."""

import csv
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import providers
from serving.errors import BadSetting
from serving.model.encoder import Encoder
from tests.tiny_model import write_tiny_model


class Slow:
    """Takes three times as long as the CPU, and embeds a little elsewhere."""

    def __init__(self, path: Path, *, threads: int, provider: str) -> None:
        if provider == "cuda":
            raise BadSetting("there is no GPU")
        self.spec, self.slow = SimpleNamespace(image_size=8), provider != "cpu"

    def encode(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        time.sleep(0.006 if self.slow else 0.002)
        return np.full((len(images), 3), 0.25 * self.slow, np.float32)


@pytest.mark.parametrize(("kind", "names"), [(Encoder, ["cpu"]), (Slow, ["cpu", "openvino"])])
def test_the_whole_in_short(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: Any,
    names: list[str],
) -> None:
    monkeypatch.setattr(providers, "Encoder", kind)
    if kind is Slow:
        monkeypatch.setattr(providers, "offered_providers", lambda: ["cpu", "openvino", "cuda"])
    model, out = write_tiny_model(tmp_path / "birds.onnx"), tmp_path / "out.csv"
    providers.main(f"{model} --threads 1 --batches 1 3 --rounds 2 --out {out}".split())
    with out.open() as file:
        rows = list(csv.DictReader(file))
    told = [(row["batch"], row["provider"]) for row in rows]
    assert told == [(size, name) for size in "13" for name in names]
    for row in rows:
        assert (row["model"], row["threads"]) == ("birds", "1")
        ratio = float(row["ratio"])
        assert ratio == 1 if row["provider"] == "cpu" else 0 < ratio < 0.9
        assert float(row["difference"]) == (0 if row["provider"] == "cpu" else 0.25)
    assert ("cuda: there is no GPU" in capsys.readouterr().out) == (kind is Slow)
