"""Attention over every key: GQA of dense layers, and the dense prefill that replaces sparse MLA at or below the top-k.

Uncapped: its cost follows the whole context.
"""

from typing import Final

from profiler.core.shots import Shot
from profiler.core.types import Category, ModelSpec
from profiler.families.deepseek_v32_tail import TAIL
from profiler.kernels._axes import Limits
from profiler.kernels._batches import (
    cap_point,
    decode_cells,
    decode_shot,
    dense_prefill_cells,
    prefill_cells,
    prefill_shot,
)
from profiler.kernels._components import components_of
from profiler.kernels._work import Work, key_rows, queries, query_key_pairs

CATEGORY: Final[Category] = "attention"
UNITS: Final = {
    "prefill_chunk_tokens": "tokens",
    "prefill_context_tokens": "tokens",
    "decode_requests": "requests",
    "decode_kv_tokens": "tokens",
    "decode_query_tokens": "tokens",
}
DRIVERS: Final = ("prefill", "decode")


def kv_cap_tokens(spec: ModelSpec) -> int | None:
    return None


def shots(spec: ModelSpec, limits: Limits) -> list[Shot]:
    """Prefill and decode cells of kernels that always run; prefill cells up to the top-k of those that replace it."""
    components = components_of(spec, CATEGORY)
    always = tuple(c.name for c in components if c.when == "always")
    short = tuple(c.name for c in components if c.when == "prefill_dense")
    found: list[Shot] = []
    if always:
        # A kernel that contains the selection changes where that begins.
        cap = cap_point(spec, limits) if TAIL in always else None
        cells = prefill_cells(limits, limits.longest, cap=cap)
        found += [prefill_shot(CATEGORY, always, chunk, context, "auto") for chunk, context in cells]
        found += [decode_shot(CATEGORY, always, requests, kv) for requests, kv in decode_cells(limits, cap)]
    if short and spec.indexer is not None:
        # The regime ends at the top-k, so its table does too: no row beyond it would be of this kernel.
        cells = dense_prefill_cells(limits, spec.indexer.attended_cap_tokens)
        found += [prefill_shot(CATEGORY, short, chunk, context, "dense") for chunk, context in cells]
    return found


def work(spec: ModelSpec, name: str, key: tuple[int, ...], weights: str) -> Work | None:
    """Least work of one call; key as in UNITS. Dense MLA prefill also expands every latent to keys and values."""
    pairs = query_key_pairs(key)
    if name == "mla_dense_prefill" and spec.mla is not None:
        mla, heads = spec.mla, spec.num_heads
        expand = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        score = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
        flops = 2.0 * heads * score * pairs + 2.0 * key_rows(key) * mla.kv_lora_rank * expand
        moved = key_rows(key) * mla.latent_dim + queries(key) * heads * score
        return Work(flops, 2.0 * mla.kv_lora_rank * expand, 2.0 * moved)
    if name == "attention" and spec.gqa is not None:
        gqa, heads = spec.gqa, spec.num_heads
        flops = 4.0 * heads * gqa.head_dim * pairs
        moved = key_rows(key) * 2 * gqa.num_kv_heads * gqa.head_dim + queries(key) * 2 * heads * gqa.head_dim
        # One byte per cached element: the smallest cache that an engine offers.
        return Work(flops, 0.0, moved)
    return None
