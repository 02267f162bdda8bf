"""What is computed where, told without the device: fake tensors carry a device and compute nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from serving.errors import BadSetting
from training.loop import processes
from training.loop.fit import _to_host
from training.loop.processes import start_processes
from training.method.histogram import histogram
from training.method.prototypes import fit_prototypes
from training.recipes.recipe import Recipe

MISSING_ON_MPS = {"cholesky_solve", "linalg_eigh"}


class _Mps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse what torch cannot do on MPS."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, torch.Tensor) and value.device.type == "mps":
                assert value.dtype != torch.float64, f"{function} makes float64 on MPS"
                assert function.__name__.partition(".")[0] not in MISSING_ON_MPS, function
        return result


@torch.no_grad()
def _on_mps(compute: Callable[[Callable[..., torch.Tensor]], torch.Tensor]) -> torch.Tensor:
    with FakeTensorMode(), _Mps():  # type: ignore[no-untyped-call]
        return compute(lambda *shape: torch.empty(shape, device="mps"))


def test_what_a_step_tells_is_widened_on_the_cpu() -> None:
    told = _on_mps(lambda make: _to_host([make(), make()]))
    assert (told.device.type, told.dtype, told.shape) == ("cpu", torch.float64, (2,))
    with pytest.raises(AssertionError, match="float64 on MPS"):
        _on_mps(lambda make: make().double())


@pytest.mark.parametrize("batch", [6, 3])  # the primal fit and the dual one
def test_prototypes_are_solved_where_there_is_a_solver(batch: int) -> None:
    def compute(make: Callable[..., torch.Tensor]) -> torch.Tensor:
        return fit_prototypes(histogram(make(batch, 7, 5), make(4, 5)), make(batch, 5))

    found = _on_mps(compute)
    assert (found.device.type, found.shape) == ("mps", (5, 4))


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

    monkeypatch.setattr(processes, "Fabric", Fabric)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    start_processes("auto", Recipe())
    start_processes("mps", Recipe())
    assert asked == [expected, "mps"]


def test_a_device_that_is_not_there_is_told() -> None:
    if not torch.backends.mps.is_available():
        with pytest.raises(BadSetting, match="--device mps with precision 32-true cannot be used"):
            start_processes("mps", Recipe())
