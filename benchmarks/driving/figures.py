"""Latencies and rounds in figures."""

import math
import statistics
from collections.abc import Sequence

__all__ = ["apart", "median", "percentile", "quartiles"]


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
