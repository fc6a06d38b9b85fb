from dataclasses import replace

import pytest

from profiler.core.errors import ConfigError
from profiler.core.registry import load_model
from profiler.core.shard import broken_rules, geometry, is_launchable, padded_vocab
from profiler.core.types import ModelSpec, Parallel
from profiler.core.weights import engine_weights, held_bytes, layer_matrices, stage_weights, whole

V32, GLM5, M3 = (load_model(n) for n in ("deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5", "MiniMaxAI/MiniMax-M3"))
QWEN, LLAMA = load_model("Qwen/Qwen3-30B-A3B-Instruct-2507"), load_model("meta-llama/Llama-3.1-8B")


def test_widths_of_a_rank() -> None:
    found = geometry(V32, Parallel(tp=8))
    assert (found.heads, found.intermediate, found.shared_intermediate, found.moe_intermediate) == (16, 2304, 256, 256)
    assert (found.experts, found.moe_tp, found.index_heads, found.vocab) == (256, 8, 64, 16160)
    wide = geometry(V32, Parallel(dp=8, ep=8))
    assert (wide.heads, wide.experts, wide.moe_intermediate, wide.moe_tp) == (128, 32, 2048, 1)


def test_sequence_parallel_moe_keeps_the_shared_expert_whole() -> None:
    assert geometry(V32, Parallel(tp=2, dp=4, ep=8)).shared_intermediate == 2048
    assert geometry(V32, Parallel(tp=8, ep=8)).shared_intermediate == 256
    assert geometry(V32, Parallel(dp=8, ep=8)).shared_intermediate == 2048


def test_index_heads_of_m3_follow_the_key_value_heads() -> None:
    assert [geometry(M3, Parallel(tp=tp)).index_heads for tp in (1, 2, 4, 8)] == [4, 2, 1, 1]
    rows = {
        tp: sum(
            m.rows
            for m in layer_matrices(M3, M3.layers[-1], geometry(M3, Parallel(tp=tp)))
            if m.name in ("qkv_proj", "index_qk_proj")
        )
        for tp in (1, 2, 4, 8)
    }
    assert {tp: n // 128 for tp, n in rows.items()} == {1: 77, 2: 39, 4: 20, 8: 12}, "rows of vLLM's fused projection"


def test_uneven_experts_count_the_fullest_rank() -> None:
    assert geometry(GLM5, Parallel(dp=24, ep=24)).experts == 11
    assert geometry(GLM5, Parallel(dp=3, ep=3)).experts == 86
    assert geometry(V32, Parallel(dp=8, ep=8)).experts == 32


@pytest.mark.parametrize(
    ("spec", "split", "message"),
    [
        (GLM5, Parallel(tp=3), "64 attention heads do not divide by tp 3"),
        (V32, Parallel(tp=32), "shared expert width 2048 / 32 = 64 is no multiple of the fp8 block width 128"),
        (V32, Parallel(tp=32), "MLP width 18432 / 32 = 576 is no multiple of the fp8 block width 128"),
        (V32, Parallel(dp=8, ep=4), "ep 4 is no multiple of dp 8"),
        (V32, Parallel(dp=32, ep=1), "expert width 2048 / 32 = 64 is no multiple of the fp8 block width 128"),
        (V32, Parallel(dp=4, ep=8), r"ep 8 / dp 4 = 2 exceeds tp 1 \(ep is at most tp x dp = 4\)"),
        (V32, Parallel(tp=8, ep=3), "8 ranks do not divide by ep 3"),
        (V32, Parallel(dp=512, ep=512), "ep 512 exceeds the 256 experts"),
        (LLAMA, Parallel(tp=2, ep=2), "ep 2 for a model without experts"),
        (LLAMA, Parallel(pp=33), "pp 33 exceeds the 32 layers"),
        (QWEN, Parallel(tp=5), "32 attention heads do not divide by tp 5"),
        (replace(V32, vocab=64), Parallel(tp=128), "padded vocabulary of 64 rows does not divide by tp 128"),
    ],
)
def test_broken_rules_are_named(spec: ModelSpec, split: Parallel, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        geometry(spec, split)


def test_v3_2_splits_over_16_and_an_unquantised_model_over_32() -> None:
    assert broken_rules(V32, Parallel(tp=16)) == ()
    assert broken_rules(GLM5, Parallel(tp=32)) == ()


@pytest.mark.parametrize("name", ["tp", "pp", "dp", "ep"])
@pytest.mark.parametrize("degree", [0, -1])
def test_degrees_below_one_are_refused(name: str, degree: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {degree}"):
        geometry(V32, Parallel(**{name: degree}))


def test_what_the_engine_can_launch() -> None:
    assert is_launchable(Parallel(tp=8)) and is_launchable(Parallel(tp=2, dp=4, ep=8))
    assert not is_launchable(Parallel(tp=2, dp=4, ep=4))


def test_vocabulary_is_padded_to_64_rows() -> None:
    assert padded_vocab(replace(V32, vocab=129281)) == 129344


def test_stages_hold_the_whole_model_once() -> None:
    whole_model = engine_weights(GLM5, Parallel()).total_bytes
    assert sum(stage.total_bytes for stage in stage_weights(GLM5, Parallel(pp=4))) == whole_model
    first, *_, last = stage_weights(GLM5, Parallel(pp=4))
    assert "embedding" in first.groups and "head" not in first.groups
    assert "head" in last.groups and "embedding" not in last.groups


def test_mtp_layer_is_held_by_the_last_stage() -> None:
    plain, drafted = (stage_weights(GLM5, Parallel(pp=2), mtp_layers=n) for n in (0, 1))
    assert drafted[0].groups == plain[0].groups
    assert drafted[1].total_bytes > plain[1].total_bytes


def test_fp8_scales_are_one_per_block() -> None:
    matrices = {matrix.name: matrix for matrix in layer_matrices(V32, V32.layers[0], whole(V32))}
    kv_a = matrices["kv_a_proj"]
    assert held_bytes(V32, kv_a) == 576 * 7168 + 5 * 56 * 4, "576 rows are 4.5 blocks, which take 5 scales"
    assert held_bytes(V32, matrices["index_wk"]) == 2 * 128 * 7168, "stays wide under fp8 weights"
    assert held_bytes(V32, matrices["absorbed_kv_b"]) == 2 * 128 * 256 * 512


def test_router_widths() -> None:
    gate = {
        name: next(m for m in layer_matrices(s, s.layers[-1], whole(s)) if m.name == "gate")
        for name, s in (("v", V32), ("m", M3))
    }
    assert held_bytes(V32, gate["v"]) == 2 * 256 * 7168
    assert held_bytes(M3, gate["m"]) == 4 * 128 * 6144


def test_tied_embeddings_are_held_once() -> None:
    tied = replace(LLAMA, tie_embeddings=True)
    assert (
        engine_weights(LLAMA, Parallel()).total_bytes - engine_weights(tied, Parallel()).total_bytes
        == 2 * 128256 * 4096
    )
