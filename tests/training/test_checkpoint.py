"""Checkpoints: what goes in comes out, damage is told, a write that fails leaves the previous file."""

import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from serving.errors import BadArtifact, CrossbatchError, NotFound
from training.loop.checkpoint import load_checkpoint, load_state, save_checkpoint, write_file


def test_round_trip(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "b": torch.tensor(7)}
    state = {"epochs_done": 3, "best": {"map_at_r": 0.1234567890123456}, "history": [{"epoch": 1}]}
    save_checkpoint(tmp_path / "x.safetensors", tensors, state)
    loaded, told = load_checkpoint(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert told == {"format_version": 2, **state} == load_state(tmp_path / "x.safetensors")


@pytest.mark.parametrize(("of", "at"), [(Path, "open"), (os, "fsync"), (Path, "replace")])
def test_a_full_disk_is_borne(of: object, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, {"a": torch.zeros(3)}, {"epochs_done": 1})
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(of, at, Mock(side_effect=full))
    with pytest.raises(CrossbatchError, match=r"no space left.*previous one is"):
        save_checkpoint(path, {"a": torch.ones(3)}, {"epochs_done": 2})
    monkeypatch.undo()
    tensors, state = load_checkpoint(path)
    assert state["epochs_done"] == 1
    assert not tensors["a"].any()
    assert list(tmp_path.iterdir()) == [path]


def test_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(NotFound):
        load_checkpoint(path)
    save_checkpoint(path, {"a": torch.zeros(300)}, {})
    whole = path.read_bytes()
    for damaged in (whole[:50], whole[:-8], b"", b"\xff" * 100, whole[:-1] + b"\1"):
        path.write_bytes(damaged)
        with pytest.raises(BadArtifact, match="is damaged"):
            load_checkpoint(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(BadArtifact, match="not a checkpoint of crossbatch"):
        load_checkpoint(path)
    save_file({"a": torch.zeros(1)}, path, metadata={"crossbatch": json.dumps({"format_version": 99})})
    with pytest.raises(BadArtifact, match=r"version 99.*up to 2"):
        load_checkpoint(path)


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CrossbatchError, match="no plain file"):
        write_file(tmp_path / "pipe", b"x")
    assert not (tmp_path / "pipe").is_file()
    with pytest.raises(CrossbatchError, match="cannot be written"):
        write_file(tmp_path, b"x")
