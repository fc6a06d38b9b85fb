"""Calls of the attention-like components. A batch's requests are separate: each has cache rows of its own."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch

from profiler.core.shots import Shot
from profiler.core.types import IndexerDims
from profiler.engines.reference_support.bench import Bench, Builder, Call
from profiler.ops.formats import SparseKVFormat, dequantize_index_rows, quantize_index_rows, quantize_mla_rows
from profiler.ops.gqa import gqa_prefill
from profiler.ops.indexer import index_scores, select_topk_causal
from profiler.ops.mla import mla_prefill, sparse_mla, widen_rows
from profiler.ops.msa import msa_attend, msa_block_scores, msa_select


def _latents(bench: Bench, rows: int) -> torch.Tensor:
    """Cache rows of MLA in the layout under test."""
    assert bench.spec.mla is not None
    latents = bench.random(rows, bench.spec.mla.latent_dim, what="cached latents")
    return quantize_mla_rows(latents) if bench.kv_format is SparseKVFormat.FP8_PACKED else latents


def _seen(bench: Bench, new: int, context: int) -> torch.Tensor:
    return torch.arange(context, context + new, device=bench.device)


def _scores(bench: Bench, rows: int, keys: int) -> torch.Tensor:
    """Distinct random scores: ties would slow a top-k down or speed it up."""
    generator = torch.Generator(device=bench.device).manual_seed(bench.seed + rows)
    return torch.randn(rows, keys, device=bench.device, dtype=torch.float32, generator=generator)


def _index_scores(bench: Bench, shot: Shot) -> Call:
    """Reads the 132-byte rows of each request and scores its new tokens against all of them."""
    index = bench.spec.indexer
    assert index is not None
    work = []
    for new, context in shot.requests:
        rows = quantize_index_rows(bench.random(new + context, index.head_dim, what="index keys"))
        query = bench.random(new, index.num_heads, index.head_dim)
        work.append((query, bench.random(new, index.num_heads), rows))
    return lambda: [index_scores(q, w, dequantize_index_rows(rows, bench.dtype)) for q, w, rows in work]


def _index_topk(bench: Bench, shot: Shot) -> Call:
    index = bench.spec.indexer
    assert index is not None
    work = [(_scores(bench, new, new + ctx), _seen(bench, new, ctx)) for new, ctx in shot.requests]
    return lambda: [select_topk_causal(scores, seen, index.topk, checked=False) for scores, seen in work]


def _picked(bench: Bench, requests: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Cache rows that every new token attends, (new tokens, K) int32, K the longest pick of the batch."""
    assert bench.spec.indexer is not None
    topk = bench.spec.indexer.topk
    width = min(topk, max(new + context for new, context in requests))
    starts = accumulate((new + context for new, context in requests), initial=0)
    parts = []
    for (new, context), start in zip(requests, starts, strict=False):
        scores = _scores(bench, new, new + context)
        picks = select_topk_causal(scores, _seen(bench, new, context), topk, checked=False)[:, :width]
        parts.append(torch.where(picks >= 0, picks + start, picks))
    return torch.cat(parts)


def _sparse_mla(bench: Bench, shot: Shot) -> Call:
    mla, heads = bench.spec.mla, bench.spec.num_heads
    assert mla is not None
    rows, picks = _latents(bench, shot.kv_tokens), _picked(bench, shot.requests)
    nope = bench.random(shot.new_tokens, heads, mla.kv_lora_rank)
    rope = bench.random(shot.new_tokens, heads, mla.qk_rope_head_dim)
    scale = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5
    return lambda: sparse_mla(nope, rope, rows, picks, scale, kv_format=bench.kv_format, checked=False)


def _mla_dense_prefill(bench: Bench, shot: Shot) -> Call:
    mla, heads = bench.spec.mla, bench.spec.num_heads
    assert mla is not None
    kv_b = bench.weight("kv_b_proj", heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
    scale = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5
    work = []
    # Decode rows beside dense prefills take the sparse kernel.
    decodes = shot.regime == "dense" and any(new > 1 for new, _ in shot.requests)
    prefills = [(new, context) for new, context in shot.requests if new > 1 or not decodes]
    for new, context in prefills:
        nope = bench.random(new, heads, mla.qk_nope_head_dim)
        rope = bench.random(new, heads, mla.qk_rope_head_dim)
        work.append((nope, rope, _latents(bench, new + context)))
    return lambda: [
        mla_prefill(nope, rope, widen_rows(rows, bench.kv_format, bench.dtype), kv_b, scale)
        for nope, rope, rows in work
    ]


def _attention(bench: Bench, shot: Shot) -> Call:
    gqa, heads = bench.spec.gqa, bench.spec.num_heads
    assert gqa is not None
    work = []
    for new, context in shot.requests:
        query = bench.random(new, heads, gqa.head_dim)
        key = bench.random(new + context, gqa.num_kv_heads, gqa.head_dim, what="cached keys")
        work.append((query, key, bench.random(new + context, gqa.num_kv_heads, gqa.head_dim, what="cached values")))
    return lambda: [gqa_prefill(q, k, v, gqa.head_dim**-0.5) for q, k, v in work]


def _index_dims(bench: Bench) -> IndexerDims:
    assert bench.spec.indexer is not None
    return bench.spec.indexer


def _padded(bench: Bench, tokens: int) -> int:
    """Tokens in whole selection blocks, as pages hold them."""
    block = _index_dims(bench).block_tokens
    return -(-tokens // block) * block


def _block_scores(bench: Bench, shot: Shot) -> Call:
    index = _index_dims(bench)
    work = []
    for new, context in shot.requests:
        keys = bench.random(_padded(bench, new + context), index.head_dim, what="index keys")
        work.append((bench.random(new, index.num_heads, index.head_dim), keys, _seen(bench, new, context)))
    return lambda: [
        msa_block_scores(q, keys, seen, block_tokens=index.block_tokens, checked=False) for q, keys, seen in work
    ]


def _block_choices(bench: Bench, new: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct random scores (new, heads, blocks) and the positions of the rows."""
    index = _index_dims(bench)
    blocks = _padded(bench, new + context) // index.block_tokens
    scores = _scores(bench, new, index.num_heads * blocks).view(new, index.num_heads, blocks)
    return scores, _seen(bench, new, context)


def _block_topk(bench: Bench, shot: Shot) -> Call:
    index = _index_dims(bench)
    work = [_block_choices(bench, new, context) for new, context in shot.requests]
    return lambda: [
        msa_select(scores, seen, index.topk, block_tokens=index.block_tokens, checked=False) for scores, seen in work
    ]


def _sparse_gqa(bench: Bench, shot: Shot) -> Call:
    gqa, heads, index = bench.spec.gqa, bench.spec.num_heads, _index_dims(bench)
    assert gqa is not None
    work = []
    for new, context in shot.requests:
        scores, seen = _block_choices(bench, new, context)
        picks = msa_select(scores, seen, index.topk, block_tokens=index.block_tokens, checked=False)
        rows = _padded(bench, new + context)
        key = bench.random(rows, gqa.num_kv_heads, gqa.head_dim, what="cached keys")
        value = bench.random(rows, gqa.num_kv_heads, gqa.head_dim, what="cached values")
        work.append((bench.random(new, heads, gqa.head_dim), key, value, picks, seen))
    scale = gqa.head_dim**-0.5
    return lambda: [
        msa_attend(q, k, v, picks, seen, scale=scale, block_tokens=index.block_tokens, checked=False)
        for q, k, v, picks, seen in work
    ]


BUILDERS: Final[dict[str, Builder]] = {
    "index_scores": _index_scores,
    "index_topk": _index_topk,
    "sparse_mla": _sparse_mla,
    "mla_dense_prefill": _mla_dense_prefill,
    "attention": _attention,
    "block_scores": _block_scores,
    "block_topk": _block_topk,
    "sparse_gqa": _sparse_gqa,
}
