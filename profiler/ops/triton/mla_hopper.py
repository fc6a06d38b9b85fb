# mypy: ignore-errors
# Kernels are a language of their own: Gluon's parameters and decorators carry no Python types.
"""Sparse MLA over rows of 576 features for Hopper, with the pipeline written out in Gluon.

A program of two warpgroups takes one query, 64 heads and one split of the picks, 64 picks at a time. Each warpgroup
computes half of the logits' columns and half of the output's; Triton's own pipeliner would compute the logits in both.
The copies of the next tile start with a tile's first product and have the whole turn to arrive; Triton's pipeliner
would start them after the softmax. bf16 rows have two buffers, which the products read as they are; packed rows arrive
in one buffer of codes and are widened into one bf16 tile at the start of a turn. Per tile of 64 picks the tensor cores
need 1,152 + 1,024 cycles; the logits' left operand in shared memory makes the first part about 1,730.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from profiler.ops.checks import FP8
from profiler.ops.triton.merge import LOG2E, merge_parts, split_count

HEADS = 64
PICKS = 64
V_DIM = 512

_LOWEST = gl.constexpr(-1.0e30)
# 8 lanes copy 128 consecutive bytes of a row, so that a thread serves two rows of a tile and keeps two pointers.
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_CODES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_SHARED_CODES = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0]))
_LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
_SCAN = gl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))


@gluon.jit
def _pick_range(pick_at, picks, PICKS_PADDED: gl.constexpr, SPLITS: gl.constexpr):
    """First and one-past-last pick of this split, and whether masked picks come before unmasked ones."""
    at = gl.arange(0, PICKS_PADDED, layout=_SCAN)
    every = gl.load(pick_at + at, mask=at < picks, other=-1)
    last = gl.max(gl.where(every >= 0, at + 1, 0), axis=0)
    holes = gl.sum((every >= 0).to(gl.int32), axis=0) < last
    share = gl.cdiv(gl.cdiv(last, SPLITS), 64) * 64
    low = gl.program_id(1) * share
    return low, gl.minimum(low + share, last), holes


@gluon.jit
def _copy_rows(rows, index, latent, tail):
    """Start copying 64 bf16 rows of 576 features; rows of negative indices become zeros."""
    feature = gl.arange(0, 512, layout=gl.SliceLayout(0, _COPY))
    rest = gl.arange(0, 64, layout=gl.SliceLayout(0, _COPY))
    kept = (index >= 0)[:, None]
    row_at = rows + (gl.maximum(index, 0).to(gl.int64) * 576)[:, None]
    async_copy.async_copy_global_to_shared(latent, row_at + feature[None, :], mask=kept)
    async_copy.async_copy_global_to_shared(tail, row_at + 512 + rest[None, :], mask=kept)
    async_copy.commit_group()


@gluon.jit
def _copy_packed(codes, scales, ropes, index, raw, tail):
    """Start copying 64 packed rows: the codes, the rotary features, and the four scales into registers."""
    feature = gl.arange(0, 512, layout=gl.SliceLayout(0, _CODES))
    rest = gl.arange(0, 64, layout=gl.SliceLayout(0, _COPY))
    row = gl.maximum(index, 0).to(gl.int64)
    code_row = gl.convert_layout(row, gl.SliceLayout(1, _CODES))
    kept = gl.convert_layout(index, gl.SliceLayout(1, _CODES)) >= 0
    async_copy.async_copy_global_to_shared(
        raw, codes + (code_row * 656)[:, None] + feature[None, :], mask=kept[:, None]
    )
    async_copy.async_copy_global_to_shared(
        tail, ropes + (row * 328 + 264)[:, None] + rest[None, :], mask=(index >= 0)[:, None]
    )
    async_copy.commit_group()
    scale_at = scales + code_row * 164 + 128
    s0 = gl.load(scale_at, mask=kept, other=0.0)
    s1 = gl.load(scale_at + 1, mask=kept, other=0.0)
    s2 = gl.load(scale_at + 2, mask=kept, other=0.0)
    s3 = gl.load(scale_at + 3, mask=kept, other=0.0)
    return s0, s1, s2, s3


@gluon.jit
def _widen(raw, latent, scale, GROUP: gl.constexpr):
    code = raw.slice(128 * GROUP, 128, dim=1).load(_CODES).to(gl.float32)
    latent.slice(128 * GROUP, 128, dim=1).store((code * scale[:, None]).to(gl.bfloat16))


@gluon.jit
def _logits(q_latent, q_rope, latent, tail):
    """Start the products of the queries with one tile of rows."""
    nothing = gl.zeros([64, 64], gl.float32, layout=_LOGITS)
    logits = warpgroup_mma(q_rope, tail.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return warpgroup_mma(q_latent, latent.permute((1, 0)), logits, is_async=True)


@gluon.jit
def _weigh(logits, output, top, lanes, pick_at, start, high, holes, scale_log2, shared_weights):
    """One softmax step: the tile's weights into shared memory, the output rescaled to the new maximum."""
    column = start + gl.arange(0, 64, layout=gl.SliceLayout(0, _LOGITS))
    kept = column < high
    if holes:
        kept = gl.load(pick_at + column, mask=kept, other=-1) >= 0
    logits = gl.where(kept[None, :], logits * scale_log2, float("-inf"))
    new_top = gl.maximum(top, gl.max(logits, axis=1))
    weights = gl.exp2(logits - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    shared_weights.store(weights.to(gl.bfloat16))
    output = output * gl.convert_layout(shrink, gl.SliceLayout(1, _OUTPUT))[:, None]
    return output, new_top, lanes * shrink[:, None] + weights


@gluon.jit
def _store(
    output,
    top,
    lanes,
    sinks,
    out,
    tops,
    totals,
    query,
    first_head,
    heads,
    scale_log2,
    SPLITS: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    """The finished rows, or one split's part of them."""
    total = gl.sum(lanes, axis=1)
    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, _LOGITS))
    out_head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, _OUTPUT))
    value = gl.arange(0, 512, layout=gl.SliceLayout(0, _OUTPUT))
    mask = (out_head < heads)[:, None]
    if SPLITS == 1:
        if HAS_SINK:
            sink = gl.load(sinks + head, mask=head < heads, other=0.0).to(gl.float32) * scale_log2
            highest = gl.maximum(top, sink)
            shrink = gl.exp2(top - highest)
            factor = shrink / (total * shrink + gl.exp2(sink - highest))
        else:
            factor = 1.0 / gl.where(total == 0.0, 1.0, total)
        output = output * gl.convert_layout(factor, gl.SliceLayout(1, _OUTPUT))[:, None]
        row = query.to(gl.int64) * heads + out_head
        gl.store(out + row[:, None] * 512 + value[None, :], output.to(gl.bfloat16), mask=mask)
    else:
        part = (query.to(gl.int64) * SPLITS + gl.program_id(1)) * heads
        gl.store(out + (part + out_head)[:, None] * 512 + value[None, :], output, mask=mask)
        gl.store(tops + part + head, top, mask=head < heads)
        gl.store(totals + part + head, total, mask=head < heads)


@gluon.jit
def _attend_kernel(
    q,
    rows,
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
):
    head_blocks = gl.cdiv(heads, 64)
    query = gl.program_id(0) // head_blocks
    first_head = gl.program_id(0) % head_blocks * 64
    pick_at = indices + query.to(gl.int64) * picks
    low, high, holes = _pick_range(pick_at, picks, PICKS_PADDED, SPLITS)

    q_latent = gl.allocate_shared_memory(gl.bfloat16, [64, 512], _SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], _SHARED)
    latents = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], _SHARED)
    tails = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], _SHARED)
    shared_weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], _SHARED)

    step = gl.arange(0, 64, layout=gl.SliceLayout(1, _COPY))
    head = first_head + step
    _copy_rows(q, gl.where(head < heads, query * heads + head, -1), q_latent, q_rope)
    index = gl.load(pick_at + low + step, mask=low + step < high, other=-1)
    _copy_rows(rows, index, latents.index(0), tails.index(0))
    index = gl.load(pick_at + low + 64 + step, mask=low + 64 + step < high, other=-1)

    top = gl.full([64], _LOWEST, gl.float32, layout=gl.SliceLayout(1, _LOGITS))
    lanes = gl.zeros([64, 64], gl.float32, layout=_LOGITS)
    output = gl.zeros([64, 512], gl.float32, layout=_OUTPUT)
    buffer = 0
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    for start in range(low, high, 64):
        latent = latents.index(buffer)
        logits = _logits(q_latent, q_rope, latent, tails.index(buffer))
        buffer = 1 - buffer
        _copy_rows(rows, index, latents.index(buffer), tails.index(buffer))
        index = gl.load(pick_at + start + 128 + step, mask=start + 128 + step < high, other=-1)
        logits = warpgroup_mma_wait(0, deps=(logits,))
        output, top, lanes = _weigh(logits, output, top, lanes, pick_at, start, high, holes, scale_log2, shared_weights)
        fence_async_shared()
        gl.thread_barrier()
        output = warpgroup_mma(shared_weights, latent, output, is_async=True)
        # No product is left running at the end of a turn: with one, the assembler waits after every instruction of it
        # (C7514, C7515).
        output = warpgroup_mma_wait(0, deps=(output,))
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
    _store(output, top, lanes, sinks, out, tops, totals, query, first_head, heads, scale_log2, SPLITS, HAS_SINK)


@gluon.jit
def _attend_packed_kernel(
    q,
    codes,
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
):
    """Packed rows of 656 bytes: codes, scales and ropes are views of one buffer as FP8, fp32 and bf16."""
    head_blocks = gl.cdiv(heads, 64)
    query = gl.program_id(0) // head_blocks
    first_head = gl.program_id(0) % head_blocks * 64
    pick_at = indices + query.to(gl.int64) * picks
    low, high, holes = _pick_range(pick_at, picks, PICKS_PADDED, SPLITS)

    q_latent = gl.allocate_shared_memory(gl.bfloat16, [64, 512], _SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], _SHARED)
    latent = gl.allocate_shared_memory(gl.bfloat16, [64, 512], _SHARED)
    raw = gl.allocate_shared_memory(gl.float8e4nv, [64, 512], _SHARED_CODES)
    tails = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], _SHARED)
    shared_weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], _SHARED)

    step = gl.arange(0, 64, layout=gl.SliceLayout(1, _COPY))
    head = first_head + step
    _copy_rows(q, gl.where(head < heads, query * heads + head, -1), q_latent, q_rope)
    index = gl.load(pick_at + low + step, mask=low + step < high, other=-1)
    s0, s1, s2, s3 = _copy_packed(codes, scales, ropes, index, raw, tails.index(0))
    index = gl.load(pick_at + low + 64 + step, mask=low + 64 + step < high, other=-1)

    top = gl.full([64], _LOWEST, gl.float32, layout=gl.SliceLayout(1, _LOGITS))
    lanes = gl.zeros([64, 64], gl.float32, layout=_LOGITS)
    output = gl.zeros([64, 512], gl.float32, layout=_OUTPUT)
    buffer = 0
    for start in range(low, high, 64):
        async_copy.wait_group(0)
        gl.thread_barrier()
        _widen(raw, latent, s0, 0)
        _widen(raw, latent, s1, 1)
        _widen(raw, latent, s2, 2)
        _widen(raw, latent, s3, 3)
        fence_async_shared()
        gl.thread_barrier()
        logits = _logits(q_latent, q_rope, latent, tails.index(buffer))
        buffer = 1 - buffer
        s0, s1, s2, s3 = _copy_packed(codes, scales, ropes, index, raw, tails.index(buffer))
        index = gl.load(pick_at + start + 128 + step, mask=start + 128 + step < high, other=-1)
        logits = warpgroup_mma_wait(0, deps=(logits,))
        output, top, lanes = _weigh(logits, output, top, lanes, pick_at, start, high, holes, scale_log2, shared_weights)
        fence_async_shared()
        gl.thread_barrier()
        output = warpgroup_mma(shared_weights, latent, output, is_async=True)
        output = warpgroup_mma_wait(0, deps=(output,))
    async_copy.wait_group(0)
    _store(output, top, lanes, sinks, out, tops, totals, query, first_head, heads, scale_log2, SPLITS, HAS_SINK)


def attend_picked_hopper(
    q: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None = None,
    *,
    splits: int | None = None,
) -> torch.Tensor:
    """softmax(q . rows[indices] * scale) . rows[indices][:512], (T, H, 512) bf16.

    q (T, H, 576) bf16, rows (N, 576) bf16 or (N, 656) uint8 packed, indices (T, K) int32 with negative for none; see
    `profiler.ops.mla.attend_picked`. All contiguous.
    """
    queries, heads, _ = q.shape
    picks = indices.shape[1]
    out = torch.empty(queries, heads, V_DIM, dtype=torch.bfloat16, device=q.device)
    head_blocks = triton.cdiv(heads, HEADS)
    if splits is None:
        splits = split_count(queries * head_blocks, picks, PICKS)
    parts, tops, totals = out, out, out
    if splits > 1:
        parts = torch.empty(queries, splits, heads, V_DIM, dtype=torch.float32, device=q.device)
        tops = torch.empty(queries, splits, heads, dtype=torch.float32, device=q.device)
        totals = torch.empty_like(tops)
    packed = rows.dtype == torch.uint8
    kernel = _attend_packed_kernel if packed else _attend_kernel
    views = (rows.view(FP8), rows.view(torch.float32), rows.view(torch.bfloat16)) if packed else (rows,)
    kernel[(queries * head_blocks, splits)](
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
        num_warps=8,
    )
    if splits > 1:
        merge_parts(parts, tops, totals, out, scale, sink)
    return out
