"""Work done once per token of the batch: projections, norms, rotary embeddings, cache writes, routing.

Its cost follows the number of tokens in the step, whichever requests they belong to.
"""

from typing import Final

from profiler.core.shots import Fill, Shot
from profiler.core.types import Category, ModelSpec
from profiler.kernels._axes import Limits
from profiler.kernels._components import names_of, sparse_regime
from profiler.kernels._work import WEIGHT_BYTES, Work, elementwise, gemm

CATEGORY: Final[Category] = "dense"
UNITS: Final = {"tokens": "tokens"}
DRIVERS: Final = ("tokens",)

# What goes with the number of requests as well: metadata, and a row of the block table for each.
BY_REQUESTS: Final = frozenset({"step_inputs"})

# Matrices that an fp8 checkpoint keeps in bf16.
UNQUANTIZED: Final = frozenset({"embedding", "router_gate", "indexer_wk_weights", "absorb_q", "absorb_v"})


def kv_cap_tokens(spec: ModelSpec) -> int | None:
    return None


def shots(spec: ModelSpec, limits: Limits) -> list[Shot]:
    """One prefill request of each token count, on the sparse path where there is one, since its projections differ."""
    names = names_of(spec, CATEGORY)
    return [
        Shot(fills=(Fill(CATEGORY, (tokens,), names),), requests=((tokens, 0),), regime=sparse_regime(spec))
        for tokens in limits.up_to(limits.axes.tokens, min(limits.max_num_batched_tokens, limits.longest))
    ]


def matrix(spec: ModelSpec, name: str) -> tuple[int, int, int] | None:
    """(batch, k, n) of a component that multiplies each token's activations by weights, None for any other.

    `spec` has per-rank widths. The absorbed projections are one product per head.
    """
    hidden, inter = spec.hidden, spec.intermediate
    shapes: dict[str, tuple[int, int, int]] = {
        "gate_up_proj": (1, hidden, 2 * inter),
        "down_proj": (1, inter, hidden),
    }
    if spec.mla is not None:
        mla, heads = spec.mla, spec.num_heads
        query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        rank = mla.q_lora_rank
        shapes["o_proj"] = (1, heads * mla.v_head_dim, hidden)
        shapes["absorb_q"] = (heads, mla.qk_nope_head_dim, mla.kv_lora_rank)
        shapes["absorb_v"] = (heads, mla.kv_lora_rank, mla.v_head_dim)
        if rank is not None:
            shapes["fused_qkv_a_proj"] = (1, hidden, rank + mla.latent_dim)
            shapes["q_b_proj"] = (1, rank, query)
            if spec.indexer is not None:
                shapes["indexer_wq_b"] = (1, rank, spec.indexer.num_heads * spec.indexer.head_dim)
        if spec.indexer is not None:
            shapes["indexer_wk_weights"] = (1, hidden, spec.indexer.head_dim + spec.indexer.num_heads)
    if spec.gqa is not None:
        gqa = spec.gqa
        rows = (spec.num_heads + 2 * gqa.num_kv_heads) * gqa.head_dim
        shapes["qkv_proj"] = (1, hidden, rows)
        if spec.indexer is not None:
            # One GEMM emits queries, keys, values, index queries and the one index key.
            index = (spec.indexer.num_heads + 1) * spec.indexer.head_dim
            shapes["qkv_index_proj"] = (1, hidden, rows + index)
        shapes["o_proj"] = (1, spec.num_heads * gqa.head_dim, hidden)
    if spec.moe is not None:
        shared = spec.moe.shared_intermediate
        shapes["router_gate"] = (1, hidden, spec.moe.num_experts)
        shapes["shared_gate_up_proj"] = (1, hidden, 2 * shared)
        shapes["shared_down_proj"] = (1, shared, hidden)
    return shapes.get(name)


def _elements(spec: ModelSpec, name: str) -> int | None:
    """Elements that one token reads and writes in an elementwise component."""
    hidden = spec.hidden
    counts = {
        "step_inputs": 4,
        "embedding": 2 * hidden,
        "activation": 3 * spec.intermediate,
        "act_fn": 3 * spec.intermediate,
    }
    norms = ("input_norm", "post_attention_norm", "final_norm", "layernorm", "final_layernorm")
    counts |= dict.fromkeys(norms, 2 * hidden)
    if spec.mla is not None:
        counts["q_a_norm"] = 2 * (spec.mla.q_lora_rank or 0)
        counts["kv_a_norm"] = 2 * spec.mla.kv_lora_rank
        counts["rotary"] = 2 * (spec.num_heads + 1) * spec.mla.qk_rope_head_dim
        counts["kv_cache_write"] = 2 * spec.mla.latent_dim
        if spec.indexer is not None:
            counts["indexer_k_norm"] = 2 * spec.indexer.head_dim
            # The key alone: engines fuse the rotation of the index queries into their quantisation.
            counts["indexer_rotary"] = 2 * spec.mla.qk_rope_head_dim
            counts["indexer_quant"] = spec.indexer.num_heads * spec.indexer.head_dim
            counts["indexer_cache_write"] = spec.indexer.head_dim
    if spec.gqa is not None:
        width = (spec.num_heads + spec.gqa.num_kv_heads) * spec.gqa.head_dim
        counts["qk_norm"] = 2 * width
        counts["rotary_emb"] = width
        if spec.indexer is not None:
            counts["qknorm_rope_insert"] = 2 * (width + (spec.indexer.num_heads + 1) * spec.indexer.head_dim)
    if spec.moe is not None:
        counts["router_topk"] = spec.moe.num_experts
        counts["shared_activation"] = counts["shared_act_fn"] = 3 * spec.moe.shared_intermediate
        counts["moe_combine"] = 2 * hidden
    return counts.get(name)


def work(spec: ModelSpec, name: str, key: tuple[int, ...], weights: str) -> Work | None:
    """Least work of one call; key is (tokens,), `spec` has per-rank widths, `weights` is the format that ran.

    None for a component that this module does not know, which then has no roofline.
    """
    (tokens,) = key
    shape = matrix(spec, name)
    if shape is not None:
        batch, k, n = shape
        return gemm(tokens, k, n, 2.0 if name in UNQUANTIZED else WEIGHT_BYTES[weights], batch)
    elements = _elements(spec, name)
    return None if elements is None else elementwise(tokens * elements)
