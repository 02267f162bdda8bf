"""What metrics.csv of a run tells: a row an epoch, of which only finite numbers are of use."""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from serving.errors import BadArtifact
from training.loop.run import METRICS

__all__ = ["History", "read_history"]


@dataclass(frozen=True, slots=True)
class History:
    """The epochs of a run, by rising number."""

    rows: tuple[dict[str, float], ...]
    """`epoch` and whatever else is a finite number in that row."""

    def points(self, name: str) -> list[tuple[float, float]]:
        """Give (epoch, value) of each epoch that has a value of that name."""
        return [(row["epoch"], row[name]) for row in self.rows if name in row]

    @property
    def names(self) -> list[str]:
        """What is told beside the epoch, in the order of the file."""
        return [name for name in dict.fromkeys(key for row in self.rows for key in row) if name != "epoch"]

    def thinned(self, most: int) -> "History":
        """Give at most `most` of the epochs, evenly spaced, the first and the last among them."""
        if len(self.rows) <= most:
            return self
        places = {round(i * (len(self.rows) - 1) / (most - 1)) for i in range(most)}
        return History(tuple(self.rows[place] for place in sorted(places)))


def read_history(path: Path) -> History:
    """Read the history of a run folder; a run without one has an empty one.

    A row that names no epoch is passed over, and of two of one epoch the last counts.

    Raises:
        BadArtifact: If the file is no table.
    """
    file = path / METRICS
    if not file.is_file():
        return History(())
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = [_finite(row.items()) for row in csv.DictReader(lines)]
    except (OSError, ValueError, csv.Error) as error:
        raise BadArtifact(f"{file} is damaged: it is not a readable table ({error})") from error
    by_epoch = {row["epoch"]: row for row in rows if "epoch" in row}
    return History(tuple(by_epoch[epoch] for epoch in sorted(by_epoch)))


def _finite(cells: Iterable[tuple[object, object]]) -> dict[str, float]:
    """Keep what is a finite number under a name; DictReader puts cells past the head under None."""
    found = {}
    for name, cell in cells:
        if not name or not isinstance(name, str) or not isinstance(cell, str):
            continue
        try:
            value = float(cell)
        except ValueError:
            continue
        if math.isfinite(value):
            found[name] = value
    return found
