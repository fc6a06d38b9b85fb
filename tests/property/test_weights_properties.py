"""Weights never shrink when a layer, an expert or a head is added, and never grow when the split widens."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.core.registry import load_model
from profiler.core.types import LayerKind, ModelSpec, Parallel
from profiler.core.weights import engine_weights, nominal_weights, parameters

V32 = load_model("deepseek-ai/DeepSeek-V3.2")
KINDS = [LayerKind("mla", s, m) for s in ("full", "shared") for m in ("dense", "moe")]
stacks = st.lists(st.sampled_from(KINDS), min_size=1, max_size=20).map(lambda kinds: replace(V32, layers=tuple(kinds)))
powers = st.integers(0, 4).map(lambda power: 2**power)


def held(spec: ModelSpec, split: Parallel = Parallel()) -> int:  # noqa: B008
    return engine_weights(spec, split).total_bytes


@given(stacks, st.sampled_from(KINDS))
def test_a_layer_adds_parameters_and_bytes(spec: ModelSpec, kind: LayerKind) -> None:
    more = replace(spec, layers=(*spec.layers, kind))
    assert sum(parameters(more).values()) > sum(parameters(spec).values())
    assert held(more) > held(spec)


@given(stacks, st.integers(1, 64))
def test_heads_and_experts_add_bytes(spec: ModelSpec, extra: int) -> None:
    assert held(replace(spec, num_heads=spec.num_heads + extra)) > held(spec)
    assert spec.moe is not None
    more = replace(spec, moe=replace(spec.moe, num_experts=spec.moe.num_experts + extra))
    assert (held(more) > held(spec)) == any(kind.mlp == "moe" for kind in spec.layers)


@given(stacks)
def test_a_wider_dtype_adds_bytes(spec: ModelSpec) -> None:
    wide = replace(spec, quantization=replace(spec.quantization, weights="bf16", block=None))
    assert held(wide) > held(spec)
    assert nominal_weights(wide).dense_bytes == 2 * nominal_weights(spec).dense_bytes


@settings(max_examples=50)
@given(stacks, powers, powers)
def test_wider_splits_never_hold_more(spec: ModelSpec, tp: int, dp: int) -> None:
    ep = tp * dp
    assert held(spec, Parallel(tp=tp, dp=dp, ep=ep)) <= held(spec)
    assert held(spec, Parallel(tp=1, dp=2 * dp, ep=2 * dp)) <= held(spec, Parallel(tp=1, dp=dp, ep=dp))
    assert held(spec, Parallel(tp=tp)) >= held(spec) / tp, "what is replicated makes a rank's share larger than 1 / tp"


@given(stacks)
def test_engine_holds_more_than_the_nominal_view(spec: ModelSpec) -> None:
    nominal = nominal_weights(spec)
    assert held(spec) > nominal.dense_bytes + nominal.experts_bytes
