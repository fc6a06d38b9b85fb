"""How FlashAttention 3 divides its work, against tiles laid out one by one, and lookups along it."""

import math
from heapq import heapreplace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.core.grid import BatchRow, Outside, cost_of_work, decode_grid, prefill_grid, straight
from profiler.core.grid_work import first_free
from profiler.kernels._flash_attention import _DENSE_TILE, _TILE, DenseWork, SparseWork, _merge, dense_keys, most_splits
from profiler.kernels._placement import Ran, decode_straight, prefill_straight

OUT = Outside("kernel", "python -m profiler profile")


def one_by_one(lengths: list[float], slots: int) -> float:
    ends = [0.0] * slots
    for length in lengths:
        heapreplace(ends, ends[0] + length)
    return max(ends)


@settings(max_examples=100, deadline=None)
@given(
    tiles=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8),
    slots=st.integers(1, 12),
)
def test_tiles_in_groups_end_when_they_do_one_by_one(tiles: list[tuple[int, float]], slots: int) -> None:
    lengths = [length for count, length in tiles for _ in range(count)]
    assert first_free(tiles, slots) == one_by_one(lengths, slots)


def sparse_by_hand(seen: list[int], heads: int) -> float:
    """Blocks of queries that see so many keys each: the launch of every tile, then the merge."""
    rows, most = math.ceil(heads / 64), 28
    blocks = [math.ceil(min(keys, 2048) / 64) for keys in seen]
    share = math.ceil(1.1 * rows * sum(blocks) / 132)
    tiles: list[float] = []
    parts = 0
    for own in blocks:
        of_one = math.ceil(own / max(1, min(most, math.ceil(own / share))))
        used = math.ceil(own / of_one)
        tiles += [of_one + _TILE] * (rows * used)
        parts += used
    n = len(seen)
    return one_by_one(tiles, 132) + _merge(n * heads, parts / n + n / 1000, 512)


@settings(max_examples=60, deadline=None)
@given(chunk=st.integers(1, 992), context=st.integers(0, 3000), heads=st.sampled_from((128, 64, 16)))
def test_a_chunk_of_sparse_attention_is_its_tiles(chunk: int, context: int, heads: int) -> None:
    by_hand = sparse_by_hand([context + i for i in range(1, chunk + 1)], heads)
    assert SparseWork(132, heads, 2048).prefill(chunk, context) == pytest.approx(by_hand, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(requests=st.integers(1, 512), keys=st.integers(1, 5000), heads=st.sampled_from((128, 64, 16)))
def test_a_decode_batch_is_its_tiles(requests: int, keys: int, heads: int) -> None:
    by_hand = sparse_by_hand([keys] * requests, heads)
    assert SparseWork(132, heads, 2048).decode(requests, keys) == pytest.approx(by_hand, rel=1e-9)


def test_batches_step_and_fall_where_tiles_no_longer_fit() -> None:
    """Two tiles a query of 128 heads: 33 queries in two parts each are 132 tiles; 24 in three parts are 144."""
    two, one = SparseWork(132, 128, 2048), SparseWork(132, 64, 2048)
    for work, steps in ((two, (33, 66, 132, 198)), (one, (33, 66, 132))):
        for last in steps:
            assert work.decode(last + 1, 4096) > 1.2 * work.decode(last, 4096)
    assert two.decode(24, 4096) > two.decode(32, 4096) and two.decode(48, 4096) > two.decode(64, 4096)
    assert one.decode(96, 4096) > one.decode(128, 4096)
    # Measured at 199 requests of 64 heads and fewer: no step there.
    assert one.decode(199, 4096) < 1.02 * one.decode(198, 4096)


@settings(max_examples=60, deadline=None)
@given(chunk=st.integers(993, 16000), context=st.integers(0, 4000), heads=st.sampled_from((128, 16)))
def test_beyond_992_queries_nothing_is_split_and_work_grows(chunk: int, context: int, heads: int) -> None:
    work = SparseWork(132, heads, 2048)
    assert work.prefill(chunk + 1, context) >= work.prefill(chunk, context)
    assert work.prefill(chunk, context + 1) >= work.prefill(chunk, context) - 1e-6
    rows = math.ceil(heads / 64)
    assert work.prefill(chunk, 2048) == math.ceil(chunk * rows / 132) * (32 + _TILE)
    assert work.prefill(992, context) > work.prefill(993, context)


def test_the_public_heuristic_of_splits() -> None:
    assert most_splits(106, 32, 132) == 1 and most_splits(105, 32, 132) > 1
    assert most_splits(8, 4, 132) == 1
    # 64 tiles fill 0.48 of 132 multiprocessors, in two parts 0.97 of them.
    assert most_splits(64, 8, 132) == 2
    # 96 tiles: 0.73 in one, two and three parts, 0.97 in four.
    assert most_splits(96, 6, 132) == 4
    assert most_splits(1, 32, 132) == most_splits(2, 32, 132) == 28


def test_short_dense_chunks_are_split_where_heads_are_few() -> None:
    """Measured: at 16 heads 768 tokens take longer than 1,024, at 32 heads 257 behind 1,024 longer than 512."""
    few, some, many = DenseWork(132, 16), DenseWork(132, 32), DenseWork(132, 128)
    assert few.prefill(768, 0) > few.prefill(1024, 0)
    assert some.prefill(257, 1024) > some.prefill(512, 1024)
    for work in (few, some):
        assert work.prefill(257, 0) < work.prefill(512, 0)
    points = [(chunk, context) for chunk in (257, 512, 768, 1024) for context in (0, 256, 512, 1024)]
    assert all(many.prefill(c, k) < many.prefill(c, k + 256) < many.prefill(c + 256, k + 256) for c, k in points)


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(2, 16), heads=st.sampled_from((128, 64)))
def test_unsplit_causal_tiles_start_with_the_longest(rows: int, heads: int) -> None:
    lengths = [blocks + _DENSE_TILE for blocks in range(rows, 0, -1) for _ in range(heads)]
    own = DenseWork(132, heads).prefill(128 * rows, 0) - 4e-4 * heads * 128 * rows
    assert own == pytest.approx(one_by_one(lengths, 132))


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(2, 16), heads=st.sampled_from((64, 128)))
def test_keys_of_256_are_read_in_blocks_of_80(rows: int, heads: int) -> None:
    """As GLM-5 has them: 128 rows see two blocks, 256 four, 384 five."""
    lengths = [math.ceil(128 * row / 80) + _DENSE_TILE for row in range(rows, 0, -1) for _ in range(heads)]
    wide = DenseWork(132, heads, dense_keys(256), 256, 448)
    own = wide.prefill(128 * rows, 0) - 4e-4 * 448 / 256 * heads * 128 * rows
    assert own == pytest.approx(one_by_one(lengths, 132))
    assert dense_keys(192) == 128 and list(wide.bends(128, 100)) == [0, 1, 80, 81]
    ran = Ran(132, True, heads, 2048, key_width=256, value_width=256, projected_width=448)
    assert prefill_straight("mla_dense_prefill", ran) == wide


def test_a_chunk_has_no_keys_beyond_its_end() -> None:
    """At 32 heads 257 wide tokens are three rows of tiles and four blocks of keys, too few to be split: an H200 takes
    as long as for 256 (39.5 and 39.0 us, GLM-5.2), and for 384, five blocks, twice that (78.6)."""
    wide = DenseWork(132, 32, dense_keys(256), 256, 448)
    assert wide.prefill(257, 0) == pytest.approx(wide.prefill(256, 0), rel=0.1)
    assert wide.prefill(384, 0) > 1.8 * wide.prefill(257, 0)


def test_which_kernels_follow_these_rules() -> None:
    bf16, other = (Ran(132, True, 16, 2048, flash_attention=known) for known in (True, False))
    assert isinstance(prefill_straight("sparse_mla", bf16), SparseWork)
    assert isinstance(decode_straight("sparse_mla", bf16), SparseWork)
    assert not isinstance(decode_straight("sparse_mla", other), SparseWork)
    assert isinstance(prefill_straight("mla_dense_prefill", other), DenseWork)
    elsewhere = Ran(0, False, 16, 2048)
    assert not isinstance(prefill_straight("mla_dense_prefill", elsewhere), DenseWork)
    assert prefill_straight("sparse_mla", None) is None and decode_straight("index_topk", bf16) is None


def test_few_batches_give_all_others_where_time_follows_the_tiles() -> None:
    work = SparseWork(132, 128, 2048)

    def decode(n: int, keys: float) -> float:
        return 12.0 + 1.8 * work.decode(n, keys)

    rows = [BatchRow(0, 0, n, keys, decode(n, keys)) for n in (1, 32, 256) for keys in (64, 1024, 2048, 9000)]
    grid = decode_grid(rows, OUT, work)
    for n in (1, 7, 24, 33, 34, 48, 66, 67, 133, 199, 250):
        for keys in (64, 500, 1025, 2048, 5000.5):
            assert grid.at(n, keys) == pytest.approx(decode(n, keys), rel=1e-9)
    dense = DenseWork(132, 16)
    chunks = [(c, k) for c in (129, 512, 2048) for k in (0, 1, 512, 1536)]
    measured = [BatchRow(c, k, 0, 0, 10.0 + 1.8 * dense.prefill(c, k)) for c, k in chunks]
    found = prefill_grid(measured, OUT, dense)
    for c in (200, 600, 768, 1024, 1500):
        for k in (0, 1, 128, 129, 700, 1300):
            assert found.at(c, k) == pytest.approx(10.0 + 1.8 * dense.prefill(c, k), rel=1e-9)


def test_between_points_of_equal_work_the_whole_table_tells_what_work_costs() -> None:
    # Works 10 and 10.5 say little; 14 in between costs 4 less half of 0.5 beyond the line, at 2 us each.
    assert straight(30.0, 34.0, (10.0, 14.0, 10.5), 0.5, 2.0) == pytest.approx(32.0 + 2.0 * 3.75)
    # Works 10 and 20 do: the line through both.
    assert straight(30.0, 34.0, (10.0, 14.0, 20.0), 0.9, 2.0) == pytest.approx(30.0 + 4.0 * 0.4)
    # What is far from both is no share of the way.
    assert straight(30.0, 34.0, (10.0, 40.0, 20.0), 0.5, 2.0) == pytest.approx(32.0 + 2.0 * 25.0)
    assert straight(1.0, 2.0, (10.0, 0.0, 10.0), 0.5, 2.0) == 0.0
    points = [(4.0, 1.0, 9.0), (1.0, 8.0, 5.0), (1.0, 2.0, 3.0)]
    assert cost_of_work(points, lambda x, y: x * y) == pytest.approx((9.0 - 3.0) / (4.0 - 2.0))
    assert cost_of_work(points, lambda x, y: 1.0) == 0.0
