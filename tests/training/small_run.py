"""A training of seconds, how to cut it, and whether two of them are the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import training.loop.fit
from training.loop.checkpoint import load_checkpoint

__all__ = ["SMALL", "TINY", "Train", "cut_at", "equal_runs"]

Train = Callable[..., dict[str, Any]]
"""Trains the small recipe into a folder, with settings changed, on the drawn images or others."""

SMALL = """
image_size: 16
dimension: 8
prototypes: 4
classes_per_batch: 3
images_per_class: 2
epochs: 3
split_train: 5
validation: 0.4
ema_decay: 0.9
crop_scale: 0.5
flip: 0.5
clip_norm: 5
threads: 1
"""
TINY = ("epochs=1", "classes_per_batch=2", "split_train=0.5", "validation=0", "ema_decay=0")
"""What makes the small recipe one epoch on half of the classes."""


def cut_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt every training from now on at that step, counted from 0."""

    def check(*_: object, **told: int) -> None:
        if told["step"] == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(training.loop.fit, "_check_finite", check)


def equal_runs(first: Path, second: Path) -> None:
    """Compare the checkpoints of two runs, bit by bit."""
    for name in ("best.safetensors", "last.safetensors"):
        (ours, state), (theirs, told) = load_checkpoint(first / name), load_checkpoint(second / name)
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), key
        for row in (*state.get("history", ()), *told.get("history", ())):
            row.pop("seconds", None)  # of the wall clock
        assert state == told
