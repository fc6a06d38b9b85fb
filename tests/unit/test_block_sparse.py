"""How block-sparse kernels and grouped-query attention divide their work, against tiles one by one and an H200."""

import math
from heapq import heapreplace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.core.grid import BatchRow, Outside, decode_grid, prefill_grid
from profiler.core.grid_work import DecodeWork, PrefillWork, Work, in_waves
from profiler.core.registry import load_model
from profiler.kernels._block_sparse import _TILE, PicksWork, ScoreWork, TopkWork
from profiler.kernels._breaks import breaks, jumps
from profiler.kernels._flash_attention import GroupedWork
from profiler.kernels._placement import Ran, decode_straight, prefill_straight, ran_of
from profiler.kernels._unequal import together_of

OUT = Outside("kernel", "python -m profiler profile")
M3 = load_model("MiniMaxAI/MiniMax-M3")
META = {
    "provenance": "measured",
    "hardware": "H200",
    "engine": {"name": "vllm"},
    "kv": {"layout": "bf16"},
}


def ran(tp: int, **other: object) -> Ran:
    found = ran_of(META | other, M3, tp)
    assert found is not None
    return found


def one_by_one(lengths: list[float], slots: int) -> float:
    ends = [0.0] * slots
    for length in lengths:
        heapreplace(ends, ends[0] + length)
    return max(ends)


@settings(max_examples=50, deadline=None)
@given(pairs=st.integers(1, 128), context=st.integers(0, 500_000), heads=st.sampled_from((4, 2, 1)))
def test_scores_of_a_chunk_are_its_tiles_head_by_head(pairs: int, context: int, heads: int) -> None:
    lengths = [(context + 128 * (pair + 1)) / 128 + _TILE for _ in range(heads) for pair in range(pairs) for _ in "ab"]
    assert ScoreWork(132, heads, 128).prefill(128 * pairs, context) == pytest.approx(one_by_one(lengths, 264))


@settings(max_examples=50, deadline=None)
@given(chunk=st.integers(1, 9000), context=st.integers(0, 40_000))
def test_sorts_of_a_chunk_are_those_of_its_queries(chunk: int, context: int) -> None:
    by_hand = sum(math.ceil((context + query) / 128 / 64 - 1e-9) for query in range(1, chunk + 1))
    # A query that fills its last sort is counted with the next.
    assert TopkWork(4, 128).prefill(chunk, context) == pytest.approx(by_hand, abs=chunk / 8192 + 2)


def test_sorts_of_decodes_come_with_the_parts_of_a_row() -> None:
    work = TopkWork(4, 128)
    assert [work.decode(n, 524_288) for n in (1, 2, 4, 5, 8, 9, 16, 64)] == [4, 8, 16, 32, 32, 64, 64, 64]
    assert [work.decode(1, keys) for keys in (64, 131_072, 131_073, 262_144)] == [1, 1, 2, 2]
    # One head: as many parts for four times the requests.
    assert all(TopkWork(1, 128).decode(4 * n, 300_000) == work.decode(n, 300_000) for n in (1, 2, 5, 8, 40))
    assert list(work.decode_bends(16, 1e6))[:3] == [8192, 8193, 16_384]


@pytest.mark.parametrize(
    ("tp", "last", "next_"),
    [(1, 264, 265), (2, 528, 529), (4, 1056, 1057), (8, 2112, 2113)],
)
def test_grouped_attention_steps_where_a_wave_of_tiles_is_full(tp: int, last: int, next_: int) -> None:
    work = prefill_straight("attention", ran(tp))
    assert isinstance(work, GroupedWork)
    assert work.prefill(next_, 500_000) > 1.9 * work.prefill(last, 500_000)
    assert work.prefill(last, 500_000) < 1.01 * work.prefill(int(0.9 * last), 500_000)


# Microseconds on an H200, tp 1: cells at both ends, and cells between them that they shall give.
SCORES = {(2048, 8192): 112.5, (8192, 8192): 392.9, (2048, 131_072): 1465.7, (8192, 131_072): 3495.2}
ATTENTION = {(1, 131_072): 81.5, (64, 131_072): 413.4, (129, 131_072): 1541.7, (512, 131_072): 2937.7}
ATTENTION |= {(1, 524_288): 271.2, (64, 524_288): 1573.6, (129, 524_288): 6056.7, (512, 524_288): 11_715.7}
TOPK = {(8, 131_072): 16.3, (32, 131_072): 33.2, (8, 524_288): 62.3, (32, 524_288): 121.5}


@pytest.mark.parametrize(
    ("work", "cells", "between", "within"),
    [
        (ScoreWork(132, 4, 128), SCORES, {(4096, 8192): 140.9, (4096, 131_072): 1541.0}, 0.1),
        (
            GroupedWork(132, 64, 4),
            ATTENTION,
            {(16, 131_072): 135.4, (16, 524_288): 448.7, (256, 131_072): 1471.4, (257, 524_288): 5885.7},
            0.1,
        ),
    ],
)
def test_measured_chunks_lie_where_the_tiles_put_them(
    work: PrefillWork, cells: dict[tuple[int, int], float], between: dict[tuple[int, int], float], within: float
) -> None:
    rows = [BatchRow(chunk, context, 0, 0, us) for (chunk, context), us in cells.items()]
    by_tiles, by_keys = prefill_grid(rows, OUT, work), prefill_grid(rows, OUT, Work())
    for (chunk, context), us in between.items():
        assert by_tiles.at(chunk, context) == pytest.approx(us, rel=within)
    assert any(abs(by_keys.at(*at) / us - 1) > 0.25 for at, us in between.items())


def test_measured_selections_of_decodes_lie_where_the_parts_put_them() -> None:
    work: DecodeWork = TopkWork(4, 128)
    grid = decode_grid([BatchRow(0, 0, n, keys, us) for (n, keys), us in TOPK.items()], OUT, work)
    assert grid.at(16, 131_072) == pytest.approx(30.4, rel=0.1)
    assert grid.at(16, 524_288) == pytest.approx(121.2, rel=0.1)
    plain = decode_grid([BatchRow(0, 0, n, keys, us) for (n, keys), us in TOPK.items()], OUT)
    assert plain.at(16, 524_288) < 0.7 * 121.2


def test_which_kernels_follow_these_rules() -> None:
    one, eight = ran(1), ran(8)
    assert prefill_straight("block_scores", one) == ScoreWork(132, 4, 128)
    assert prefill_straight("block_scores", eight) == prefill_straight("block_scores", ran(4)) == ScoreWork(132, 1, 128)
    assert prefill_straight("block_topk", one) == TopkWork(4, 128) and decode_straight("block_topk", one) == TopkWork(
        4, 128
    )
    picks = PicksWork(132, 4, 128, 2048)
    assert prefill_straight("sparse_gqa", one) == picks and decode_straight("sparse_gqa", one) == picks
    assert prefill_straight("attention", eight) == GroupedWork(132, 8, 1) == decode_straight("attention", eight)
    for other in ({"engine": {"name": "reference"}}, {"hardware": "RTXPRO6000"}, {"provenance": "projected"}):
        elsewhere = ran(1, **other)
        for name in ("block_scores", "block_topk", "attention"):
            assert prefill_straight(name, elsewhere) == Work() and decode_straight(name, elsewhere) is None
        assert prefill_straight("sparse_gqa", elsewhere) == Work(cap_keys=2048)
        assert decode_straight("sparse_gqa", elsewhere) is None
    assert prefill_straight("attention", ran(1, kv={"layout": "fp8"})) == Work(), "tiles of fp8 are others"


def test_tiles_of_a_wave_are_faster_the_fewer_they_are() -> None:
    first, later = ((0.0, 0.3), (0.5, 0.6), (0.5, 0.7), (1.0, 1.0)), ((0.0, 0.4), (1.0, 1.0))
    assert in_waves(132, 264, first, later) == pytest.approx(0.6)
    assert 0.7 < in_waves(133, 264, first, later) < 0.71, "one multiprocessor has two"
    assert in_waves(264, 264, first, later) == 1.0
    assert in_waves(396, 264, first, later) == pytest.approx(1.7)
    assert [in_waves(n * 264, 264, first, later) for n in range(4)] == [0, 1, 2, 3]


# Sparse attention of an H200, bf16, tp 8 (one head) and tp 1 (four heads): (requests, keys) and microseconds.
PICKS_TP8 = {(48, 16384): 20.3, (64, 16384): 23.0, (66, 16384): 26.5, (128, 16384): 37.9, (133, 16384): 48.1}
PICKS_TP8 |= {(48, 1024): 15.7, (66, 1024): 24.2, (96, 1024): 24.4}
PICKS_TP1 = {(64, 16384): 69.4, (67, 16384): 99.8, (132, 16384): 140.2, (192, 16384): 197.4}


def test_picks_of_decodes_are_divided_over_a_fixed_grid() -> None:
    one, four = PicksWork(132, 1, 128, 2048), PicksWork(132, 4, 128, 2048)
    assert [one._part_keys(n) // 128 for n in (16, 17, 64, 65, 128, 129, 256)] == [1, 2, 4, 8, 8, 16, 16]
    assert [four._part_keys(n) // 128 for n in (4, 5, 16, 17, 64)] == [1, 2, 4, 8, 16]
    assert list(one.decode_bends(64, 4096)) == [512, 513, 1024, 1025, 1536, 1537, 2048]
    for work, cells in ((one, PICKS_TP8), (four, PICKS_TP1)):
        grid = decode_grid([BatchRow(0, 0, n, keys, us) for (n, keys), us in cells.items()], OUT, work)
        for (n, keys), us in cells.items():
            assert grid.at(n, keys) == us
    grid = decode_grid([BatchRow(0, 0, n, k, us) for (n, k), us in PICKS_TP8.items() if n != 64], OUT, one)
    assert grid.at(64, 16384) == pytest.approx(23.0, rel=0.05)
    assert grid.at(64, 1024) == pytest.approx(17.0, rel=0.1), "two parts of four picks, as with 48 requests"
    grid = decode_grid([BatchRow(0, 0, n, k, us) for (n, k), us in PICKS_TP1.items() if n != 132], OUT, four)
    assert grid.at(132, 16384) == pytest.approx(140.2, rel=0.05)


def test_a_chunk_of_picks_runs_in_waves_of_two_for_each_multiprocessor() -> None:
    """tp 4 and 8 of an H200, behind 4,096 keys: 257 tokens 40.8 us, 384 67.5, 512 73.7."""
    rows = [BatchRow(n, 4096, 0, 0, us) for n, us in ((2, 29.4), (257, 40.8), (512, 73.7), (1024, 140.4))]
    grid = prefill_grid(rows, OUT, PicksWork(132, 1, 128, 2048))
    assert grid.at(384, 4096) == pytest.approx(67.5, rel=0.05)
    assert prefill_grid(rows, OUT, Work(cap_keys=2048)).at(384, 4096) == pytest.approx(57.2, rel=0.05)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from((1, 2, 4)), st.integers(1, 20_000), st.integers(0, 100_000))
def test_more_of_a_chunk_is_never_less_work(heads: int, chunk: int, context: int) -> None:
    work = PicksWork(132, heads, 128, 2048)
    assert work.prefill(chunk, context) <= work.prefill(chunk + 1, context) * (1 + 1e-9)
    assert work.prefill(chunk, context) <= work.prefill(chunk, context + 1) * (1 + 1e-9)


# Grouped-query attention over 131,072 keys, tp 4 and 8 (one head of the cache): microseconds by requests.
DECODES = {16: 253.1, 24: 387.2, 32: 488.1, 34: 736.1, 48: 984.6, 64: 955.7, 67: 1436.3, 96: 1586.4, 128: 1883.2}


@pytest.mark.parametrize("left_out", [24, 34, 48, 64, 96])
def test_decodes_of_grouped_attention_lie_where_the_waves_of_their_parts_put_them(left_out: int) -> None:
    rows = [BatchRow(0, 0, n, keys, us * keys / 131_072) for n, us in DECODES.items() for keys in (65_536, 131_072)]
    kept = [row for row in rows if row.requests != left_out]
    grid = decode_grid(kept, OUT, GroupedWork(132, 16, 1))
    assert grid.at(left_out, 131_072) == pytest.approx(DECODES[left_out], rel=0.07)


def test_one_new_token_is_a_decode_and_no_kernel_but_attention_bends_at_the_cap() -> None:
    for name in ("block_scores", "block_topk", "sparse_gqa"):
        assert breaks(M3, name, "prefill_chunk_tokens", 0) == (1,) and jumps(name, "prefill_chunk_tokens")
    assert breaks(M3, "sparse_gqa", "decode_kv_tokens", 8) == (2048,)
    assert (
        breaks(M3, "block_topk", "decode_kv_tokens", 8) == () == breaks(M3, "block_topk", "prefill_context_tokens", 64)
    )


def test_several_prefills_of_one_launch_share_the_card() -> None:
    """Four chunks of 512 behind 8,192 take 97 us on an H200 where each alone takes 92."""
    cells = {(16, 0): 3.9, (32, 0): 3.8, (512, 0): 7.0, (2048, 0): 22.4, (16, 8192): 86.4, (32, 8192): 86.5}
    cells |= {(512, 8192): 91.9, (2048, 4096): 68.0, (2048, 8192): 112.5}
    rows = [BatchRow(chunk, context, 0, 0, us) for (chunk, context), us in cells.items()]
    one = ran(1)
    grid, together = (
        prefill_grid(rows, OUT, prefill_straight("block_scores", one)),
        together_of("block_scores", M3, one),
    )
    assert together is not None and together.steps == (1,)
    assert 3.9 + 4 * together.share_us(grid, 3.9, (512, 8192), 2048) == pytest.approx(97.4, rel=0.1)
