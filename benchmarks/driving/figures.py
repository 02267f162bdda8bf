"""Latencies and rounds in figures, and the file that they are kept in."""

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["apart", "median", "percentile", "quartiles", "write_csv"]


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows, or add them to those of an earlier run; a cell is empty where a row has no value."""
    if path.exists():
        with path.open(newline="") as file:
            rows = [*csv.DictReader(file), *rows]
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="") as file:
        lines = csv.DictWriter(file, columns, lineterminator="\n")
        lines.writeheader()
        lines.writerows({name: _short(value) for name, value in row.items()} for row in rows)


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that so many percent are not above; NaN where there is none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def median(values: Sequence[float]) -> float:
    """Return the median; NaN where there is no value."""
    return statistics.median(values) if values else math.nan


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; the value itself twice where there is one only."""
    if len(values) < 2:
        return median(values), median(values)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def apart(one: float, other: float) -> float:
    """Return how far two positive values are apart, as a share of their mean."""
    return 2 * abs(one - other) / (one + other)
