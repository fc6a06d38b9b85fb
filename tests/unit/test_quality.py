"""Quality of tables, on tables whose errors, order and outliers are known by construction."""

import math
from collections.abc import Callable

import pytest

from profiler.core.bundle import Table, make_table
from profiler.core.registry import load_model
from profiler.kernels._placement import Ran
from profiler.quality import lines, open_changes, outliers, quality

V32 = load_model("deepseek-ai/DeepSeek-V3.2-Exp")
KV = (64, 1024, 4096, 8192, 16384)


def decode_table(time: Callable[[int, int], float], kv: tuple[int, ...] = KV, name: str = "index_scores") -> Table:
    rows = [(name, 0, 0, n, keys, 1, time(n, keys), 0.01) for n in (1, 2, 4) for keys in kv]
    return make_table("indexer", rows)


def test_a_straight_table_has_no_interpolation_error() -> None:
    found = quality(decode_table(lambda n, kv: 3.0 + 0.001 * n * kv), V32)
    assert found["leave_one_out"]["p90"] == 0.0 and found["leave_one_out"]["cells"] == 3 * 3 + 1 * 5
    assert found["disorder"] == {"pairs": 12, "wrong": 0} and found["outliers"] == 0


def test_the_error_of_a_square_is_that_of_its_chord() -> None:
    """t = x^2 at x = 4096 between 1024 and 8192: the chord is (1024 + 8192) x 4096 - 1024 x 8192."""
    found = quality(decode_table(lambda n, kv: float(kv) ** 2, (1024, 4096, 8192)), V32)
    chord = (1024 + 8192) * 4096 - 1024 * 8192
    assert found["leave_one_out"]["decode_kv_tokens"]["p50"] == pytest.approx(chord / 4096**2 - 1, abs=1e-4)
    assert found["leave_one_out"]["decode_requests"]["p50"] == 0.0


def test_no_line_leads_across_a_change_of_kernel() -> None:
    """Selection works from the first key beyond the top-k; a point on each side closes the gap."""
    step = decode_table(lambda n, kv: 2.0 if kv <= 2048 else 7.0, name="index_topk")
    assert quality(step, V32)["open_changes"] == {"index_topk decode_kv_tokens": 3}
    assert quality(step, V32)["leave_one_out"]["p90"] == 0.0
    closed = decode_table(lambda n, kv: 2.0 if kv <= 2048 else 7.0, (64, 2048, 2049, 8192), "index_topk")
    assert "open_changes" not in quality(closed, V32)
    assert all(open_changes(line) == 0 for line in lines(closed, V32))


def test_a_step_within_one_token_is_a_change_of_kernel_and_no_outlier() -> None:
    rows = [("embedding", n, 12.0 if n <= 16 else 3.0, 0.0) for n in (8, 16, 17, 32)]
    assert outliers(make_table("dense", rows), V32) == ()
    smooth = [("embedding", n, 12.0 if n != 17 else 3.0, 0.0) for n in (8, 16, 18, 32)]
    assert outliers(make_table("dense", smooth), V32) == ()
    wild = [("embedding", n, 12.0 if n != 18 else 3.0, 0.0) for n in (8, 16, 18, 32)]
    table = make_table("dense", wild)
    # The cell beside it is held against it, too.
    assert [table.columns["tokens"][row] for row in outliers(table, V32)] == [16, 18]


def test_a_cell_off_its_neighbours_on_every_axis_is_found() -> None:
    def time(n: int, kv: int) -> float:
        return (3.0 + 0.001 * n * kv) * (2.5 if (n, kv) == (2, 4096) else 1.0)

    table = decode_table(time)
    requests, keys = table.columns["decode_requests"], table.columns["decode_kv_tokens"]
    assert (2, 4096) in [(requests[row], keys[row]) for row in outliers(table, V32)]


def test_more_keys_in_less_time_are_counted_beyond_the_spread() -> None:
    falling = quality(decode_table(lambda n, kv: 10.0 - 0.0001 * kv), V32)
    # 0.096, 0.307, 0.41 and 0.82 of about ten microseconds: three of the four steps are beyond 3 %.
    assert falling["disorder"] == {"pairs": 12, "wrong": 9}


def test_spread_counts_cells_of_twenty_microseconds_and_more() -> None:
    rows = [("lm_head", n, time, spread) for n, time, spread in ((1, 19.0, 0.9), (2, 20.0, 0.02), (4, 30.0, math.nan))]
    assert quality(make_table("per_sequence", rows), V32)["spread_from_20_us"] == {"p50": 0.02, "p90": 0.02, "cells": 1}


def test_no_line_leads_from_one_function_to_another() -> None:
    """What ran tells two kernels apart where neither ran at the other; a gap between them stays open."""
    rows = [("index_topk", 0, 0, n, 4096, 1, time, 0.0) for n, time in ((1, 5.0), (8, 5.0), (16, 9.0), (32, 9.0))]
    table = make_table("indexer", rows)
    functions = {0: ("small", "fill"), 1: ("small", "fill"), 2: ("large", "fill"), 3: ("large", "fill")}
    blind, told = quality(table, V32), quality(table, V32, None, functions)
    assert blind["leave_one_out"]["cells"] == 2 and "open_changes" not in blind
    assert "leave_one_out" not in told and told["open_changes"] == {"index_topk decode_requests": 1}
    # A helper that takes more time at one point is no other kernel.
    helper = functions | {1: ("fill", "small"), 2: ("small", "fill"), 3: ("small", "fill")}
    assert quality(table, V32, None, helper)["leave_one_out"]["cells"] == 2


def test_errors_are_those_of_lookups_along_the_work() -> None:
    """Causal chunks: t = 3 + pairs is off by a half along the length, and exact along the work."""
    rows = [("index_scores", c, 0, 0, 0, 0, 3.0 + c * (c + 1) / 2, 0.0) for c in (64, 256, 1024)]
    table = make_table("indexer", rows)
    assert quality(table, V32)["leave_one_out"]["p50"] > 0.5
    along = quality(table, V32, Ran(sm_count=0, tiles=False, heads=128, cap_tokens=2048))
    assert along["leave_one_out"]["p50"] == 0.0
