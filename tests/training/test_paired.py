"""Means and intervals against scipy's own, and what pairing takes out of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from training.evaluation.paired import interval, summarise, tell

SHARES = st.floats(min_value=0, max_value=1, width=32)


@given(st.lists(SHARES, min_size=2, max_size=30))
def test_the_interval_is_scipys(values: list[float]) -> None:
    mean, half = interval(values)
    spread = stats.sem(values)
    assert mean == pytest.approx(np.mean(values))
    if spread == 0:
        assert half == 0
    else:
        low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=spread)
        assert half == pytest.approx((high - low) / 2, rel=1e-6)


def test_one_value_has_no_interval_and_pairs_are_of_two() -> None:
    assert interval([0.5, 0.9, 0.3], [0.25, 0.5, 0.5]) == interval([0.25, 0.4, -0.2])  # as the paired t-test
    assert interval([0.5]) == (0.5, None)
    assert interval([0.5], [0.25]) == (0.25, None)
    with pytest.raises(ValueError, match="longer"):
        interval([0.5], [0.5, 0.6])


def test_summaries_are_told_in_percent() -> None:
    lone, two = summarise([0.25]), summarise([0.5, 0.6], [0.4, 0.45])
    assert (tell(lone), tell(None)) == ("25.00", "")
    assert tell(two, "+") == f"+12.50 ± {100 * 12.7062 * 0.025:.2f}"
