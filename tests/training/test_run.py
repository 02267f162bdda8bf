"""A run folder: records and metrics that are damaged or edited are told; one of an earlier version opens."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

import training.loop.run
from serving.errors import BadArtifact
from training.loop.checkpoint import load_checkpoint
from training.loop.logbook import read_history
from training.loop.run import check_record, load_run, new_record, read_record

BAD = [
    ("name", None), ("name", "n" * 201), ("metrics", None), ("data", None), ("data.root", ""),
    ("data.root", "a\0b"), ("data.root", "\ud800"), ("data.format", "zarr"), ("data.digest", "short"),
    ("data.train_images", "many"), ("seed", "zero"), ("versions", ["2"]),
]  # fmt: skip
DEEP, DIGITS = "[" * 100_000, '{"name": ' + "1" * 5000 + "}"


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_bad_key_is_named_with_its_file(key: str, value: Any, whole: Path, tmp_path: Path) -> None:
    record = part = read_record(whole)
    *parents, last = key.split(".")
    for parent in parents:
        part = part[parent]
    part[last] = value
    if value is None:
        del part[last]
    (tmp_path / "record.json").write_text(json.dumps(record))
    with pytest.raises(BadArtifact) as caught:
        read_record(tmp_path)
    told = str(caught.value)
    assert f"{tmp_path / 'record.json'} is damaged" in told
    assert f" {key}" in told
    assert len(told.removeprefix(str(tmp_path))) < 250
    assert "\n" not in told


@pytest.mark.parametrize(
    "text", ["[]", "{", "\udcff", DEEP, DIGITS], ids=["list", "cut", "bytes", "deep", "digits"]
)
def test_a_file_that_is_no_record_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadArtifact, match=r"record\.json is damaged"):
        read_record(tmp_path)


def test_the_commit_is_of_the_repository_that_holds_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not of a user's own, in which a virtual environment lies."""
    monkeypatch.setattr(training.loop.run, "__file__", str(tmp_path / "run.py"))
    git = ("git", "-C", str(tmp_path), "-c", "user.name=us", "-c", "user.email=us@home")
    (tmp_path / "run.py").touch()
    for words in ("init", "commit --allow-empty -mone", "add .", "commit -mtwo"):
        subprocess.run([*git, *words.split()], check=True)
        assert bool(new_record("", 0, {})["git_commit"]) == (words == "commit -mtwo")


def test_keys_beside_ours_stay(whole: Path) -> None:
    record = read_record(whole) | {"note": "by hand"}
    assert check_record(record, source="here") == record


def test_only_finite_numbers_count(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(
        "epoch,loss,note,\n2,nan,good,1\n1,inf,,\n,3,,\nx,4,,\n3,1.5,7,,8,9\n3,1.25\n"
    )
    found = read_history(tmp_path)
    assert found == [{"epoch": 1}, {"epoch": 2}, {"epoch": 3, "loss": 1.25}]


@pytest.mark.parametrize("text", [None, "", "epoch,loss\n", "loss\n1\n"])
def test_an_empty_history(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.csv").write_text(text)
    assert read_history(tmp_path) == []


@pytest.mark.parametrize("contents", [b"epoch,loss\n\xff\xfe,1\n", b"epoch\n" + b"1" * 200_000])
def test_damage_is_told(contents: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(contents)
    with pytest.raises(BadArtifact, match=r"metrics.csv is damaged: it is not a readable table"):
        read_history(tmp_path)


def test_a_run_of_version_1_opens_with_the_same_weights(whole: Path, tmp_path: Path) -> None:
    old = shutil.copytree(whole, tmp_path / "old")
    settings = yaml.safe_load((old / "recipe.yaml").read_text())
    del settings["assign_on"]
    settings |= {"unit": False, "epsilon": settings.pop("assignment_scale")}
    (old / "recipe.yaml").write_text(yaml.safe_dump(settings))
    record = read_record(old)
    del record["recipe_digest"]
    (old / "record.json").write_text(json.dumps(record))
    tensors, state = load_checkpoint(old / "best.safetensors")
    tensors["model.prototypes"] = tensors.pop("model.codebook")
    told = {"crossbatch": json.dumps(state | {"format_version": 1})}
    save_file(tensors, old / "best.safetensors", metadata=told)
    opened, new = load_run(old), load_run(whole)
    assert (opened.recipe.assign_on, opened.recipe.assignment_scale) == ("raw", new.recipe.assignment_scale)
    assert torch.equal(opened.embedder.codebook, new.embedder.codebook)
