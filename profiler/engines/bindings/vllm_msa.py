"""vLLM's MiniMax-M3 (models/minimax_m3): grouped-query attention, block-sparse in most layers, on 0.26.

The attention of a sparse layer launches its norms, its cache writes and its sparse kernels itself, so there the
kernel's name decides; the block indexer is a module of its own. A dense layer's one kernel before its attention does
the norms of queries and keys and their rotation; its cache is written inside the attention module.
"""

from collections.abc import Mapping, Sequence

from profiler.core.types import Category, ModelSpec
from profiler.engines.base import EngineInfo, Rule
from profiler.engines.bindings.vllm_decomposed_dsa import FIRST_NORM, PLAIN, SMALL

FUSED: Mapping[str, str] = {"rotary_emb": "qk_norm"}

ATTENTION = r"\.self_attn"
MOE = r"\.block_sparse_moe"
NORM_AND_ROPE = r"(?i)norm|rope|minimax_?m3"
# Router kernels inside the module of the experts; those that sort tokens by expert belong to the experts.
ROUTER = r"(?i)top_?k_?gating|grouped_topk|moe_?sigmoid|moe_?topk"
# The scheduler of the dense layers' attention runs while its metadata is built.
AROUND = rf"{SMALL}|varlen|scheduler"


def matches(info: EngineInfo) -> bool:
    backends = info.settings.get("attention_backends", ())
    return info.name == "vllm" and info.versions["vllm"].startswith("0.26") and "MINIMAX_M3_SPARSE" in backends


def rules(spec: ModelSpec) -> Sequence[Rule]:
    """First match wins. `spec` has the layers of the engine's stack: their kinds tell its dense layers' projections."""
    return (
        Rule(r"^experts\.ep\d+$", "", "moe", "experts"),
        *_dense_attention(spec),
        *_sparse_attention(),
        *_mlp(),
        Rule(FIRST_NORM, PLAIN, "dense", "layernorm", stands_in=True),
        _dense(r"\.(input|post_attention)_layernorm$", "layernorm"),
        _dense(r"^(language_model\.)?model\.norm$", "final_layernorm"),
        _dense(r"\.embed_tokens$", "embedding"),
        Rule(r"^(language_model\.)?(lm_head|logits_processor)$", "", "per_sequence", "lm_head"),
        Rule(r"^runner\.(sampler|sample)", "", "per_sequence", "sampler"),
        _dense(r"^runner\.|^(language_model)?(\.?model)?$", "step_inputs", AROUND),
    )


def _dense(module: str, name: str, kernel: str = "") -> Rule:
    category: Category = "dense"
    return Rule(module, kernel, category, name)


def _dense_attention(spec: ModelSpec) -> tuple[Rule, ...]:
    numbers = [str(i) for i, kind in enumerate(spec.layers) if kind.selection == "none"]
    if not numbers:
        return ()
    layer = rf"\.layers\.({'|'.join(numbers)}){ATTENTION}"
    return (
        _dense(rf"{layer}\.qkv_proj$", "qkv_proj"),
        _dense(rf"{layer}$", "qk_norm", NORM_AND_ROPE),
        Rule(rf"{layer}\.attn$", "", "attention", "attention"),
        _dense(rf"{layer}\.o_proj$", "o_proj"),
    )


def _sparse_attention() -> tuple[Rule, ...]:
    return (
        _dense(rf"{ATTENTION}\.qkv_proj$", "qkv_index_proj"),
        Rule(rf"{ATTENTION}\.indexer(\.impl)?$", r"index_(block_)?score_kernel", "indexer", "block_scores"),
        Rule(rf"{ATTENTION}\.indexer(\.impl)?$", r"topk_index_", "indexer", "block_topk"),
        Rule(rf"{ATTENTION}$", r"gqa_sparse_|merge_topk_attn_out", "sparse_attention", "sparse_gqa"),
        _dense(rf"{ATTENTION}$", "qknorm_rope_insert", NORM_AND_ROPE),
        _dense(rf"{ATTENTION}\.o_proj$", "o_proj"),
    )


def _mlp() -> tuple[Rule, ...]:
    return (
        _dense(rf"{MOE}\.shared_experts\.gate_up_proj$", "shared_gate_up_proj"),
        _dense(rf"{MOE}\.shared_experts\.act_fn$", "shared_act_fn"),
        _dense(rf"{MOE}\.shared_experts\.down_proj$", "shared_down_proj"),
        _dense(rf"{MOE}\.gate$", "router_gate"),
        _dense(rf"{MOE}\.experts$", "router_topk", ROUTER),
        # The sum of routed and shared outputs, elementwise after the expert kernels.
        _dense(rf"{MOE}\.experts$", "moe_combine", r"elementwise_kernel.*(AUnaryFunctor|CUDAFunctor_add)"),
        Rule(rf"{MOE}\.experts(\.routed_experts)?$", "", "moe", "experts"),
        _dense(r"\.mlp\.gate_up_proj$", "gate_up_proj"),
        _dense(r"\.mlp\.act_fn$", "act_fn"),
        _dense(r"\.mlp\.down_proj$", "down_proj"),
    )
