# mypy: ignore-errors
# Kernels are a language of their own: Triton's parameters and decorators carry no Python types.
"""Top-k selection in Triton: the threshold of a row is searched in registers, then the picks are written in order.

fp32 scores map to int32 keys of the same order (-0 is 0). The k-th largest key is found by counting keys against a
pivot, by interpolation and bisection in turn; a search ends early when a pivot has exactly k keys at or above it. One
scan then gives each picked key its place: all keys above the threshold, and as many equal to it as are needed, earliest
first. A row longer than one block is split: each chunk keeps its own k best, in position order, and the survivors are
selected again. Equal keys stay in position order throughout, so ties go to the earlier position.
"""

import torch
import triton
import triton.language as tl

from profiler.ops.triton.launches import SelectLaunch, select_launch

BLOCK_TOKENS = 8192
# Both running counts of a scan share 32 bits, and a chunk must be twice as long as its survivors.
MOST_PICKS = 4096
_LOWEST = tl.constexpr(-(2**31))
_INIT_KEY = tl.constexpr(2**31 - 1)
_LOCAL_KEY = tl.constexpr(2**31 - 2)


@triton.jit
def _ordered_key(score):
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _threshold(keys, wanted, valid):
    """Per row, a t with wanted keys at or above it, or the smallest such t when ties straddle it. keys (R, N) int32."""
    top = tl.max(keys, axis=1).to(tl.int64)
    some = valid > wanted
    # A row that keeps every key needs no search: each valid key is above the lowest.
    low = tl.where(some, tl.min(tl.where(keys == _LOWEST, _INIT_KEY, keys), axis=1).to(tl.int64), _LOWEST + 1)
    high = tl.where(some, top + 1, low + 1)
    at_low = valid
    at_high = tl.zeros_like(valid)
    turn = 0
    while tl.max(high - low, axis=0) > 1:
        width = high - low
        share = (at_low - wanted).to(tl.float32) / tl.maximum(at_low - at_high, 1).to(tl.float32)
        step = tl.where(turn % 2 == 0, (width.to(tl.float32) * share).to(tl.int64), width // 2)
        pivot = tl.where(width > 1, low + tl.minimum(tl.maximum(step, 1), tl.maximum(width - 1, 1)), low)
        count = tl.sum((keys >= pivot.to(tl.int32)[:, None]).to(tl.int32), axis=1)
        enough = count >= wanted
        low = tl.where(enough, pivot, low)
        at_low = tl.where(enough, count, at_low)
        high = tl.where(enough, tl.where(count == wanted, pivot + 1, high), pivot)
        at_high = tl.where(enough, at_high, count)
        turn += 1
    return low.to(tl.int32)


@triton.jit
def _select_kernel(
    scores,
    sources,
    positions,
    out_scores,
    out_picks,
    rows,
    width,
    score_stride,
    out_stride,
    row_divisor,
    block_tokens,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    FINAL: tl.constexpr,
    INIT_BLOCKS: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
):
    """One chunk of BLOCK columns of ROWS rows. With sources, columns are survivors and carry their position."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk = tl.program_id(1)
    real = row < rows
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    # Floor division, so that position -1 sees nothing.
    position = tl.load(positions + row // row_divisor, mask=real, other=-1).to(tl.int32)
    visible = tl.where(position < 0, 0, position // block_tokens + 1)
    wide_row = row.to(tl.int64)
    out = wide_row * out_stride + chunk * TOPK
    slot = tl.arange(0, TOPK_PADDED)
    empty = tl.full((ROWS, TOPK_PADDED), -1, tl.int32)
    if not HAS_SOURCES and tl.max(visible, axis=0) <= chunk * BLOCK:
        mask = real[:, None] & (slot < TOPK)[None, :]
        tl.store(out_picks + out[:, None] + slot[None, :], empty, mask=mask)
    else:
        at = wide_row[:, None] * score_stride + column[None, :]
        inside = real[:, None] & (column < width)[None, :]
        if HAS_SOURCES:
            source = tl.load(sources + at, mask=inside, other=-1)
            inside = source >= 0
        else:
            source = tl.broadcast_to(column[None, :], (ROWS, BLOCK))
            inside = inside & (column[None, :] < visible[:, None])
        score = tl.load(scores + at, mask=inside, other=0.0)
        keys = _ordered_key(score)
        if LOCAL_BLOCKS > 0:
            keys = tl.where(column[None, :] >= visible[:, None] - LOCAL_BLOCKS, _LOCAL_KEY, keys)
        if INIT_BLOCKS > 0:
            keys = tl.where(column[None, :] < INIT_BLOCKS, _INIT_KEY, keys)
        keys = tl.where(inside, keys, _LOWEST)
        valid = tl.sum(inside.to(tl.int32), axis=1)
        wanted = tl.minimum(valid, TOPK)
        threshold = _threshold(keys, wanted, valid)
        above = keys > threshold[:, None]
        equal = keys == threshold[:, None]
        ties = wanted - tl.sum(above.to(tl.int32), axis=1)
        # Both running counts in one scan: above in the high half, equal in the low half (BLOCK < 2^15).
        packed = above.to(tl.int32) * 65536 + equal.to(tl.int32)
        before = tl.cumsum(packed, axis=1) - packed
        equal_before = before & 0xFFFF
        chosen = inside & (above | (equal & (equal_before < ties[:, None])))
        place = (before >> 16) + tl.minimum(equal_before, ties[:, None])
        tl.store(out_picks + out[:, None] + place, source, mask=chosen)
        if not FINAL:
            tl.store(out_scores + out[:, None] + place, score, mask=chosen)
        mask = real[:, None] & (slot < TOPK)[None, :] & (slot[None, :] >= wanted[:, None])
        tl.store(out_picks + out[:, None] + slot[None, :], empty, mask=mask)


def _config(width: int, topk: int, rows: int, block: int | None) -> tuple[int, int, int]:
    """Columns and rows of one program, and its warps: about 32 keys per thread."""
    if block is None:
        block = min(max(triton.next_power_of_2(width), 16), max(BLOCK_TOKENS, 4 * triton.next_power_of_2(topk)))
    tile_rows = max(1, min(2048 // block, triton.next_power_of_2(rows)))
    warps = max(1, min(16, block * tile_rows // 1024))
    return block, tile_rows, warps


def _select(
    scores: torch.Tensor,
    positions: torch.Tensor,
    topk: int,
    row_divisor: int,
    block_tokens: int,
    init_blocks: int,
    local_blocks: int,
    block: int | None,
    warps: int | None,
) -> torch.Tensor:
    if topk > MOST_PICKS:
        raise ValueError(f"topk: {topk} exceeds the {MOST_PICKS} that the Triton selection keeps; use backend='naive'")
    rows, width = scores.shape
    picks = torch.empty(rows, topk, dtype=torch.int32, device=scores.device)
    if rows == 0 or width == 0:
        return picks.fill_(-1)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    sources = None
    while True:
        columns, tile_rows, best_warps = _config(width, topk, rows, block)
        chunks = triton.cdiv(width, columns)
        final = chunks == 1
        if not final and columns < 2 * topk:
            raise ValueError(f"block: chunks of {columns} columns do not shrink to topk {topk}")
        kept = None
        if not final:
            picks = torch.empty(rows, chunks * topk, dtype=torch.int32, device=scores.device)
            kept = torch.empty(rows, chunks * topk, dtype=torch.float32, device=scores.device)
        else:
            picks = torch.empty(rows, topk, dtype=torch.int32, device=scores.device)
        _select_kernel[(triton.cdiv(rows, tile_rows), chunks)](
            scores,
            scores if sources is None else sources,
            positions,
            picks if kept is None else kept,
            picks,
            rows,
            width,
            scores.stride(0),
            picks.stride(0),
            row_divisor,
            block_tokens,
            TOPK=topk,
            TOPK_PADDED=triton.next_power_of_2(topk),
            ROWS=tile_rows,
            BLOCK=columns,
            HAS_SOURCES=sources is not None,
            FINAL=final,
            # Survivors of a first round keep their scores only, so forced columns need a single round.
            INIT_BLOCKS=init_blocks,
            LOCAL_BLOCKS=local_blocks,
            num_warps=best_warps if warps is None else warps,
        )
        if final:
            return picks
        assert kept is not None
        scores, sources, width = kept, picks, chunks * topk


def select_topk(
    scores: torch.Tensor,
    positions: torch.Tensor,
    topk: int,
    *,
    block: int | None = None,
    warps: int | None = None,
    wide: SelectLaunch | None = None,
) -> torch.Tensor:
    """Positions of the topk best scores of each row in ascending order, (T, topk) int32, -1 padded.

    scores (T, S) fp32, positions (T,). `block` and `warps`, or `wide`, override the launch for tests and benchmarks.
    """
    rows, width = scores.shape
    if wide is None and block is None and warps is None and topk <= MOST_PICKS:
        wide = select_launch(rows, width)
    if wide is not None and rows and width:
        from profiler.ops.triton.select_wide import select_wide

        return select_wide(scores if scores.stride(1) == 1 else scores.contiguous(), positions, topk, wide)
    return _select(scores, positions, topk, 1, 1, 0, 0, block, warps)


def select_blocks(
    scores: torch.Tensor,
    positions: torch.Tensor,
    topk: int,
    block_tokens: int,
    init_blocks: int,
    local_blocks: int,
) -> torch.Tensor:
    """The topk best visible blocks of each row and group in ascending order, (T, G, topk) int32, -1 padded.

    scores (T, G, NB) fp32; see `profiler.ops.msa.msa_select`. NB is at most BLOCK_TOKENS (a million tokens).
    """
    rows, groups, count = scores.shape
    if count > BLOCK_TOKENS:
        raise ValueError(f"scores: {count} blocks exceed the {BLOCK_TOKENS} that one round selects from")
    flat = scores.reshape(rows * groups, count)
    return _select(flat, positions, topk, groups, block_tokens, init_blocks, local_blocks, None, None).view(
        rows, groups, topk
    )
