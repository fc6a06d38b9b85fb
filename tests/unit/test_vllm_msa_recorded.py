"""MiniMax-M3 bound on passes recorded on an H200 with vLLM 0.26.0 (tp 1): nothing left over, nothing counted twice."""

from collections import Counter, defaultdict

import pytest

from profiler.bind import bind, matcher, stack_spec
from profiler.core.registry import load_model
from profiler.core.shots import Fill, Shot
from profiler.core.stack import fold
from profiler.engines.base import EngineInfo, KernelSample, ShotResult
from profiler.engines.bindings import vllm_msa
from profiler.kernels._components import names_of

M3 = load_model("MiniMaxAI/MiniMax-M3")
INFO = EngineInfo("vllm", {"vllm": "0.26.0"}, {}, {}, "bf16", ("gqa-none-dense", "gqa-block-moe"), True)
D, S = "model.layers.0", "model.layers.1"

# 64 decodes of 4,096 keys beside a prefill of 2,048 tokens behind 8,192, which runs the kernels of both: module, the
# beginning of the kernel's name without at::native, microseconds (median of five), component.
PASS = [
    ("runner.prepare_inputs", "Memcpy HtoD (Pinned -> Device)", 50.53, "dense/step_inputs"),
    ("runner.prepare_inputs", "vectorized_elementwise_kernel<4, FillFunctor<i", 0.8, "dense/step_inputs"),
    ("runner.prepare_inputs", "index_elementwise_kernel<128, 4, gpu_index_ker", 3.26, "dense/step_inputs"),
    ("runner.prepare_inputs", "unrolled_elementwise_kernel<direct_copy_kernel", 2.11, "dense/step_inputs"),
    ("runner.prepare_inputs", "vectorized_elementwise_kernel<2, CUDAFunctor_a", 1.12, "dense/step_inputs"),
    ("runner.prepare_inputs", "Memcpy DtoD (Device -> Device)", 1.86, "dense/step_inputs"),
    ("runner.prepare_inputs", "vectorized_elementwise_kernel<4, CUDAFunctor_a", 1.12, "dense/step_inputs"),
    ("runner.prepare_inputs", "unrolled_elementwise_kernel<FillFunctor<int>", 0.67, "dense/step_inputs"),
    ("runner.prepare_inputs", "_compute_slot_mapping_kernel", 4.29, "dense/step_inputs"),
    ("runner.prepare_inputs", "unrolled_elementwise_kernel<CUDAFunctorOnSelf_", 0.8, "dense/step_inputs"),
    ("runner.build_attention_metadata", "flash::prepare_varlen_num_blocks_kernel<4, false", 1.41, "dense/step_inputs"),
    ("runner.build_attention_metadata", "unrolled_elementwise_kernel<CUDAFunctor_add<in", 0.8, "dense/step_inputs"),
    ("runner.build_attention_metadata", "vectorized_elementwise_kernel<4, CUDAFunctor_a", 0.99, "dense/step_inputs"),
    ("runner.build_attention_metadata", "Memcpy DtoD (Device -> Device)", 1.63, "dense/step_inputs"),
    ("runner.build_attention_metadata", "vectorized_elementwise_kernel<4, CUDAFunctorOn", 1.82, "dense/step_inputs"),
    ("runner.build_attention_metadata", "Memcpy HtoD (Pageable -> Device)", 0.8, "dense/step_inputs"),
    ("runner.build_attention_metadata", "at_cuda_detail::cub::detail::scan::DeviceScanIni", 0.74, "dense/step_inputs"),
    ("runner.build_attention_metadata", "at_cuda_detail::cub::detail::scan::DeviceScanKer", 1.44, "dense/step_inputs"),
    ("model.embed_tokens", "unrolled_elementwise_kernel<direct_copy_kernel", 2.37, "dense/embedding"),
    ("model.embed_tokens", "vectorized_gather_kernel<16, long>", 13.02, "dense/embedding"),
    (f"{D}.input_layernorm", "flashinfer::norm::RMSNormKernel<8u, __nv_bfloat1", 20.35, "dense/layernorm"),
    (f"{D}.self_attn.qkv_proj", "Memset (Device)", 0.73, "dense/qkv_proj"),
    (f"{D}.self_attn.qkv_proj", "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", 289.31, "dense/qkv_proj"),
    (f"{D}.self_attn", "vllm::minimax_m3_fused_ops::fusedMiniMaxM3QNormR", 38.78, "dense/qk_norm"),
    (f"{D}.self_attn.attn", "vllm::reshape_and_cache_flash_kernel<__nv_bfloat", 12.22, "attention/attention"),
    (f"{D}.self_attn.attn", "cutlass::device_kernel<flash::enable_sm90_or_lat", 986.94, "attention/attention"),
    (f"{D}.self_attn.attn", "vectorized_elementwise_kernel<4, FillFunctor<i", 0.7, "attention/attention"),
    (f"{D}.self_attn.o_proj", "Memset (Device)", 0.74, "dense/o_proj"),
    (f"{D}.self_attn.o_proj", "nvjet_sm90_tst_128x192_64x5_2x1_v_bz_coopB_TNN", 261.47, "dense/o_proj"),
    (f"{D}.post_attention_layernorm", "flashinfer::norm::FusedAddRMSNormKernel<8u, __nv", 29.12, "dense/layernorm"),
    (f"{D}.mlp.gate_up_proj", "Memset (Device)", 0.74, "dense/gate_up_proj"),
    (f"{D}.mlp.gate_up_proj", "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", 787.9, "dense/gate_up_proj"),
    (f"{D}.mlp.act_fn", "vllm::act_and_mul_kernel<c10::BFloat16, __nv_bfl", 45.76, "dense/act_fn"),
    (f"{D}.mlp.down_proj", "Memset (Device)", 0.74, "dense/down_proj"),
    (f"{D}.mlp.down_proj", "nvjet_sm90_tst_128x192_64x5_2x1_v_bz_coopB_TNN", 390.5, "dense/down_proj"),
    (f"{S}.input_layernorm", "flashinfer::norm::FusedAddRMSNormKernel<8u, __nv", 28.96, "dense/layernorm"),
    (f"{S}.self_attn.qkv_proj", "Memset (Device)", 0.74, "dense/qkv_index_proj"),
    (f"{S}.self_attn.qkv_proj", "nvjet_sm90_tst_320x128_64x3_1x1_h_bz_coopB_TNT", 331.97, "dense/qkv_index_proj"),
    (f"{S}.self_attn", "vllm::minimax_m3_fused_ops::fusedMiniMaxM3QNormR", 50.82, "dense/qknorm_rope_insert"),
    (f"{S}.self_attn.indexer.impl", "_decode_index_score_kernel", 23.9, "indexer/block_scores"),
    (f"{S}.self_attn.indexer.impl", "_topk_index_partial_kernel", 3.23, "indexer/block_topk"),
    (f"{S}.self_attn.indexer.impl", "_topk_index_merge_kernel", 1.82, "indexer/block_topk"),
    (f"{S}.self_attn.indexer.impl", "_index_block_score_kernel", 114.53, "indexer/block_scores"),
    (f"{S}.self_attn.indexer.impl", "_topk_index_kernel", 26.53, "indexer/block_topk"),
    (f"{S}.self_attn", "_gqa_sparse_decode_kernel", 65.86, "sparse_attention/sparse_gqa"),
    (f"{S}.self_attn", "_merge_topk_attn_out_kernel", 3.65, "sparse_attention/sparse_gqa"),
    (f"{S}.self_attn", "_gqa_sparse_fwd_kernel", 1092.16, "sparse_attention/sparse_gqa"),
    (f"{S}.self_attn.o_proj", "Memset (Device)", 0.74, "dense/o_proj"),
    (f"{S}.self_attn.o_proj", "nvjet_sm90_tst_128x192_64x5_2x1_v_bz_coopB_TNN", 262.56, "dense/o_proj"),
    (f"{S}.post_attention_layernorm", "flashinfer::norm::FusedAddRMSNormKernel<8u, __nv", 29.09, "dense/layernorm"),
    (f"{S}.block_sparse_moe.gate", "unrolled_elementwise_kernel<direct_copy_kernel", 40.26, "dense/router_gate"),
    (f"{S}.block_sparse_moe.gate", "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize25", 85.54, "dense/router_gate"),
    (f"{S}.block_sparse_moe.gate", "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize25", 4.51, "dense/router_gate"),
    (f"{S}.block_sparse_moe.shared_experts.gate_up_proj", "Memset (Device)", 0.74, "dense/shared_gate_up_proj"),
    (
        f"{S}.block_sparse_moe.shared_experts.gate_up_proj",
        "nvjet_sm90_tst_128x192_64x5_2x1_v_bz_coopB_TNN",
        197.02,
        "dense/shared_gate_up_proj",
    ),
    (
        f"{S}.block_sparse_moe.shared_experts.act_fn",
        "vllm::act_and_mul_kernel<c10::BFloat16, __nv_bfl",
        12.58,
        "dense/shared_act_fn",
    ),
    (f"{S}.block_sparse_moe.shared_experts.down_proj", "Memset (Device)", 0.77, "dense/shared_down_proj"),
    (
        f"{S}.block_sparse_moe.shared_experts.down_proj",
        "nvjet_sm90_tst_128x192_64x5_2x1_v_bz_coopB_TNN",
        100.64,
        "dense/shared_down_proj",
    ),
    (f"{S}.block_sparse_moe.experts", "vllm::moe::topkGating<4, 128, 4, 16, 32, int, fl", 4.48, "dense/router_topk"),
    (f"{S}.block_sparse_moe.experts", "vllm::moe::moe_align_block_size_kernel<int>", 4.67, "moe/experts"),
    (f"{S}.block_sparse_moe.experts", "vllm::moe::count_and_sort_expert_tokens_kernel<i", 3.01, "moe/experts"),
    (f"{S}.block_sparse_moe.experts", "fused_moe_kernel", 3794.97, "moe/experts"),
    (f"{S}.block_sparse_moe.experts", "vllm::act_and_mul_kernel<c10::BFloat16, __nv_bfl", 41.44, "moe/experts"),
    (f"{S}.block_sparse_moe.experts", "vllm::moe::moe_sum_vec_kernel<c10::BFloat16, int", 28.83, "moe/experts"),
    (f"{S}.block_sparse_moe.experts", "Memcpy DtoD (Device -> Device)", 12.58, "moe/experts"),
    (
        f"{S}.block_sparse_moe.experts",
        "vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>",
        18.34,
        "dense/moe_combine",
    ),
    ("model.norm", "flashinfer::norm::FusedAddRMSNormKernel<8u, __nv", 30.08, "dense/final_layernorm"),
    ("", "unrolled_elementwise_kernel<direct_copy_kernel", 1.38, "dense/step_inputs"),
    ("", "vectorized_gather_kernel<16, long>", 2.27, "dense/step_inputs"),
    ("logits_processor", "Memset (Device)", 0.74, "per_sequence/lm_head"),
    ("logits_processor", "nvjet_sm90_tst_512x72_64x2_2x1_v_bz_coopA_TNT", 623.65, "per_sequence/lm_head"),
    ("runner.sampler", "unrolled_elementwise_kernel<direct_copy_kernel", 37.31, "per_sequence/sampler"),
    ("runner.sampler", "Memset (Device)", 0.8, "per_sequence/sampler"),
    ("runner.sampler", "reduce_kernel<512, 1, ReduceOp<float, at::nati", 27.81, "per_sequence/sampler"),
    ("runner.sampler", "unrolled_elementwise_kernel<direct_copy_kernel", 1.18, "per_sequence/sampler"),
    ("runner.bookkeeping_sync", "unrolled_elementwise_kernel<direct_copy_kernel", 1.25, "dense/step_inputs"),
    ("runner.bookkeeping_sync", "Memcpy DtoH (Device -> Pinned)", 1.73, "dense/step_inputs"),
]
# What other passes had besides: of few tokens, split decodes and other products of the router.
OTHERS = [
    ("runner.build_attention_metadata", "flash::prepare_varlen_num_blocks_kernel<1, false>", "dense/step_inputs"),
    ("model.embed_tokens", "indexSelectSmallIndex<c10::BFloat16", "dense/embedding"),
    (f"{D}.self_attn.qkv_proj", "cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloa", "dense/qkv_proj"),
    (f"{D}.mlp.down_proj", "cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloa", "dense/down_proj"),
    (f"{S}.self_attn.qkv_proj", "cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloa", "dense/qkv_index_proj"),
    (f"{S}.block_sparse_moe.gate", "fp32_router_gemm_kernel<__nv_bfloat16, 128, 8, 1, 128, 6144", "dense/router_gate"),
    (f"{S}.block_sparse_moe.experts", "vectorized_elementwise_kernel<4, FillFunctor<i", "moe/experts"),
    ("", "index_elementwise_kernel<128, 4, gpu_index_ker", "dense/step_inputs"),
    (f"{D}.self_attn.attn", "cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tupl", "attention/attention"),
    ("runner.prepare_inputs", "vectorized_elementwise_kernel<2, FillFunctor<i", "dense/step_inputs"),
    (f"{S}.block_sparse_moe.gate", "cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>", "dense/router_gate"),
    (f"{S}.block_sparse_moe.gate", "cublasLt::splitKreduce_kernel<32, 16, int, float, float, flo", "dense/router_gate"),
    (f"{S}.block_sparse_moe.gate", "cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_tn_align1>", "dense/router_gate"),
    (f"{S}.block_sparse_moe.gate", "cutlass::Kernel2<cutlass_80_simt_sgemm_128x128_8x4_tn_align1", "dense/router_gate"),
    (f"{S}.block_sparse_moe.gate", "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3", "dense/router_gate"),
    (f"{S}.block_sparse_moe.gate", "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stag", "dense/router_gate"),
]


@pytest.mark.parametrize(("module", "kernel", "component"), [*((m, k, c) for m, k, _, c in PASS), *OTHERS])
def test_every_recorded_kernel_has_its_component(module: str, kernel: str, component: str) -> None:
    rule = matcher(vllm_msa.rules(stack_spec(M3, INFO)))(module, kernel, "auto")
    assert rule is not None and f"{rule.category}/{rule.name}" == component


def test_the_cells_of_a_recorded_pass_add_up_to_its_device_time() -> None:
    key = (2048, 8192, 64, 4096, 1)
    keys = {"dense": (2112,), "per_sequence": (65,), "attention": key, "indexer": key, "sparse_attention": key}
    fills = tuple(Fill(category, k, names_of(M3, category)) for category, k in keys.items())  # type: ignore[arg-type]
    shot = Shot(fills, (*((1, 4095),) * 64, (2048, 8192)))
    samples = tuple(KernelSample(0, 0, module, kernel, us, 1) for module, kernel, us, _ in PASS)
    found = bind([ShotResult(0, samples)], [shot], M3, INFO, vllm_msa)
    assert not found.problems and not found.unbound and found.bound_share == 1.0
    calls = Counter[str]()
    for component, count in fold(stack_spec(M3, INFO)).components:
        calls[component.name] += count
    cells = {row.name: row.time_us for row in found.rows}
    experts = sum(us for *_, us, component in PASS if component == "moe/experts")
    first_norm = next(us for module, _, us, _ in PASS if module == f"{D}.input_layernorm")
    stood_in = cells["layernorm"] - first_norm
    device = sum(us for _, _, us, _ in PASS)
    assert sum(cells[name] * calls[name] for name in cells) - stood_in == pytest.approx(device - experts)


def test_decodes_and_prefill_of_one_pass_are_one_cell_of_each_kernel() -> None:
    spent: defaultdict[str, float] = defaultdict(float)
    for _, kernel, us, component in PASS:
        if component.split("/")[0] in ("indexer", "sparse_attention"):
            assert kernel.startswith(("_decode_index", "_index_block", "_topk_index", "_gqa_sparse", "_merge_topk"))
            spent[component] += us
    assert {name: round(us, 2) for name, us in spent.items()} == {
        "indexer/block_scores": 138.43,
        "indexer/block_topk": 31.58,
        "sparse_attention/sparse_gqa": 1161.67,
    }
