"""Calls of the per-token and per-sequence components. Every call is what one layer does for the whole batch."""

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

from profiler.core.shots import Shot
from profiler.engines.reference_support.bench import Bench, Builder, Call
from profiler.kernels.dense import matrix
from profiler.ops.formats import SparseKVFormat, quantize_fp8, quantize_index_rows, quantize_mla_rows
from profiler.ops.layers import layer_norm, rms_norm, rotary, rotary_table, swiglu, swiglu_clipped
from profiler.ops.mla import absorb_q, absorb_v
from profiler.ops.moe import grouped_topk


def _rows(bench: Bench, shot: Shot, *width: int) -> torch.Tensor:
    return bench.random(shot.new_tokens, *width)


def _projection(name: str) -> Builder:
    def build(bench: Bench, shot: Shot) -> Call:
        shape = matrix(bench.spec, name)
        if shape is None:
            raise ValueError(f"{name}: not a projection of {bench.spec.name}")
        _, k, n = shape
        x, w = _rows(bench, shot, k), bench.weight(name, n, k)
        return lambda: F.linear(x, w)

    return build


def _norm(width: Callable[[Bench], int], residual: bool) -> Builder:
    """RMS norm over `width` features, after adding the residual stream where there is one."""

    def build(bench: Bench, shot: Shot) -> Call:
        x, w = _rows(bench, shot, width(bench)), bench.random(width(bench))
        if not residual:
            return lambda: rms_norm(x, w)
        stream = _rows(bench, shot, width(bench))
        return lambda: rms_norm(x + stream, w)

    return build


def _hidden(bench: Bench) -> int:
    return bench.spec.hidden


def _query_rank(bench: Bench) -> int:
    assert bench.spec.mla is not None and bench.spec.mla.q_lora_rank is not None
    return bench.spec.mla.q_lora_rank


def _latent_rank(bench: Bench) -> int:
    assert bench.spec.mla is not None
    return bench.spec.mla.kv_lora_rank


def _embedding(bench: Bench, shot: Shot) -> Call:
    table = bench.weight("embedding", bench.spec.vocab, bench.spec.hidden)
    ids = torch.randint(bench.spec.vocab, (shot.new_tokens,), device=bench.device)
    return lambda: F.embedding(ids, table)


_PAGE_TOKENS: Final = 64


def _step_inputs(bench: Bench, shot: Shot) -> Call:
    """Token ids, positions and cache slots of the step, from each request's own page table."""
    new = torch.tensor([new for new, _ in shot.requests])
    context = torch.tensor([context for _, context in shot.requests])
    pages = -(-int((new + context).max()) // _PAGE_TOKENS)
    table = torch.arange(len(shot.requests) * pages, device=bench.device).view(-1, pages)
    tokens = torch.zeros(shot.new_tokens, dtype=torch.int64)

    def call() -> object:
        counts = new.to(bench.device)
        request = torch.repeat_interleave(torch.arange(len(counts), device=bench.device), counts)
        starts = counts.cumsum(0) - counts
        position = torch.arange(tokens.shape[0], device=bench.device) - (starts - context.to(bench.device))[request]
        slots = table[request, position // _PAGE_TOKENS] * _PAGE_TOKENS + position % _PAGE_TOKENS
        return tokens.to(bench.device, copy=True), position, slots

    return call


def positions(bench: Bench, shot: Shot) -> torch.Tensor:
    """Position of every new token, request after request."""
    parts = [torch.arange(context, context + new, device=bench.device) for new, context in shot.requests]
    return torch.cat(parts)


def _rotate(heads: int, width: int, rotary_dim: int, interleaved: bool) -> Builder:
    """Rotates the queries of `heads` heads and the one key that they share."""

    def build(bench: Bench, shot: Shot) -> Call:
        query, key = _rows(bench, shot, heads, width), _rows(bench, shot, 1, width)
        cos, sin = rotary_table(positions(bench, shot), rotary_dim)
        return lambda: (
            rotary(query, cos, sin, interleaved=interleaved),
            rotary(key, cos, sin, interleaved=interleaved),
        )

    return build


def _mla_rotary(bench: Bench, shot: Shot) -> Call:
    assert bench.spec.mla is not None
    rope = bench.spec.mla.qk_rope_head_dim
    return _rotate(bench.spec.num_heads, rope, rope, interleaved=True)(bench, shot)


def _index_rotary(bench: Bench, shot: Shot) -> Call:
    assert bench.spec.mla is not None and bench.spec.indexer is not None
    index = bench.spec.indexer
    return _rotate(index.num_heads, index.head_dim, bench.spec.mla.qk_rope_head_dim, interleaved=False)(bench, shot)


def _slots(bench: Bench, shot: Shot) -> torch.Tensor:
    """Cache rows of the new tokens, each request behind the one before."""
    return torch.randperm(shot.new_tokens, device=bench.device)


def _kv_cache_write(bench: Bench, shot: Shot) -> Call:
    assert bench.spec.mla is not None
    latents, slots = _rows(bench, shot, bench.spec.mla.latent_dim), _slots(bench, shot)
    if bench.kv_format is SparseKVFormat.FP8_PACKED:
        packed = quantize_mla_rows(latents)
        return lambda: packed.index_copy_(0, slots, quantize_mla_rows(latents))
    cache = torch.empty_like(latents)
    return lambda: cache.index_copy_(0, slots, latents)


def _absorb_q(bench: Bench, shot: Shot) -> Call:
    heads, k, n = matrix(bench.spec, "absorb_q") or (0, 0, 0)
    q, w = _rows(bench, shot, heads, k), bench.weight("absorb_q", heads, k, n)
    return lambda: absorb_q(q, w)


def _absorb_v(bench: Bench, shot: Shot) -> Call:
    heads, k, n = matrix(bench.spec, "absorb_v") or (0, 0, 0)
    attended, w = _rows(bench, shot, heads, k), bench.weight("absorb_v", heads, k, n)
    return lambda: absorb_v(attended, w)


def _index_k_norm(bench: Bench, shot: Shot) -> Call:
    assert bench.spec.indexer is not None
    width = bench.spec.indexer.head_dim
    x, w, b = _rows(bench, shot, width), bench.random(width), bench.random(width)
    return lambda: layer_norm(x, w, b)


def _index_quant(bench: Bench, shot: Shot) -> Call:
    assert bench.spec.indexer is not None
    q = _rows(bench, shot, bench.spec.indexer.num_heads, bench.spec.indexer.head_dim)
    return lambda: quantize_fp8(q, bench.spec.indexer.head_dim if bench.spec.indexer else 1)


def _index_cache_write(bench: Bench, shot: Shot) -> Call:
    assert bench.spec.indexer is not None
    keys, slots = _rows(bench, shot, bench.spec.indexer.head_dim), _slots(bench, shot)
    cache = quantize_index_rows(keys)
    return lambda: cache.index_copy_(0, slots, quantize_index_rows(keys))


def _activation(shared: bool) -> Builder:
    def build(bench: Bench, shot: Shot) -> Call:
        width = bench.spec.intermediate
        if shared:
            assert bench.spec.moe is not None
            width = bench.spec.moe.shared_intermediate
        x = _rows(bench, shot, 2 * width)
        gate = swiglu_clipped if bench.spec.family == "minimax_m3" else swiglu
        return lambda: gate(x)

    return build


def _router_topk(bench: Bench, shot: Shot) -> Call:
    moe = bench.spec.moe
    assert moe is not None
    logits = _rows(bench, shot, moe.num_experts)
    bias = bench.random(moe.num_experts, scale=0.01).float() if moe.has_bias else None
    return lambda: grouped_topk(
        logits,
        moe.topk,
        n_group=moe.n_group,
        topk_group=moe.topk_group,
        scoring=moe.scoring,
        bias=bias,
        renormalize=moe.renormalize,
        routed_scaling=moe.routed_scaling,
    )


def _moe_combine(bench: Bench, shot: Shot) -> Call:
    routed, shared = _rows(bench, shot, bench.spec.hidden), _rows(bench, shot, bench.spec.hidden)
    return lambda: routed + shared


def _qk_norm(bench: Bench, shot: Shot) -> Call:
    gqa = bench.spec.gqa
    assert gqa is not None
    w = bench.random(gqa.head_dim)
    q = _rows(bench, shot, bench.spec.num_heads, gqa.head_dim)
    k = _rows(bench, shot, gqa.num_kv_heads, gqa.head_dim)
    return lambda: (rms_norm(q, w), rms_norm(k, w))


def _gqa_rotary(bench: Bench, shot: Shot) -> Call:
    gqa = bench.spec.gqa
    assert gqa is not None
    q = _rows(bench, shot, bench.spec.num_heads, gqa.head_dim)
    k = _rows(bench, shot, gqa.num_kv_heads, gqa.head_dim)
    cos, sin = rotary_table(positions(bench, shot), gqa.head_dim)
    return lambda: (rotary(q, cos, sin), rotary(k, cos, sin))


def _qknorm_rope_insert(bench: Bench, shot: Shot) -> Call:
    """Norm and half-width rotary of queries, keys, index queries and index key, then their cache rows."""
    gqa, index = bench.spec.gqa, bench.spec.indexer
    assert gqa is not None and index is not None
    w, slots = bench.random(gqa.head_dim), _slots(bench, shot)
    q, k, v = (_rows(bench, shot, n, gqa.head_dim) for n in (bench.spec.num_heads, gqa.num_kv_heads, gqa.num_kv_heads))
    index_q, index_k = (_rows(bench, shot, n, index.head_dim) for n in (index.num_heads, 1))
    cos, sin = rotary_table(positions(bench, shot), gqa.head_dim // 2)
    caches = [torch.empty_like(x) for x in (k, v, index_k)]

    def call() -> object:
        turned = [rotary(rms_norm(x, w, unit_offset=True), cos, sin) for x in (q, index_q, k, index_k)]
        for cache, rows in zip(caches, (turned[2], v, turned[3]), strict=True):
            cache.index_copy_(0, slots, rows)
        return turned

    return call


def _lm_head(bench: Bench, shot: Shot) -> Call:
    x = bench.random(len(shot.requests), bench.spec.hidden)
    w = bench.weight("lm_head", bench.spec.vocab, bench.spec.hidden)
    return lambda: F.linear(x, w)


def _sampler(bench: Bench, shot: Shot) -> Call:
    logits = bench.random(len(shot.requests), bench.spec.vocab)
    return lambda: logits.float().argmax(-1)


_PROJECTIONS: Final = (
    *("fused_qkv_a_proj", "q_b_proj", "o_proj", "indexer_wq_b", "indexer_wk_weights", "gate_up_proj", "down_proj"),
    *("router_gate", "shared_gate_up_proj", "shared_down_proj", "qkv_proj", "qkv_index_proj"),
)
_RESIDUAL_NORMS: Final = ("input_norm", "post_attention_norm", "final_norm", "layernorm", "final_layernorm")

BUILDERS: Final[dict[str, Builder]] = {
    **{name: _projection(name) for name in _PROJECTIONS},
    **{name: _norm(_hidden, residual=True) for name in _RESIDUAL_NORMS},
    "q_a_norm": _norm(_query_rank, residual=False),
    "kv_a_norm": _norm(_latent_rank, residual=False),
    "step_inputs": _step_inputs,
    "embedding": _embedding,
    "rotary": _mla_rotary,
    "kv_cache_write": _kv_cache_write,
    "absorb_q": _absorb_q,
    "absorb_v": _absorb_v,
    "indexer_k_norm": _index_k_norm,
    "indexer_rotary": _index_rotary,
    "indexer_quant": _index_quant,
    "indexer_cache_write": _index_cache_write,
    "activation": _activation(shared=False),
    "act_fn": _activation(shared=False),
    "shared_activation": _activation(shared=True),
    "shared_act_fn": _activation(shared=True),
    "router_topk": _router_topk,
    "moe_combine": _moe_combine,
    "qk_norm": _qk_norm,
    "rotary_emb": _gqa_rotary,
    "qknorm_rope_insert": _qknorm_rope_insert,
    "lm_head": _lm_head,
    "sampler": _sampler,
}
