"""The provider that runs a model: the one asked for, or the fastest that gives what the CPU gives."""

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.errors import BadSetting
from serving.model import trial
from serving.model.trial import load_encoder


class Timed:
    """Takes so many seconds a batch and is so far from the CPU, by its provider; may fail to start."""

    seconds: ClassVar = {"cpu": 0.02}
    away: ClassVar = {"cpu": 0.0}
    runs: ClassVar = 0

    def __init__(self, path: Path, *, threads: int, provider: str = "cpu") -> None:
        if provider not in self.seconds:
            raise BadSetting(f"{provider} could not be started")
        self.provider, self.spec = provider, SimpleNamespace(name="birds", image_size=8)

    def encode(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        Timed.runs += 1
        assert images.shape[1:] == (8, 8, 3)
        time.sleep(self.seconds[self.provider])
        return np.full((len(images), 4), 0.5 + self.away[self.provider], np.float32)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Give what `auto` chooses and says, by the seconds and distances of the providers that are offered."""

    def choose(offered: list[str], seconds: dict[str, float], **away: float) -> tuple[str, str]:
        monkeypatch.setattr(trial, "Encoder", Timed)
        monkeypatch.setattr(trial, "offered_providers", lambda: offered)
        monkeypatch.setattr(Timed, "seconds", {"cpu": 0.02} | seconds)
        monkeypatch.setattr(Timed, "away", dict.fromkeys(offered, 0.0) | away)
        monkeypatch.setattr(Timed, "runs", 0)
        with caplog.at_level(logging.INFO):
            found = load_encoder(Path("m.onnx"), provider="auto")
        return found.provider, caplog.messages[-1]

    return choose


def test_auto_takes_the_fastest_and_says_so(chosen: Any) -> None:
    best, said = chosen(["cpu", "openvino", "cuda"], {"openvino": 0.06, "cuda": 0.002})
    assert best == "cuda"
    assert said.startswith("the model birds is run by cuda (")
    assert all(f"{name}: " in said and "images/s" in said for name in ("cpu", "openvino", "cuda"))
    assert chosen(["cpu", "openvino"], {"openvino": 0.06})[0] == "cpu"


@pytest.mark.parametrize("away", [2e-4, -2e-4, float("nan")])
def test_auto_takes_none_that_gives_other_embeddings(chosen: Any, away: float) -> None:
    best, said = chosen(["cpu", "openvino"], {"openvino": 0.0}, openvino=away)
    assert best == "cpu"
    assert f"openvino: its embeddings differ from the CPU's by {abs(away):.1e}" in said
    assert chosen(["cpu", "openvino"], {"openvino": 0.0}, openvino=5e-5)[0] == "openvino"


def test_auto_passes_over_what_cannot_be_started(chosen: Any) -> None:
    best, said = chosen(["cpu", "cuda", "openvino"], {"openvino": 0.0})
    assert best == "openvino"
    assert "cuda: cuda could not be started" in said


def test_auto_tries_nothing_where_there_is_nothing_to_choose(chosen: Any) -> None:
    assert chosen(["cpu"], {}) == ("cpu", "the model birds is run by cpu (no other provider is installed)")
    assert Timed.runs == 0


def test_a_provider_asked_for_by_name_is_had_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "Encoder", Timed)
    assert load_encoder(Path("m.onnx")).provider == "cpu"
    with pytest.raises(BadSetting, match="cuda could not be started"):
        load_encoder(Path("m.onnx"), provider="cuda")
