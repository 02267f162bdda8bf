"""Several processes give the gradients of one on the whole batch, and one run folder; devices; memory."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file

from serving.errors import BadData, BadSetting
from tests.training.side_by_side import gradients
from tests.training.small import draw_folder, equal_runs
from training.loop import processes as module
from training.loop.checkpoint import load_checkpoint
from training.loop.processes import agree, keep_freed_memory, start_processes, sync_batchnorm
from training.recipes.recipe import Recipe
from training.train import Settings, run

RECIPE = """
{image_size: 16, dimension: 8, prototypes: 4, classes_per_batch: 4, images_per_class: 3, loss: proxy_anchor,
xml_weight: 0.3, xml_prototypes: recursion, epochs: 2, validation: 0.3, optimizer: rmsprop,
learning_rate: 1.0e-5, head_learning_rate: 1.0e-5, prototype_learning_rate: 1.0e-5,
loss_learning_rate: 1.0e-5, freeze_batchnorm: true, threads: 1}
"""
PLAIN = RECIPE.replace("proxy_anchor", "contrastive").replace("recursion", "batch")
"""Another loss and another fit, whose gradients lie otherwise in memory."""
FAULTS = """
import resource, torch
from training.loop.processes import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(12 * 2**20)  # 48 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(), keep_freed_memory() and faults())
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Path]:
    """The images, the recipe, and the folder with what two processes made of them."""
    root = tmp_path_factory.mktemp("side_by_side")
    data = draw_folder(root / "data", classes=14, images=3, size=18)
    (root / "recipe.yaml").write_text(RECIPE)
    (root / "plain.yaml").write_text(PLAIN)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "tests.training.side_by_side", str(data), str(root),
        str(root / "plain.yaml"), str(root / "recipe.yaml"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (root / "stdout").write_text(done.stdout)
    return data, str(root / "recipe.yaml"), root


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", ["recipe", "plain"])
def test_gradients_of_two_processes_are_those_of_one(name: str, made: tuple[Path, str, Path]) -> None:
    data, _, root = made
    one = gradients(data, str(root / f"{name}.yaml"))
    ranks = [load_file(root / f"{name}.{rank}") for rank in (0, 1)]
    two = ranks[0]
    assert one.keys() == two.keys()
    assert len(torch.unique(two["embedded"], dim=0)) == 15  # an odd number, which two processes cannot halve
    assert {"model.codebook", "model.head.weight", "model.backbone.body.conv.weight"} <= one.keys()
    assert any(key.startswith("objective.") for key in one) == (name == "recipe")
    for key, value in one.items():
        assert value.abs().max() > 0, key
        drift = 0.5 if key.startswith("objective.") else 0  # the mean of what the two were given
        torch.testing.assert_close(two[key], value + drift, rtol=2e-3, atol=1e-5, msg=key)
        assert torch.equal(ranks[1][key], two[key]), key  # and so they stay alike


@pytest.fixture(scope="module")
def plain(made: tuple[Path, str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that one process makes."""
    data, recipe, _ = made
    out = tmp_path_factory.mktemp("plain") / "run"
    run(Settings(recipe=recipe, data=data, out=out))
    return out


def test_two_processes_leave_the_run_that_one_leaves(made: tuple[Path, str, Path], plain: Path) -> None:
    _, _, root = made
    ours, one = load_checkpoint(plain / "last.safetensors")
    theirs, two = load_checkpoint(root / "run" / "last.safetensors")
    for row, other in zip(one["history"], two["history"], strict=True):
        for name in row.keys() - {"seconds", "waited"}:
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-6), name
    for key, value in ours.items():
        if not key.startswith("optimizer."):  # squares of tiny gradients differ by their rounding
            torch.testing.assert_close(theirs[key], value, rtol=1e-3, atol=1e-4, msg=key)
    assert (root / "stdout").read_text().count("The run is in") == 1  # one of them speaks
    record = json.loads((root / "run" / "record.json").read_text())
    assert record["metrics"]["validation"]["queries"] == one["best"]["queries"] == 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"classes_per_batch": 3, "images_per_class": 3}, "9 images cannot be shared evenly by 2 processes"),
        ({"loss": "multi_similarity", "mixing": "input"}, "2 processes do not hold"),
    ],
)
def test_what_two_processes_cannot_do_is_told_before_they_meet(
    settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(BadSetting, match=words):
        start_processes("cpu", Recipe.model_validate(settings))


def test_batchnorm_is_synchronised_or_refused() -> None:
    plain, cpus, gpus = torch.nn.Conv2d(3, 4, 1), MagicMock(world_size=2), MagicMock(world_size=2)
    cpus.device, gpus.device = torch.device("cpu"), torch.device("cuda")
    net = torch.nn.Sequential(plain, torch.nn.BatchNorm2d(4))
    assert sync_batchnorm(net, cpus, frozen=True) is net
    assert sync_batchnorm(plain, cpus, frozen=False) is plain
    with pytest.raises(BadSetting, match="2 processes on cpu cannot share the statistics of BatchNorm"):
        sync_batchnorm(net, cpus, frozen=False)
    synced: Any = sync_batchnorm(net, gpus, frozen=False)
    assert isinstance(synced[1], torch.nn.SyncBatchNorm)


def test_torchrun_of_one_process_is_plain_training(
    made: tuple[Path, str, Path], plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {  # what torchrun tells the one process that it starts
        "TORCHELASTIC_RUN_ID": "one", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    }  # fmt: skip
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert torch.distributed.is_torchelastic_launched()
    run(Settings(recipe=made[1], data=made[0], out=tmp_path / "one"))
    equal_runs(tmp_path / "one", plain)


def test_processes_that_read_other_images_than_the_first_are_told() -> None:
    def second(first: object) -> Any:
        """The second of two processes, where the first has read `first`."""
        return SimpleNamespace(
            world_size=2, device="cpu", broadcast=lambda _: first,
            all_gather=lambda rows, **_: torch.stack([torch.ones_like(rows), rows]),
        )  # fmt: skip

    agree({"digest": "a"}, second({"digest": "a"}))
    with pytest.raises(BadData, match="2 processes do not read the same images"):
        agree({"digest": "b"}, second({"digest": "a"}))


@pytest.mark.parametrize(("cuda", "expected"), [(False, "cpu"), (True, "cuda")])
def test_auto_takes_a_measured_device(cuda: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = MagicMock()
    monkeypatch.setattr(module, "Fabric", fabric)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    start_processes("auto", Recipe())
    start_processes("mps", Recipe())
    assert [call.kwargs["accelerator"] for call in fabric.call_args_list] == [expected, "mps"]


def test_a_device_that_is_not_there_is_told() -> None:
    if not torch.backends.mps.is_available():
        with pytest.raises(BadSetting, match="--device mps with precision 32-true cannot be used"):
            start_processes("mps", Recipe())


@pytest.mark.skipif(not keep_freed_memory(), reason="not the C library of GNU")
def test_pages_are_faulted_in_once() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    assert kept < given_back / 2
