"""KV blocks against public vLLM logs, and the budget against runs on a card.

Given the available KV memory that a log prints to two digits, the logged number of blocks has to lie between the
blocks of that figure -0.005 and +0.005 GiB. Sources: docs/guide/kv-shapes.md.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profiler.core.hardware import load_hardware
from profiler.core.registry import load_model
from profiler.core.stack import shrunk_layers
from profiler.core.types import ModelSpec, Parallel
from serving.capacity import Budget, memory_budget

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "H200"
GLM51 = "zai-org/GLM-5-FP8"
GLM52, M3, V32 = "zai-org/GLM-5.2", "MiniMaxAI/MiniMax-M3", "deepseek-ai/DeepSeek-V3.2-Exp"


def with_kv(model: str | ModelSpec, gpu: str, split: Parallel, gib: float, **options: Any) -> Budget:
    spec = load_model(model) if isinstance(model, str) else model
    return memory_budget(spec, load_hardware(gpu), split, available_kv_gib=gib, **options)


@pytest.mark.parametrize(
    ("model", "gpu", "split", "options", "gib", "tokens", "concurrency"),
    [
        (GLM52, "GB200", Parallel(tp=4, ep=4), {"kv_dtype": "fp8", "max_model_len": 819_200}, 50.62, 1_139_456, 1.39),
        (GLM51, "H200", Parallel(tp=8), {"max_model_len": 202_752}, 34.86, 373_696, 1.84),
        (GLM51, "H200", Parallel(tp=8), {"max_model_len": 202_752}, 32.11, 344_192, 1.70),
        (GLM52, "H200", Parallel(tp=4), {"kv_dtype": "bf16", "max_model_len": 131_072}, 14.97, 173_568, None),
        # A fork that lets eight and four ranks share a sequence: tokens are multiplied by dcp.
        (
            GLM51,
            "RTXPRO6000",
            Parallel(tp=4),
            {"dcp": 4, "mtp_layers": 1, "max_model_len": 202_752},
            7.58,
            523_008,
            2.58,
        ),
        (
            "zai-org/GLM-5",
            "RTXPRO6000",
            Parallel(tp=16),
            {"dcp": 8, "max_model_len": 202_752},
            1.49,
            208_384,
            1.03,
        ),
        # Kimi-K2-Thinking has the cache of DeepSeek-V3.
        ("deepseek-ai/DeepSeek-V3", "H200", Parallel(tp=8), {"max_model_len": 163_840}, 46.80, 715_072, None),
    ],
)
def test_logged_tokens(
    model: str, gpu: str, split: Parallel, options: dict[str, Any], gib: float, tokens: int, concurrency: float | None
) -> None:
    low, high = (with_kv(model, gpu, split, gib + rounding, **options) for rounding in (-0.005, 0.005))
    blocks, rest = divmod(tokens, low.layout.tokens_per_block)
    assert rest == 0
    assert low.num_gpu_blocks <= blocks <= high.num_gpu_blocks
    if concurrency is not None:
        assert tokens / options["max_model_len"] == pytest.approx(concurrency, abs=0.005)
        assert round(low.max_concurrency, 1) <= concurrency + 0.05 and concurrency - 0.05 <= round(
            high.max_concurrency, 1
        )


def test_printed_tokens_are_concurrency_times_length() -> None:
    """vLLM issue 51041: the engine prints int(max_concurrency x max_model_len), so a log can show 208,383."""
    budget = with_kv("zai-org/GLM-5", "RTXPRO6000", Parallel(tp=16), 1.4935, dcp=8, max_model_len=202_752)
    assert budget.num_gpu_blocks == 407
    assert abs(int(budget.max_concurrency * 202_752) - 208_383) <= 1


def test_blocks_of_m3_on_a_card() -> None:
    """4 layers on one H200 with vLLM 0.26: 61.91 GiB available, 61,473 blocks of 128."""
    spec = load_model(M3)
    short = replace(spec, layers=spec.layers[: shrunk_layers(spec)])
    low, high = (with_kv(short, "H200", Parallel(), 61.91 + r, max_model_len=131_072) for r in (-0.005, 0.005))
    assert low.layout.bytes_per_token == 4 * 2048 + 256
    assert low.num_gpu_blocks <= 61_473 <= high.num_gpu_blocks


def test_pages_of_native_v3_2_on_a_card() -> None:
    """4 layers with fp8 KV: pages of 41,984 B and 8,448 B."""
    spec = load_model(V32)
    short = replace(spec, layers=spec.layers[:4])
    layout = with_kv(short, "H200", Parallel(), 10.0, kv_dtype="fp8", max_model_len=8192).layout
    assert [cache.bytes_per_token_layer * 64 for cache in layout.caches] == [41_984, 8_448]


@pytest.mark.parametrize(
    ("options", "gib", "length", "needed", "largest"),
    [
        # GLM-5.2 with MTP and bf16 KV was refused at 131,072; the engine estimated 115,328 (public log 67212217832).
        ({"kv_dtype": "bf16", "mtp_layers": 1}, 10.09, 131_072, 11.46, 115_328),
        # GLM-5.2-FP8 shapes at 1M tokens (vLLM recipes PR 893).
        ({"kv_dtype": "fp8"}, 25.94, 1_048_576, 52.68, 516_352),
    ],
)
def test_refused_starts(options: dict[str, Any], gib: float, length: int, needed: float, largest: int) -> None:
    budget = with_kv("zai-org/GLM-5.2-FP8", "H200", Parallel(tp=8), gib, max_model_len=length, **options)
    assert not budget.fits
    assert budget.needed_kv_gib == pytest.approx(needed, abs=0.01)
    low, high = (
        with_kv("zai-org/GLM-5.2-FP8", "H200", Parallel(tp=8), gib + r, max_model_len=length, **options)
        for r in (-0.005, 0.005)
    )
    assert low.largest_max_model_len <= largest <= high.largest_max_model_len


# What the engine's log counts elsewhere than this budget does.
AT_LOAD = ("weights", "topk_buffer", "rotary_tables")
NO_ACTIVATION = (*AT_LOAD, "non_torch", "cuda_graphs", "other_activation")


def loaded(budget: Budget) -> float:
    return sum(budget.gib(name) for name in AT_LOAD)


def activation(budget: Budget) -> float:
    """Computed terms alone, without the reserve."""
    return sum(term.gib for term in budget.terms if term.name not in NO_ACTIVATION)


def divided(spec: ModelSpec, tp: int) -> ModelSpec:
    """The model with heads, MLP, vocabulary and expert width of one of tp ranks."""
    assert spec.moe is not None
    moe = replace(
        spec.moe,
        intermediate=spec.moe.intermediate // tp,
        shared_intermediate=spec.moe.shared_intermediate // tp,
    )
    return replace(
        spec,
        num_heads=spec.num_heads // tp,
        intermediate=spec.intermediate // tp,
        vocab=spec.vocab // tp,
        moe=moe,
    )


@pytest.mark.parametrize(
    ("recording", "model", "layers", "weights", "without_formula"),
    [
        # A million positions, and weights in bf16: a table of 0.5 GiB and copies of 0.19 GiB would show.
        ("GLM-5.2-7L", "zai-org/GLM-5.2", 7, 79.555, 0.05),
        ("GLM-5-FP8-6L", "zai-org/GLM-5-FP8", 6, 32.602, 0.08),
        ("DeepSeek-V3.2-Exp-6L", "deepseek-ai/DeepSeek-V3.2-Exp", 6, 37.702, 0.08),
    ],
)
def test_weights_of_recorded_engines(
    recording: str, model: str, layers: int, weights: float, without_formula: float
) -> None:
    """What vLLM 0.26 said it loaded on one H200, against weights, buffer of selected tokens and rotary tables."""
    engine = json.loads((RECORDED / recording / "graphs-mixed" / "vllm" / "engine.json").read_text())
    assert engine["memory_gib"]["weights"] == pytest.approx(weights, abs=0.001)
    spec = load_model(model)
    short = replace(spec, layers=spec.layers[:layers])
    budget = memory_budget(
        short, load_hardware("H200"), Parallel(), max_model_len=135_168, max_num_batched_tokens=8_192, max_num_seqs=64
    )
    assert 0 < engine["memory_gib"]["weights"] - loaded(budget) < without_formula


@pytest.mark.parametrize(
    ("tp", "weights", "peak", "kv_gib", "tokens"),
    [(1, 16.23, 6.65, 88.80, 18_564_928), (4, 4.32, 4.84, 102.52, 21_432_320)],
)
def test_four_layers_measured_on_one_h200(tp: int, weights: float, peak: float, kv_gib: float, tokens: int) -> None:
    """Measured on one H200, vLLM 0.26.0, 2026-11-30: V3.2 fp8, 4 layers, dummy weights, eager, utilisation 0.8,
    max_model_len 163,840, 16,384 batched tokens, 256 sequences; tp 4 as the widths of one of four ranks."""
    spec = load_model(V32)
    spec = replace(spec, layers=spec.layers[:4])
    spec = spec if tp == 1 else divided(spec, tp)
    options: dict[str, Any] = {
        "max_model_len": 163_840,
        "utilization": 0.8,
        "max_num_batched_tokens": 16_384,
        "max_num_seqs": 256,
        "cuda_graph_gib": 0.0,
        "non_torch_gib": 0.16,
    }
    budget = memory_budget(spec, load_hardware("H200"), Parallel(), **options)
    assert budget.total_gib * budget.utilization == pytest.approx(111.84, abs=0.01)
    assert loaded(budget) == pytest.approx(weights, rel=0.01)
    assert activation(budget) == pytest.approx(peak, rel=0.01)
    assert budget.kv_available_gib == pytest.approx(kv_gib, rel=0.005)
    assert budget.kv_tokens == pytest.approx(tokens, rel=0.005)
    low, high = (with_kv(spec, "H200", Parallel(), kv_gib + r, max_model_len=163_840) for r in (-0.005, 0.005))
    assert low.kv_tokens <= tokens <= high.kv_tokens


def test_six_layers_measured_on_one_h200() -> None:
    """V3.2 fp8, 6 layers, vLLM 0.26: utilisation 0.9, max_model_len 131,072, 8,192 tokens per step."""
    spec = load_model(V32)
    budget = memory_budget(
        replace(spec, layers=spec.layers[:6]),
        load_hardware("H200"),
        Parallel(),
        max_model_len=131_072,
        max_num_batched_tokens=8192,
        non_torch_gib=0.23,
        cuda_graph_gib=1.06,
    )
    assert budget.total_gib * budget.utilization == pytest.approx(125.83, abs=0.005)
    assert loaded(budget) == pytest.approx(37.7, rel=0.005)
    assert activation(budget) == pytest.approx(6.69, rel=0.01)
    assert budget.kv_available_gib == pytest.approx(80.16, rel=0.005)


def test_activation_of_the_logged_full_budget() -> None:
    """GLM-5.2 TP4 EP4 at 819,200 tokens: 6.31 GiB of activations, 4.99 of graphs (public log 61511710941)."""
    budget = memory_budget(
        load_model(GLM52),
        load_hardware("GB200"),
        Parallel(tp=4, ep=4),
        max_model_len=819_200,
        kv_dtype="fp8",
        max_num_batched_tokens=8192,
    )
    assert budget.gib("index_workspace") == pytest.approx(4.03, abs=0.005)
    assert budget.gib("cuda_graphs") == pytest.approx(4.99, abs=0.005)
    assert activation(budget) == pytest.approx(6.31, rel=0.02)


def test_activation_of_m3_on_a_card() -> None:
    """4 layers on one H200: 1.35 GiB. The run's limits are not on record; 8,192 tokens and few sequences are taken."""
    spec = load_model(M3)
    budget = memory_budget(
        replace(spec, layers=spec.layers[:4]),
        load_hardware("H200"),
        Parallel(),
        max_model_len=131_072,
        max_num_batched_tokens=8192,
        max_num_seqs=64,
    )
    assert activation(budget) == pytest.approx(1.35, rel=0.08)
