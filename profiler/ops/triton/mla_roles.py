# mypy: ignore-errors
# Kernels are a language of their own: Gluon's parameters and decorators carry no Python types.
"""Sparse MLA over rows of 576 features for Hopper, with a role for every group of warps.

A program takes one query, 64 heads and one split of the picks, 32 picks a turn. Four warps gather the rows of coming
turns into a ring of four slots (and widen packed rows on the way), four warps compute the logits of a turn and its
weights while the next turn's products run, and eight warps keep the output, 256 values of every head each half. They
meet at barriers in shared memory only, so that copies, both products and the softmax of different turns overlap; in
`mla_hopper` they take turns. Per 64 picks the tensor cores need 1,152 + 1,024 cycles; reading both operands of the
logits from shared memory makes the first part about 1,730.

Barriers, one of each kind per slot or weights buffer: `full` rows have arrived, `ready` weights are written, `spent`
weights have been used, `empty` rows have been used. The n-th use of a buffer waits for phase n mod 2; the first wait
for an unused buffer passes at once, as it waits for the phase before.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from profiler.ops.checks import FP8
from profiler.ops.triton.merge import LOG2E, merge_parts, split_count

HEADS = 64
PICKS = 32
V_DIM = 512
# Registers of a scoring and of a copying thread, by packed rows (widened on the way) and query features held.
REGISTERS = {(False, 0): (104, 56), (False, 256): (152, 40), (True, 0): (96, 96)}

_LOWEST = gl.constexpr(-1.0e30)
_WIDE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_NARROW = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
# Two rows of codes that one access reads lie in different banks.
_CODES = gl.constexpr(gl.SwizzledSharedLayout(vec=64, per_phase=1, max_phase=2, order=[1, 0]))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
# 8 lanes copy 64 consecutive features of a row: 128 bytes of bf16, 64 of codes.
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_COPY_Q = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_HELD = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]), 2))
# Products of 128 columns: the assembler refuses one instruction of more accumulators than its 128 registers at entry.
_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16]))
_SCAN = gl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))


@gluon.jit
def _pick_range(pick_at, picks, PICKS_PADDED: gl.constexpr, SPLITS: gl.constexpr):
    """First and one-past-last pick of this split: its share of the picks up to the last unmasked one."""
    at = gl.arange(0, PICKS_PADDED, layout=_SCAN)
    every = gl.load(pick_at + at, mask=at < picks, other=-1)
    last = gl.max(gl.where(every >= 0, at + 1, 0), axis=0)
    share = gl.cdiv(gl.cdiv(last, SPLITS), 32) * 32
    low = gl.program_id(1) * share
    return low, gl.minimum(low + share, last)


@gluon.jit
def _copy_queries(q, query, first_head, heads, q_latent, q_rope):
    """Start copying the queries of 64 heads; heads past the last are zeros."""
    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, _COPY_Q))
    feature = gl.arange(0, 512, layout=gl.SliceLayout(0, _COPY_Q))
    rest = gl.arange(0, 64, layout=gl.SliceLayout(0, _COPY_Q))
    real = (head < heads)[:, None]
    q_at = q + ((query.to(gl.int64) * heads + gl.minimum(head, heads - 1)) * 576)[:, None]
    async_copy.async_copy_global_to_shared(q_latent, q_at + feature[None, :], mask=real)
    async_copy.async_copy_global_to_shared(q_rope, q_at + 512 + rest[None, :], mask=real)
    async_copy.commit_group()


@gluon.jit
def _gather(rows, pick_at, low, high, turns, latents, tails, full, empty, SLOTS: gl.constexpr):
    """The copying warps for bf16 rows; rows of negative indices become zeros."""
    step = gl.arange(0, 32, layout=gl.SliceLayout(1, _COPY))
    feature = gl.arange(0, 512, layout=gl.SliceLayout(0, _COPY))
    rest = gl.arange(0, 64, layout=gl.SliceLayout(0, _COPY))
    index = gl.load(pick_at + low + step, mask=low + step < high, other=-1)
    for turn in range(turns):
        slot = turn % SLOTS
        mbarrier.wait(empty.index(slot), (turn // SLOTS & 1) ^ 1)
        kept = (index >= 0)[:, None]
        row_at = rows + (gl.maximum(index, 0).to(gl.int64) * 576)[:, None]
        async_copy.async_copy_global_to_shared(latents.index(slot), row_at + feature[None, :], mask=kept)
        async_copy.async_copy_global_to_shared(tails.index(slot), row_at + 512 + rest[None, :], mask=kept)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        coming = low + (turn + 1) * 32 + step
        index = gl.load(pick_at + coming, mask=coming < high, other=-1)
    async_copy.wait_group(0)


@gluon.jit
def _start_codes(codes, index, raw):
    """Start copying a turn's codes; rows of negative indices become zeros. A thread reads back what it copied."""
    feature = gl.arange(0, 512, layout=gl.SliceLayout(0, _COPY))
    row = gl.maximum(index, 0).to(gl.int64)
    code_at = codes + (row * 656)[:, None] + feature[None, :]
    async_copy.async_copy_global_to_shared(raw, code_at, mask=(index >= 0)[:, None])
    async_copy.commit_group()


@gluon.jit
def _fetch(scales, ropes, index):
    """The four scales of a turn's rows and their rotary features, in registers."""
    rest = gl.arange(0, 64, layout=gl.SliceLayout(0, _COPY))
    row = gl.maximum(index, 0).to(gl.int64)
    kept = index >= 0
    scale_at = scales + row * 164 + 128
    s0 = gl.load(scale_at, mask=kept, other=0.0)
    s1 = gl.load(scale_at + 1, mask=kept, other=0.0)
    s2 = gl.load(scale_at + 2, mask=kept, other=0.0)
    s3 = gl.load(scale_at + 3, mask=kept, other=0.0)
    tail = gl.load(ropes + (row * 328 + 264)[:, None] + rest[None, :], mask=kept[:, None], other=0.0)
    return s0, s1, s2, s3, tail


@gluon.jit
def _widen(code, latent, scale, GROUP: gl.constexpr):
    wide = (code.to(gl.float32) * scale[:, None]).to(gl.bfloat16)
    latent.slice(128 * GROUP, 128, dim=1).store(wide)


@gluon.jit
def _gather_packed(
    codes, scales, ropes, pick_at, low, high, turns, raws, latents, tails, full, empty, SLOTS: gl.constexpr
):
    """The copying warps for packed rows: codes arrive two turns ahead and are widened into the ring."""
    step = gl.arange(0, 32, layout=gl.SliceLayout(1, _COPY))
    index = gl.load(pick_at + low + step, mask=low + step < high, other=-1)
    at = low + 32 + step
    index_1 = gl.load(pick_at + at, mask=at < high, other=-1)
    at = low + 64 + step
    index_2 = gl.load(pick_at + at, mask=at < high, other=-1)
    _start_codes(codes, index, raws.index(0))
    _start_codes(codes, index_1, raws.index(1))
    s0, s1, s2, s3, tail = _fetch(scales, ropes, index)
    for turn in range(turns):
        slot = turn % SLOTS
        raw = raws.index(turn % 2)
        t0, t1, t2, t3, next_tail = _fetch(scales, ropes, index_1)
        index_1 = index_2
        at = low + (turn + 3) * 32 + step
        index_2 = gl.load(pick_at + at, mask=at < high, other=-1)
        mbarrier.wait(empty.index(slot), (turn // SLOTS & 1) ^ 1)
        latent = latents.index(slot)
        tails.index(slot).store(tail)
        async_copy.wait_group(1)
        c0 = raw.slice(0, 128, dim=1).load(_COPY)
        c1 = raw.slice(128, 128, dim=1).load(_COPY)
        c2 = raw.slice(256, 128, dim=1).load(_COPY)
        c3 = raw.slice(384, 128, dim=1).load(_COPY)
        _widen(c0, latent, s0, 0)
        _widen(c1, latent, s1, 1)
        _widen(c2, latent, s2, 2)
        _widen(c3, latent, s3, 3)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(slot), count=1)
        _start_codes(codes, index_1, raw)
        s0, s1, s2, s3, tail = t0, t1, t2, t3, next_tail
    async_copy.wait_group(0)


@gluon.jit
def _start_logits(q_latent, q_rope, held, latents, tails, full, turn, SLOTS: gl.constexpr, HELD: gl.constexpr):
    """Wait for a turn's rows and start their products with the queries, whose first HELD features are in registers."""
    slot = turn % SLOTS
    mbarrier.wait(full.index(slot), turn // SLOTS & 1)
    fence_async_shared()
    latent = latents.index(slot)
    nothing = gl.zeros([64, 32], gl.float32, layout=_LOGITS)
    logits = warpgroup_mma(q_rope, tails.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    if HELD > 0:
        REST: gl.constexpr = 512 - HELD
        logits = warpgroup_mma(held, latent.slice(0, HELD, dim=1).permute((1, 0)), logits, is_async=True)
        rest = latent.slice(HELD, REST, dim=1).permute((1, 0))
        logits = warpgroup_mma(q_latent.slice(HELD, REST, dim=1), rest, logits, is_async=True)
    else:
        logits = warpgroup_mma(q_latent, latent.permute((1, 0)), logits, is_async=True)
    return logits


@gluon.jit
def _soften(logits, kept, top, lanes, turn, weights, shrinks, ready, spent, scale_log2):
    """One softmax step: the turn's weights and the factor of the output so far into shared memory."""
    logits = gl.where(kept[None, :], logits * scale_log2, float("-inf"))
    new_top = gl.maximum(top, gl.max(logits, axis=1))
    grown = gl.exp2(logits - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    lanes = lanes * shrink[:, None] + grown
    buffer = turn % 2
    mbarrier.wait(spent.index(buffer), (turn // 2 & 1) ^ 1)
    weights.index(buffer).store(grown.to(gl.bfloat16))
    shrinks.index(buffer).store(shrink)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ready.index(buffer), count=1)
    return new_top, lanes


@gluon.jit
def _score(
    pick_at,
    low,
    high,
    turns,
    scale_log2,
    q_latent,
    q_rope,
    latents,
    tails,
    weights,
    shrinks,
    ends,
    full,
    ready,
    spent,
    SLOTS: gl.constexpr,
    AHEAD: gl.constexpr,
    HELD: gl.constexpr,
):
    """The scoring warps. ends: row maxima and sums of weights.

    AHEAD starts the next turn's products before a turn's softmax: no idle tensor core, but rows are held longer. HELD
    query features, 0 or 256, stay in registers, which spares shared memory their reading for every turn.
    """
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, _LOGITS))
    top = gl.full([64], _LOWEST, gl.float32, layout=gl.SliceLayout(1, _LOGITS))
    lanes = gl.zeros([64, 32], gl.float32, layout=_LOGITS)
    held = top
    if HELD > 0:
        held = q_latent.slice(0, HELD, dim=1).load(_HELD)
    if AHEAD:
        if turns > 0:
            at = low + column
            kept = gl.load(pick_at + at, mask=at < high, other=-1) >= 0
            started = _start_logits(q_latent, q_rope, held, latents, tails, full, 0, SLOTS, HELD)
            logits = warpgroup_mma_wait(0, deps=(started,))
            for turn in range(turns - 1):
                at = low + (turn + 1) * 32 + column
                coming = gl.load(pick_at + at, mask=at < high, other=-1)
                started = _start_logits(q_latent, q_rope, held, latents, tails, full, turn + 1, SLOTS, HELD)
                top, lanes = _soften(logits, kept, top, lanes, turn, weights, shrinks, ready, spent, scale_log2)
                logits = warpgroup_mma_wait(0, deps=(started,))
                kept = coming >= 0
            top, lanes = _soften(logits, kept, top, lanes, turns - 1, weights, shrinks, ready, spent, scale_log2)
    else:
        for turn in range(turns):
            at = low + turn * 32 + column
            index = gl.load(pick_at + at, mask=at < high, other=-1)
            started = _start_logits(q_latent, q_rope, held, latents, tails, full, turn, SLOTS, HELD)
            logits = warpgroup_mma_wait(0, deps=(started,))
            top, lanes = _soften(logits, index >= 0, top, lanes, turn, weights, shrinks, ready, spent, scale_log2)
    ends.index(0).store(top)
    ends.index(1).store(gl.sum(lanes, axis=1))


@gluon.jit
def _weigh(turns, latents, weights, shrinks, ready, spent, empty, SLOTS: gl.constexpr):
    """The warps of the output: the sum of weighted rows in units of exp2 of the row maxima, (64, 512) fp32."""
    output = gl.zeros([64, 512], gl.float32, layout=_OUTPUT)
    for turn in range(turns):
        slot = turn % SLOTS
        buffer = turn % 2
        mbarrier.wait(ready.index(buffer), turn // 2 & 1)
        shrink = shrinks.index(buffer).load(gl.SliceLayout(1, _OUTPUT))
        fence_async_shared()
        output = output * shrink[:, None]
        output = warpgroup_mma(weights.index(buffer), latents.index(slot), output, is_async=True)
        output = warpgroup_mma_wait(0, deps=(output,))
        gl.thread_barrier()
        mbarrier.arrive(spent.index(buffer), count=1)
        mbarrier.arrive(empty.index(slot), count=1)
    return (output,)


@gluon.jit
def _attend_kernel(
    q,
    rows,
    scales,
    ropes,
    indices,
    sinks,
    out,
    tops,
    totals,
    scale_log2,
    heads,
    picks,
    PICKS_PADDED: gl.constexpr,
    SPLITS: gl.constexpr,
    HAS_SINK: gl.constexpr,
    PACKED: gl.constexpr,
    AHEAD: gl.constexpr,
    HELD: gl.constexpr,
    SCORE_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """With PACKED, rows, scales and ropes are views of one buffer as FP8, fp32 and bf16; otherwise rows are bf16."""
    head_blocks = gl.cdiv(heads, 64)
    query = gl.program_id(0) // head_blocks
    first_head = gl.program_id(0) % head_blocks * 64
    pick_at = indices + query.to(gl.int64) * picks

    # Slots of the ring; the codes of packed rows take the place of one.
    SLOTS: gl.constexpr = 3 if PACKED else 4
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [64, 512], _WIDE)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], _WIDE)
    latents = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 32, 512], _WIDE)
    tails = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 32, 64], _WIDE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 32], _NARROW)
    shrinks = gl.allocate_shared_memory(gl.float32, [2, 64], _FLAT)
    ends = gl.allocate_shared_memory(gl.float32, [2, 64], _FLAT)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    spent = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())

    _copy_queries(q, query, first_head, heads, q_latent, q_rope)
    # Every copying thread arrives for its own copies; after ordinary stores, one thread arrives for all.
    arrivals: gl.constexpr = 1 if PACKED else 128
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=arrivals)
        mbarrier.init(empty.index(slot), count=1)
    for buffer in gl.static_range(2):
        mbarrier.init(ready.index(buffer), count=1)
        mbarrier.init(spent.index(buffer), count=1)
    low, high = _pick_range(pick_at, picks, PICKS_PADDED, SPLITS)
    turns = gl.cdiv(gl.maximum(high - low, 0), 32)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()

    # The arguments stand here at length because a tuple in a variable would lose its constants.
    if PACKED:
        raws = gl.allocate_shared_memory(gl.float8e4nv, [2, 32, 512], _CODES)
        (output,) = gl.warp_specialize(
            [
                (_weigh, (turns, latents, weights, shrinks, ready, spent, empty, SLOTS)),
                (
                    _score,
                    (
                        pick_at,
                        low,
                        high,
                        turns,
                        scale_log2,
                        q_latent,
                        q_rope,
                        latents,
                        tails,
                        weights,
                        shrinks,
                        ends,
                        full,
                        ready,
                        spent,
                        SLOTS,
                        AHEAD,
                        HELD,
                    ),
                ),
                (
                    _gather_packed,
                    (rows, scales, ropes, pick_at, low, high, turns, raws, latents, tails, full, empty, SLOTS),
                ),
            ],
            [4, 4],
            [SCORE_REGISTERS, COPY_REGISTERS],
        )
    else:
        (output,) = gl.warp_specialize(
            [
                (_weigh, (turns, latents, weights, shrinks, ready, spent, empty, SLOTS)),
                (
                    _score,
                    (
                        pick_at,
                        low,
                        high,
                        turns,
                        scale_log2,
                        q_latent,
                        q_rope,
                        latents,
                        tails,
                        weights,
                        shrinks,
                        ends,
                        full,
                        ready,
                        spent,
                        SLOTS,
                        AHEAD,
                        HELD,
                    ),
                ),
                (_gather, (rows, pick_at, low, high, turns, latents, tails, full, empty, SLOTS)),
            ],
            [4, 4],
            [SCORE_REGISTERS, COPY_REGISTERS],
        )

    top = ends.index(0).load(gl.SliceLayout(1, _OUTPUT))
    total = ends.index(1).load(gl.SliceLayout(1, _OUTPUT))
    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, _OUTPUT))
    value = gl.arange(0, 512, layout=gl.SliceLayout(0, _OUTPUT))
    real = head < heads
    if SPLITS == 1:
        if HAS_SINK:
            sink = gl.load(sinks + head, mask=real, other=0.0).to(gl.float32) * scale_log2
            highest = gl.maximum(top, sink)
            shrink = gl.exp2(top - highest)
            factor = shrink / (total * shrink + gl.exp2(sink - highest))
        else:
            factor = 1.0 / gl.where(total == 0.0, 1.0, total)
        row = query.to(gl.int64) * heads + head
        output = output * factor[:, None]
        gl.store(out + row[:, None] * 512 + value[None, :], output.to(gl.bfloat16), mask=real[:, None])
    else:
        part = (query.to(gl.int64) * SPLITS + gl.program_id(1)) * heads + head
        gl.store(out + part[:, None] * 512 + value[None, :], output, mask=real[:, None])
        gl.store(tops + part, top, mask=real)
        gl.store(totals + part, total, mask=real)


def attend_picked_roles(
    q: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None = None,
    *,
    splits: int | None = None,
    ahead: bool = True,
    held: int = 0,
    registers: tuple[int, int] | None = None,
) -> torch.Tensor:
    """softmax(q . rows[indices] * scale) . rows[indices][:512], (T, H, 512) bf16.

    q (T, H, 576) bf16, rows (N, 576) bf16 or (N, 656) uint8 packed, indices (T, K) int32 with negative for none; see
    `profiler.ops.mla.attend_picked`. All contiguous. ahead, held: see `_score`; packed rows leave no registers to hold
    queries. registers: per thread of the scoring and of the copying warps, in steps of 8; the warps of the output share
    what is left of 65,536.
    """
    queries, heads, _ = q.shape
    picks = indices.shape[1]
    out = torch.empty(queries, heads, V_DIM, dtype=torch.bfloat16, device=q.device)
    head_blocks = triton.cdiv(heads, HEADS)
    if splits is None:
        splits = split_count(queries * head_blocks, picks, 2 * PICKS)
    parts, tops, totals = out, out, out
    if splits > 1:
        parts = torch.empty(queries, splits, heads, V_DIM, dtype=torch.float32, device=q.device)
        tops = torch.empty(queries, splits, heads, dtype=torch.float32, device=q.device)
        totals = torch.empty_like(tops)
    packed = rows.dtype == torch.uint8
    views = (rows.view(FP8), rows.view(torch.float32), rows.view(torch.bfloat16)) if packed else (rows, rows, rows)
    score_registers, copy_registers = registers or REGISTERS[packed, held]
    _attend_kernel[(queries * head_blocks, splits)](
        q,
        *views,
        indices,
        q if sink is None else sink.contiguous(),
        parts,
        tops,
        totals,
        scale * LOG2E,
        heads,
        picks,
        PICKS_PADDED=max(1024, triton.next_power_of_2(picks)),
        SPLITS=splits,
        HAS_SINK=sink is not None,
        PACKED=packed,
        AHEAD=ahead,
        HELD=held,
        SCORE_REGISTERS=score_registers,
        COPY_REGISTERS=copy_registers,
        num_warps=8,
    )
    if splits > 1:
        merge_parts(parts, tops, totals, out, scale, sink)
    return out
