"""vLLM's native DeepSeek-V3.2 module (vllm.models.deepseek_v32), split by kernel name.

Its attention module launches everything but five projections itself, so the innermost module says nothing there and
the kernel's name says all. One kernel does the work of several components of the catalog: `_fused_norm_rope_kernel`
both latent norms, the index keys' norm and rotation, and both cache writes; `_fused_q_kernel` the rotation of the
queries and the quantisation of the index queries. The two absorbed products are batched GEMMs of one kind of name.
"""

from collections.abc import Mapping, Sequence

from profiler.core.types import Category, ModelSpec
from profiler.engines.base import EngineInfo, Rule
from profiler.engines.bindings import vllm_decomposed_dsa

FUSED: Mapping[str, str] = {
    **dict.fromkeys(("kv_a_norm", "kv_cache_write", "indexer_k_norm", "indexer_cache_write"), "q_a_norm"),
    **dict.fromkeys(("indexer_rotary", "indexer_quant"), "rotary"),
    "absorb_v": "absorb_q",
}

# The attention module, and the parts of it that an engine may annotate, but none of its projections.
TAIL_MODULE = r"\.self_attn(\.indexer)?(\.(attn|mla_attn|indexer_op|forward_mqa|forward_mha|v_up|do_kv_cache_update))*$"

# Kernels of the tail by name, first match wins: (pattern, category, component, only in passes on the dense path).
TAIL_KERNELS: tuple[tuple[str, Category, str, bool], ...] = (
    (r"fused_norm_rope", "dense", "q_a_norm", False),
    (r"fused_q_kernel|fused_q_cute", "dense", "rotary", False),
    (r"mqa_logits|cp_gather_indexer", "indexer", "index_scores", False),
    (r"(?i)top_?k", "indexer", "index_topk", False),
    (
        r"(?i)flash|fmha|merge_attn_states|cp_gather_cache|gather_and_maybe|CatArray",
        "attention",
        "mla_dense_prefill",
        True,
    ),
    # The sparse kernels and what only they need: padded queries, rows of the picked keys, a wider copy of the cache.
    (r"sparse_attn_fwd|flash_fwd|mla_combine|mla_metadata|ConcatMLAQ", "sparse_attention", "sparse_mla", False),
    (r"convert_req_index|gather_and_upconvert", "sparse_attention", "sparse_mla", False),
    (r"(?i)memcpy|memset|copy|FillFunctor|CatArray", "sparse_attention", "sparse_mla", False),
    (r"(?i)nvjet|gemm|cutlass|cublas|splitk|gemv", "dense", "absorb_q", False),
)


def matches(info: EngineInfo) -> bool:
    return (
        info.name == "vllm" and info.versions["vllm"].startswith("0.26") and info.settings.get("execution") == "native"
    )


def rules(spec: ModelSpec) -> Sequence[Rule]:
    """What the sparse kernel's call launches, the rest of the tail by kernel, and the modules of the usual path."""
    tail = tuple(
        Rule(TAIL_MODULE, pattern, category, name, ("dense",) if only_dense else ())
        for pattern, category, name, only_dense in TAIL_KERNELS
    )
    attend = Rule(r"\.self_attn\.forward_mqa$", "", "sparse_attention", "sparse_mla")
    return (attend, *tail, *vllm_decomposed_dsa.rules(spec))
