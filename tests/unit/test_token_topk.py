"""Selection of top keys per query on SM90: launches cut by the memory of their scores, queries in waves of three."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.core.bundle import read_bundle
from profiler.core.grid import Outside, batch_rows, prefill_grid
from profiler.core.paths import default_bundle_root
from profiler.core.registry import load_model
from profiler.kernels._placement import Ran, prefill_straight, ran_of
from profiler.kernels._token_topk import _IDLE_KEYS, TokenTopkWork

SCORES = 512 * 1024 * 1024 // 4
WORK = TokenTopkWork(132, 2048, SCORES)


def part_by_part(work: TokenTopkWork, chunk: int, context: int) -> float:
    """As vLLM cuts a chunk: as many queries as fit, if each had the keys of the last one."""
    if chunk * (chunk + context) <= work.most_scores:
        return work._launch(chunk, context)
    part, done, total = max(1, work.most_scores // (chunk + context)), 0, 0.0
    while done < chunk:
        own = min(part, chunk - done)
        total += work._launch(own, context + done)
        done += own
    return total


@settings(max_examples=200, deadline=None)
@given(
    chunk=st.integers(1, 16384),
    context=st.one_of(st.integers(0, 3000), st.integers(0, 1_048_576)),
    most=st.sampled_from([SCORES, 1 << 20, 3_000_000]),
)
def test_a_chunk_is_the_sum_of_its_launches(chunk: int, context: int, most: int) -> None:
    work = TokenTopkWork(132, 2048, most)
    assert work.prefill(chunk, context) == pytest.approx(part_by_part(work, chunk, context), rel=1e-9)


def test_queries_run_in_waves_and_one_too_many_costs_a_launch() -> None:
    wave = WORK.prefill(396, 100_000)
    assert WORK.prefill(16, 100_000) < 0.5 * wave and WORK.prefill(256, 100_000) < 0.9 * wave
    assert WORK.prefill(2 * 396, 100_000) == pytest.approx(2 * wave, rel=0.01)
    assert 511 * (511 + 262_144) <= SCORES < 512 * (512 + 262_144)
    assert WORK.prefill(512, 262_144) > 1.25 * WORK.prefill(511, 262_144)


def test_queries_of_few_keys_have_nothing_to_select() -> None:
    assert WORK.prefill(2048, 0) == pytest.approx(2048 * _IDLE_KEYS / 396)
    assert WORK.prefill(2048, 0) < WORK.prefill(2048, 1024) < WORK.prefill(2048, 2048) < WORK.prefill(2048, 4096)
    bends = list(WORK.bends(512, 9000))
    assert (bends[0], bends[-1]) == (1536, 2048)
    assert WORK.straight_until(512) == SCORES // 512 - 512


def test_it_is_for_vllm_on_sm90_alone() -> None:
    assert prefill_straight("index_topk", Ran(132, True, 16, 2048)) == WORK
    assert not isinstance(prefill_straight("index_topk", Ran(132, False, 16, 2048)), TokenTopkWork)
    assert not isinstance(prefill_straight("index_topk", Ran(132, True, 16, 0)), TokenTopkWork)


@pytest.mark.parametrize("model", ["zai-org/GLM-5.2", "zai-org/GLM-5"])
def test_measured_steps_are_followed_between_the_points_around_them(model: str) -> None:
    """Cells left out that straight lines in the keys miss by 20 to 46 %: a second wave, and a second launch."""
    spec, bundle = load_model(model), read_bundle(default_bundle_root() / "H200" / model / "bf16")
    rows = batch_rows(bundle.table(1, "indexer"), "index_topk")
    work = prefill_straight("index_topk", ran_of(bundle.meta, spec, 1))
    cells = {(row.chunk, row.context): row.time_us for row in rows if row.chunk}
    for left_out in ((384, 131_072), (512, 131_072), (1024, 131_072), (1024, 98_304)):
        others = [row for row in rows if (row.chunk, row.context) != left_out]
        found = prefill_grid(others, Outside("index_topk", "-"), work).at(*left_out)
        assert found == pytest.approx(cells[left_out], rel=0.12), left_out
