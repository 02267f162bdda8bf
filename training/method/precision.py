"""Full precision: run a formula in float32 (or float64) whatever the caller's autocast says."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["full_precision"]

P = ParamSpec("P")
T = TypeVar("T")

_DEVICES = ("cpu", "cuda", "mps")
_HALVES = (torch.float16, torch.bfloat16)


def full_precision(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` outside autocast, with its half-precision tensor arguments widened to float32.

    Solves and losses lose their meaning in 8 bits of mantissa, and Cholesky has no half-precision kernel.
    float64 arguments stay float64, so that gradients can be checked.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        wide_args: tuple[Any, ...] = tuple(_widen(value) for value in args)
        wide_kwargs: dict[str, Any] = {name: _widen(value) for name, value in kwargs.items()}
        with ExitStack() as stack:
            for device in _DEVICES:
                # Entered only where autocast is on: the exporter would otherwise record a region for nothing.
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*wide_args, **wide_kwargs)

    return wrapper


def _widen(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value
