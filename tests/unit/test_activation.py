"""Which buffers the highest point of the profiling run holds, against sizes written out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from profiler.core.kv import kv_layout
from profiler.core.registry import load_model
from profiler.core.shard import geometry
from profiler.core.types import ModelSpec, Parallel
from profiler.core.units import GIB, MIB
from serving.activation import Step, activation_terms, profiled_step, workspace_users

V32, GLM52, M3, LLAMA = (
    load_model(name)
    for name in (
        "deepseek-ai/DeepSeek-V3.2-Exp",
        "zai-org/GLM-5.2",
        "MiniMaxAI/MiniMax-M3",
        "meta-llama/Llama-3.1-8B",
    )
)

ALONE = Parallel()


def step(
    spec: ModelSpec, split: Parallel = ALONE, *, architecture: str = "sm90", stage: int = 0, **options: Any
) -> Step:
    tokens, seqs = options.pop("batched_tokens", 8192), options.pop("num_seqs", 256)
    layout = kv_layout(spec, split, architecture, **options, stage=stage)
    return profiled_step(spec, split, geometry(spec, split), layout, stage, tokens, seqs)


def users(found: Step, length: int = 131_072) -> dict[str, float]:
    return {user.name: user.size_bytes for user in workspace_users(found, length)}


def gib(found: Step, length: int = 131_072) -> dict[str, float]:
    return {term.name: term.gib for term in activation_terms(found, length)}


@pytest.mark.parametrize(("length", "size"), [(163_840, 0.81), (202_752, 1.00), (819_200, 4.03), (1_048_576, 5.16)])
def test_index_workspace(length: int, size: float) -> None:
    """vLLM issue 55221."""
    assert users(step(GLM52, Parallel(tp=8)), length)["index_workspace"] / GIB == pytest.approx(size, abs=0.006)


def test_moe_workspace_is_two_buffers_of_rows() -> None:
    """8,192 tokens x top-8 x hidden 7,168 in bf16, twice: down output is wider than both halves of the gate-up one."""
    assert users(step(V32))["moe_workspace"] == 2 * 8192 * 8 * 7168 * 2
    assert users(step(M3))["moe_workspace"] == 2 * 8192 * 4 * 6144 * 2
    # A data-parallel group brings its tokens together, up to one pass of 32,768.
    assert users(step(V32, Parallel(dp=8, ep=8)))["moe_workspace"] == 2 * 32_768 * 8 * 7168 * 2


def test_flashmla_workspace() -> None:
    """Queries of the step, and 5 x max_model_len latents for fp8_ds_mla alone."""
    assert "flashmla_workspace" not in users(step(V32)), "FlashAttention on sm90"
    packed = users(step(V32, kv_dtype="fp8"))["flashmla_workspace"]
    assert packed == (8192 * 128 + 5 * 131_072) * 576 * 2
    assert users(step(V32, architecture="sm100"))["flashmla_workspace"] == 8192 * 128 * 576 * 2


def test_only_the_largest_user_of_the_workspace_is_charged() -> None:
    found = gib(step(V32))
    assert "moe_workspace" in found and "index_workspace" not in found
    assert "index_workspace" in gib(step(GLM52, Parallel(tp=4)), 1_048_576)


def test_experts_count_for_attention_only_where_an_earlier_layer_has_some() -> None:
    short = replace(V32, layers=V32.layers[:4])
    assert "index_workspace" in gib(step(short)) and "moe_workspace" not in gib(step(short))
    assert "moe_workspace" in gib(step(replace(V32, layers=V32.layers[:5])))


def test_the_moment_with_most_memory_is_charged() -> None:
    short = replace(V32, layers=V32.layers[:4])
    wide, narrow = (gib(step(short, Parallel(tp=tp), batched_tokens=16_384)) for tp in (1, 4))
    assert wide["mha_workspace"] == 65_536 * 128 * 256 * 2 / GIB == 4.0
    assert "mha_workspace" not in narrow and "expert_buffers" in narrow
    assert {"mha_workspace", "expert_buffers"} & set(gib(step(LLAMA))) == set()
    assert "mlp_buffers" in gib(step(LLAMA, num_seqs=1))
    sampled = gib(step(LLAMA, num_seqs=1024))
    assert sampled["sampler_buffers"] == 1024 * 128_256 * 14 / GIB


def test_indexer_of_few_heads_is_the_moment_with_its_logits() -> None:
    """With two heads per rank the expanded keys are smaller than 512 MiB of logits."""
    few = replace(V32, layers=V32.layers[:1], num_heads=2)
    found = gib(step(few, num_seqs=1, batched_tokens=64))
    assert found["index_logits"] == 512 * MIB / GIB and "mha_workspace" not in found


def test_the_last_stage_samples() -> None:
    split = Parallel(pp=2)
    first, last = (step(LLAMA, split, stage=stage, num_seqs=1024) for stage in (0, 1))
    assert (first.samples, last.samples) == (False, True)
    assert "sampler_buffers" in gib(last) and "sampler_buffers" not in gib(first)
    assert len(first.kinds) == len(last.kinds) == 16


def test_gathered_tokens_belong_to_data_parallel_groups() -> None:
    split = Parallel(tp=2, dp=4, ep=8)
    assert gib(step(M3, split))["gathered_tokens"] == 2 * 4 * 8192 * 6144 * 2 / GIB
    assert "gathered_tokens" not in gib(step(M3, Parallel(tp=8)))
