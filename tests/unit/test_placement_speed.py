"""Steps of a placement: the prices of the cost model, and a reason wherever there is none."""

from pathlib import Path

import priced
import pytest

from profiler.core.errors import ConfigError
from profiler.core.hardware import load_hardware
from profiler.core.paths import default_bundle_root
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from serving.core.shape import StepShape
from serving.cost import build_cost, default_capture_sizes
from serving.placement import place
from serving.placement_speed import Load, Speed, speeds

SPEC, H200 = load_model(priced.MODEL), load_hardware("H200")


def speed(root: Path, parallel: Parallel, load: Load, **limits: int) -> Speed:
    placement = place(SPEC, H200, parallel, max_model_len=81920, kv_dtype="bf16")
    (found,) = speeds(SPEC, H200, [placement], load, root, **limits)
    return found


def test_a_step_is_that_of_the_cost_model(tmp_path: Path) -> None:
    bundle = priced.bundle(tmp_path)
    group = Parallel(dp=8, ep=8)
    found = speed(tmp_path, group, Load(4096, 250), max_num_batched_tokens=4096, max_num_seqs=256)
    cost = build_cost(
        bundle=bundle,
        spec=SPEC,
        parallel=group,
        hardware=H200,
        max_num_batched_tokens=4096,
        capture_sizes=default_capture_sizes(256),
        step_us=H200.step_overhead_us or 0.0,
    )
    shape = StepShape((), 32, 32 * 4096, 4096, 32 * 2048, 32)  # 250 over 8 ranks: 32 on the fullest
    step_s = cost.step_ns([shape] * 8) / 1e9
    assert found.requests == 256
    assert found.decode_step_ms == pytest.approx(1e3 * step_s)
    assert found.decode_tokens_per_s == pytest.approx(256 / step_s)
    prompt = StepShape(((4096, 0),), 0, 0, 0, 0, 1)
    assert found.prefill_tokens_per_s == pytest.approx(8 * 4096e9 / cost.step_ns([prompt] * 8))


def test_what_cannot_be_priced_says_why(tmp_path: Path) -> None:
    priced.bundle(tmp_path)
    limits = {"max_num_batched_tokens": 4096, "max_num_seqs": 256}
    held = speed(tmp_path, Parallel(dp=8, ep=8), Load(65536, 64), **limits)
    assert held.decode_step_ms is None
    assert held.reason == "a rank holds 2 requests of 65,536 tokens at once, 8 are needed"
    assert "no tables of tp 8, only of tp 1." in str(speed(tmp_path, Parallel(tp=8, ep=8), Load(4096), **limits).reason)
    assert "pipeline" in str(speed(tmp_path, Parallel(dp=4, pp=2, ep=4), Load(4096), **limits).reason)
    (tmp_path / "empty").mkdir()
    assert "no bundle of" in str(speed(tmp_path / "empty", Parallel(dp=8, ep=8), Load(4096)).reason)
    small = place(SPEC, H200, Parallel(dp=4, ep=4), max_model_len=81920, kv_dtype="bf16")
    assert speeds(SPEC, H200, [small], Load(4096), tmp_path)[0].reason == "does not fit"
    for load in (Load(0), Load(10, 0)):
        with pytest.raises(ConfigError, match="at least one request with at least one token"):
            speeds(SPEC, H200, [small], load, tmp_path)


def test_a_prefill_beyond_the_tables_names_the_largest_budget_within_them() -> None:
    """Experts divided over 8 ranks end at 16,384 tokens of the group: 2,048 of each."""
    group, root = Parallel(dp=8), default_bundle_root()
    beyond = speed(root, group, Load(4096), max_num_batched_tokens=8192, max_num_seqs=256)
    assert (beyond.prefill_tokens_per_s, beyond.prefill_budget_tokens) == (None, 2048)
    within = speed(root, group, Load(4096), max_num_batched_tokens=2048, max_num_seqs=256)
    assert within.prefill_tokens_per_s is not None and within.prefill_budget_tokens is None
    assert speed(root, group, Load(4096), max_num_batched_tokens=2049).prefill_tokens_per_s is None


def test_measured_tables_rank_the_layouts_as_a_public_benchmark_does() -> None:
    """8 x H200, V3.2: TP1 DP8 EP gives more throughput than TP8 (public runs of two engines: 1.11 and 2.4 times).

    Only the direction: the benchmarks mix prefill and decode under their own arrivals.
    """
    root = default_bundle_root()
    wide = speed(root, Parallel(dp=8, ep=8), Load(4096), max_num_batched_tokens=8192, max_num_seqs=256)
    tall = speed(root, Parallel(tp=8, ep=8), Load(4096), max_num_batched_tokens=8192, max_num_seqs=256)
    assert wide.reason is None and tall.reason is None
    assert wide.decode_tokens_per_s is not None and tall.decode_tokens_per_s is not None
    assert 1.1 < wide.decode_tokens_per_s / tall.decode_tokens_per_s < 2.6
    assert wide.requests > tall.requests
