"""Objectives against requests whose times are written by hand; percentiles against numpy's."""

import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.core.errors import ConfigError
from serving.core.runlog import RequestRecord
from serving.result import Result
from serving.sweeps.intervals import mean_and_halfwidth
from serving.sweeps.slo import Slo, judge, percentile_of, slo_of
from serving.traces import Trace, TraceRequest

MS = 1_000_000


def record(**known):
    """A record with these fields; counts are 0 and times None otherwise."""
    counts = ("emitted_tokens", "preemptions", "prefix_hit_tokens")
    blank = {field.name: 0 if field.name in counts else None for field in fields(RequestRecord)}
    return RequestRecord(**blank | known)


def result_of(rows):
    """rows: (arrival, first token, finish, output tokens) in ms; None for a request that never finished."""
    asked, got, gaps = [], [], []
    for number, row in enumerate(rows):
        if row is None:
            asked.append(TraceRequest(str(number), 0, 10, 5))
            got.append(record(index=number, outcome="rejected", engine_index=-1, emitted_tokens=0))
            continue
        arrival, first, finish, output = row
        gap = round((finish - first) / (output - 1) * MS) if output > 1 else None
        gaps += [gap] * (output - 1)
        asked.append(TraceRequest(str(number), arrival * MS, 10, output))
        times = {
            "queued_ns": arrival * MS,
            "scheduled_ns": arrival * MS,
            "first_token_ns": first * MS,
            "finish_ns": finish * MS,
        }
        gaps_of = {"itl_p50_ns": gap, "itl_p99_ns": gap}
        got.append(record(index=number, outcome="finished", engine_index=0, emitted_tokens=output, **times, **gaps_of))
    return Result(
        cluster="c", router="r", trace=Trace("t", tuple(asked)), records=tuple(got), gaps_ns=(gaps, [1] * len(gaps)),
        deployments=(), steps=0, extrapolated_lookups=0, seed=0, horizon_ns=None,
    )  # fmt: skip


# TTFT 10, 20, 30, 40 ms; TPOT 5, 10, 15, 20 ms
ROWS = [(n, n + 10 * (n + 1), n + 10 * (n + 1) + 20 * (n + 1), 5) for n in range(4)]


def test_percentiles_are_numpys():
    found = judge(Slo(ttft_ms=40, tpot_ms=12, percentile=90), result_of(ROWS))
    assert found.attained_ms["ttft_ms"] == pytest.approx(np.percentile([10, 20, 30, 40], 90))
    assert found.attained_ms["tpot_ms"] == pytest.approx(np.percentile([5, 10, 15, 20], 90))
    assert not found.met and found.limiting == "tpot_ms"
    assert found.worst_ratio == pytest.approx(np.percentile([5, 10, 15, 20], 90) / 12)


def test_goodput_counts_requests_that_keep_every_bound():
    slo = Slo(ttft_ms=30, tpot_ms=10, goodput_share=0.5)
    found = judge(slo, result_of(ROWS))
    assert (found.good, found.good_share, found.met) == (2, 0.5, True)
    assert found.goodput_per_s == pytest.approx(2 / 0.123)  # the last finish is at 3 + 40 + 80 ms
    assert not judge(Slo(ttft_ms=30, tpot_ms=10, goodput_share=0.51), result_of(ROWS)).met


def test_a_rejected_request_breaks_every_bound():
    found = judge(Slo(ttft_ms=1e9, percentile=99), result_of([*ROWS, None]))
    assert not found.met and math.isinf(found.attained_ms["ttft_ms"])
    assert judge(Slo(ttft_ms=1e9, percentile=50), result_of([*ROWS, None])).met
    assert judge(Slo(ttft_ms=1e9, goodput_share=0.8), result_of([*ROWS, None])).met


def test_single_tokens_have_no_time_between_tokens():
    found = judge(Slo(ttft_ms=100, tpot_ms=1, itl_ms=1, percentile=99), result_of([(0, 5, 5, 1)]))
    assert found.met and found.attained_ms["tpot_ms"] == 0.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentile_of_equals_numpy(values, percent):
    assert percentile_of(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "needs a bound"),
        ({"ttft_ms": 5}, "one of percentile .* and goodput_share"),
        ({"ttft_ms": 5, "percentile": 99, "goodput_share": 0.9}, "one of percentile"),
        ({"tpot_ms": 5, "percentile": 99}, "wait for ever"),
        ({"ttft_ms": -1, "percentile": 99}, "above 0"),
        ({"ttft_ms": True, "percentile": 99}, "above 0"),
        ({"ttft_ms": float("nan"), "percentile": 99}, "above 0"),
        ({"ttft_ms": 5, "percentile": 0.99}, "between 50 and 100"),
        ({"ttft_ms": 5, "goodput_share": 95}, "at most 1"),
        ({"ttft_ms": 50, "e2e_ms": 5, "percentile": 99}, "below ttft_ms"),
        ({"ttft": 5, "percentile": 99}, "did you mean 'ttft_ms'"),
    ],
)
def test_contradictions_are_refused_with_the_place(values, message):
    with pytest.raises(ConfigError, match=message):
        slo_of(values, "spec.yaml: slo")


def test_interval_is_students():
    # 2.776 is the 97.5 % quantile of t with 4 degrees of freedom in any table
    assert mean_and_halfwidth([1, 2, 3, 4, 5]) == (3, pytest.approx(2.776 * math.sqrt(2.5) / math.sqrt(5)))
    assert mean_and_halfwidth([2.0]) == (2.0, None)
