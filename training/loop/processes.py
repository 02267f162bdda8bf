"""Several processes that train one model (`torchrun`), each on its run of rows of every batch.

What the network makes of the rows is gathered in the order of ranks: each process computes the loss of the
whole batch, and the mean of the processes' gradients is that of one process on the whole batch.
"""

import contextlib
import ctypes
import os
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import MixedPrecision
from timm.layers.norm_act import convert_sync_batchnorm
from torch import Tensor, nn

from serving.errors import BadData, BadSetting, cause_of
from training.recipes.recipe import Recipe

__all__ = [
    "agree", "batchnorms", "device_of", "gather_rows", "gather_shares", "keep_freed_memory", "mean_gradients",
    "processes", "share", "start_processes", "sync_batchnorm",
]  # fmt: skip

T = TypeVar("T")


def device_of(name: str) -> str:
    """Choose a device by its name or `auto`, which is never mps: no training has been measured on it."""
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def start_processes(device: str, recipe: Recipe) -> Fabric:
    """Join the processes that `torchrun` started, or be the only one, on `auto` or a device by its name."""
    device = device_of(device)
    several = torch.distributed.is_torchelastic_launched()
    total = int(os.environ["WORLD_SIZE"]) if several else 1
    here = int(os.environ["LOCAL_WORLD_SIZE"]) if several else 1
    if recipe.batch_size % total:
        raise BadSetting(
            f"a batch of {recipe.batch_size} images cannot be shared evenly by {total} processes: change"
            " classes_per_batch or images_per_class, or how many processes there are"
        )
    if total > 1 and recipe.mixing != "none":
        raise BadSetting(
            f"mixing {recipe.mixing} pairs images of a whole batch, which {total} processes do not hold:"
            " train in one process, or set mixing to none"
        )
    # Lightning's own call of a function that torch wants called by another name
    warnings.filterwarnings("ignore", r"torch\.distributed\.nn\.functional", module="lightning_fabric")
    try:
        # given as a plugin, for Lightning would silently change fp16 on a CPU for bf16
        mixed = None if recipe.precision == "32-true" else MixedPrecision(recipe.precision, device)
        nodes, strategy = total // here, "ddp" if total > 1 else "auto"
        fabric = Fabric(accelerator=device, devices=here, num_nodes=nodes, strategy=strategy, plugins=mixed)
        fabric.launch()
    except Exception as error:  # Lightning has a class of its own for each accelerator that is missing
        raise BadSetting(
            f"--device {device} with precision {recipe.precision} cannot be used: {cause_of(error)}"
        ) from error
    return fabric


@contextlib.contextmanager
def processes(device: str, recipe: Recipe) -> Iterator[Fabric]:
    """Join the processes as `start_processes` does, and part from them at the end."""
    fabric = start_processes(device, recipe)
    try:
        yield fabric
        fabric.barrier()  # else one that ends first may cut off another's last message
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def agree(value: Any, fabric: Fabric) -> None:
    """Raise a `BadData` in every process, if what one of them has read is not what the first one has."""
    if fabric.world_size == 1:
        return
    same = torch.tensor([fabric.broadcast(value) == value], device=fabric.device)
    if not gather_rows(same, fabric).all():
        raise BadData(f"the {fabric.world_size} processes do not read the same images: give all the same")


def share(batch: list[T], fabric: Fabric) -> list[T]:
    """Give this process's run of rows of a batch that divides evenly."""
    size = len(batch) // fabric.world_size
    return batch[fabric.global_rank * size : (fabric.global_rank + 1) * size]


def gather_rows(rows: Tensor, fabric: Fabric) -> Tensor:
    """Put the processes' rows (b, ...) together in the order of ranks; gradients flow back to their own."""
    if fabric.world_size == 1:
        return rows
    gathered: Tensor = fabric.all_gather(rows, sync_grads=rows.requires_grad)  # type: ignore[assignment]
    return _InRows.apply(gathered.flatten(0, 1))  # type: ignore[no-any-return]


class _InRows(torch.autograd.Function):
    """The same tensor, whose gradient is laid out row by row before it goes back to the processes.

    On gloo torch sends a gradient as it lies in memory: one laid out by columns would arrive scrambled.
    """

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def gather_shares(rows: Tensor, total: int, fabric: Fabric) -> Tensor:
    """Put together (total, ...) what the processes made of `arange(total).tensor_split(processes)`."""
    if fabric.world_size == 1:
        return rows
    sizes = [len(part) for part in torch.arange(total).tensor_split(fabric.world_size)]
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered: Tensor = fabric.all_gather(padded)  # type: ignore[assignment]
    return torch.cat([part[:size] for part, size in zip(gathered.to(rows.device), sizes, strict=True)])


def mean_gradients(module: nn.Module, fabric: Fabric) -> None:
    """Average the gradients of a module that every process ran on the same rows, so that none drifts away."""
    if fabric.world_size == 1:
        return
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = fabric.all_reduce(parameter.grad, reduce_op="mean")  # type: ignore[assignment]


def batchnorms(module: nn.Module) -> list[nn.Module]:
    """Give the layers of a network that normalise by batches."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return [layer for layer in module.modules() if isinstance(layer, kinds)]


def sync_batchnorm(module: nn.Module, fabric: Fabric, *, frozen: bool) -> nn.Module:
    """Let BatchNorm take its statistics from the rows of all processes, which torch cannot on CPUs."""
    if fabric.world_size == 1 or frozen or not batchnorms(module):
        return module
    if fabric.device.type != "cuda":
        raise BadSetting(
            f"{fabric.world_size} processes on {fabric.device.type} cannot share the statistics of BatchNorm:"
            " set freeze_batchnorm to true, or train in one process"
        )
    synced: nn.Module = convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    return synced


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep what is freed for the next tensor; tell whether the C library does.

    glibc maps each block above 32 MiB afresh, and the kernel clears it page by page: for the maps of a
    network that can cost more than what is computed on them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: False)  # which another C library lacks
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _LARGEST))
