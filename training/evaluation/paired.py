"""What repeats tell: a mean and its Student-t interval, of values or of differences within pairs."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

__all__ = ["interval", "summarise", "tell"]


def interval(values: Sequence[float], less: Sequence[float] | None = None) -> tuple[float, float | None]:
    """Give the mean of n values and half the width of its 95 % interval, None where one tells no spread.

    With `less`, of the differences from these in pairs (of one seed, say): what a pair shares drops out. The
    half width is t(0.975, n − 1) · s / √n with the sample's standard deviation s.
    """
    if less is not None:
        values = [one - other for one, other in zip(values, less, strict=True)]
    mean = float(np.mean(values))
    if len(values) == 1:
        return mean, None
    return mean, float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))


def summarise(values: Sequence[float], less: Sequence[float] | None = None) -> dict[str, float | None]:
    """Give `mean` and `half_width`, see `interval`."""
    return dict(zip(("mean", "half_width"), interval(values, less), strict=True))


def tell(summary: Mapping[str, float | None] | None, sign: str = "") -> str:
    """Write a summary of shares in percent, as in `12.30 ± 0.42`; nothing for none."""
    if summary is None:
        return ""
    half = "" if summary["half_width"] is None else f" ± {100 * summary['half_width']:.2f}"
    return f"{100 * (summary['mean'] or 0):{sign}.2f}{half}"
