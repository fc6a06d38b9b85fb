"""The parts of the vLLM engine that need neither a GPU nor vLLM."""

import re

import pytest

from profiler.core.errors import AcquisitionError, ConfigError
from profiler.core.registry import load_model, load_model_config
from profiler.engines.bindings import vllm_decomposed_dsa
from profiler.engines.vllm_support.batches import place_blocks
from profiler.engines.vllm_support.boot import check_version
from profiler.engines.vllm_support.jit import fp8_gemm_shapes
from profiler.engines.vllm_support.overrides import per_rank_config
from profiler.engines.vllm_support.trace import kernel_times, shot_range_name


def _range(name: str, start: float, end: float, tid: int = 1) -> dict[str, object]:
    return {"cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "tid": tid}


def _launch(correlation: int, at: float, tid: int = 1) -> dict[str, object]:
    event = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1, "tid": tid}
    return {**event, "args": {"correlation": correlation}}


def _kernel(correlation: int, name: str, duration: float) -> dict[str, object]:
    # The device runs late: its timestamps must not matter.
    return {"cat": "kernel", "name": name, "ts": 10_000, "dur": duration, "args": {"correlation": correlation}}


def test_a_kernel_belongs_to_the_innermost_range_open_at_its_launch() -> None:
    events = [
        _range(shot_range_name(3, 0), 0, 100),
        _range("mod|layers.0", 10, 60),
        _range("mod|layers.0.q", 20, 30),
        _launch(1, 5),
        _launch(2, 15),
        _launch(3, 25),
        _launch(4, 40),
        _launch(5, 80),
        _launch(6, 150),
        *(_kernel(i, f"k{i}", float(i)) for i in range(1, 7)),
    ]
    assert kernel_times(events) == {
        (3, 0, "", "k1"): (1.0, 1),
        (3, 0, "layers.0", "k2"): (2.0, 1),
        (3, 0, "layers.0.q", "k3"): (3.0, 1),
        (3, 0, "layers.0", "k4"): (4.0, 1),
        (3, 0, "", "k5"): (5.0, 1),
    }


def test_launches_of_one_kernel_in_one_module_add_up_and_repeats_stay_apart() -> None:
    events = [
        _range(shot_range_name(0, 0), 0, 50),
        _range(shot_range_name(0, 1), 60, 110),
        _range("mod|a", 10, 20),
        _range("mod|a", 70, 80),
        _launch(1, 11),
        _launch(2, 12),
        _launch(3, 71),
        *(_kernel(i, "same", 2.5) for i in (1, 2, 3)),
    ]
    assert kernel_times(events) == {(0, 0, "a", "same"): (5.0, 2), (0, 1, "a", "same"): (2.5, 1)}


def test_ranges_of_another_thread_do_not_capture_a_launch() -> None:
    events = [
        _range(shot_range_name(0, 0), 0, 50),
        _range("mod|a", 10, 20),
        _range("mod|b", 10, 20, tid=2),
        _launch(1, 15),
        _kernel(1, "k", 1.0),
    ]
    assert kernel_times(events) == {(0, 0, "a", "k"): (1.0, 1)}


def test_a_module_shared_by_layers_is_counted_in_the_layer_that_called_it() -> None:
    events = [
        _range(shot_range_name(0, 0), 0, 50),
        _range("mod|model.layers.3.self_attn", 10, 40),
        _range("mod|model.layers.0.self_attn.rotary_emb", 20, 30),
        _launch(1, 25),
        _kernel(1, "rope", 1.5),
    ]
    assert kernel_times(events) == {(0, 0, "model.layers.3.self_attn.rotary_emb", "rope"): (1.5, 1)}


def test_two_ranges_that_start_together_nest_by_length() -> None:
    events = [
        _range("mod|inner", 10, 20),
        _range("mod|outer", 10, 40),
        _range(shot_range_name(0, 0), 0, 50),
        _launch(1, 12),
        _launch(2, 30),
        _kernel(1, "k", 1.0),
        _kernel(2, "k", 1.0),
    ]
    assert kernel_times(events) == {(0, 0, "inner", "k"): (1.0, 1), (0, 0, "outer", "k"): (1.0, 1)}


def test_requests_get_disjoint_blocks_after_the_null_block() -> None:
    placed = place_blocks(((1, 63), (1, 64), (100, 0)), block_tokens=64, num_blocks=6)
    assert placed is not None
    assert [list(ids) for ids in placed] == [[1], [2, 3], [4, 5]]
    assert place_blocks(((1, 63), (1, 64), (100, 0)), block_tokens=64, num_blocks=5) is None


def test_block_ids_are_what_the_engines_block_table_takes() -> None:
    # vllm 0.26, v1/worker/block_table.py: truth, length, and assignment to a row of int32 or a conversion by numpy.
    import numpy as np

    (ids,) = place_blocks(((1, 640),), block_tokens=64, num_blocks=99) or ()
    row = np.zeros((2, 16), dtype=np.int32)
    assert ids
    row[1, 0 : len(ids)] = ids
    assert row[1].tolist() == [*range(1, 12), 0, 0, 0, 0, 0]
    assert np.array(ids).tolist() == list(range(1, 12))


def test_deepseek_gemm_shapes() -> None:
    config = {
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "intermediate_size": 18432,
        "index_n_heads": 64,
        "index_head_dim": 128,
    }
    assert fp8_gemm_shapes(config) == (
        (2112, 7168),
        (24576, 1536),
        (32768, 512),
        (7168, 16384),
        (36864, 7168),
        (7168, 18432),
        (4096, 7168),
        (7168, 2048),
        (8192, 1536),
    )


def test_an_engine_version_outside_the_catalog_is_refused() -> None:
    check_version("0.26.0")
    with pytest.raises(AcquisitionError, match=r"0\.31\.0.*supported: 0\.26"):
        check_version("0.31.0")


def test_per_rank_config_divides_what_shards_and_nothing_else() -> None:
    config = load_model_config("deepseek-ai/DeepSeek-V3.2-Exp")
    rank = per_rank_config(config, 8)
    changed = {key: rank[key] for key in config if rank[key] != config[key]}
    assert changed == {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 2304,
        "moe_intermediate_size": 256,
        "vocab_size": 16160,
    }
    assert per_rank_config(config, 1) == config


@pytest.mark.parametrize(("tp", "message"), [(3, "does not divide num_attention_heads"), (32, "fp8 block 128")])
def test_a_degree_that_does_not_divide_is_refused(tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        per_rank_config(load_model_config("deepseek-ai/DeepSeek-V3.2-Exp"), tp)


def _bound(module: str, kernel: str) -> str:
    spec = load_model("deepseek-ai/DeepSeek-V3.2-Exp")
    for rule in vllm_decomposed_dsa.rules(spec):
        if re.search(rule.module, module) and re.search(rule.kernel, kernel):
            return f"{rule.category}/{rule.name}"
    return "unbound"


# Module paths and kernel names (shortened) as vLLM 0.26.0 showed them on an H200.
@pytest.mark.parametrize(
    ("module", "kernel", "component"),
    [
        ("model.layers.3.self_attn.indexer.wq_b", "deep_gemm::sm90_fp8_gemm_1d2d_impl", "dense/indexer_wq_b"),
        ("model.layers.3.self_attn.indexer", "_fused_indexer_q_rope_quant_kernel", "dense/indexer_quant"),
        ("model.layers.3.self_attn.indexer", "at::native::CatArrayBatchedCopy", "dense/indexer_rotary"),
        ("model.layers.0.self_attn.indexer.indexer_op", "deep_gemm::sm90_fp8_mqa_logits<64u>", "indexer/index_scores"),
        ("model.layers.0.self_attn.indexer.indexer_op", "sm90_fp8_paged_mqa_logits<1u>", "indexer/index_scores"),
        ("model.layers.0.self_attn.indexer.indexer_op", "vllm::topKPerRowPrefill<512>", "indexer/index_topk"),
        (
            "model.layers.0.self_attn.indexer.indexer_op",
            "vllm::cooperative::cooperative_topk_cs4",
            "indexer/index_topk",
        ),
        (
            "model.layers.0.self_attn.indexer.indexer_op",
            "vectorized_elementwise_kernel<4, FillFunctor",
            "indexer/index_topk",
        ),
        (
            "model.layers.0.self_attn.indexer.indexer_op",
            "vllm::indexer_k_quant_and_cache_kernel",
            "dense/indexer_cache_write",
        ),
        ("model.layers.0.self_attn.mla_attn.mla_attn", "nvjet_sm90_tst_256x128_64x4", "dense/absorb_q"),
        ("model.layers.0.self_attn.mla_attn.mla_attn.v_up", "nvjet_sm90_tst_128x256_64x4", "dense/absorb_v"),
        (
            "model.layers.0.self_attn.mla_attn.mla_attn.forward_mqa",
            "flash::FlashAttnFwdSm90",
            "sparse_attention/sparse_mla",
        ),
        (
            "model.layers.0.self_attn.mla_attn.mla_attn.forward_mha",
            "flash::FlashAttnFwdSm90",
            "attention/mla_dense_prefill",
        ),
        ("model.layers.0.self_attn.kv_b_proj", "deep_gemm::sm90_fp8_gemm_1d2d_impl", "attention/mla_dense_prefill"),
        ("model.layers.3.mlp.experts", "fused_moe_kernel", "moe/experts"),
        ("model.layers.3.mlp.experts", "vllm::moe::grouped_topk_fused_small_expert_count_kernel", "dense/router_topk"),
        (
            "model.layers.3.mlp.experts",
            "vectorized_elementwise_kernel<8, CUDAFunctor_add<BFloat16>",
            "dense/moe_combine",
        ),
        ("experts.ep8", "fused_moe_kernel", "moe/experts"),
        ("logits_processor", "nvjet_sm90_tst_512x32", "per_sequence/lm_head"),
        ("runner.prepare_inputs", "Memcpy HtoD (Pinned -> Device)", "dense/step_inputs"),
        ("", "some_large_attention_kernel", "unbound"),
        ("model.layers.0.self_attn.mla_attn.mla_attn", "flash::FlashAttnFwdSm90", "unbound"),
        # As the same version's source has it for GLM-5: one rotary kernel for attention and indexer, products of cuBLAS
        # in bf16, a router of fp32 logits, queries of few heads padded for FlashMLA, keys put together by copies.
        ("model.layers.2.self_attn.rotary_emb", "vllm::rotary_embedding_kernel<BFloat16, false>", "dense/rotary"),
        (
            "model.layers.2.self_attn.indexer_rope_emb",
            "vllm::rotary_embedding_kernel<BFloat16, false>",
            "dense/indexer_rotary",
        ),
        ("model.layers.1.self_attn.fused_qkv_a_proj", "nvjet_sm90_tst_128x64_64x8", "dense/fused_qkv_a_proj"),
        ("model.layers.1.self_attn.o_proj", "cublasLt::splitKreduce_kernel", "dense/o_proj"),
        ("model.layers.1.self_attn.kv_b_proj", "nvjet_sm90_tst_256x128_64x4", "attention/mla_dense_prefill"),
        ("model.layers.1.mlp.gate", "router_gemm_kernel_float_output<BFloat16, 128, 8, 16>", "dense/router_gate"),
        ("model.layers.1.mlp.shared_experts.gate_up_proj", "nvjet_sm90_tst_128x64", "dense/shared_gate_up_proj"),
        (
            "model.layers.0.self_attn.mla_attn.mla_attn.forward_mqa",
            "at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda",
            "sparse_attention/sparse_mla",
        ),
        (
            "model.layers.0.self_attn.mla_attn.mla_attn.forward_mha",
            "at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda",
            "attention/mla_dense_prefill",
        ),
    ],
)
def test_the_binding_of_the_decomposed_path(module: str, kernel: str, component: str) -> None:
    assert _bound(module, kernel) == component
