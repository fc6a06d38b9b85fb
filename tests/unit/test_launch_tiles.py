"""Several requests in one launch: tiles one by one, MiniMax-M3 on an H200, and serving against the report."""

from dataclasses import replace
from heapq import heapreplace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.core.bundle import Table, make_table
from profiler.core.grid import BatchRow, Grid, Outside, decode_grid, fixed_us, prefill_grid
from profiler.core.launch import Captured, JointLaunch, Tiles, least_block_us
from profiler.core.registry import load_model
from profiler.core.types import Category
from profiler.core.unequal import beyond_fixed_us
from profiler.kernels._block_sparse import _TILE, ScoreWork, TopkWork
from profiler.kernels._flash_attention import GroupedWork
from profiler.kernels._placement import Ran, ran_of
from profiler.kernels._unequal import captured_of, launch_of, sharing_of, tiles_of
from profiler.skew import fit_skew
from serving.core.shape import StepShape
from serving.cost.kernels import Kernel

OUT = Outside("kernel", "python -m profiler profile")
M3 = load_model("MiniMaxAI/MiniMax-M3")
META = {"provenance": "measured", "hardware": "H200", "engine": {"name": "vllm"}, "kv": {"layout": "bf16"}}
SCORES, ATTENTION = ScoreWork(132, 4, 128), GroupedWork(132, 64, 4)
PREFILLS = st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 200_000)), min_size=1, max_size=5)

# Microseconds on an H200, tp 1, vLLM 0.26.0, medians of five: chunks alone, (chunk, context).
SCORE_CELLS = {
    **{(16, 0): 3.9, (32, 0): 3.8, (512, 0): 7.0, (1024, 0): 11.0, (2048, 0): 22.4, (4096, 0): 46.6, (8192, 0): 142.8},
    **{(1024, 512): 16.0, (2048, 512): 29.6, (4096, 512): 51.9, (512, 512): 12.1, (1024, 1024): 21.4},
    **{(2048, 1024): 35.8, (4096, 1024): 55.7, (1024, 4096): 55.2, (2048, 4096): 68.0, (4096, 4096): 93.3},
    **{(128, 4096): 47.3, (512, 4096): 49.2, (2048, 8192): 112.5, (4096, 8192): 140.9, (512, 8192): 91.9},
    **{(1024, 8192): 98.7, (512, 32_768): 345.7, (1024, 32_768): 362.9, (2048, 32_768): 383.8, (1024, 65_536): 701.9},
    **{(2048, 65_536): 752.7, (4096, 32_768): 400.0, (2048, 2048): 46.8, (4096, 2048): 66.4},
}
SCORE_BATCHES = {
    ((128, 4096),) * 16: 53.2,
    ((1024, 65_536), (1024, 0)): 711.4,
    ((2048, 0), (300, 700), (300, 700), (300, 700)): 21.9,
    ((4096, 0), (512, 32_768), (512, 32_768), (512, 32_768)): 354.8,
    ((1024, 0), (1024, 0)): 13.5,
    ((2048, 4096), (2048, 4096)): 72.8,
    ((2048, 0),) * 4: 41.8,
    ((2048, 8192),) * 4: 243.5,
    ((512, 512),) * 4: 14.0,
    ((512, 8192),) * 4: 97.4,
    ((1024, 1024),) * 8: 50.6,
}
ATTENTION_CELLS = {
    **{(1, 0): 12.1, (16, 0): 13.4, (128, 0): 14.1, (256, 0): 16.1, (512, 0): 26.4, (2048, 0): 146.3},
    **{
        (1, 8192): 19.0,
        (16, 8192): 25.9,
        (128, 8192): 72.7,
        (256, 8192): 107.9,
        (512, 8192): 212.3,
        (2048, 8192): 870.2,
    },
    **{(1, 65_536): 49.8, (16, 65_536): 78.1, (128, 65_536): 415.8, (256, 65_536): 744.5, (512, 65_536): 1482.2},
    **{(2048, 65_536): 6025.7},
}
DECODES = {(8, 65_536): 251.5, (64, 4096): 135.9, (128, 16_384): 947.5}
JOINT = {
    **{
        ((128, 0), 8): 396.3,
        ((512, 0), 8): 740.9,
        ((2048, 0), 8): 732.5,
        ((512, 8192), 8): 726.1,
        ((128, 8192), 8): 406.3,
    },
    **{((2048, 8192), 8): 1102.6, ((128, 65_536), 8): 814.9, ((512, 65_536), 8): 2179.9, ((2048, 65_536), 8): 6094.8},
    **{((128, 0), 64): 146.8, ((128, 8192), 64): 242.6, ((512, 65_536), 64): 1613.6, ((2048, 0), 64): 272.8},
    **{((128, 0), 128): 963.2, ((128, 65_536), 128): 1722.1, ((512, 65_536), 128): 2420.4, ((128, 8192), 128): 1061.7},
}
KEYS = {8: 65_536, 64: 4096, 128: 16_384}


def ran(**other: object) -> Ran:
    found = ran_of(META | other, M3, 1)
    assert found is not None
    return found


def chunks(cells: dict[tuple[int, int], float], work: ScoreWork | TopkWork | GroupedWork) -> Grid:
    return prefill_grid([BatchRow(*at, 0, 0, us) for at, us in cells.items()], OUT, work, (1,))


def one_by_one(tiles: list[float], slots: int) -> float:
    ends = [0.0] * slots
    for tile in tiles:
        heapreplace(ends, ends[0] + tile)
    return max(ends)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 16), st.integers(0, 100_000)), min_size=1, max_size=5))
def test_scores_of_a_launch_are_its_tiles_request_by_request(pairs: list[tuple[int, int]]) -> None:
    prefills = [(128 * n, context) for n, context in pairs]
    tiles = [
        (context + 128 * (pair + 1)) / 128 + _TILE
        for n, context in pairs
        for _ in range(4)
        for pair in range(n)
        for _ in "ab"
    ]
    found = SCORES.launched(prefills)
    assert found.work == pytest.approx(one_by_one(tiles, 264))
    assert found.tokens == pytest.approx(sum(tiles) / found.work / 4 * 64)


@given(st.integers(1, 20_000), st.integers(0, 200_000))
def test_a_launch_of_one_is_the_chunk_itself(chunk: int, context: int) -> None:
    for work in (SCORES, ATTENTION):
        assert work.launched([(chunk, context)]).work == pytest.approx(work.prefill(chunk, context))
    assert SCORES.launched([(chunk, context)]).tokens <= 64 * -(-chunk // 64) * (1 + 1e-9)
    assert ATTENTION.joint(((1, context + 1.0),), (), 1.0) == pytest.approx(ATTENTION.prefill(1, context))


@settings(max_examples=40, deadline=None)
@given(PREFILLS)
def test_a_launch_takes_no_less_than_its_longest_and_no_more_than_all_in_turn(prefills: list[tuple[int, int]]) -> None:
    alone = [SCORES.prefill(*prefill) for prefill in prefills]
    together = SCORES.launched(prefills).work
    # Tiles are taken in order: a chunk may end sooner behind others that leave its last tiles a better place.
    assert max((sum(p) / 128 + _TILE) for p in prefills) <= together * (1 + 1e-9)
    assert together <= sum(alone) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(PREFILLS, st.integers(1, 200), st.integers(1, 200_000), st.floats(1.0, 2.0))
def test_decodes_beside_chunks_are_split_no_further_than_without(
    prefills: list[tuple[int, int]], requests: int, keys: int, slower: float
) -> None:
    decodes = ((requests, float(keys)),)
    assert ATTENTION.filled(decodes, prefills) <= 1.0
    both = ATTENTION.joint(decodes, prefills, slower)
    longest = max(chunk for chunk, _ in prefills)
    if 4 * longest / 8 >= 0.8 * 132:
        assert both >= slower * keys / 128  # one multiprocessor reads all of a decode's keys
    assert both >= ATTENTION.joint(decodes, prefills, 1.0) * 0.5


@pytest.mark.parametrize(("prefills", "us"), SCORE_BATCHES.items())
def test_measured_prefills_of_one_launch_are_met(prefills: tuple[tuple[int, int], ...], us: float) -> None:
    """Of all twelve measured ones, this one left out for want of its cells: within 10 %. Shares of longer chunks miss
    two of them by a factor of 1.9, and 1,024 tokens behind 65,536 beside others by 46 %."""
    grid = chunks(SCORE_CELLS, SCORES)
    tiles = tiles_of("block_scores", M3, ran())
    assert tiles is not None and tiles.apart == 1
    assert 3.7 + beyond_fixed_us(grid, 3.7, tiles, prefills) == pytest.approx(us, rel=0.1)


# Selection on an H200 at tp 8 (one index head): chunks alone, and several in one step.
TOPK_CELLS = {
    **{(16, 0): 2.5, (2048, 0): 4.8, (4096, 0): 7.7, (8192, 0): 13.5, (2048, 4096): 4.8, (4096, 4096): 7.8},
    **{(512, 8192): 4.8, (2048, 8192): 8.8, (4096, 8192): 14.4, (8192, 8192): 26.5, (512, 0): 3.2, (1024, 0): 3.6},
}
TOPK_BATCHES = {
    ((2048, 0),) * 4: 13.4,
    ((2048, 4096), (2048, 4096)): 7.7,
    ((2048, 8192),) * 4: 26.5,
    ((128, 4096),) * 16: 4.9,
    ((2048, 0), (300, 700), (300, 700), (300, 700)): 8.2,
}


@pytest.mark.parametrize(("prefills", "us"), TOPK_BATCHES.items())
def test_selections_of_a_step_fill_the_card_as_one_chunk_does(prefills: tuple[tuple[int, int], ...], us: float) -> None:
    """A chunk of 2,048 beside three of 300 has 5,244 blocks that only end: 8.2 us, and 6.3 as one chunk."""
    grid = chunks(TOPK_CELLS, TopkWork(1, 128))
    assert 2.4 + Tiles(TopkWork(1, 128), 1).beyond_fixed_us(grid, 2.4, prefills) == pytest.approx(us, rel=0.1)


def test_a_single_new_token_beside_chunks_is_run_by_the_kernel_of_decodes() -> None:
    grid = chunks(SCORE_CELLS | {(1, 0): 3.3, (1, 65_536): 9.0}, SCORES)
    tiles = Tiles(SCORES, apart=1)
    two = [(512, 8192), (512, 8192)]
    with_one = tiles.beyond_fixed_us(grid, 3.7, [(1, 65_536), *two])
    assert with_one == pytest.approx(9.0 - 3.7 + tiles.beyond_fixed_us(grid, 3.7, two))
    assert tiles.beyond_fixed_us(grid, 3.7, [(1, 65_536), two[0]]) == pytest.approx(9.0 - 3.7 + 91.9 - 3.7)


def test_a_block_costs_what_the_least_hindered_chunk_shows() -> None:
    assert least_block_us(chunks(ATTENTION_CELLS, ATTENTION), ATTENTION) == pytest.approx(1.42, abs=0.02)
    assert least_block_us(chunks({(64, 0): 3.0, (128, 0): 4.0}, ATTENTION), ATTENTION) == 0.0


def launch() -> tuple[Grid, JointLaunch]:
    grid = chunks(ATTENTION_CELLS, ATTENTION)
    found = launch_of("attention", ran(), grid, 12.0)
    assert found is not None
    return grid, found


@pytest.mark.parametrize(("batch", "us"), JOINT.items())
def test_measured_decodes_beside_a_chunk_are_met(batch: tuple[tuple[int, int], int], us: float) -> None:
    """Eight decodes of 65,536 keys beside 512 tokens take 741 us, the sum of both 278."""
    prefill, requests = batch
    grid, joint = launch()
    decodes = DECODES[requests, KEYS[requests]]
    price = max(
        joint.added_us(decodes, grid.at(*prefill)),
        joint.us(decodes, requests, KEYS[requests], KEYS[requests], [prefill]),
    )
    assert price == pytest.approx(us, rel=0.08)


@pytest.mark.parametrize(("decodes", "prefill", "us"), [(48.7, 12.8, 49.6), (48.7, 36.7, 64.4), (48.7, 17.5, 56.4)])
def test_short_decodes_beside_a_short_chunk_share_one_launch(decodes: float, prefill: float, us: float) -> None:
    """64 decodes of 4,096 keys beside 128, 2,048 and 512 tokens at tp 8 of an H200, and what both take alone."""
    _, joint = launch()
    one = replace(joint, fixed_us=10.7)
    assert one.added_us(decodes, prefill) == pytest.approx(us, rel=0.2) and decodes + prefill > 1.1 * us
    assert joint.added_us(5.0, 4.0) == 5.0


def test_one_long_decode_among_short_ones_is_not_split_beside_a_chunk() -> None:
    _, joint = launch()
    alike = joint.us(200.0, 32, 16_384.0, 16_384, [(512, 0)])
    one_long = joint.us(200.0, 32, 16_384.0, 400_000, [(512, 0)])
    assert one_long > 400_000 / 128 * joint.block_us > 10 * alike
    assert joint.us(200.0, 32, 16_384.0, 400_000, [(8, 0)]) < one_long / 4  # split, if into fewer parts than alone


def test_which_kernels_have_these_forms() -> None:
    grid = chunks(ATTENTION_CELLS, ATTENTION)
    assert sharing_of("tiles", "block_scores", M3, ran()) == Tiles(SCORES, 1)
    assert sharing_of("tiles", "attention", M3, ran()) == Tiles(ATTENTION, 0)
    assert sharing_of("tiles", "block_topk", M3, ran()) == Tiles(TopkWork(4, 128), 1)
    assert launch_of("block_topk", ran(), grid, 12.0) is None
    for name in ("sparse_gqa", "index_scores", "sparse_mla"):
        assert tiles_of(name, M3, ran()) is None and launch_of(name, ran(), grid, 12.0) is None
    assert launch_of("block_scores", ran(), grid, 12.0) is None, "decodes have a launch of their own"
    for other in ({"engine": {"name": "reference"}}, {"hardware": "RTXPRO6000"}):
        assert tiles_of("attention", M3, ran(**other)) is None
        assert launch_of("attention", ran(**other), grid, 12.0) is None
    assert sharing_of(None, "block_scores", M3, ran()) is None and sharing_of("once", "block_scores", M3, ran()) is None


def tables() -> dict[Category, Table]:
    attention = [("attention", *at, 0, 0, 0, us, 0.0) for at, us in ATTENTION_CELLS.items()]
    attention += [("attention", 0, 0, *at, 1, us, 0.0) for at, us in DECODES.items()]
    scores = [("block_scores", *at, 0, 0, 0, us, 0.0) for at, us in SCORE_CELLS.items()]
    unequal = [
        ("attention", f"1x{chunk}@{context}", f"{n}x{KEYS[n]}", "joint", us, 0.0)
        for ((chunk, context), n), us in JOINT.items()
    ]
    unequal += [
        ("block_scores", " ".join(f"1x{chunk}@{context}" for chunk, context in prefills), "none", "prefills", us, 0.0)
        for prefills, us in SCORE_BATCHES.items()
    ]
    return {
        "attention": make_table("attention", attention),
        "indexer": make_table("indexer", scores),
        "skew": make_table("skew", unequal),
    }


def test_the_forms_are_chosen_and_reported_where_they_do_better() -> None:
    report = fit_skew(tables(), M3, ran()).report
    joint, prefills = report["attention"]["joint"], report["block_scores"]["prefills"]
    assert joint["form"] == "launch" and joint["launch"]["p90"] < 0.06 < 0.25 < joint["sum"]["p90"]
    assert prefills["form"] == "tiles" and prefills["tiles"]["p90"] < 0.1 < 0.4 < prefills["together"]["p90"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([(128, 0), (512, 0), (512, 8192), (2048, 65_536)]), min_size=1, max_size=3))
def test_serving_prices_a_launch_as_the_report_does(prefills: list[tuple[int, int]]) -> None:
    grid, joint = launch()
    decode = grid  # any table of two axes
    kernel = Kernel(
        name="attention",
        count=1,
        prefill=grid,
        decode=decode,
        mixed=None,
        skew=None,
        together=Tiles(ATTENTION, 0),
        fixed_us=fixed_us(grid),
        cap_tokens=0,
        prefill_when="always",
        provenance="measured",
        launch=joint,
    )
    shape = StepShape(tuple(prefills), 8, 8 * 8000, 30_000, 8 * 8000, 8)
    decodes = decode.at(8, 8000)
    shared = (
        grid.at(*prefills[0])
        if len(prefills) == 1
        else kernel.fixed_us + beyond_fixed_us(grid, kernel.fixed_us, kernel.together, prefills)
    )
    expected = max(joint.added_us(decodes, shared), joint.us(decodes, 8, 8000.0, 30_000, prefills))
    assert kernel.us(shape, prefills) == pytest.approx(expected)
    assert replace(kernel, launch=None).us(shape, prefills) == pytest.approx(decodes + shared)


TOPK = TopkWork(4, 128)
LONGEST = 1_048_575


@given(st.integers(1, 64), st.integers(1, LONGEST))
def test_a_captured_row_lies_in_parts_of_the_longest(requests: int, keys: int) -> None:
    """As many sorts as a part of the captured kernel has blocks for, with its own numbers."""
    most = max(1, min(16, 64 // (requests * 4)))
    parts = 1 << (most.bit_length() - 1)
    own_blocks, all_blocks = -(-keys // 128), -(-(LONGEST + 1) // 128)
    sorts = -(-min(own_blocks, -(-all_blocks // parts)) // 64)
    assert TOPK.decode(requests, TOPK.captured_keys(requests, keys, LONGEST)) == sorts
    assert keys <= TOPK.captured_keys(requests, keys, LONGEST) <= LONGEST


def test_selections_of_captured_decode_steps_are_priced_by_the_longest_request() -> None:
    rows = {(1, 8192): 6.0, (1, 65_536): 6.5, (1, 131_072): 7.0, (1, 524_288): 12.0, (1, LONGEST): 19.0}
    rows |= {(16, 8192): 7.0, (16, 65_536): 20.0, (16, LONGEST): 230.0}
    grid = decode_grid([BatchRow(0, 0, *at, us) for at, us in rows.items()], OUT, TOPK)
    eager = Kernel("block_topk", 57, grid, grid, None, None, None, 0.0, 0, "selection", "measured")
    graphs = replace(eager, captured=captured_of("block_topk", ran(), 256, LONGEST))

    def us(kernel: Kernel, requests: int, keys: int, *prefills: tuple[int, int]) -> float:
        return kernel.us(StepShape(prefills, requests, requests * keys, keys, requests * keys, 1), prefills)

    assert us(eager, 1, 65_536) == 6.5 and us(graphs, 1, 65_536) == 19.0
    assert us(graphs, 1, 4096) == us(eager, 1, 65_536)
    assert us(graphs, 16, 65_536) == us(eager, 16, 65_536), "one part each"
    assert us(graphs, 1, 65_536, (8, 8192)) == us(eager, 1, 65_536, (8, 8192)), "cut where the model attends"
    assert us(replace(graphs, captured=replace(graphs.captured, tokens=0)), 1, 65_536) == 6.5  # type: ignore[type-var]


def test_attention_of_short_steps_is_split_where_decode_steps_are_captured() -> None:
    grid, joint = launch()
    eager = Kernel("attention", 3, grid, grid, None, None, None, 12.0, 0, "always", "measured", launch=joint)
    graphs = replace(eager, captured=captured_of("attention", ran(), 512, LONGEST))
    assert graphs.captured == Captured(512, LONGEST, None)
    assert captured_of("block_scores", ran(), 512, LONGEST) is None

    def us(kernel: Kernel, chunk: int) -> float:
        shape = StepShape(((chunk, 0),), 8, 8 * 65_536, 65_536, 8 * 65_536, 8)
        return kernel.us(shape, shape.prefills)

    one_launch = grid.at(8, 65_536) + grid.at(504, 0) - joint.fixed_us
    assert us(graphs, 504) == pytest.approx(one_launch) and one_launch < us(eager, 504) / 4
    assert us(graphs, 505) == us(eager, 505)
    decodes = StepShape((), 8, 8 * 65_536, 65_536, 8 * 65_536, 8)
    assert graphs.us(decodes, ()) == eager.us(decodes, ())
