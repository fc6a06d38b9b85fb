"""Budget terms sum to the total; more memory never holds less; longer limits never hold more."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.core.hardware import load_hardware
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from serving.capacity import Budget, memory_budget

MODELS = {
    name: load_model(name)
    for name in ("deepseek-ai/DeepSeek-V3.2-Exp", "zai-org/GLM-5.2-FP8", "MiniMaxAI/MiniMax-M3", "Qwen/Qwen3-32B")
}
GPUS = {name: load_hardware(name) for name in ("H200", "B200", "RTXPRO6000")}


@st.composite
def budgets(draw: st.DrawFn) -> dict[str, Any]:
    spec = draw(st.sampled_from(list(MODELS.values())))
    tp, dp, pp = (draw(st.sampled_from([1, 2, 4, 8])) for _ in range(3))
    return {
        "spec": spec,
        "hardware": draw(st.sampled_from(list(GPUS.values()))),
        "parallel": Parallel(tp=tp, pp=pp, dp=dp, ep=tp * dp if spec.moe else 1),
        "max_model_len": draw(st.integers(1, spec.max_position // 2)),
        "utilization": draw(st.floats(0.1, 1.0)),
        "max_num_batched_tokens": draw(st.sampled_from([256, 2048, 8192, 16384])),
    }


def build(arguments: dict[str, Any], **changes: Any) -> Budget:
    return memory_budget(**{**arguments, **changes})


@settings(max_examples=60, deadline=None)
@given(budgets())
def test_terms_sum_to_the_total(arguments: dict[str, Any]) -> None:
    budget = build(arguments)
    assert sum(budget.parts().values()) == pytest.approx(budget.total_gib, abs=1e-9)
    assert all(term.gib >= 0 and term.source for term in budget.terms)
    if budget.parallel.pp == 1 and budget.num_gpu_blocks:
        spare = budget.kv_available_gib * 2**30 - budget.num_gpu_blocks * budget.layout.bytes_per_block
        assert 0 <= spare < budget.layout.bytes_per_block


@settings(max_examples=60, deadline=None)
@given(budgets(), st.floats(0.0, 1.0))
def test_more_memory_never_holds_less(arguments: dict[str, Any], share: float) -> None:
    more = arguments["utilization"] + share * (1 - arguments["utilization"])
    assert build(arguments, utilization=more).num_gpu_blocks >= build(arguments).num_gpu_blocks


@settings(max_examples=60, deadline=None)
@given(budgets(), st.integers(1, 4))
def test_longer_limits_never_hold_more(arguments: dict[str, Any], factor: int) -> None:
    longer = min(arguments["max_model_len"] * factor, arguments["spec"].max_position)
    before, after = build(arguments), build(arguments, max_model_len=longer)
    assert after.num_gpu_blocks <= before.num_gpu_blocks
    assert after.needed_blocks >= before.needed_blocks
    assert after.largest_max_model_len == before.largest_max_model_len


@settings(max_examples=60, deadline=None)
@given(budgets())
def test_largest_length_agrees_with_the_verdict(arguments: dict[str, Any]) -> None:
    budget = build(arguments)
    assert budget.safe_max_model_len <= budget.largest_max_model_len
    if budget.fits:
        assert budget.largest_max_model_len + budget.layout.tokens_per_block > budget.max_model_len
    else:
        assert budget.largest_max_model_len < budget.max_model_len


@given(st.floats(0.01, 130.0), st.floats(0.0, 5.0))
def test_given_memory_is_floored_to_blocks(gib: float, extra: float) -> None:
    spec, gpu = MODELS["deepseek-ai/DeepSeek-V3.2-Exp"], GPUS["H200"]
    small, large = (
        memory_budget(spec, gpu, Parallel(tp=8), max_model_len=64, available_kv_gib=g) for g in (gib, gib + extra)
    )
    assert small.num_gpu_blocks <= large.num_gpu_blocks
    used = small.num_gpu_blocks * small.layout.bytes_per_block
    assert used <= gib * 2**30 < used + small.layout.bytes_per_block * (1 + 1e-9)
