from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.core.bundle import make_table
from profiler.core.errors import CoverageError
from profiler.core.grid import (
    BatchRow,
    Outside,
    batch_rows,
    curve,
    decode_grid,
    equal_end,
    fixed_us,
    make_grid,
    prefill_grid,
)
from profiler.core.grid_mixed import mixed_grid
from profiler.core.grid_moe import moe_grid, natural_experts

COMMAND = "python -m profiler profile acme/Tiny --hardware H200 --tp 1 --categories x"


def outside(allow: bool = False) -> Outside:
    return Outside("kernel", COMMAND, allow)


def batch(chunk: int, context: int, requests: int, kv: int, time_us: float) -> BatchRow:
    return BatchRow(chunk, context, requests, kv, time_us)


def test_curve_is_linear_between_its_points() -> None:
    table = make_table("dense", [("a", 1, 5.0, 0), ("a", 10, 14.0, 0), ("a", 20, 34.0, 0), ("b", 1, 99.0, 0)])
    found = curve(table, "a", outside())
    assert [found.at(x) for x in (1, 4, 10, 15, 20)] == [5.0, 8.0, 14.0, 24.0, 34.0]


def test_curve_refuses_what_lies_outside_and_names_the_option_that_extends_it() -> None:
    table = make_table("dense", [("a", 1, 5.0, 0), ("a", 10, 14.0, 0)])
    with pytest.raises(CoverageError, match=r"kernel: tokens 11 is outside.*1 to 10.*--max-num-batched-tokens 11$"):
        curve(table, "a", outside()).at(11)
    with pytest.raises(CoverageError, match=r"no measured points.*--categories x"):
        curve(table, "c", outside())


def test_contexts_that_the_command_cannot_measure_have_another() -> None:
    """Tables of a model of the same kernels and a shorter context."""
    out = Outside("kernel", COMMAND, longest_tokens=1024, instead="python -m profiler profile acme/Long")
    with pytest.raises(CoverageError, match=r"of at most 1,024 tokens. .* profile acme/Long$"):
        out.refuse([("decode_requests", 1), ("decode_kv_tokens", 1025)], "-")
    with pytest.raises(CoverageError, match=r"--categories x --max-num-seqs 1 --max-model-len 1024$"):
        out.refuse([("decode_requests", 1), ("decode_kv_tokens", 1024)], "-")


def test_extrapolation_is_linear_and_counted() -> None:
    table = make_table("dense", [("a", 1, 5.0, 0), ("a", 10, 14.0, 0)])
    beyond = outside(allow=True)
    found = curve(table, "a", beyond)
    assert found.at(20) == 24.0
    assert found.at(5) == 9.0
    assert beyond.extrapolated == {"kernel": 1}


# A cost that is linear in each coordinate and in their product is reproduced exactly: batched attention over
# requests x keys is one.
@given(n=st.integers(1, 256), kv=st.integers(16, 16384))
def test_decode_lookup_is_exact_for_work_proportional_to_keys(n: int, kv: int) -> None:
    def cost(n: float, kv: float) -> float:
        return 4.0 + 0.05 * n + 0.002 * n * kv

    rows = [batch(0, 0, n, kv, cost(n, kv)) for n, kv in product((1, 2, 8, 64, 256), (16, 100, 5000, 16384))]
    assert decode_grid(rows, outside()).at(n, kv) == pytest.approx(cost(n, kv))


@given(n=st.integers(1, 64), total=st.integers(64, 65536))
def test_ragged_decode_is_read_at_equal_total_keys(n: int, total: int) -> None:
    """Rows end where the cache is full: requests x keys <= 65,536."""

    def cost(n: float, kv: float) -> float:
        return 4.0 + 0.05 * n + 0.002 * n * kv

    rows = [
        batch(0, 0, n, kv, cost(n, kv))
        for n, kv in product((1, 4, 16, 64), (1, 64, 256, 1024, 4096, 16384, 65536))
        if n * kv <= 65536
    ]
    grid = decode_grid(rows, outside())
    assert not grid.rectangular
    assert grid.at(n, total / n) == pytest.approx(cost(n, total / n))
    with pytest.raises(CoverageError, match="decode_kv_tokens"):
        grid.at(n, 65537 / n + 1)


def test_ragged_prefill_is_read_at_equal_end() -> None:
    def cost(chunk: float, context: float) -> float:
        return 3.0 + 0.1 * chunk + 0.01 * context

    rows = [
        batch(c, k, 0, 0, cost(c, k)) for c, k in product((16, 512, 1024), (0, 1024, 3072, 3584, 4080)) if c + k <= 4096
    ]
    grid = prefill_grid(rows, outside())
    # 700 + 3,300 ends within 4,096, but the row of 1,024 tokens stops at a context of 3,072.
    assert grid.at(700, 3300) == pytest.approx(cost(700, 3300), rel=0.01)
    assert grid.covers(700, 3300) and not grid.covers(700, 3500)
    with pytest.raises(CoverageError, match=r"--max-num-batched-tokens 700 --max-model-len 4200$"):
        grid.at(700, 3500)


def test_less_than_a_tile_or_a_block_of_keys_costs_a_whole_one() -> None:
    rows = [batch(c, k, 0, 0, c + k) for c, k in product((16, 32), (0, 100))]
    rows += [batch(0, 0, n, kv, n * kv) for n, kv in product((1, 2), (16, 32))]
    assert prefill_grid(rows, outside()).at(3, 0) == 16
    assert decode_grid(rows, outside()).at(1, 5) == 16
    large = [batch(c, 0, 0, 0, c) for c in (64, 128)] + [batch(0, 0, n, kv, n) for n, kv in product((2, 4), (64, 128))]
    with pytest.raises(CoverageError):
        prefill_grid(large, outside()).at(63, 0)
    assert decode_grid(large, outside()).at(2, 63) == 2, "a decode reads whole blocks of 64 keys"
    with pytest.raises(CoverageError):
        decode_grid([batch(0, 0, n, kv, n) for n, kv in product((2, 4), (128, 256))], outside()).at(2, 127)
    with pytest.raises(CoverageError):
        decode_grid(large, outside()).at(1, 64)


def test_grid_without_points_names_the_kernel_and_the_command() -> None:
    with pytest.raises(CoverageError, match=r"kernel: no measured points.*python -m profiler profile"):
        prefill_grid([], outside())


def test_fixed_part_is_the_intercept_of_the_smallest_chunks() -> None:
    rows = [batch(c, k, 0, 0, 7.0 + 0.5 * c + k) for c, k in product((16, 64, 128), (0, 64))]
    assert fixed_us(prefill_grid(rows, outside())) == pytest.approx(7.0)
    falling = [batch(16, 0, 0, 0, 9.0), batch(64, 0, 0, 0, 6.0)]
    assert fixed_us(prefill_grid(falling, outside())) == pytest.approx(6.0)


@settings(max_examples=50)
@given(
    st.lists(st.floats(1, 1e4), min_size=9, max_size=9),
    st.floats(1, 100),
    st.floats(0, 1000),
)
def test_lookup_stays_within_the_measured_times(times: list[float], x: float, y: float) -> None:
    points = [(float(a), float(b), t) for (a, b), t in zip(product((1, 10, 100), (0, 10, 1000)), times, strict=True)]
    grid = make_grid(("x", "y"), points, equal_end, outside())
    assert min(times) - 1e-6 <= grid.at(x, y) <= max(times) + 1e-6
    for a, b, t in points:
        assert grid.at(a, b) == pytest.approx(t)


def test_table_rows_of_one_kernel_never_answer_for_another() -> None:
    rows = [("scores", 16, 0, 0, 0, 0, 5.0, 0), ("topk", 16, 0, 0, 0, 0, 9.0, 0), ("topk", 0, 0, 1, 16, 2, 7.0, 0)]
    table = make_table("indexer", rows)
    assert [row.time_us for row in batch_rows(table, "scores")] == [5.0]
    assert [row.time_us for row in batch_rows(table, "topk")] == [9.0]
    assert [row.time_us for row in batch_rows(table, "topk", decode_query_tokens=2)] == [7.0, 9.0]


def mixed_cost(c: float, k: float, n: float, kv: float) -> float:
    return 5.0 + 0.01 * c + 0.0001 * c * k + 0.001 * n * kv + 0.02 * n


@given(c=st.integers(16, 256), k=st.integers(0, 4096), n=st.integers(1, 32), kv=st.integers(16, 4096))
def test_mixed_lookup_is_exact_for_multilinear_cost(c: int, k: int, n: int, kv: int) -> None:
    axes = (16, 64, 256), (0, 512, 4096), (1, 8, 32), (16, 700, 4096)
    grid = mixed_grid([batch(*point, mixed_cost(*point)) for point in product(*axes)], outside())
    assert grid is not None
    assert grid.at(c, k, n, kv) == pytest.approx(mixed_cost(c, k, n, kv))


def test_mixed_tables_of_two_overlaid_rectangles() -> None:
    coarse = product((16, 64), (0, 16, 512, 4096), (1, 8), (16, 512, 4096))
    fine = product((16, 40, 64), (0, 512, 1000, 4096), (1, 8), (512, 1000, 4096))
    points = dict.fromkeys([*coarse, *fine])
    grid = mixed_grid([batch(*point, mixed_cost(*point)) for point in points], outside())
    assert grid is not None
    # Below 512 keys only the coarse rectangle answers, and the chunk of 40 tokens is not in it.
    for point in ((40, 300, 4, 100), (40, 300, 4, 600), (50, 2000, 8, 4096), (16, 8, 1, 16), (3, 0, 1, 5)):
        c, k, n, kv = point
        assert grid.at(*point) == pytest.approx(mixed_cost(max(c, 16), k, n, max(kv, 16)))
    with pytest.raises(CoverageError, match="decode_requests 9"):
        grid.at(16, 0, 9, 16)
    with pytest.raises(CoverageError, match="prefill_chunk_tokens 65"):
        grid.at(65, 0, 8, 16)


def test_no_mixed_rows_no_mixed_grid() -> None:
    assert mixed_grid([batch(16, 0, 0, 0, 1.0), batch(0, 0, 1, 16, 1.0)], outside()) is None


def test_natural_experts_against_its_closed_form() -> None:
    assert natural_experts(32, 1) == pytest.approx(1.0)
    assert natural_experts(32, 2) == pytest.approx(1 + 31 / 32)
    assert natural_experts(1, 5) == 1.0
    assert natural_experts(32, 10_000) == pytest.approx(32.0)


def test_experts_measured_with_forced_counts() -> None:
    rows = [
        ("experts", 1, tokens, n, tokens * 8, 10.0 * n + 0.1 * tokens * 8, 0)
        for tokens, n in product((1, 4, 16, 64), (8, 16, 32, 64))
        if n <= 8 * tokens
    ]
    grid = moe_grid(make_table("moe", rows), "experts", 1, 64, outside())
    assert grid.at(128, 32) == pytest.approx(10 * 32 + 12.8)
    assert grid.at(300, 20) == pytest.approx(10 * 20 + 30)
    assert grid.at(128, 0) == 0.0
    assert 0 < grid.at(4, 4) < grid.at(8, 8)


def test_experts_measured_with_drawn_counts() -> None:
    """One draw per token count, as realistic routing gives it: time follows the weights that are read."""
    draws = {8: (7, 8), 64: (28, 64), 512: (32, 512), 4096: (32, 4096)}
    rows = [("experts", 8, tokens, n, pairs, 12.0 * n + 0.05 * pairs, 0) for tokens, (n, pairs) in draws.items()]
    grid = moe_grid(make_table("moe", rows), "experts", 8, 32, outside())
    for pairs, (n, _) in ((8, draws[8]), (64, draws[64]), (4096, draws[4096])):
        assert grid.at(pairs, n) == pytest.approx(12.0 * n + 0.05 * pairs)
    expected = natural_experts(32, 64)
    assert grid.at(64, expected) == pytest.approx(12 * expected + 3.2, rel=0.01)
    assert grid.at(20, natural_experts(32, 20)) == pytest.approx(12 * natural_experts(32, 20), rel=0.15)
    with pytest.raises(CoverageError, match=r"local_pairs 5000, .* a lower max_num_batched_tokens makes them fewer"):
        grid.at(5000, 32)
    with pytest.raises(CoverageError, match=r"no rows for ep 4; measured: 8\..*--ep 4$"):
        moe_grid(make_table("moe", rows), "experts", 4, 64, outside())


def test_rows_between_uneven_draws_know_what_few_experts_cost() -> None:
    """Time is the weights read or, where few experts have many pairs, the pairs computed: 10 us each, 0.05 us each."""

    def us(experts: float, pairs: float) -> float:
        return max(10.0 * experts, 0.05 * pairs)

    even = {tokens: min(256.0, 8.0 * tokens) for tokens in (1, 16, 64, 256, 1024, 4096, 8192)}
    rows = [("experts", 1, n, reached, 8 * n, us(reached, 8 * n), 0) for n, reached in even.items()]
    uneven = [("experts", 1, n, 32, 8 * n, us(32, 8 * n), 0) for n in (256, 4096)]
    grid = moe_grid(make_table("moe", rows + uneven), "experts", 1, 256, outside())
    for tokens, reached in even.items():
        assert grid.at(8 * tokens, reached) == pytest.approx(us(reached, 8 * tokens)), "measured"
    assert grid.at(8 * 4096, 32) == pytest.approx(us(32, 8 * 4096)), "measured"
    between = us(32, 8 * 256) + (us(32, 8 * 4096) - us(32, 8 * 256)) * (1024 - 256) / (4096 - 256)
    assert grid.at(8 * 1024, 32) == pytest.approx(between), "straight in the pairs"
    assert grid.at(8 * 8192, 32) > 0.6 * us(256, 8 * 8192), "computing is not a share of the experts"
    alone = moe_grid(make_table("moe", rows), "experts", 1, 256, outside())
    assert alone.at(8 * 8192, 32) == pytest.approx(us(256, 8 * 8192) / 8)


def test_a_draw_of_other_pairs_tells_nothing_of_other_rows() -> None:
    """A slice's uneven draw has pairs of its own: how many experts and how many pairs cannot be told apart."""
    rows = [("experts", 8, n, 16, n, 200.0 + n, 0) for n in (16, 64, 256)]
    uneven = [("experts", 8, 64, 2, 40, 150.0, 0)]
    grids = [moe_grid(make_table("moe", one), "experts", 8, 16, outside()) for one in (rows, rows + uneven)]
    for pairs in (16, 256):
        assert grids[0].at(pairs, 4) == grids[1].at(pairs, 4)


def test_rows_of_draws_stand_in_the_order_of_their_tokens() -> None:
    """A larger batch may draw fewer pairs, and larger tiles take longer: 64 and 65 tokens, as measured."""
    draws = [
        (48, 50, 96, 557.0),
        (64, 56, 127, 625.5),
        (65, 57, 124, 739.1),
        (96, 62, 186, 806.9),
        (97, 61, 206, 790.3),
    ]
    rows = [("experts", 4, tokens, experts, pairs, us, 0) for tokens, experts, pairs, us in draws]
    grid = moe_grid(make_table("moe", rows), "experts", 4, 64, outside())
    assert grid.at(128, 56) == pytest.approx(625.5)
    assert grid.at(130, 57) == pytest.approx(739.1)
    assert 557 < grid.at(2 * 60, 55) < 625.5, "below the larger tiles"
    assert grid.at(194, 61) == pytest.approx(790.3), "the last row stands where an even load of its tokens does"


def test_a_draw_of_few_experts_does_not_hide_what_its_neighbours_say() -> None:
    """Five pairs reach 4.7 of 32 experts on average; the one draw of five that was measured reached three."""
    draws = [(4, 4, 80.6), (5, 3, 73.6), (8, 7, 104.6), (64, 31, 429.6)]
    rows = [("experts", 8, tokens, experts, tokens, us, 0) for tokens, experts, us in draws]
    grid = moe_grid(make_table("moe", rows), "experts", 8, 32, outside())
    usual = natural_experts(32, 5)
    assert grid.at(5, 3) == pytest.approx(73.6), "measured"
    assert grid.at(5, usual) == pytest.approx(80.6 + (104.6 - 80.6) * (usual - 4) / 3)
    assert grid.at(6, natural_experts(32, 6)) < 104.6


def test_the_corner_of_a_triangular_table_is_inside() -> None:
    """Chunk + context up to 2048: the last cell has one point on its far side. Linear functions stay exact."""
    points = [(x, y, 3.0 + 2 * x + 5 * y) for x in (512.0, 1024.0, 2048.0) for y in (0.0, 512.0, 1024.0, 1536.0)]
    corner = make_grid(("a", "b"), [p for p in points if p[0] + p[1] <= 2048], equal_end, Outside("k", "measure"))
    for x, y in ((1549.0, 274.0), (1100.0, 900.0), (2000.0, 48.0), (1536.0, 512.0)):
        assert corner.covers(x, y)
        assert corner.at(x, y) == pytest.approx(3 + 2 * x + 5 * y)
    for x, y in ((1549.0, 500.0), (2048.0, 1.0), (1536.0, 513.0)):
        assert not corner.covers(x, y)
        with pytest.raises(CoverageError):
            corner.at(x, y)
