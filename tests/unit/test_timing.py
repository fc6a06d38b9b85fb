"""Statistics and timers."""

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.timing import cpu_timer, median, percentile, spread_rel

values = st.lists(st.floats(min_value=0.001, max_value=1e6), min_size=1, max_size=40)


@given(values, st.floats(min_value=0, max_value=100))
def test_percentiles_are_those_of_numpy(numbers: list[float], q: float) -> None:
    assert percentile(numbers, q) == pytest.approx(float(np.percentile(numbers, q)), rel=1e-9)


@given(values)
def test_the_median_does_not_depend_on_order(numbers: list[float]) -> None:
    assert median(numbers) == median(sorted(numbers, reverse=True))


def test_spread_is_the_inner_eighty_percent_over_the_median() -> None:
    assert spread_rel([float(n) for n in range(1, 12)]) == pytest.approx((10 - 2) / 6)
    assert spread_rel([5.0, 5.0, 5.0]) == 0.0
    assert math.isnan(spread_rel([3.0]))


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="at least one"):
        median([])


def test_the_cpu_timer_counts_calls_and_measures_them() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        time.sleep(0.002)

    times = cpu_timer(flush_bytes=1024)(call, 2, 3)
    assert len(calls) == 5 and len(times) == 3
    assert all(1_900 < t < 500_000 for t in times)
