"""Sparse SDPA: attention of every query over its own list of cache rows, with sinks and striped caches."""

import torch

from profiler.ops.checks import (
    FLOATS,
    FP8,
    Backend,
    check_positive,
    check_range,
    check_tensor,
    is_checked,
)
from profiler.ops.formats import MLA_DIM, MLA_ROW_BYTES, SparseKVFormat
from profiler.ops.mla import attend_picked

SENTINEL = 0xFFFFFFFF


def block_cyclic_slots(
    positions: torch.Tensor, cache_tokens: int, stripes: int, stripe_chunk_tokens: int
) -> torch.Tensor:
    """Rows of natural positions in a cache striped over `stripes` shards, chunk by chunk; -1 stays -1.

    Chunk b of stripe_chunk_tokens tokens lies on shard b % stripes as its chunk b // stripes; the shards, each of
    cache_tokens / stripes rows, follow one another.
    """
    chunk = positions // stripe_chunk_tokens
    local = (chunk // stripes) * stripe_chunk_tokens + positions % stripe_chunk_tokens
    slots = (chunk % stripes) * (cache_tokens // stripes) + local
    return torch.where(positions < 0, positions, slots)


def _stripes(
    *, axis: int, chunk_local: int, tp_sharded: bool, mesh_shape: tuple[int, int] | None, cache_tokens: int, rows: int
) -> tuple[int, int]:
    """Shards of the cache and the chunk length on each. Raises ValueError for a mesh or lengths that cannot be."""
    if mesh_shape is None or len(mesh_shape) != 2:
        raise ValueError(f"mesh_shape: a block-cyclic cache needs (rows, columns) of the mesh, found {mesh_shape!r}")
    for size in mesh_shape:
        check_positive("mesh_shape", size)
    if axis not in (0, 1):
        raise ValueError(f"block_cyclic_sp_axis: expected 0 or 1, an axis of mesh_shape {mesh_shape}, found {axis!r}")
    check_positive("block_cyclic_chunk_local", chunk_local)
    sp, tp = mesh_shape[axis], mesh_shape[1 - axis]
    if cache_tokens % sp:
        raise ValueError(f"kv: {cache_tokens} cache rows are no multiple of the {sp} SP shards")
    if chunk_local not in (rows, tp * rows):
        raise ValueError(
            f"block_cyclic_chunk_local: {chunk_local} is neither the {rows} queries of q nor tp x that, {tp * rows}"
        )
    if not tp_sharded:
        return sp, chunk_local
    if chunk_local % tp or cache_tokens % (sp * tp):
        raise ValueError(
            f"block_cyclic_cache_tp_sharded: chunk {chunk_local} and cache {cache_tokens} must divide over "
            f"tp {tp} and sp x tp {sp * tp}"
        )
    return sp * tp, chunk_local // tp


def check_sentinel_tail(indices: torch.Tensor) -> None:
    """Refuse a row in which a masked index comes before an unmasked one. indices (S, TOPK) int32, negative = masked."""
    masked = indices < 0
    broken = (masked[:, :-1] & ~masked[:, 1:]).any(-1)
    if bool(broken.any()):
        row = int(broken.int().argmax())
        raise ValueError(f"indices: row {row} has a masked index before an unmasked one; masks must be a tail")


def _check_indices(picks: torch.Tensor, tokens: int, striped: tuple[int, int] | None) -> None:
    """Refuse an unmasked index that no cache row holds."""
    unmasked = picks[picks != -1]
    outside = unmasked < 0
    if striped is None:
        where = f"{tokens} rows of the cache"
        outside |= unmasked >= tokens
    else:
        stripes, chunk = striped
        where = f"{tokens} rows of the cache, in chunks of {chunk} over {stripes} shards"
        local = unmasked // (chunk * stripes) * chunk + unmasked % chunk
        outside |= local >= tokens // stripes
    if bool(outside.any()):
        raise ValueError(f"indices: {int(unmasked[outside][0]) & SENTINEL} lies outside the {where}")


def _cache_rows(
    kv: torch.Tensor, kv_format: SparseKVFormat, k_dim: int, cache_batch_idx: int | torch.Tensor | None
) -> tuple[torch.Tensor, int | torch.Tensor]:
    """All rows of kv as (B x T, row), and the first row of the batch slot."""
    if not isinstance(kv_format, SparseKVFormat):
        raise ValueError(f"kv_format: expected a SparseKVFormat, found {kv_format!r}")
    width, dtypes = {
        SparseKVFormat.BF16: (k_dim, FLOATS),
        SparseKVFormat.FP8_RAW: (k_dim, (FP8,)),
        SparseKVFormat.FP8_PACKED: (MLA_ROW_BYTES, (torch.uint8,)),
    }[kv_format]
    if kv_format is SparseKVFormat.FP8_PACKED and k_dim != MLA_DIM:
        raise ValueError(f"q: packed rows hold {MLA_DIM} features, the queries have {k_dim}")
    check_tensor("kv", kv, ("B", 1, "T", width), dtypes)
    batch, _, tokens, _ = kv.shape
    rows = kv.flatten(0, 2)
    if cache_batch_idx is None:
        if batch != 1:
            raise ValueError(f"cache_batch_idx: needed to choose among the {batch} batch slots of kv")
        return rows, 0
    if isinstance(cache_batch_idx, torch.Tensor):
        check_tensor("cache_batch_idx", cache_batch_idx, (), (torch.int32, torch.int64), kv.device)
        if kv.device.type == "cpu":
            check_range("cache_batch_idx", cache_batch_idx, 0, batch)
        return rows, cache_batch_idx.to(torch.int32) * tokens
    if isinstance(cache_batch_idx, bool) or not isinstance(cache_batch_idx, int) or not 0 <= cache_batch_idx < batch:
        raise ValueError(f"cache_batch_idx: expected 0 .. {batch - 1}, found {cache_batch_idx!r}")
    return rows, cache_batch_idx * tokens


def _signed_indices(indices: torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
    """(S, TOPK) int32 with -1 for masked, from uint32 or int32 (1, 1, S, TOPK)."""
    check_tensor("indices", indices, (1, 1, rows, "TOPK"), (torch.uint32, torch.int32), device)
    return indices.view(torch.int32)[0, 0]


def sparse_sdpa(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    v_dim: int,
    *,
    kv_format: SparseKVFormat,
    attention_sink: torch.Tensor | None = None,
    scale: float | None = None,
    k_chunk_size: int = 128,
    compute_kernel_config: object | None = None,
    cache_batch_idx: int | torch.Tensor | None = None,
    block_cyclic_sp_axis: int | None = None,
    block_cyclic_chunk_local: int | None = None,
    block_cyclic_cache_tp_sharded: bool = False,
    mesh_shape: tuple[int, int] | None = None,
    checked: bool | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """softmax(q k^T scale) v over each query's indexed cache rows, v their first v_dim features: (1, H, S, v_dim).

    q (1, H, S, K_DIM) bf16, FP8 E4M3 or wider; the result has its dtype. H may be any number (kernels pad it inside).
    kv (B, 1, T, K_DIM): bf16 (or wider) or raw FP8, or (B, 1, T, 656) uint8 packed rows; kv_format alone says which.
    indices (1, 1, S, TOPK) uint32 with 0xFFFFFFFF for masked, or int32 with -1; masked ones are a tail of each row.
    A query whose indices are all masked gives zeros.

    attention_sink (1, 1, 1, H), one logit per head: multiplied by scale, it enters the softmax denominator only. For
    sinks that are scaled logits already, pass sink / scale, which then contributes exp(sink).
    scale: K_DIM^-0.5 by default. k_chunk_size: tile of the top-k loop, a multiple of 32 that divides TOPK; it changes
    rounding at most (the naive path takes all of TOPK at once). compute_kernel_config: accepted for callers that pass
    one; it has no effect here.
    cache_batch_idx: batch slot of kv, needed when B > 1. As a 0-dim integer tensor it can change between replays of a
    captured graph.

    block_cyclic_sp_axis and block_cyclic_chunk_local together say that indices are natural token positions of a cache
    striped over the SP axis of a mesh of mesh_shape = (rows, columns): chunks of block_cyclic_chunk_local tokens go
    round the shards, and the shards follow one another in kv. With block_cyclic_cache_tp_sharded the cache is striped
    over all SP x TP devices (device = sp x TP + tp), each holding block_cyclic_chunk_local / TP tokens of a chunk.

    Raises ValueError on wrong ranks, dtypes, widths or formats, a chunk size or mesh that does not divide, a batch slot
    that does not exist, and in the checked mode (the default on the CPU) on an index outside the cache or a masked
    index before an unmasked one.
    """
    check_tensor("q", q, (1, "H", "S", "K_DIM"), (*FLOATS, FP8))
    _, heads, count, k_dim = q.shape
    rows, first_row = _cache_rows(kv, kv_format, k_dim, cache_batch_idx)
    check_tensor("kv", kv, kv.shape, (), q.device)
    tokens = kv.shape[2]
    picks = _signed_indices(indices, count, q.device)
    topk = picks.shape[1]
    check_positive("k_chunk_size", k_chunk_size)
    if k_chunk_size % 32 or topk % k_chunk_size:
        raise ValueError(f"k_chunk_size: {k_chunk_size} must be a multiple of 32 that divides TOPK {topk}")
    check_positive("v_dim", v_dim)
    if v_dim > k_dim:
        raise ValueError(f"v_dim: {v_dim} is wider than K_DIM {k_dim}")
    sink = None
    if attention_sink is not None:
        check_tensor("attention_sink", attention_sink, (1, 1, 1, heads), FLOATS, q.device)
        sink = attention_sink[0, 0, 0]
    if scale is not None and not isinstance(scale, int | float):
        raise ValueError(f"scale: expected a number, found {scale!r}")
    if (block_cyclic_sp_axis is None) != (block_cyclic_chunk_local is None):
        raise ValueError(
            "block_cyclic_sp_axis, block_cyclic_chunk_local: both must be given, or neither; found "
            f"{block_cyclic_sp_axis!r} and {block_cyclic_chunk_local!r}"
        )
    if block_cyclic_sp_axis is None and block_cyclic_cache_tp_sharded:
        raise ValueError("block_cyclic_cache_tp_sharded: only for a block-cyclic cache; give block_cyclic_sp_axis")
    striped = None
    if block_cyclic_sp_axis is not None and block_cyclic_chunk_local is not None:
        striped = _stripes(
            axis=block_cyclic_sp_axis,
            chunk_local=block_cyclic_chunk_local,
            tp_sharded=block_cyclic_cache_tp_sharded,
            mesh_shape=mesh_shape,
            cache_tokens=tokens,
            rows=count,
        )
    if is_checked(checked, q):
        check_sentinel_tail(picks)
        _check_indices(picks, tokens, striped)
    if striped is not None:
        picks = block_cyclic_slots(picks, tokens, *striped)
    if isinstance(first_row, torch.Tensor) or first_row:
        picks = torch.where(picks < 0, picks, picks + first_row)
    out = attend_picked(
        q[0].transpose(0, 1),
        rows,
        picks,
        v_dim,
        scale=k_dim**-0.5 if scale is None else float(scale),
        kv_format=kv_format,
        sink=sink,
        checked=False,
        backend=backend,
    )
    return out.transpose(0, 1)[None].contiguous()
