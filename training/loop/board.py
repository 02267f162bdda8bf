"""TensorBoard: the rows of metrics.csv as curves, where they are asked for."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving.errors import BadSetting

__all__ = ["Board", "Writer"]

_FOLDER = "tensorboard"


class Writer:
    """Draws rows; without TensorBoard's own writer it draws nothing."""

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner

    def add(self, row: Mapping[str, Any]) -> None:
        """Draw one epoch: every figure of its row, over its steps."""
        if self._inner is None:
            return
        for name, value in row.items():
            if name not in ("epoch", "steps"):
                self._inner.add_scalar(name, value, row["steps"])
        self._inner.flush()


class Board:
    """Curves in the folder `tensorboard` of a run.

    Args:
        on: Whether to write anything at all.

    Raises:
        BadSetting: If the package tensorboard is not installed.
    """

    def __init__(self, *, on: bool) -> None:
        self._make: Any = None
        if not on:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise BadSetting(
                "--tensorboard needs the package tensorboard: pip install tensorboard, or leave the flag out"
            ) from error
        self._make = SummaryWriter

    @contextmanager
    def open(self, folder: Path, history: Sequence[Mapping[str, Any]]) -> Iterator[Writer]:
        """Open the board of a run, the epochs so far drawn anew: those of a resumed run are not lost.

        Args:
            folder: The run's.
            history: Rows of the epochs so far.
        """
        if self._make is None:
            yield Writer()
            return
        inner = self._make(str(folder / _FOLDER), purge_step=0)
        try:
            writer = Writer(inner)
            for row in history:
                writer.add(row)
            yield writer
        finally:
            inner.close()
