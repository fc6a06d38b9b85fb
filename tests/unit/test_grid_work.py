"""Work of a batch against its obvious sum, and lookups along it."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import profiler
from profiler.core.bundle import read_bundle
from profiler.core.grid import BatchRow, Outside, decode_grid, fixed_us, prefill_grid
from profiler.core.grid_work import Work
from profiler.core.registry import load_model
from profiler.kernels._placement import Ran, decode_work, prefill_work, ran_of
from profiler.quality import quality

H200 = Ran(sm_count=132, tiles=True, heads=128, cap_tokens=2048)
OUT = Outside("kernel", "python -m profiler profile")
PACKED = {
    "provenance": "measured",
    "hardware": "H200",
    "engine": {"name": "vllm"},
    "kv": {"layout": "fp8_ds_mla"},
    "grid": {f"tp{tp}/attention": {"dense_prefill": {"longer_than_tokens": 128}} for tp in (4, 8)},
}


def waves(chunk: int, context: int, size: int, cap: int | None) -> int:
    """Keys of the last query of each wave, added up."""
    total = 0
    for first in range(0, chunk, size):
        last = context + min(first + size, chunk)
        total += last if cap is None else min(cap, last)
    return total


@settings(max_examples=200, deadline=None)
@given(
    chunk=st.integers(1, 3000),
    context=st.integers(0, 5000),
    size=st.sampled_from((1, 66, 132, 264)),
    cap=st.sampled_from((None, 2048)),
)
def test_waves_add_up(chunk: int, context: int, size: int, cap: int | None) -> None:
    assert Work(size, cap).prefill(chunk, context) == waves(chunk, context, size, cap)


@settings(max_examples=100, deadline=None)
@given(chunk=st.integers(1, 3000), context=st.integers(0, 5000))
def test_a_row_of_the_top_k_costs_its_keys_where_it_selects(chunk: int, context: int) -> None:
    seen = range(context + 1, context + chunk + 1)
    expected = sum(10.0 if keys <= 2048 else keys + 100.0 for keys in seen)
    work = Work(select_beyond=2048, idle_keys=10.0, row_keys=100.0)
    assert work.prefill(chunk, context) == pytest.approx(expected, rel=1e-12)


def test_scores_beyond_their_buffer_are_made_in_parts() -> None:
    """1024 queries of 131072 keys: 2^27 scores hold 1016 of them, in 4 waves of 264; the last 8 take one of theirs."""
    work = prefill_work("index_scores", H200)
    assert work is not None
    part = 2**27 // (1024 + 131072)
    assert part == 1016
    assert work.prefill(1024, 131072) == waves(part, 131072, 264, None) + waves(8, 131072 + part, 264, None)
    assert work.prefill(1024, 130000) == waves(1024, 130000, 264, None)
    assert work.straight_until(1024) == 130048


def test_a_block_of_scores_has_as_many_queries_as_make_128_index_heads() -> None:
    """32 index heads: four queries, so that 528 are one wave of 132 blocks."""
    glm = prefill_work("index_scores", replace(H200, index_heads=32))
    assert glm is not None
    assert glm.prefill(1056, 4096) == waves(1056, 4096, 528, None)


@pytest.mark.parametrize(("heads", "wave"), [(128, 66), (32, 132), (16, 132)])
def test_sparse_attention_runs_in_tiles_of_heads(heads: int, wave: int) -> None:
    ran = Ran(132, True, heads, 2048)
    work = decode_work("sparse_mla", ran)
    assert work is not None
    steps = [work.decode(requests, 4096) / 2048 for requests in (wave, wave + 1, 2 * wave, 2 * wave + 1)]
    assert steps == [1, 2, 2, 3]
    # Less than a wave spreads over the idle multiprocessors, each request over as many as there are for it.
    assert [work.decode(n, 4096) for n in (wave // 2, wave // 3, 1)] == [1024, pytest.approx(2048 / 3), 2048 / wave]


def test_a_fixed_number_of_picks_is_read_whatever_there_is() -> None:
    ran = Ran(132, True, 128, 2048, whole_below=256)
    work = prefill_work("sparse_mla", ran)
    assert work is not None
    assert work.prefill(256, 0) == work.prefill(256, 100_000) == 4 * 2048
    assert work.prefill(257, 0) < work.prefill(257, 4096)
    assert work.decode(200, 64) == work.decode(200, 4096)


def test_what_ran_is_read_from_the_bundle() -> None:
    meta, spec = PACKED, load_model("deepseek-ai/DeepSeek-V3.2-Exp")
    assert ran_of(meta, spec, 4) == Ran(132, True, 32, 2048, whole_below=128, decodes_apart=True)
    assert ran_of(meta, spec, 8) == Ran(132, True, 16, 2048, whole_below=sys.maxsize)
    assert ran_of(meta | {"kv": {"layout": "bf16"}}, spec, 8) == Ran(132, True, 16, 2048, flash_attention=True)
    glm = ran_of(meta, load_model("zai-org/GLM-5"), 4)
    widths = {"index_heads": 32, "key_width": 256, "value_width": 256, "projected_width": 448}
    assert glm == Ran(132, True, 16, 2048, whole_below=sys.maxsize, **widths)
    for change, whole in (
        ({"engine": {"name": "reference"}}, 128),
        ({"hardware": "CPU"}, 128),
        ({"provenance": "projected"}, sys.maxsize),
    ):
        ran = ran_of(meta | change, spec, 8)
        assert ran is not None and not ran.tiles and ran.whole_below == whole
    assert ran_of(meta | {"provenance": "imported"}, spec, 8) is None


def test_few_heads_read_every_pick_for_chunks_of_any_length() -> None:
    """Up to 31 heads per rank every token of a step runs FlashMLA's decode kernel. The times are of an H200 at tp 8,
    chunks without a context; work that grows with the position puts 1,024 tokens 32 % too low."""
    few = prefill_work("sparse_mla", ran_of(PACKED, load_model("deepseek-ai/DeepSeek-V3.2-Exp"), 8))
    assert few is not None and few.prefill(4096, 0) == few.prefill(4096, 70_000)
    rows = [BatchRow(chunk, 0, 0, 0, time) for chunk, time in ((257, 235.874), (2048, 1815.56), (16384, 14437.5))]
    grid = prefill_grid(rows, OUT, few)
    for chunk, time in ((512, 464.897), (1024, 921.3), (4096, 3619.16), (8192, 7236.14)):
        assert grid.at(chunk, 0) == pytest.approx(time, rel=0.02)


@pytest.mark.parametrize("tp", [1, 2])
def test_decodes_of_many_heads_are_straight_in_their_number(tp: int) -> None:
    """FlashMLA divides their keys evenly; waves of queries miss these measured batches by 24 and 17 % at p90."""
    root = Path(profiler.__file__).parent / "perf-native"
    bundle = read_bundle(root / "H200/deepseek-ai/DeepSeek-V3.2-Exp/fp8-kvfp8_ds_mla", tps={tp})
    spec = load_model("deepseek-ai/DeepSeek-V3.2-Exp")
    found = quality(bundle.table(tp, "sparse_attention"), spec, ran_of(bundle.meta, spec, tp))["leave_one_out"]
    assert found["decode_requests"]["p90"] < 0.07


@settings(max_examples=60, deadline=None)
@given(chunk=st.integers(2, 4096), context=st.integers(0, 100_000))
def test_a_time_straight_in_the_work_is_met_everywhere(chunk: int, context: int) -> None:
    """Rows at powers of two are enough for a kernel of known waves; the length of the chunk is off by up to a half."""
    work = prefill_work("index_scores", H200)
    assert work is not None

    def time(c: int, k: int) -> float:
        return 3.0 + 0.001 * work.prefill(c, k)

    rows = [BatchRow(c, k, 0, 0, time(c, k)) for c in (2, 256, 512, 1024, 2048, 4096) for k in (0, 4096, 65536, 131072)]
    grid = prefill_grid(rows, OUT, work)
    assert grid.at(chunk, context) == pytest.approx(time(chunk, context), rel=1e-9)


def test_decode_waves_are_met_between_measured_batches() -> None:
    work = decode_work("sparse_mla", H200)
    assert work is not None
    rows = [
        BatchRow(0, 0, n, kv, 20 + work.decode(n, kv) / 30) for n in (1, 16, 64, 128, 256) for kv in (64, 1024, 8192)
    ]
    grid = decode_grid(rows, OUT, work)
    for requests in (40, 66, 67, 100, 132, 133, 199, 250):
        for keys in (500, 2048, 3000.5, 8000):
            assert grid.at(requests, keys) == pytest.approx(20 + work.decode(requests, keys) / 30, rel=1e-9)


def test_measured_points_are_returned_as_they_are() -> None:
    work = prefill_work("index_topk", H200)
    rows = [BatchRow(c, k, 0, 0, 1.0 + (c * 31 + k * 17) % 97) for c in (2, 100, 3000) for k in (0, 1000, 2048, 9000)]
    grid = prefill_grid(rows, OUT, work)
    assert all(grid.at(row.chunk, row.context) == pytest.approx(row.time_us, rel=1e-12) for row in rows)


def test_between_a_decode_and_a_tile_the_tile_answers() -> None:
    """A chunk of one token is a decode for the indexer; those of two and more run what sixteen run."""
    rows = [BatchRow(c, k, 0, 0, t) for c, t in ((1, 3.0), (16, 6.0), (64, 6.4)) for k in (0, 1000)]
    grid = prefill_grid(rows, OUT, steps=(1,))
    assert [grid.at(c, 500) for c in (1, 2, 9, 16, 40)] == [3.0, 6.0, 6.0, 6.0, pytest.approx(6.2)]
    assert fixed_us(grid, (1,)) == pytest.approx(6.0 - 0.4 / 48 * 16)
    assert fixed_us(prefill_grid(rows, OUT)) == pytest.approx(3.0 - 3.0 / 15)
    assert math.isclose(prefill_grid(rows, OUT).at(9, 500), 3.0 + 3.0 * 8 / 15)
