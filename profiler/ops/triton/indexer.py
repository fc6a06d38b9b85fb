# mypy: ignore-errors
# Kernels are a language of their own: Triton's parameters and decorators carry no Python types.
"""Index scores in Triton, over keys in position order and over pages, and the fused quantise-and-store of new keys.

Keys are the rows and (query, head) pairs the columns of a product: the weighted sum over heads then runs along a row of
the accumulator, inside a thread and the four lanes that share its row, and needs no exchange between warps.
"""

import torch
import triton
import triton.language as tl

from profiler.ops.checks import FP8
from profiler.ops.formats import FP8_MAX, INDEX_DIM, INDEX_ROW_BYTES

# Programs to aim at: several waves of an H200's 132 multiprocessors at two or more programs each.
_TARGET_PROGRAMS = 132 * 8


@triton.jit
def _scores_kernel(
    q,
    weights,
    keys,
    key_scales,
    positions,
    out,
    rows,
    count,
    split_tokens,
    out_stride,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    CAUSAL: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS query rows against the keys of one split. With CAUSAL, keys that no row of the program sees are skipped."""
    # The last rows see the most keys: start them first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    low = tl.program_id(0) * split_tokens
    pair = tl.arange(0, ROWS * HEADS_PADDED)
    row = tile * ROWS + pair // HEADS_PADDED
    head = pair % HEADS_PADDED
    feature = tl.arange(0, DIM_PADDED)
    real = (row < rows) & (head < HEADS)
    pair_at = row.to(tl.int64) * HEADS + head
    query = tl.load(
        q + pair_at[None, :] * DIM + feature[:, None], mask=real[None, :] & (feature < DIM)[:, None], other=0.0
    ).to(COMPUTE)
    weight = tl.load(weights + pair_at, mask=real, other=0.0).to(tl.float32)
    out_row = tile * ROWS + tl.arange(0, ROWS)
    out_at = out + out_row.to(tl.int64) * out_stride
    high = tl.minimum(low + split_tokens, count)
    if CAUSAL:
        seen = tl.load(positions + out_row, mask=out_row < rows, other=-1)
        high = tl.minimum(high, (tl.max(seen, axis=0) + 1).to(tl.int32))
    for start in tl.range(low, high, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < count
        key = tl.load(
            keys + token.to(tl.int64)[:, None] * DIM + feature[None, :],
            mask=inside[:, None] & (feature < DIM)[None, :],
            other=0.0,
        ).to(COMPUTE)
        product = tl.dot(key, query, input_precision=PRECISION)
        weighted = tl.maximum(product, 0.0) * weight[None, :]
        score = tl.sum(tl.reshape(weighted, (BLOCK, ROWS, HEADS_PADDED)), axis=2)
        if HAS_SCALES:
            score = score * tl.load(key_scales + token, mask=inside, other=0.0)[:, None]
        tl.store(out_at[None, :] + token[:, None], score, mask=inside[:, None] & (out_row < rows)[None, :])


@triton.jit
def _paged_scores_kernel(
    q,
    weights,
    keys,
    scales,
    pages,
    row_page_offset,
    row_start,
    positions,
    out,
    out_stride,
    key_page_stride,
    scale_page_stride,
    scale_offset,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row against every SPLITS-th tile of BLOCK slots of its request's pages."""
    row = tl.program_id(0)
    head = tl.arange(0, HEADS_PADDED)
    feature = tl.arange(0, DIM_PADDED)
    position = tl.load(positions + row)
    first = tl.load(row_start + row)
    table = pages + tl.load(row_page_offset + row)
    query = tl.load(
        q + (row * HEADS + head)[None, :] * DIM + feature[:, None],
        mask=(head < HEADS)[None, :] & (feature < DIM)[:, None],
        other=0.0,
    ).to(COMPUTE)
    weight = tl.load(weights + row * HEADS + head, mask=head < HEADS, other=0.0).to(tl.float32)
    end = tl.where(position < 0, 0, first + position + 1)
    out_at = out + row.to(tl.int64) * out_stride - first
    for start in tl.range(tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        slot = start + tl.arange(0, BLOCK)
        inside = (slot >= first) & (slot < end)
        page = tl.load(table + slot // PAGE, mask=inside, other=0).to(tl.int64)
        offset = slot % PAGE
        key = tl.load(
            keys + (page * key_page_stride + offset * DIM)[:, None] + feature[None, :],
            mask=inside[:, None] & (feature < DIM)[None, :],
            other=0.0,
        ).to(COMPUTE)
        product = tl.dot(key, query, input_precision=PRECISION)
        score = tl.sum(tl.maximum(product, 0.0) * weight[None, :], axis=1)
        if HAS_SCALES:
            score = score * tl.load(scales + page * scale_page_stride + scale_offset + offset, mask=inside, other=0.0)
        tl.store(out_at + slot, score, mask=inside)


@triton.jit
def _write_kernel(
    keys,
    slots,
    codes,
    scales,
    rows,
    page_tokens,
    key_page_stride,
    scale_page_stride,
    scale_offset,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feature = tl.arange(0, DIM)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    kept = slot >= 0
    key = tl.load(keys + row.to(tl.int64)[:, None] * DIM + feature[None, :], mask=kept[:, None], other=0.0)
    key = key.to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(key), axis=1), LARGEST)
    if POWER_OF_TWO:
        # Round the exponent up: adding a full mantissa carries unless the mantissa is zero.
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(scale == 0.0, 1.0, scale)
    code = tl.div_rn(key, tl.broadcast_to(scale[:, None], (ROWS, DIM)))
    code = tl.minimum(tl.maximum(code, -LARGEST), LARGEST).to(codes.dtype.element_ty)
    page = slot // page_tokens
    offset = slot % page_tokens
    tl.store(codes + (page * key_page_stride + offset * DIM)[:, None] + feature[None, :], code, mask=kept[:, None])
    tl.store(scales + page * scale_page_stride + scale_offset + offset, scale, mask=kept)


def _compute_type(q: torch.Tensor, keys: torch.Tensor) -> tuple[object, str]:
    """Element type of the product, and its precision: FP8 when both are, else the wider of the two.

    fp32 products run as three of TF32, which keeps about fp32's precision on the tensor cores.
    """
    if q.dtype == FP8 and keys.dtype == FP8:
        return tl.float8e4nv, "tf32"
    kinds = {q.dtype, keys.dtype} - {FP8}
    if kinds == {torch.bfloat16}:
        return tl.bfloat16, "tf32"
    return (tl.float16, "tf32") if kinds == {torch.float16} else (tl.float32, "tf32x3")


def index_scores_dense(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    block: int | None = None,
    pairs: int = 256,
    warps: int = 4,
    stages: int = 3,
) -> torch.Tensor:
    """Scores (T, S) fp32 of q (T, H, D), weights (T, H), keys (S, D); see `profiler.ops.indexer.index_scores`.

    With positions (T,), keys that a row does not see may be left unwritten. block (keys per tile), pairs (query-head
    columns per program), warps and stages are for tests and benchmarks.
    """
    rows, heads, dim = q.shape
    count = keys.shape[0]
    out = torch.empty(rows, count, dtype=torch.float32, device=q.device)
    if rows == 0 or count == 0:
        return out
    compute, precision = _compute_type(q, keys)
    if compute == tl.float32:
        pairs, block, stages = min(pairs, 64), block or 32, 1
    padded = max(8, triton.next_power_of_2(heads))
    tile_rows = max(1, min(pairs // padded, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, tile_rows)
    block = block or (64 if warps == 4 else 128)
    splits = max(1, min(triton.cdiv(count, 8 * block), triton.cdiv(_TARGET_PROGRAMS, tiles)))
    split_tokens = triton.cdiv(triton.cdiv(count, splits), block) * block
    _scores_kernel[(triton.cdiv(count, split_tokens), tiles)](
        q.contiguous(),
        weights.contiguous(),
        keys.contiguous(),
        keys if key_scales is None else key_scales.contiguous(),
        q if positions is None else positions,
        out,
        rows,
        count,
        split_tokens,
        out.stride(0),
        HEADS=heads,
        HEADS_PADDED=padded,
        DIM=dim,
        DIM_PADDED=max(32, triton.next_power_of_2(dim)),
        ROWS=tile_rows,
        BLOCK=block,
        HAS_SCALES=key_scales is not None,
        CAUSAL=positions is not None,
        COMPUTE=compute,
        PRECISION=precision,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def index_scores_paged(
    q: torch.Tensor,
    weights: torch.Tensor,
    buffer: torch.Tensor,
    page_tokens: int,
    pages: torch.Tensor,
    row_page_offset: torch.Tensor,
    row_start: torch.Tensor,
    positions: torch.Tensor,
    width: int,
    *,
    block: int = 128,
    warps: int = 4,
    stages: int = 4,
) -> torch.Tensor:
    """Scores (T, width) fp32 of each row over its request's pages; see `PagedIndexKeyStore.scores`.

    buffer is uint8 (pages, page_tokens x 132) for FP8 keys or (pages, page_tokens, D) bf16. Columns past a row's
    position are left unwritten.
    """
    rows, heads, dim = q.shape
    out = torch.empty(rows, width, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out
    packed = buffer.dtype == torch.uint8
    keys = buffer.view(FP8) if packed else buffer
    scales = buffer.view(torch.float32) if packed else buffer
    compute, precision = _compute_type(q, keys)
    if compute == tl.float32:
        block, stages = min(block, 64), 1
    tiles = triton.cdiv(width, block)
    splits = max(1, min(tiles, triton.cdiv(_TARGET_PROGRAMS, rows)))
    _paged_scores_kernel[(rows, splits)](
        q.contiguous(),
        weights.contiguous(),
        keys,
        scales,
        pages,
        row_page_offset,
        row_start,
        positions,
        out,
        out.stride(0),
        keys.stride(0),
        scales.stride(0),
        page_tokens * INDEX_DIM // 4,
        HEADS=heads,
        HEADS_PADDED=max(8, triton.next_power_of_2(heads)),
        DIM=dim,
        DIM_PADDED=max(32, triton.next_power_of_2(dim)),
        PAGE=page_tokens,
        BLOCK=block,
        HAS_SCALES=packed,
        COMPUTE=compute,
        PRECISION=precision,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def write_index_pages(
    keys: torch.Tensor, slots: torch.Tensor, buffer: torch.Tensor, page_tokens: int, power_of_two: bool
) -> None:
    """Quantise keys (T, 128) and store them at cache slots (T,) int64 of index pages, uint8 (pages, page_tokens x 132).

    Rows with slot -1 are dropped.
    """
    rows = keys.shape[0]
    if rows == 0:
        return
    if buffer.shape[1] != page_tokens * INDEX_ROW_BYTES:
        raise ValueError(f"buffer: pages of {page_tokens} tokens do not fit {tuple(buffer.shape)}")
    codes, scales = buffer.view(FP8), buffer.view(torch.float32)
    tile_rows = 4
    _write_kernel[(triton.cdiv(rows, tile_rows),)](
        keys.contiguous(),
        slots,
        codes,
        scales,
        rows,
        page_tokens,
        codes.stride(0),
        scales.stride(0),
        page_tokens * INDEX_DIM // 4,
        DIM=INDEX_DIM,
        ROWS=tile_rows,
        POWER_OF_TWO=power_of_two,
        LARGEST=FP8_MAX,
        num_warps=4,
    )
