"""Means and intervals against scipy's own, and what pairing takes out of them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from training.evaluation.paired import interval, paired, summarise, tell

SHARES = st.floats(min_value=0, max_value=1, width=32)


@given(st.lists(SHARES, min_size=2, max_size=30), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_interval_is_scipys(values: list[float], confidence: float) -> None:
    mean, half = interval(values, confidence=confidence)
    spread = stats.sem(values)
    assert mean == pytest.approx(np.mean(values))
    if spread == 0:
        assert half == 0
    else:
        low, high = stats.t.interval(confidence, len(values) - 1, loc=np.mean(values), scale=spread)
        assert half == pytest.approx((high - low) / 2, rel=1e-6)


@given(st.lists(st.tuples(SHARES, SHARES), min_size=3, max_size=20))
def test_the_paired_interval_leaves_out_zero_where_the_paired_t_test_does(
    pairs: list[tuple[float, float]],
) -> None:
    first, second = ([pair[place] for pair in pairs] for place in (0, 1))
    differences = np.subtract(first, second)
    mean, half = paired(first, second)
    assert half is not None
    assert mean == pytest.approx(differences.mean(), abs=1e-12)
    if differences.std() > 1e-6:
        found = stats.ttest_rel(first, second)
        low, high = found.confidence_interval(0.95)
        assert (mean - half, mean + half) == pytest.approx((low, high), rel=1e-6, abs=1e-9)
        assert (found.pvalue < 0.05) == (abs(mean) > half) or math.isclose(abs(mean), half, rel_tol=1e-9)


def test_what_a_pair_shares_drops_out() -> None:
    seeds = np.array([0.30, 0.50, 0.70, 0.90])
    better = np.add(seeds, (0.010, 0.012, 0.011, 0.011))
    mean, half = paired(better.tolist(), seeds.tolist())
    assert mean == pytest.approx(0.011)
    assert half is not None
    assert half < mean  # while each mean by itself is known no better than to 0.4
    assert paired(seeds.tolist(), better.tolist())[0] == pytest.approx(-mean)


def test_one_value_has_no_interval_and_none_is_refused() -> None:
    assert interval([0.5]) == (0.5, None)
    assert paired([0.5], [0.25]) == (0.25, None)
    with pytest.raises(ValueError, match="no value"):
        interval([])
    with pytest.raises(ValueError, match="2 and 1"):
        paired([0.5, 0.6], [0.5])


def test_summaries_are_told_in_percent() -> None:
    lone, two = summarise([0.25]), summarise([0.5, 0.6], [0.4, 0.45])
    assert (tell(lone), tell(None)) == ("25.00", "")
    assert tell(two, "+") == f"+12.50 ± {100 * 12.7062 * 0.025:.2f}"
