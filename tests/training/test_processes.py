"""Several processes give the gradients of one on the whole batch, and one run folder; devices; memory."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning_fabric import Fabric
from safetensors.torch import load_file

import training.train
from serving.errors import BadData, BadSetting
from tests.training.drawn import draw_folder
from tests.training.side_by_side import gradients
from tests.training.small_run import equal_runs
from training.loop import processes as module
from training.loop.checkpoint import load_checkpoint
from training.loop.processes import agree, keep_freed_memory, processes, start_processes, sync_batchnorm
from training.recipes.recipe import Recipe
from training.train import Settings, run

RECIPE = """
image_size: 16
dimension: 8
prototypes: 4
classes_per_batch: 4
images_per_class: 3
loss: proxy_anchor
xml_weight: 0.3
xml_prototypes: recursion
epochs: 2
validation: 0.3
optimizer: rmsprop
learning_rate: 1.0e-5
head_learning_rate: 1.0e-5
prototype_learning_rate: 1.0e-5
loss_learning_rate: 1.0e-5
freeze_batchnorm: true
threads: 1
"""


PLAIN = RECIPE.replace("proxy_anchor", "contrastive").replace("recursion", "batch")
"""Another loss and another fit, whose gradients lie otherwise in memory."""


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
def test_gradients_of_two_processes_are_those_of_one_on_the_whole_batch(
    name: str, made: tuple[Path, str, Path]
) -> None:
    data, _, root = made
    one = gradients(data, str(root / f"{name}.yaml"))
    ranks = [load_file(root / f"{name}.{rank}") for rank in (0, 1)]
    two = ranks[0]
    assert one.keys() == two.keys()
    assert {"model.codebook", "model.head.weight", "model.backbone.body.conv.weight"} <= one.keys()
    assert any(key.startswith("objective.") for key in one) == (name == "recipe")
    for key, value in one.items():
        assert value.abs().max() > 0, key
        drift = 0.5 if key.startswith("objective.") else 0  # the mean of what the two were given
        torch.testing.assert_close(two[key], value + drift, rtol=2e-3, atol=1e-5, msg=key)
        assert torch.equal(ranks[1][key], two[key]), key  # and so they stay alike


def test_evaluation_holds_each_image_once(made: tuple[Path, str, Path]) -> None:
    _, _, root = made
    embedded = load_file(root / "plain.1")["embedded"]
    assert len(embedded) == 15  # an odd number, which two processes cannot halve
    assert len(torch.unique(embedded, dim=0)) == 15


def test_two_processes_leave_the_run_that_one_leaves(made: tuple[Path, str, Path], tmp_path: Path) -> None:
    data, recipe, root = made
    result = run(Settings(recipe=recipe, data=data, out=tmp_path / "run"))
    (ours, one), (theirs, two) = (
        load_checkpoint(folder / "run" / "last.safetensors") for folder in (tmp_path, root)
    )
    for row, other in zip(one["history"], two["history"], strict=True):
        for name in row.keys() - {"seconds"}:
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-6), name
    for key, value in ours.items():
        if not key.startswith("optimizer."):  # squares of tiny gradients differ by their rounding
            torch.testing.assert_close(theirs[key], value, rtol=1e-3, atol=1e-4, msg=key)
    assert (root / "stdout").read_text().count("The run is in") == 1  # one of them speaks
    record = json.loads((root / "run" / "record.json").read_text())
    assert record["metrics"]["validation"]["queries"] == result["best"]["queries"] == 6


class _Group:
    """Two processes' worth of Fabric, seen from one of them."""

    def __init__(self, rank: int, device: str = "cpu") -> None:
        self.world_size, self.global_rank, self.device = 2, rank, torch.device(device)


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
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
    alone = cast("Fabric", SimpleNamespace(world_size=1))
    assert sync_batchnorm(net, alone, frozen=False) is net
    assert sync_batchnorm(net, cast("Fabric", _Group(0)), frozen=True) is net
    plain = torch.nn.Conv2d(3, 4, 1)
    assert sync_batchnorm(plain, cast("Fabric", _Group(0)), frozen=False) is plain
    with pytest.raises(BadSetting, match="2 processes on cpu cannot share the statistics of BatchNorm"):
        sync_batchnorm(net, cast("Fabric", _Group(0)), frozen=False)
    synced = sync_batchnorm(net, cast("Fabric", _Group(0, "cuda")), frozen=False)
    assert isinstance(cast("Any", synced)[1], torch.nn.SyncBatchNorm)


def test_torchrun_of_one_process_is_plain_training(
    made: tuple[Path, str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, recipe, _ = made
    run(Settings(recipe=recipe, data=data, out=tmp_path / "plain"))
    told = {  # what torchrun tells the one process that it starts
        "TORCHELASTIC_RUN_ID": "one", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    }  # fmt: skip
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert torch.distributed.is_torchelastic_launched()
    run(Settings(recipe=recipe, data=data, out=tmp_path / "one"))
    equal_runs(tmp_path / "one", tmp_path / "plain")


def test_fewer_validation_images_than_processes_are_refused(
    made: tuple[Path, str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, recipe, _ = made
    inner = processes

    @contextlib.contextmanager
    def many(*arguments: Any) -> Iterator[Any]:
        with inner(*arguments) as fabric:
            several = SimpleNamespace(world_size=7, is_global_zero=True, device=fabric.device)
            yield several
            fabric.barrier()

    monkeypatch.setattr(training.train, "processes", many)
    with pytest.raises(BadData, match="6 validation images for 7 processes"):
        run(Settings(recipe=recipe, data=data, out=tmp_path / "r"))


class _Pair(_Group):
    """The first of two processes, or the second, where the first has read `first`."""

    def __init__(self, rank: int, first: object) -> None:
        super().__init__(rank)
        self._first = first

    def broadcast(self, _: object) -> object:
        return self._first

    def all_gather(self, rows: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.stack([torch.ones_like(rows), rows])


def test_processes_that_read_other_images_than_the_first_are_told() -> None:
    agree({"digest": "a"}, cast("Fabric", _Pair(1, {"digest": "a"})))
    with pytest.raises(BadData, match="2 processes do not read the same images"):
        agree({"digest": "b"}, cast("Fabric", _Pair(1, {"digest": "a"})))
    agree({"digest": "b"}, cast("Fabric", SimpleNamespace(world_size=1)))


@pytest.mark.parametrize(("cuda", "expected"), [(False, "cpu"), (True, "cuda")])
def test_auto_takes_a_device_that_was_measured(
    cuda: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Fabric:
        def __init__(self, **options: Any) -> None:
            asked.append(options["accelerator"])

        def launch(self) -> None:
            pass

    monkeypatch.setattr(module, "Fabric", Fabric)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    start_processes("auto", Recipe())
    start_processes("mps", Recipe())
    assert asked == [expected, "mps"]


def test_a_device_that_is_not_there_is_told() -> None:
    if not torch.backends.mps.is_available():
        with pytest.raises(BadSetting, match="--device mps with precision 32-true cannot be used"):
            start_processes("mps", Recipe())


FAULTS = """
import resource, torch
from training.loop.processes import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(16 * 2**20)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(), keep_freed_memory() and faults())
"""


@pytest.mark.skipif(not keep_freed_memory(), reason="not the C library of GNU")
def test_pages_are_faulted_in_once() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    assert kept < given_back / 2
