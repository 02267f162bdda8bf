"""What repeats tell: a mean and its Student-t interval, of values or of differences within pairs."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

__all__ = ["interval", "paired", "summarise", "tell"]


def interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float | None]:
    """Give the mean of n values and half the width of its interval, None where one value tells no spread.

    The half width is t((1 + confidence) / 2, n − 1) · s / √n with the sample's standard deviation s.
    """
    count = len(values)
    if count == 0:
        raise ValueError("there is no value, and the mean needs one")
    mean = float(np.mean(values))
    if count == 1:
        return mean, None
    critical = stats.t.ppf((1 + confidence) / 2, count - 1)
    return mean, float(critical * np.std(values, ddof=1) / math.sqrt(count))


def paired(
    first: Sequence[float], second: Sequence[float], *, confidence: float = 0.95
) -> tuple[float, float | None]:
    """Give the mean of first − second over n pairs (of one seed, say) and half the width of its interval.

    What a pair shares drops out of the difference, so that the interval is narrower than those of the two
    means would suggest.
    """
    if len(first) != len(second):
        raise ValueError(f"pairs are needed, but there are {len(first)} and {len(second)} values")
    return interval([one - other for one, other in zip(first, second, strict=True)], confidence=confidence)


def summarise(values: Sequence[float], less: Sequence[float] | None = None) -> dict[str, float | None]:
    """Give `mean` and `half_width` of values, or of the differences from others in pairs."""
    mean, half = interval(values) if less is None else paired(values, less)
    return {"mean": mean, "half_width": half}


def tell(summary: Mapping[str, float | None] | None, sign: str = "") -> str:
    """Write a summary of shares in percent, as in `12.30 ± 0.42`; nothing for none."""
    if summary is None:
        return ""
    half = "" if summary["half_width"] is None else f" ± {100 * summary['half_width']:.2f}"
    return f"{100 * (summary['mean'] or 0):{sign}.2f}{half}"
