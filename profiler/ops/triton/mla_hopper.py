# mypy: ignore-errors
# Kernels are a language of their own: Gluon's parameters and decorators carry no Python types.
"""Sparse MLA over bf16 rows of 576 features for Hopper, with the pipeline written out in Gluon.

A program of two warpgroups takes one query, 64 heads and one split of the picks, 64 picks at a time. Each warpgroup
computes half of the logits' columns and half of the output's; Triton's own pipeliner would compute the logits in both.
Two buffers hold the picked rows: the copies of the next tile start with a tile's first product and have the whole turn
to arrive, where Triton's pipeliner would start them after the softmax. Per tile of 64 picks the tensor cores need
1,152 + 1,024 cycles; the logits' left operand in shared memory makes the first part about 1,730.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from profiler.ops.triton.merge import LOG2E, merge_parts, split_count

HEADS = 64
PICKS = 64
K_DIM = 576
V_DIM = 512

_LOWEST = gl.constexpr(-1.0e30)
# 8 lanes copy 128 consecutive bytes of a row, so that a thread serves two rows of a tile and keeps two pointers.
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))


@gluon.jit
def _copy_tile(rows, index, latent, tail):
    """Start copying the rows of one tile of picks, (64,) int32; rows of negative picks become zeros."""
    feature = gl.arange(0, 512, layout=gl.SliceLayout(0, _COPY))
    rest = gl.arange(0, 64, layout=gl.SliceLayout(0, _COPY))
    kept = (index >= 0)[:, None]
    row_at = rows + (gl.maximum(index, 0).to(gl.int64) * 576)[:, None]
    async_copy.async_copy_global_to_shared(latent, row_at + feature[None, :], mask=kept)
    async_copy.async_copy_global_to_shared(tail, row_at + 512 + rest[None, :], mask=kept)
    async_copy.commit_group()


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

    # The range of this split, and whether it has masked picks before unmasked ones.
    scan: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    at = gl.arange(0, PICKS_PADDED, layout=scan)
    every = gl.load(pick_at + at, mask=at < picks, other=-1)
    last = gl.max(gl.where(every >= 0, at + 1, 0), axis=0)
    holes = gl.sum((every >= 0).to(gl.int32), axis=0) < last
    share = gl.cdiv(gl.cdiv(last, SPLITS), 64) * 64
    low = gl.program_id(1) * share
    high = gl.minimum(low + share, last)

    q_latent = gl.allocate_shared_memory(gl.bfloat16, [64, 512], _SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], _SHARED)
    latents = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], _SHARED)
    tails = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], _SHARED)
    shared_weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], _SHARED)

    copy_head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, _COPY))
    copy_index = gl.where(copy_head < heads, query * heads + copy_head, -1)
    _copy_tile(q, copy_index, q_latent, q_rope)

    step = gl.arange(0, 64, layout=gl.SliceLayout(1, _COPY))
    index = gl.load(pick_at + low + step, mask=low + step < high, other=-1)
    _copy_tile(rows, index, latents.index(0), tails.index(0))
    index = gl.load(pick_at + low + 64 + step, mask=low + 64 + step < high, other=-1)

    column = gl.arange(0, 64, layout=gl.SliceLayout(0, _LOGITS))
    top = gl.full([64], _LOWEST, gl.float32, layout=gl.SliceLayout(1, _LOGITS))
    lanes = gl.zeros([64, 64], gl.float32, layout=_LOGITS)
    nothing = gl.zeros([64, 64], gl.float32, layout=_LOGITS)
    output = gl.zeros([64, 512], gl.float32, layout=_OUTPUT)
    buffer = 0
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    for start in range(low, high, 64):
        latent = latents.index(buffer)
        tail = tails.index(buffer)
        buffer = 1 - buffer
        logits = warpgroup_mma(q_rope, tail.permute((1, 0)), nothing, use_acc=False, is_async=True)
        logits = warpgroup_mma(q_latent, latent.permute((1, 0)), logits, is_async=True)
        _copy_tile(rows, index, latents.index(buffer), tails.index(buffer))
        ahead = start + 128 + step
        index = gl.load(pick_at + ahead, mask=ahead < high, other=-1)

        logits = warpgroup_mma_wait(0, deps=(logits,))
        kept = start + column < high
        if holes:
            kept = gl.load(pick_at + start + column, mask=kept, other=-1) >= 0
        logits = gl.where(kept[None, :], logits * scale_log2, float("-inf"))
        new_top = gl.maximum(top, gl.max(logits, axis=1))
        weights = gl.exp2(logits - new_top[:, None])
        shrink = gl.exp2(top - new_top)
        lanes = lanes * shrink[:, None] + weights
        top = new_top
        shared_weights.store(weights.to(gl.bfloat16))
        output = output * gl.convert_layout(shrink, gl.SliceLayout(1, _OUTPUT))[:, None]
        fence_async_shared()
        gl.thread_barrier()
        output = warpgroup_mma(shared_weights, latent, output, is_async=True)
        # No product is left running at the end of a turn: with one, the assembler waits after every instruction of it
        # (C7514, C7515).
        output = warpgroup_mma_wait(0, deps=(output,))
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()

    total = gl.sum(lanes, axis=1)
    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, _LOGITS))
    out_head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, _OUTPUT))
    value = gl.arange(0, 512, layout=gl.SliceLayout(0, _OUTPUT))
    if SPLITS == 1:
        if HAS_SINK:
            sink = gl.load(sinks + head, mask=head < heads, other=0.0).to(gl.float32) * scale_log2
            highest = gl.maximum(top, sink)
            shrink = gl.exp2(top - highest)
            factor = shrink / (total * shrink + gl.exp2(sink - highest))
        else:
            factor = 1.0 / gl.where(total == 0.0, 1.0, total)
        output = output * gl.convert_layout(factor, gl.SliceLayout(1, _OUTPUT))[:, None]
        out_row = query.to(gl.int64) * heads + out_head
        gl.store(
            out + out_row[:, None] * 512 + value[None, :], output.to(gl.bfloat16), mask=(out_head < heads)[:, None]
        )
    else:
        part = (query.to(gl.int64) * SPLITS + gl.program_id(1)) * heads
        gl.store(out + (part + out_head)[:, None] * 512 + value[None, :], output, mask=(out_head < heads)[:, None])
        gl.store(tops + part + head, top, mask=head < heads)
        gl.store(totals + part + head, total, mask=head < heads)


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

    q (T, H, 576) and rows (N, 576) bf16, indices (T, K) int32 with negative for none; see
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
    _attend_kernel[(queries * head_blocks, splits)](
        q,
        rows,
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
