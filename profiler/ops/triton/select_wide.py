# mypy: ignore-errors
# Kernels are a language of their own: Triton's parameters and decorators carry no Python types.
"""Top-k selection of wide rows in Triton: a pivot from a sample, one pass that keeps what reaches it, an exact search.

A program walks over rows. An order statistic of a sample of the row is a pivot that, but for bad luck, between topk and
CAPACITY scores reach: one pass over the row writes those, in position order, to the program's scratch, and the exact
threshold is searched among them in registers. A pivot that misses is replaced by another order statistic, then by
bisection; when too many equal scores straddle the topk-th, bisection ends at them and a last pass emits the picks from
the row itself. A row is read once from memory, and its scratch stays in the L2 cache. Scores are compared as int32 keys
of the same order (-0 is 0).
"""

import torch
import triton
import triton.language as tl

from profiler.ops.triton.launches import SelectLaunch
from profiler.ops.triton.select import _ordered_key

# The lowest key of a score, and the key of an empty lane below it.
_FLOOR = tl.constexpr(-(2**31) + 1)
_EMPTY = tl.constexpr(-(2**31))
# Samples are runs of one memory sector.
_RUN = tl.constexpr(8)
# Order statistics of the sample to try before bisection.
_SAMPLED_TURNS = tl.constexpr(2)


@triton.jit
def _keys(scores, mask):
    return tl.maximum(_ordered_key(tl.load(scores, mask=mask, other=0.0)), _FLOOR)


@triton.jit
def _search(keys, wanted, valid):
    """The largest t with `wanted` keys at or above it, or the key that straddles them. keys (N,), 1 <= wanted <= valid.

    Returns t and the number of keys at or above t. Empty lanes hold _EMPTY.
    """
    low = tl.min(tl.where(keys == _EMPTY, 2147483647, keys), axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64) + 1
    at_low = valid
    at_high = valid * 0
    turn = 0
    while (at_low != wanted) & (high - low > 1):
        width = high - low
        # Two interpolations, then one bisection, which bounds the turns.
        share = (at_low - wanted).to(tl.float32) / (at_low - at_high).to(tl.float32)
        step = tl.where(turn % 3 < 2, (width.to(tl.float32) * share).to(tl.int64), width // 2)
        pivot = low + tl.minimum(tl.maximum(step, 1), width - 1)
        count = tl.sum((keys >= pivot.to(tl.int32)).to(tl.int32), axis=0)
        enough = count >= wanted
        low = tl.where(enough, pivot, low)
        at_low = tl.where(enough, count, at_low)
        high = tl.where(enough, high, pivot)
        at_high = tl.where(enough, at_high, count)
        turn += 1
    return low.to(tl.int32), at_low


@triton.jit
def _emit(source, places, from_row, length, threshold, ties, out, BLOCK: tl.constexpr):
    """Write, in order, the positions of the keys above the threshold and of the first `ties` equal to it.

    source: `length` scores; their positions are 0, 1, ... when from_row is 1, and those at `places` otherwise. Both
    running counts share one scan: keys above in the high half, equal ones in the low half (BLOCK < 2^15).
    """
    written = length * 0
    seen = length * 0
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = tl.where(at < length, _keys(source + at, at < length), _EMPTY)
        position = tl.load(places + at, mask=(at < length) & (from_row == 0), other=0)
        above = (keys > threshold).to(tl.int32)
        equal = (keys == threshold).to(tl.int32)
        packed = above * 65536 + equal
        before = tl.cumsum(packed, axis=0) - packed
        rank = seen + (before & 0xFFFF)
        chosen = (above > 0) | ((equal > 0) & (rank < ties))
        place = written + (before >> 16) + tl.minimum(rank, ties)
        tl.store(out + place, tl.where(from_row > 0, at, position), mask=chosen)
        counts = tl.sum(packed, axis=0)
        written += counts >> 16
        seen += counts & 0xFFFF


@triton.jit
def _sample(row, visible, LENGTH: tl.constexpr):
    """LENGTH keys of a row of more than LENGTH scores: runs spread evenly."""
    at = tl.arange(0, LENGTH)
    gap = (visible // _RUN).to(tl.int64)
    run = ((at // _RUN) * gap // (LENGTH // _RUN)).to(tl.int32)
    return _keys(row + run * _RUN + at % _RUN, at >= 0)


@triton.jit
def _keep(row, visible, pivot, kept, kept_at, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, STAGES: tl.constexpr):
    """Write the scores that reach the pivot and their positions, in order, as far as they fit. Returns their number."""
    count = visible * 0
    for start in tl.range(0, visible, BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        score = tl.load(row + at, mask=at < visible, other=0.0)
        reaching = ((tl.maximum(_ordered_key(score), _FLOOR) >= pivot) & (at < visible)).to(tl.int32)
        place = count + tl.cumsum(reaching, axis=0) - reaching
        fits = (reaching > 0) & (place < CAPACITY)
        tl.store(kept + place, score, mask=fits)
        tl.store(kept_at + place, at, mask=fits)
        count += tl.sum(reaching, axis=0)
    return count


@triton.jit
def _wide_kernel(
    scores,
    positions,
    out,
    scratch,
    scratch_at,
    rows,
    score_stride,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EMIT: tl.constexpr,
):
    """Rows pid, pid + grid, ...: the scratches hold CAPACITY scores and CAPACITY positions for each program.

    SAMPLE is at most CAPACITY; TARGET is the number of scores that should reach the first pivot.
    """
    kept = scratch + tl.program_id(0).to(tl.int64) * CAPACITY
    kept_at = scratch_at + tl.program_id(0).to(tl.int64) * CAPACITY
    slot = tl.arange(0, TOPK_PADDED)
    lane = tl.arange(0, CAPACITY)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        visible = tl.load(positions + index).to(tl.int32) + 1
        wide_index = tl.zeros((), tl.int64) + index
        row = scores + wide_index * score_stride
        row_out = out + wide_index * TOPK
        if visible <= TOPK:
            tl.store(row_out + slot, tl.where(slot < visible, slot, -1), mask=slot < TOPK)
        else:
            none = visible * 0
            source = row
            length = visible
            from_row = none + 1
            search = none + 1
            threshold = none
            ties = none
            if visible > CAPACITY:
                low = tl.full((), _FLOOR, tl.int64)
                high = low + 4294967295
                at_high = none
                # In float: the product of two counts may not fit 32 bits.
                rank = (TARGET * (SAMPLE / visible.to(tl.float32))).to(tl.int32) + 1
                turn = none
                while (from_row > 0) & (high - low > 1):
                    pivot = low + (high - low) // 2
                    if turn < _SAMPLED_TURNS:
                        sampled = _sample(row, visible, SAMPLE)
                        best, _ = _search(sampled, tl.minimum(rank, SAMPLE), none + SAMPLE)
                        pivot = tl.minimum(tl.maximum(best.to(tl.int64), low + 1), high - 1)
                    # The scratch may still be read for the row before, or written for the pivot before.
                    tl.debug_barrier()
                    count = _keep(row, visible, pivot.to(tl.int32), kept, kept_at, BLOCK, CAPACITY, STAGES)
                    tl.debug_barrier()
                    if count < TOPK:
                        high = pivot
                        at_high = count
                        rank = rank * 4
                    elif count > CAPACITY:
                        low = pivot
                        rank = tl.maximum(rank // 4, 1)
                    else:
                        source = kept
                        length = count
                        from_row = none
                    turn += 1
                # Where no pivot fits, fewer than TOPK keys are above low and more than CAPACITY at or above it.
                search = 1 - from_row
                threshold = low.to(tl.int32)
                ties = TOPK - at_high
            if search > 0:
                keys = tl.where(lane < length, _keys(source + lane, lane < length), _EMPTY)
                threshold, reached = _search(keys, TOPK, length)
                ties = TOPK - (reached - tl.sum((keys == threshold).to(tl.int32), axis=0))
            _emit(source, kept_at, from_row, length, threshold, ties, row_out, EMIT)


def capacity_tokens(topk: int) -> int:
    """Survivors that a program keeps and searches in registers."""
    return max(64, 2 * triton.next_power_of_2(topk))


def select_wide(
    scores: torch.Tensor, positions: torch.Tensor, topk: int, launch: SelectLaunch, *, target: int | None = None
) -> torch.Tensor:
    """Positions of the topk best scores of each row in ascending order, (T, topk) int32, -1 padded.

    scores (T, S) fp32 of unit column stride, positions (T,). target scores should reach the first pivot, by default
    midway between topk and the capacity.
    """
    rows = scores.shape[0]
    capacity = capacity_tokens(topk)
    picks = torch.empty(rows, topk, dtype=torch.int32, device=scores.device)
    grid = min(rows, launch.programs)
    scratch = torch.empty(grid, capacity, dtype=torch.float32, device=scores.device)
    scratch_at = torch.empty(grid, capacity, dtype=torch.int32, device=scores.device)
    # The interpreter knows no limit of registers.
    limit = {} if launch.registers is None or not scores.is_cuda else {"maxnreg": launch.registers}
    _wide_kernel[(grid,)](
        scores,
        positions,
        picks,
        scratch,
        scratch_at,
        rows,
        scores.stride(0),
        TOPK=topk,
        TOPK_PADDED=triton.next_power_of_2(topk),
        CAPACITY=capacity,
        SAMPLE=min(launch.sample, capacity),
        TARGET=target or (topk + capacity) // 2,
        BLOCK=launch.block,
        STAGES=launch.stages,
        EMIT=min(1024, launch.block),
        num_warps=launch.warps,
        **limit,
    )
    return picks
