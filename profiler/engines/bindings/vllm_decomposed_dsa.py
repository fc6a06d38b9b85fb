"""vLLM's decomposed DSA path (models/deepseek_v2.py): DeepSeek-V3.2 and GLM-5 on 0.26.

Indexer and attention are modules of their own there; the parts of the attention module that run without a child module
are annotated by the engine as `forward_mqa`, `forward_mha`, `v_up` and `do_kv_cache_update`.
"""

from collections.abc import Mapping, Sequence

from profiler.core.types import Category, ModelSpec
from profiler.engines.base import EngineInfo, Rule

FUSED: Mapping[str, str] = {}

ATTENTION = r"\.self_attn"
CORE = r"\.self_attn\.mla_attn(\.mla_attn)?"
INDEXER = r"\.self_attn\.indexer"
MOE = r"\.mlp"
# What the runner may launch around the model; anything else there is unknown and stays unbound.
SMALL = r"(?i)elementwise|memcpy|memset|gather|index|scan|slot_mapping|metadata|fill|reduce"
# The first layer has no residual yet to add: a plain norm, at 8,192 tokens of DeepSeek-V3.2 on an H200 63 us against
# the 113 us of every other layer (vLLM's decoder layers: `if residual is None`).
FIRST_NORM = r"(^|\.)layers\.0\.input_layernorm$"
PLAIN = r"^(?!.*(?i:fused_?add))"


def matches(info: EngineInfo) -> bool:
    backends = info.settings.get("attention_backends", ())
    return info.name == "vllm" and info.versions["vllm"].startswith("0.26") and "DEEPSEEK_V32_INDEXER" in backends


def rules(spec: ModelSpec) -> Sequence[Rule]:
    """First match wins: expert slices, attention from the inside out, MLPs, then the runner around the model."""
    return (
        Rule(r"^experts\.ep\d+$", "", "moe", "experts"),
        *_indexer(),
        *_attention(),
        *_mlp(),
        Rule(FIRST_NORM, PLAIN, "dense", "input_norm", stands_in=True),
        _dense(r"\.input_layernorm$", "input_norm"),
        _dense(r"\.post_attention_layernorm$", "post_attention_norm"),
        _dense(r"^model\.norm$", "final_norm"),
        _dense(r"\.embed_tokens$", "embedding"),
        Rule(r"^(lm_head|logits_processor)$", "", "per_sequence", "lm_head"),
        Rule(r"^runner\.(sampler|sample)", "", "per_sequence", "sampler"),
        # Input copies, slot mapping and attention metadata before the model, the gather of sampled rows after it.
        _dense(r"^runner\.|^model$|^$", "step_inputs", SMALL),
    )


def _dense(module: str, name: str, kernel: str = "") -> Rule:
    category: Category = "dense"
    return Rule(module, kernel, category, name)


def _indexer() -> tuple[Rule, ...]:
    operator = rf"{INDEXER}\.indexer_op$"
    return (
        _dense(rf"{INDEXER}\.wq_b$", "indexer_wq_b"),
        _dense(rf"{INDEXER}\.wk_weights_proj$", "indexer_wk_weights"),
        _dense(rf"{INDEXER}\.k_norm$", "indexer_k_norm"),
        _dense(rf"{ATTENTION}\.indexer_rope_emb$", "indexer_rotary"),
        _dense(rf"{INDEXER}$", "indexer_quant", r"_fused_indexer_q_rope_quant_kernel|quant"),
        _dense(rf"{INDEXER}$", "indexer_rotary"),
        _dense(operator, "indexer_cache_write", "indexer_k_quant_and_cache"),
        Rule(operator, "mqa_logits|cp_gather_indexer", "indexer", "index_scores"),
        # The fill that marks unused picks belongs to the selection.
        Rule(operator, "(?i)top_?k|FillFunctor|Memset", "indexer", "index_topk"),
    )


def _attention() -> tuple[Rule, ...]:
    return (
        _dense(rf"{ATTENTION}\.fused_qkv_a_proj$", "fused_qkv_a_proj"),
        _dense(rf"{ATTENTION}\.q_a_layernorm$", "q_a_norm"),
        _dense(rf"{ATTENTION}\.q_b_proj$", "q_b_proj"),
        _dense(rf"{ATTENTION}\.kv_a_layernorm$", "kv_a_norm"),
        _dense(rf"{ATTENTION}\.rotary_emb$", "rotary"),
        _dense(rf"{CORE}\.do_kv_cache_update$", "kv_cache_write"),
        Rule(rf"{CORE}\.forward_mqa$", "", "sparse_attention", "sparse_mla"),
        # Dense prefill expands the latents to keys and values first.
        Rule(rf"{CORE}\.forward_mha$|{ATTENTION}\.kv_b_proj$", "", "attention", "mla_dense_prefill"),
        _dense(rf"{CORE}\.v_up$", "absorb_v"),
        _dense(rf"{CORE}$", "absorb_q", "nvjet|gemm|cutlass|cublas|Memset|splitK|gemv"),
        _dense(rf"{ATTENTION}\.o_proj$", "o_proj"),
    )


def _mlp() -> tuple[Rule, ...]:
    return (
        _dense(rf"{MOE}\.shared_experts\.gate_up_proj$", "shared_gate_up_proj"),
        _dense(rf"{MOE}\.shared_experts\.act_fn$", "shared_activation"),
        _dense(rf"{MOE}\.shared_experts\.down_proj$", "shared_down_proj"),
        _dense(rf"{MOE}\.gate$", "router_gate"),
        _dense(rf"{MOE}\.experts$", "router_topk", "grouped_topk|topk_gating|topkGating"),
        # The scaled sum of routed and shared outputs, elementwise after the expert kernels.
        _dense(rf"{MOE}\.experts$", "moe_combine", r"elementwise_kernel.*(AUnaryFunctor|CUDAFunctor_add)"),
        Rule(rf"{MOE}\.experts(\.routed_experts)?$", "", "moe", "experts"),
        _dense(rf"{MOE}\.gate_up_proj$", "gate_up_proj"),
        _dense(rf"{MOE}\.act_fn$", "activation"),
        _dense(rf"{MOE}\.down_proj$", "down_proj"),
    )
