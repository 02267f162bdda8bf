"""Progress of long work: a bar on a terminal, one line a minute and a last one elsewhere."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

__all__ = ["progress", "speaks", "stages"]

T = TypeVar("T")


def speaks() -> bool:
    """Tell whether this process shows anything: of those that torchrun started only the first does."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK") == "0"


def progress(items: Iterable[T], label: str, *, total: int | None = None, unit: str = "it") -> "tqdm[T]":
    """Wrap `items` so that standard error shows the count, the rate and the time left.

    One step an item; for uneven steps pass `()` and call `update(n)` of the bar, a context manager, too.
    `total` is the number of steps where `items` has no length; `unit` is what one step is, singular.
    """
    if not speaks():
        return tqdm(items, total=total, disable=True)
    if sys.stderr.isatty():
        return tqdm(items, desc=label, total=total, unit=unit, file=sys.stderr, dynamic_ncols=True)
    layout = "{desc}: {n_fmt} of {total_fmt}, {pace}, {elapsed} gone, {remaining} left"
    # The delay: not before the first step.
    seldom: dict[str, Any] = {"mininterval": 60.0, "maxinterval": 60.0, "delay": 1e-9}
    log = _LineStream(sys.stderr)
    return _Logged(items, desc=label, total=total, unit=unit, file=log, bar_format=layout, **seldom)


@contextmanager
def stages(unit: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show work that comes in stages, one bar after the other.

    Yields what is to be called with a stage's name, how many steps of it are done, and of how many.
    """
    at = ""
    bar: tqdm[Any] = tqdm(disable=True)
    with ExitStack() as shown:

        def advance(stage: str, done: int, total: int) -> None:
            nonlocal at, bar
            if stage != at:
                shown.close()
                at, bar = stage, shown.enter_context(progress((), stage, total=total, unit=unit))
            bar.update(done - bar.n)

        yield advance


class _Logged(tqdm):  # type: ignore[type-arg]  # it takes no parameter when it runs
    """A bar that tells its rate in three digits."""

    @property
    def format_dict(self) -> dict[str, Any]:
        told = dict(super().format_dict)
        done, seconds = told["n"] - told["initial"], told["elapsed"]
        return told | {"pace": _pace(told["rate"] or (done / seconds if seconds else 0.0), told["unit"])}


def _pace(rate: float, unit: str) -> str:
    """Write a rate, the other way round where a step takes longer than a second."""
    if not rate:
        return f"? {unit}/s"
    value, per = (rate, f"{unit}/s") if rate >= 1 else (1 / rate, f"s/{unit}")
    return f"{float(f'{value:.3g}'):,.15g} {per}"


class _LineStream:
    """A stream on which a bar that is drawn over and over becomes lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            self._stream.write(f"{line}\n")

    def flush(self) -> None:
        self._stream.flush()
