"""The selection branch: scores of every cached key for every query, and the top-k over them.

Uncapped: scoring is linear in the whole context however few keys are then attended.
"""

from typing import Final

from profiler.core.shots import Shot
from profiler.core.types import Category, ModelSpec
from profiler.kernels._axes import Limits
from profiler.kernels._batches import cap_point, decode_cells, decode_shot, prefill_cells, prefill_shot
from profiler.kernels._components import names_of, sparse_regime
from profiler.kernels._work import Work, key_rows, queries, query_key_pairs
from profiler.kernels.attention import UNITS as UNITS

CATEGORY: Final[Category] = "indexer"
DRIVERS: Final = ("prefill", "decode")


def kv_cap_tokens(spec: ModelSpec) -> int | None:
    return None


def shots(spec: ModelSpec, limits: Limits) -> list[Shot]:
    names = names_of(spec, CATEGORY)
    if not names:
        return []
    cap = cap_point(spec, limits)
    prefills = prefill_cells(limits, limits.longest, cap=cap)
    found = [prefill_shot(CATEGORY, names, chunk, context, sparse_regime(spec)) for chunk, context in prefills]
    return found + [decode_shot(CATEGORY, names, requests, kv) for requests, kv in decode_cells(limits, cap)]


def work(spec: ModelSpec, name: str, key: tuple[int, ...], weights: str) -> Work | None:
    """Least work of one call; key as in UNITS, one byte per cached index element (fp8).

    Scores of DSA are one number per (query, key), read again by the top-k; block scores are one per block.
    """
    if spec.indexer is None:
        return None
    index, pairs = spec.indexer, query_key_pairs(key)
    if name in ("index_scores", "block_scores"):
        moved = key_rows(key) * index.head_dim + queries(key) * index.num_heads * index.head_dim
        return Work(2.0 * index.num_heads * index.head_dim * pairs, 0.0, moved)
    if name == "index_topk":
        return Work(0.0, 0.0, 4.0 * pairs)
    if name == "block_topk":
        return Work(0.0, 0.0, 4.0 * index.num_heads * pairs / index.block_tokens)
    return None
