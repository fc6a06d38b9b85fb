"""Binding kernels to components: sums, calls per pass, shared kernels, and what is left over."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from profiling import FakeEngine, each_component

from profiler.bind import Bound, bind, calls_per_pass, matcher
from profiler.core.errors import AcquisitionError, ConfigError
from profiler.core.registry import load_model, load_model_config
from profiler.core.shots import Fill, MoeBatch, Shot
from profiler.core.types import ModelSpec
from profiler.engines.base import EngineInfo, EngineOptions, KernelSample, Rule, ShotResult, find_binding

V32 = load_model("deepseek-ai/DeepSeek-V3.2-Exp")
OPTIONS = EngineOptions(V32.name, load_model_config(V32.name), V32, "CPU", 1, (1,), "auto", None, 163_840, 8_192, 256)
# Four layers in one pass: three with a dense MLP, one with experts.
INFO = FakeEngine(OPTIONS, each_component).info()

DECOMPOSED = EngineInfo(
    name="vllm",
    versions={"vllm": "0.26.0"},
    gpu={},
    kv={},
    weights="fp8",
    layer_kinds=("mla-full-dense", "mla-full-moe"),
    whole_forward=True,
    settings={"attention_backends": ["DEEPSEEK_V32_INDEXER", "FLASH_ATTN_MLA_SPARSE"]},
)


def binding(rules: Sequence[Rule], fused: Mapping[str, str] | None = None) -> Any:
    return SimpleNamespace(FUSED=fused or {}, rules=lambda spec: rules, matches=lambda info: True)


def bound(
    samples: Sequence[tuple[int, str, str, float]], fills: Sequence[Fill], rules: Sequence[Rule], **how: Any
) -> Bound:
    """Binds one shot; samples are (repeat, module, kernel, microseconds)."""
    shot = Shot(tuple(fills), how.pop("requests", ((8, 0),)), how.pop("regime", "auto"), how.pop("moe", None))
    info = how.pop("info", INFO)
    found = tuple(KernelSample(0, r, module, kernel, us, 1) for r, module, kernel, us in samples)
    return bind([ShotResult(0, found)], [shot], V32, info, binding(rules, how.pop("fused", None)))


def test_calls_follow_the_layers_that_ran() -> None:
    calls = calls_per_pass(V32, INFO)
    assert calls["dense", "o_proj"] == 4
    assert calls["dense", "gate_up_proj"] == 3 and calls["dense", "router_gate"] == 1
    assert calls["indexer", "index_topk"] == 4 and calls["per_sequence", "lm_head"] == 1
    with pytest.raises(ConfigError, match="no layer kind gqa-none-dense"):
        calls_per_pass(V32, replace(INFO, layer_kinds=("gqa-none-dense",)))


def test_a_component_is_the_sum_of_its_kernels_over_its_calls() -> None:
    samples = [
        (0, f"model.layers.{layer}.self_attn.o_proj", kernel, us)
        for layer in range(4)
        for kernel, us in (("quant", 1.0), ("gemm", 9.0 + layer))
    ]
    result = bound(samples, [Fill("dense", (8,), ("o_proj",))], [Rule(r"\.o_proj$", "", "dense", "o_proj")])
    (row,) = result.rows
    assert row.time_us == pytest.approx((4 * 1.0 + 9 + 10 + 11 + 12) / 4)
    assert (row.category, row.name, row.key) == ("dense", "o_proj", (8,))
    assert result.bound_share == 1.0 and not result.unbound and not result.problems


def test_the_median_and_the_spread_are_over_repeats() -> None:
    samples = [(r, "model.norm", "rms", us) for r, us in enumerate([10.0, 30.0, 11.0, 12.0, 13.0])]
    (row,) = bound(samples, [Fill("dense", (8,), ("final_norm",))], [Rule("norm", "", "dense", "final_norm")]).rows
    assert row.time_us == 12.0
    assert row.spread_rel == pytest.approx((0.6 * 30 + 0.4 * 13 - (0.6 * 10 + 0.4 * 11)) / 12.0)


def test_the_first_rule_that_matches_wins_and_a_regime_restricts_it() -> None:
    rules = [
        Rule("attn", "", "attention", "mla_dense_prefill", ("dense",)),
        Rule("attn", "topk", "indexer", "index_topk"),
        Rule("attn", "", "sparse_attention", "sparse_mla"),
    ]
    samples = [(0, "layers.0.attn", "topk_kernel", 4.0), (0, "layers.0.attn", "fwd", 8.0)]
    key = (8, 0, 0, 0, 0)
    fills = [Fill("indexer", key, ("index_topk",)), Fill("sparse_attention", key, ("sparse_mla",))]
    sparse = bound(samples, fills, rules, regime="sparse")
    assert {(row.name, row.time_us) for row in sparse.rows} == {("index_topk", 1.0), ("sparse_mla", 2.0)}
    dense = bound(samples, [Fill("attention", key, ("mla_dense_prefill",))], rules, regime="dense")
    assert [row.time_us for row in dense.rows] == [3.0]


def test_a_component_without_a_kernel_leaves_its_category_incomplete() -> None:
    samples = [(0, "norm", "rms", 5.0), (0, "head", "gemm", 7.0), (1, "norm", "rms", 5.0)]
    rules = [Rule("norm", "", "dense", "final_norm"), Rule("head", "", "per_sequence", "lm_head")]
    fills = [Fill("dense", (8,), ("final_norm",)), Fill("per_sequence", (1,), ("lm_head",))]
    result = bound(samples, fills, rules)
    assert [row.name for row in result.rows] == ["final_norm"]
    assert list(result.problems) == ["per_sequence"]
    assert "no kernel of 'lm_head' in repeat 1" in result.problems["per_sequence"][0]


def test_a_failed_shot_keeps_its_reason_in_every_table_that_it_fills() -> None:
    shot = Shot((Fill("dense", (8,), ("o_proj",)), Fill("indexer", (8, 0, 0, 0, 0), ("index_topk",))), ((8, 0),))
    result = bind([ShotResult(0, (), "CUDA out of memory")], [shot], V32, INFO, binding([]))
    assert set(result.problems) == {"dense", "indexer"} and not result.rows
    assert "CUDA out of memory" in result.problems["dense"][0]


def test_unbound_kernels_are_named_with_their_time_and_share() -> None:
    samples = [
        (repeat, module, kernel, us)
        for repeat in (0, 1)
        for module, kernel, us in (("norm", "rms", 95.0), ("", "mystery", 4.0), ("", "crumb", 1.0))
    ]
    result = bound(samples, [Fill("dense", (8,), ("final_norm",))], [Rule("norm", "", "dense", "final_norm")])
    assert [(k.kernel, k.duration_us, k.share, k.material) for k in result.unbound] == [
        ("mystery", 4.0, pytest.approx(0.04), True),
        ("crumb", 1.0, pytest.approx(0.01), False),
    ]
    assert result.bound_share == pytest.approx(0.95)


def test_kernels_outside_the_tables_on_purpose_are_bound_but_give_no_row() -> None:
    rules = [Rule("^$", "Memcpy", None, "input copies"), Rule("norm", "", "dense", "final_norm")]
    samples = [(0, "", "Memcpy HtoD", 50.0), (0, "norm", "rms", 5.0)]
    result = bound(samples, [Fill("dense", (8,), ("final_norm",))], rules)
    assert not result.unbound and [row.time_us for row in result.rows] == [5.0]


def test_components_that_share_a_kernel_split_its_time_and_keep_the_sum() -> None:
    samples = [(0, f"layers.{layer}", "fused_norm_rope", 6.0) for layer in range(4)]
    names = ("q_a_norm", "kv_a_norm", "rotary")
    rules = [Rule("layers", "fused_norm_rope", "dense", "q_a_norm")]
    fused = {"kv_a_norm": "q_a_norm", "rotary": "q_a_norm"}
    result = bound(samples, [Fill("dense", (8,), names)], rules, fused=fused)
    assert [row.time_us for row in result.rows] == [2.0, 2.0, 2.0]
    with pytest.raises(ConfigError, match="'gate_up_proj' runs 3 times a pass and its carrier 'o_proj' 4"):
        bound(samples, [Fill("dense", (8,), names)], rules, fused={"gate_up_proj": "o_proj"})


def test_a_call_that_ran_something_else_counts_only_where_no_other_ran() -> None:
    """The norms of two layers as vLLM 0.26.0 launched them on an H200, 8,192 tokens: the first has no residual."""
    found = find_binding(DECOMPOSED)
    rules, fill = found.rules(V32), Fill("dense", (8_192,), ("input_norm", "post_attention_norm", "final_norm"))
    add = "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type "
    add += "vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8, true>(c10::BFloat16*, long,"
    plain = "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2, true>(c10::BFloat16*, c10::BFloat16 const*, long, long,"
    samples = [
        (0, "model.layers.0.input_layernorm", plain, 64.672),
        (0, "model.layers.0.post_attention_layernorm", add, 112.256),
        (0, "model.layers.1.input_layernorm", add, 113.12),
        (0, "model.layers.1.post_attention_layernorm", add, 113.153),
        (0, "model.norm", add, 115.104),
    ]
    result = bound(samples, [fill], rules, info=DECOMPOSED)
    times = {row.name: row.time_us for row in result.rows}
    assert times["input_norm"] == 113.12
    assert times["post_attention_norm"] == pytest.approx((112.256 + 113.153) / 2) and times["final_norm"] == 115.104
    assert not result.unbound and result.bound_share == 1.0
    # A stack of one layer has nothing else, and an engine that adds in the first layer too is taken as it is.
    one = replace(DECOMPOSED, layer_kinds=("mla-full-dense",))
    rows = bound([samples[0], samples[1], samples[4]], [fill], rules, info=one).rows
    assert {row.name: row.time_us for row in rows}["input_norm"] == 64.672
    samples[0] = (0, "model.layers.0.input_layernorm", add, 112.0)
    rows = bound(samples, [fill], rules, info=DECOMPOSED).rows
    assert {row.name: row.time_us for row in rows}["input_norm"] == pytest.approx((112.0 + 113.12) / 2)


def test_the_tenth_layer_is_not_the_first() -> None:
    rules = find_binding(DECOMPOSED).rules(V32)
    of_layer = {n: matcher(rules)(f"model.layers.{n}.input_layernorm", "rms_norm_kernel", "auto") for n in (0, 10)}
    assert [bool(rule and rule.stands_in) for rule in of_layer.values()] == [True, False]
    assert all(rule and rule.name == "input_norm" for rule in of_layer.values())


def test_an_expert_shot_is_one_call() -> None:
    fill = Fill("moe", (8, 64, 20, 64), ("experts",))
    rules = [Rule("^experts", "", "moe", "experts")]
    samples = [(0, "experts.ep8", "gemm1", 10.0), (0, "experts.ep8", "gemm2", 5.0)]
    result = bound(samples, [fill], rules, requests=(), moe=MoeBatch(8, 64))
    assert [row.time_us for row in result.rows] == [15.0]


def test_bindings_are_found_by_what_ran() -> None:
    assert find_binding(INFO).matches(INFO)
    other = EngineInfo("abacus", {"abacus": "1"}, {}, {}, "bf16", (), True)
    with pytest.raises(AcquisitionError, match=r"engine abacus \(abacus 1\) are bound by no module"):
        find_binding(other)


def test_the_reference_binding_takes_each_component_by_name() -> None:
    spec: ModelSpec = V32
    (rule,) = [r for r in find_binding(INFO).rules(spec) if r.category == "indexer"]
    assert rule.name == "" and rule.module == "^indexer$"
