"""In what the time of each kernel runs straight between two measured chunks or batches; see profiler.core.grid_work."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from profiler.core.grid import BatchRow, Grid, Outside, decode_grid, prefill_grid
from profiler.core.grid_work import DecodeWork, PrefillWork, Work
from profiler.core.hardware import known_hardware, load_hardware
from profiler.core.types import ModelSpec
from profiler.kernels._block_sparse import PicksWork, ScoreWork, TopkWork
from profiler.kernels._breaks import breaks
from profiler.kernels._flash_attention import GROUPED_WIDTH, DenseWork, GroupedWork, SparseWork, dense_keys
from profiler.kernels._token_topk import TokenTopkWork

# DeepGEMM's fp8 MQA logits give each block 128 index heads, which are two queries of DeepSeek-V3.2 and four of GLM-5
# (sm90_fp8_mqa_logits, BLOCK_Q); vLLM cuts a chunk where its fp32 scores would exceed
# VLLM_SPARSE_INDEXER_MAX_LOGITS_MB = 512.
_INDEX_HEADS_PER_BLOCK: Final = 128
_MOST_SCORES: Final = 512 * 1024 * 1024 // 4
# FlashAttention 3 and FlashMLA take 64 heads of one query as the rows of a tile of sparse MLA.
_TILE_HEADS: Final = 64
# What a row of the top-k costs beyond its keys, and one without any selection, in keys: fitted on four tables of an
# H200 (bf16 at tp 1, 4 and 8, fp8_ds_mla at tp 1).
_ROW_KEYS: Final = 3000.0
_IDLE_KEYS: Final = 1000.0
# Engines whose kernels are known; both mask causally and read no more than the cap.
_ENGINES: Final = ("vllm", "reference")
# The KV layout whose decode kernel (FlashMLA) reads as many picks as the top-k has, used or not.
WHOLE_PICKS: Final = "fp8_ds_mla"
# vLLM's FLASHMLA_SPARSE (MIN_HEADS_FOR_BF16_PREFILL, v1/attention/backends/mla/flashmla_sparse.py, 0.26): with fewer
# heads per rank all tokens of a step are one request of as many queries for that decode kernel. It gives each query
# multiprocessors / queries / (heads / 64) parts, at least one, so that queries run in waves. With more heads each
# decode is a request of one query, and the keys of all are divided evenly over the parts that one query has.
_ONE_BATCH_BELOW_HEADS: Final = 32
# Longer than any chunk.
_EVERY_CHUNK: Final = sys.maxsize
# The one whose sparse attention is FlashAttention 3 (vLLM's FLASH_ATTN_MLA_SPARSE), which splits by rules of its own.
_FLASH_ATTENTION: Final = "bf16"


@dataclass(frozen=True, slots=True)
class Ran:
    """What ran a table's kernels.

    sm_count: multiprocessors of the card. tiles: the kernels are those of vLLM on SM90, whose tiles are known.
    heads: of one rank. cap_tokens: most attended keys, 0 without a selection. whole_below: chunks up to this length
    read the whole cap, as decode kernels over a fixed number of picks do. decodes_apart: that kernel runs decodes in a
    launch of their own, their keys divided evenly over the card. flash_attention: sparse MLA is FlashAttention 3.
    index_heads: of the token indexer. key_width, value_width: of one head in the dense prefill; projected_width: of
    both what comes from the latent. kv_heads: groups of one rank of grouped-query attention, 0 where its tiles are not
    known; selection_blocks: tokens of a block that is selected, 0 without block selection.
    """

    sm_count: int
    tiles: bool
    heads: int
    cap_tokens: int
    whole_below: int = 0
    decodes_apart: bool = False
    flash_attention: bool = False
    index_heads: int = 64
    key_width: int = 192
    value_width: int = 128
    projected_width: int = 256
    kv_heads: int = 0
    selection_blocks: int = 0


def ran_of(meta: Mapping[str, Any], spec: ModelSpec, tp: int) -> Ran | None:
    """What a bundle's meta.yaml says of its tables of one tp; None for tables that nobody measured as kernels.

    `spec` is the whole model.
    """
    if meta["provenance"] not in ("measured", "projected") or meta["engine"]["name"] not in _ENGINES:
        return None
    name, measured = str(meta["hardware"]), meta["provenance"] == "measured"
    card = load_hardware(name) if name in known_hardware() else None
    known = card is not None and card.architecture == "sm90" and meta["engine"]["name"] == "vllm"
    heads, whole = max(1, spec.num_heads // tp), meta["kv"]["layout"] == WHOLE_PICKS
    one_batch = known and heads < _ONE_BATCH_BELOW_HEADS
    seen = ((meta.get("grid") or {}).get(f"tp{tp}/attention") or {}).get("dense_prefill") or {}
    short = _EVERY_CHUNK if one_batch else int(seen.get("longer_than_tokens", 0))
    return Ran(
        sm_count=card.sm_count if card else 0,
        tiles=measured and known,
        heads=heads,
        cap_tokens=spec.indexer.attended_cap_tokens if spec.indexer else 0,
        whole_below=short if whole else 0,
        decodes_apart=whole and known and not one_batch,
        flash_attention=measured and known and meta["kv"]["layout"] == _FLASH_ATTENTION,
        **_widths(spec),
        **_groups(spec, tp),
    )


def _widths(spec: ModelSpec) -> dict[str, int]:
    if spec.mla is None or spec.indexer is None:
        return {}
    return {
        "index_heads": spec.indexer.num_heads,
        "key_width": spec.mla.qk_nope_head_dim + spec.mla.qk_rope_head_dim,
        "value_width": spec.mla.v_head_dim,
        "projected_width": spec.mla.qk_nope_head_dim + spec.mla.v_head_dim,
    }


def _groups(spec: ModelSpec, tp: int) -> dict[str, int]:
    if spec.gqa is None:
        return {}
    known = spec.gqa.head_dim == GROUPED_WIDTH
    return {
        "kv_heads": max(1, spec.gqa.num_kv_heads // tp) if known else 0,
        "selection_blocks": spec.indexer.block_tokens if spec.indexer else 0,
    }


def prefill_work(name: str, ran: Ran | None) -> Work | None:
    """In keys. None for a kernel whose time is taken to run straight in the chunk's length."""
    if ran is None:
        return None
    if name == "index_scores":
        queries = max(1, _INDEX_HEADS_PER_BLOCK // ran.index_heads)
        return Work(queries * ran.sm_count, split_pairs=_MOST_SCORES) if ran.tiles else Work()
    if name == "index_topk" and ran.cap_tokens:
        return Work(select_beyond=ran.cap_tokens, idle_keys=_IDLE_KEYS, row_keys=_ROW_KEYS)
    if name == "sparse_mla" and ran.cap_tokens:
        return _sparse_mla(ran)
    if name == "sparse_gqa" and ran.cap_tokens:
        return Work(cap_keys=ran.cap_tokens)
    return Work() if name in ("mla_dense_prefill", "attention", "block_scores", "block_topk") else None


def decode_work(name: str, ran: Ran | None) -> Work | None:
    """In keys. None for a kernel whose time is taken to run straight in the number of requests."""
    if ran is None or not ran.tiles or not ran.cap_tokens or name != "sparse_mla" or ran.decodes_apart:
        return None
    return _sparse_mla(ran)


def prefill_straight(name: str, ran: Ran | None) -> PrefillWork | None:
    """What lookups and leave-one-out take a chunk's time to run straight in: the rules by which the kernel divides its
    work where these are known, else its keys."""
    if ran is not None and ran.flash_attention and ran.cap_tokens and name == "sparse_mla":
        return SparseWork(ran.sm_count, ran.heads, ran.cap_tokens)
    if ran is not None and ran.tiles and ran.cap_tokens and name == "index_topk":
        return TokenTopkWork(ran.sm_count, ran.cap_tokens, _MOST_SCORES)
    if ran is not None and ran.tiles and name == "mla_dense_prefill":
        return DenseWork(ran.sm_count, ran.heads, dense_keys(ran.key_width), ran.value_width, ran.projected_width)
    if ran is not None and ran.flash_attention and ran.kv_heads and name == "attention":
        return GroupedWork(ran.sm_count, ran.heads, ran.kv_heads)
    if ran is not None and _selects_blocks(ran) and name == "block_scores":
        return ScoreWork(ran.sm_count, ran.kv_heads, ran.selection_blocks)
    if ran is not None and _selects_blocks(ran) and name == "block_topk":
        return TopkWork(ran.kv_heads, ran.selection_blocks)
    if ran is not None and _selects_blocks(ran) and name == "sparse_gqa":
        return PicksWork(ran.sm_count, ran.kv_heads, ran.selection_blocks, ran.cap_tokens)
    return prefill_work(name, ran)


def decode_straight(name: str, ran: Ran | None) -> DecodeWork | None:
    """The same of a batch of decode requests."""
    if ran is not None and ran.flash_attention and ran.cap_tokens and name == "sparse_mla":
        return SparseWork(ran.sm_count, ran.heads, ran.cap_tokens)
    if ran is not None and _selects_blocks(ran) and name == "block_topk":
        return TopkWork(ran.kv_heads, ran.selection_blocks)
    if ran is not None and _selects_blocks(ran) and name == "sparse_gqa":
        return PicksWork(ran.sm_count, ran.kv_heads, ran.selection_blocks, ran.cap_tokens)
    if ran is not None and ran.flash_attention and ran.kv_heads and name == "attention":
        return GroupedWork(ran.sm_count, ran.heads, ran.kv_heads)
    return decode_work(name, ran)


def _selects_blocks(ran: Ran) -> bool:
    """Whether vLLM's Triton kernels of block selection ran, which have an index head for each key-value head."""
    return ran.tiles and ran.kv_heads > 0 and ran.selection_blocks > 0


def prefill_lookup(rows: Sequence[BatchRow], name: str, spec: ModelSpec, ran: Ran | None, outside: Outside) -> Grid:
    """Chunk x context of a kernel's rows, in its work. Raises CoverageError when there is none."""
    return prefill_grid(rows, outside, prefill_straight(name, ran), steps_of(spec, name))


def decode_lookup(rows: Sequence[BatchRow], name: str, ran: Ran | None, outside: Outside) -> Grid:
    """Requests x keys of a kernel's rows, in its work. Raises CoverageError when there is none."""
    return decode_grid(rows, outside, decode_straight(name, ran))


def steps_of(spec: ModelSpec, name: str) -> tuple[int, ...]:
    """Last chunks before another kernel takes over."""
    return breaks(spec, name, "prefill_chunk_tokens", 0)


def _sparse_mla(ran: Ran) -> Work:
    wave = ran.sm_count // math.ceil(ran.heads / _TILE_HEADS) if ran.tiles else 1
    return Work(wave, ran.cap_tokens, splits_keys=ran.tiles, whole_below=ran.whole_below)
