"""Attention over the selected keys alone: absorbed MLA over top-k latents, GQA over top-k blocks.

Capped: a query reads at most top-k tokens, or top-k blocks x block length.
"""

from typing import Final

from profiler.core.shots import Shot
from profiler.core.types import Category, ModelSpec
from profiler.kernels._axes import Limits
from profiler.kernels._batches import cap_point, decode_cells, decode_shot, prefill_cells, prefill_shot
from profiler.kernels._components import names_of, sparse_regime
from profiler.kernels._work import Work, queries, query_key_pairs
from profiler.kernels.attention import UNITS as UNITS

CATEGORY: Final[Category] = "sparse_attention"
DRIVERS: Final = ("prefill", "decode")


def kv_cap_tokens(spec: ModelSpec) -> int | None:
    return spec.indexer.attended_cap_tokens if spec.indexer else None


def shots(spec: ModelSpec, limits: Limits) -> list[Shot]:
    """Prefill cells on the sparse path at every length, since one long prompt takes a whole step there."""
    names = names_of(spec, CATEGORY)
    if not names:
        return []
    cap = cap_point(spec, limits)
    prefills = prefill_cells(limits, limits.longest, cap=cap)
    found = [prefill_shot(CATEGORY, names, chunk, context, sparse_regime(spec)) for chunk, context in prefills]
    return found + [decode_shot(CATEGORY, names, requests, kv) for requests, kv in decode_cells(limits, cap)]


def work(spec: ModelSpec, name: str, key: tuple[int, ...], weights: str) -> Work | None:
    """Least work of one call; key as in UNITS, one byte per cached element.

    Block selection always keeps the query's own, partly filled block, so block_tokens - 1 of its cap may be masked.
    """
    if spec.indexer is None:
        return None
    cap = spec.indexer.attended_cap_tokens - (spec.indexer.block_tokens - 1)
    pairs = query_key_pairs(key, cap)
    if name == "sparse_mla" and spec.mla is not None:
        width = spec.mla.latent_dim + spec.mla.kv_lora_rank
        moved = _least_rows(key, cap) * spec.mla.latent_dim + queries(key) * spec.num_heads * width
        return Work(2.0 * spec.num_heads * width * pairs, 0.0, moved)
    if name == "sparse_gqa" and spec.gqa is not None:
        gqa = spec.gqa
        moved = _least_rows(key, cap) * 2 * gqa.num_kv_heads * gqa.head_dim
        moved += queries(key) * 2 * spec.num_heads * gqa.head_dim
        return Work(4.0 * spec.num_heads * gqa.head_dim * pairs, 0.0, moved)
    return None


def _least_rows(key: tuple[int, ...], cap: int) -> float:
    """Rows read when all queries of a request pick the same ones."""
    chunk, context, requests, kv, _ = key
    return (min(context + chunk, cap) if chunk else 0.0) + requests * min(kv, cap)
