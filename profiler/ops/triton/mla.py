# mypy: ignore-errors
# Kernels are a language of their own: Triton's parameters and decorators carry no Python types.
"""Sparse attention over picked cache rows in Triton: bf16 (or wider) and raw FP8 rows, and packed 656-byte rows.

One program takes one query, a block of heads and one split of the picks. Rows are gathered by asynchronous copies into
shared memory, where the same tile serves as keys (transposed) and as values. A row's sum of weights is kept per lane
and added up once at the end. Programs of one query's head blocks follow one another, so that the second finds the rows
in the L2 cache. A query whose picks end early stops there.
"""

import torch
import triton
import triton.language as tl

from profiler.ops.checks import FP8
from profiler.ops.formats import LATENT_DIM, MLA_DIM, MLA_ROW_BYTES, ROPE_DIM, SparseKVFormat
from profiler.ops.triton.launches import HopperLaunch, hopper_launch
from profiler.ops.triton.merge import LOG2E, finish, merge_parts, split_count

# Packed rows are widened once, instead of in every query, when that many picks fall on each row of the cache.
_WIDEN_REUSE = 4
_WIDEN_LIMIT_BYTES = 1 << 32
# Stands for minus infinity in a running maximum: differences with it stay finite.
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _split_range(indices, query, picks, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PICKS_PADDED: tl.constexpr):
    """First and one-past-last pick of this program: its share of the picks up to the last unmasked one."""
    at = tl.arange(0, PICKS_PADDED)
    every = tl.load(indices + query.to(tl.int64) * picks + at, mask=at < picks, other=-1)
    last = tl.max(tl.where(every >= 0, at + 1, 0), axis=0)
    share = tl.cdiv(tl.cdiv(last, SPLITS), BLOCK) * BLOCK
    low = tl.program_id(1) * share
    return low, tl.minimum(low + share, last)


@triton.jit
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
    row_stride,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PICKS_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows of K_DIM features whose first V_DIM are the value. SPLITS > 1 leaves parts for `merge_parts`."""
    head_blocks = tl.cdiv(heads, HEADS)
    query = tl.program_id(0) // head_blocks
    head = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)
    real = head < heads
    value = tl.arange(0, V_PADDED)
    value_in = value < V_DIM
    q_at = q + (query.to(tl.int64) * heads + head)[:, None] * K_DIM
    q_value = tl.load(q_at + value[None, :], mask=real[:, None] & value_in[None, :], other=0.0).to(COMPUTE)
    if REST_PADDED > 0:
        rest = tl.arange(0, REST_PADDED)
        rest_in = rest < K_DIM - V_DIM
        q_rest = tl.load(q_at + V_DIM + rest[None, :], mask=real[:, None] & rest_in[None, :], other=0.0).to(COMPUTE)
    low, high = _split_range(indices, query, picks, SPLITS, BLOCK, PICKS_PADDED)
    pick_at = indices + query.to(tl.int64) * picks
    step = tl.arange(0, BLOCK)
    top = tl.full((HEADS,), _LOWEST, tl.float32)
    lanes = tl.zeros((HEADS, BLOCK), tl.float32)
    acc = tl.zeros((HEADS, V_PADDED), tl.float32)
    for start in tl.range(low, high, BLOCK):
        index = tl.load(pick_at + start + step, mask=start + step < high, other=-1)
        kept = index >= 0
        row_at = rows + index.to(tl.int64)[:, None] * row_stride
        if V_PADDED == V_DIM:
            latent = tl.load(row_at + value[None, :], mask=kept[:, None], other=0.0).to(COMPUTE)
        else:
            latent = tl.load(row_at + value[None, :], mask=kept[:, None] & value_in[None, :], other=0.0).to(COMPUTE)
        logits = tl.dot(q_value, tl.trans(latent), input_precision=PRECISION)
        if REST_PADDED > 0:
            if REST_PADDED == K_DIM - V_DIM:
                tail = tl.load(row_at + V_DIM + rest[None, :], mask=kept[:, None], other=0.0).to(COMPUTE)
            else:
                tail = tl.load(row_at + V_DIM + rest[None, :], mask=kept[:, None] & rest_in[None, :], other=0.0).to(
                    COMPUTE
                )
            logits = tl.dot(q_rest, tl.trans(tail), logits, input_precision=PRECISION)
        logits = tl.where(kept[None, :], logits * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        lanes = lanes * shrink[:, None] + weights
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(COMPUTE), latent, acc, input_precision=PRECISION)
        top = new_top
    total = tl.sum(lanes, axis=1)
    mask = real[:, None] & value_in[None, :]
    if SPLITS == 1:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) if HAS_SINK else 0.0
        out_at = out + (query.to(tl.int64) * heads + head)[:, None] * V_DIM + value[None, :]
        finish(acc, total, top, sink, out_at, mask, HAS_SINK, scale_log2)
    else:
        part = (query.to(tl.int64) * SPLITS + tl.program_id(1)) * heads + head
        tl.store(out + part[:, None] * V_DIM + value[None, :], acc, mask=mask)
        tl.store(tops + part, top, mask=real)
        tl.store(totals + part, total, mask=real)


@triton.jit
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
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PICKS_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    ROW: tl.constexpr,
):
    """Packed rows of ROW bytes: codes, scales and ropes are views of one buffer as FP8, fp32 and bf16.

    The codes enter the products as they are (E4M3 is a subset of bf16): a group's scale multiplies the group's part of
    the logits, and the weights before they meet the group's values.
    """
    head_blocks = tl.cdiv(heads, HEADS)
    query = tl.program_id(0) // head_blocks
    head = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)
    real = head < heads
    part = tl.arange(0, 128)
    rope = tl.arange(0, 64)
    q_at = q + (query.to(tl.int64) * heads + head)[:, None] * 576
    q0 = tl.load(q_at + part[None, :], mask=real[:, None], other=0.0).to(tl.bfloat16)
    q1 = tl.load(q_at + 128 + part[None, :], mask=real[:, None], other=0.0).to(tl.bfloat16)
    q2 = tl.load(q_at + 256 + part[None, :], mask=real[:, None], other=0.0).to(tl.bfloat16)
    q3 = tl.load(q_at + 384 + part[None, :], mask=real[:, None], other=0.0).to(tl.bfloat16)
    q_rope = tl.load(q_at + 512 + rope[None, :], mask=real[:, None], other=0.0).to(tl.bfloat16)
    low, high = _split_range(indices, query, picks, SPLITS, BLOCK, PICKS_PADDED)
    pick_at = indices + query.to(tl.int64) * picks
    step = tl.arange(0, BLOCK)
    top = tl.full((HEADS,), _LOWEST, tl.float32)
    lanes = tl.zeros((HEADS, BLOCK), tl.float32)
    acc0 = tl.zeros((HEADS, 128), tl.float32)
    acc1 = tl.zeros((HEADS, 128), tl.float32)
    acc2 = tl.zeros((HEADS, 128), tl.float32)
    acc3 = tl.zeros((HEADS, 128), tl.float32)
    for start in tl.range(low, high, BLOCK):
        index = tl.load(pick_at + start + step, mask=start + step < high, other=-1)
        kept = index >= 0
        row = index.to(tl.int64)
        code_at = codes + row[:, None] * ROW + part[None, :]
        scale_at = scales + row * (ROW // 4) + 128
        rope_at = ropes + row[:, None] * (ROW // 2) + 264 + rope[None, :]
        k0 = tl.load(code_at, mask=kept[:, None], other=0.0).to(tl.bfloat16)
        k1 = tl.load(code_at + 128, mask=kept[:, None], other=0.0).to(tl.bfloat16)
        k2 = tl.load(code_at + 256, mask=kept[:, None], other=0.0).to(tl.bfloat16)
        k3 = tl.load(code_at + 384, mask=kept[:, None], other=0.0).to(tl.bfloat16)
        k_rope = tl.load(rope_at, mask=kept[:, None], other=0.0)
        s0 = tl.load(scale_at, mask=kept, other=0.0)
        s1 = tl.load(scale_at + 1, mask=kept, other=0.0)
        s2 = tl.load(scale_at + 2, mask=kept, other=0.0)
        s3 = tl.load(scale_at + 3, mask=kept, other=0.0)
        logits = tl.dot(q_rope, tl.trans(k_rope))
        logits += tl.dot(q0, tl.trans(k0)) * s0[None, :]
        logits += tl.dot(q1, tl.trans(k1)) * s1[None, :]
        logits += tl.dot(q2, tl.trans(k2)) * s2[None, :]
        logits += tl.dot(q3, tl.trans(k3)) * s3[None, :]
        logits = tl.where(kept[None, :], logits * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        lanes = lanes * shrink[:, None] + weights
        acc0 = tl.dot((weights * s0[None, :]).to(tl.bfloat16), k0, acc0 * shrink[:, None])
        acc1 = tl.dot((weights * s1[None, :]).to(tl.bfloat16), k1, acc1 * shrink[:, None])
        acc2 = tl.dot((weights * s2[None, :]).to(tl.bfloat16), k2, acc2 * shrink[:, None])
        acc3 = tl.dot((weights * s3[None, :]).to(tl.bfloat16), k3, acc3 * shrink[:, None])
        top = new_top
    total = tl.sum(lanes, axis=1)
    mask = real[:, None]
    if SPLITS == 1:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) if HAS_SINK else 0.0
        out_at = out + (query.to(tl.int64) * heads + head)[:, None] * 512 + part[None, :]
        finish(acc0, total, top, sink, out_at, mask, HAS_SINK, scale_log2)
        finish(acc1, total, top, sink, out_at + 128, mask, HAS_SINK, scale_log2)
        finish(acc2, total, top, sink, out_at + 256, mask, HAS_SINK, scale_log2)
        finish(acc3, total, top, sink, out_at + 384, mask, HAS_SINK, scale_log2)
    else:
        piece = (query.to(tl.int64) * SPLITS + tl.program_id(1)) * heads + head
        out_at = out + piece[:, None] * 512 + part[None, :]
        tl.store(out_at, acc0, mask=mask)
        tl.store(out_at + 128, acc1, mask=mask)
        tl.store(out_at + 256, acc2, mask=mask)
        tl.store(out_at + 384, acc3, mask=mask)
        tl.store(tops + piece, top, mask=real)
        tl.store(totals + piece, total, mask=real)


@triton.jit
def _widen_kernel(codes, scales, ropes, out, count, ROWS: tl.constexpr, ROW: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = (row < count)[:, None]
    latent = tl.arange(0, 512)
    rope = tl.arange(0, 64)
    code = tl.load(codes + row[:, None] * ROW + latent[None, :], mask=real, other=0.0).to(tl.float32)
    scale = tl.load(scales + row[:, None] * (ROW // 4) + 128 + latent[None, :] // 128, mask=real, other=0.0)
    tl.store(out + row[:, None] * 576 + latent[None, :], (code * scale).to(tl.bfloat16), mask=real)
    tail = tl.load(ropes + row[:, None] * (ROW // 2) + 264 + rope[None, :], mask=real, other=0.0)
    tl.store(out + row[:, None] * 576 + 512 + rope[None, :], tail, mask=real)


def hopper_fits(q: torch.Tensor, rows: torch.Tensor, v_dim: int, packed: bool) -> bool:
    """Whether the Hopper kernels take the call: bf16 or packed rows of 576 features, on SM90.

    Gluon's interface is that of Triton 3.6.
    """
    return (
        q.is_cuda
        and triton.__version__.startswith("3.6.")
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype == torch.bfloat16
        and (packed or rows.dtype == torch.bfloat16)
        and q.shape[2] == MLA_DIM
        and v_dim == LATENT_DIM
    )


def _attend_hopper(
    q: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    launch: HopperLaunch,
    splits: int | None,
) -> torch.Tensor:
    if launch.kernel == "turns":
        from profiler.ops.triton.mla_hopper import attend_picked_hopper

        return attend_picked_hopper(q, rows, indices, scale, sink, splits=splits)
    from profiler.ops.triton.mla_roles import attend_picked_roles

    options = {"splits": splits, "ahead": launch.ahead, "held": launch.held, "registers": launch.registers}
    return attend_picked_roles(q, rows, indices, scale, sink, **options)


def widen_rows_kernel(rows: torch.Tensor) -> torch.Tensor:
    """bf16 latents (N, 576) of packed rows (N, 656) uint8."""
    count = rows.shape[0]
    out = torch.empty(count, MLA_DIM, dtype=torch.bfloat16, device=rows.device)
    if count:
        views = (rows.view(FP8), rows.view(torch.float32), rows.view(torch.bfloat16))
        _widen_kernel[(triton.cdiv(count, 4),)](*views, out, count, ROWS=4, ROW=MLA_ROW_BYTES, num_warps=4)
    return out


def attend_picked_kernel(
    q: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    v_dim: int,
    scale: float,
    kv_format: SparseKVFormat,
    sink: torch.Tensor | None = None,
    *,
    heads_per_program: int | None = None,
    block: int | None = None,
    splits: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
    hopper: HopperLaunch | None = None,
) -> torch.Tensor:
    """softmax(q . rows[indices] * scale) . rows[indices][:v_dim]; see `profiler.ops.mla.attend_picked`.

    The other arguments override the launch for tests and benchmarks; any of them but `splits` and `hopper` also keeps
    the call off the Hopper kernels.
    """
    queries, heads, k_dim = q.shape
    picks = indices.shape[1]
    out = torch.empty(queries, heads, v_dim, dtype=q.dtype, device=q.device)
    if queries == 0 or heads == 0:
        return out
    if picks == 0:
        return out.zero_()
    q, rows, indices = q.contiguous(), rows.contiguous(), indices.contiguous()
    packed = kv_format is SparseKVFormat.FP8_PACKED
    wide_bytes = 2 * MLA_DIM * rows.shape[0]
    if packed and (
        v_dim != LATENT_DIM or (queries * picks >= _WIDEN_REUSE * rows.shape[0] and wide_bytes <= _WIDEN_LIMIT_BYTES)
    ):
        rows, packed = widen_rows_kernel(rows), False
    if not (heads_per_program or block or warps or stages) and hopper_fits(q, rows, v_dim, packed):
        hopper = hopper or hopper_launch(queries, heads, packed)
        if hopper is not None:
            return _attend_hopper(q, rows, indices, scale, sink, hopper, splits or hopper.splits)
    tile_heads = heads_per_program or max(16, min(64, triton.next_power_of_2(heads)))
    head_blocks = triton.cdiv(heads, tile_heads)
    exact = torch.float32 in (q.dtype, rows.dtype) or torch.float64 in (q.dtype, rows.dtype)
    wide_head = tile_heads >= 64
    block = block or (32 if exact or packed else 64)
    if splits is None:
        # Two of the smaller programs fit a multiprocessor.
        splits = split_count(queries * head_blocks, picks, block, 1 if wide_head else 2)
    launch = {"num_warps": warps or (8 if wide_head else 4), "num_stages": stages or (3 if packed else 2)}
    parts, tops, totals = out, out, out
    if splits > 1:
        parts = torch.empty(queries, splits, heads, v_dim, dtype=torch.float32, device=q.device)
        tops = torch.empty(queries, splits, heads, dtype=torch.float32, device=q.device)
        totals = torch.empty_like(tops)
    sinks = q if sink is None else sink.contiguous()
    scale_log2 = scale * LOG2E
    grid = (head_blocks * queries, splits)
    common = {
        "HEADS": tile_heads,
        "BLOCK": block,
        "PICKS_PADDED": triton.next_power_of_2(picks),
        "SPLITS": splits,
        "HAS_SINK": sink is not None,
    }
    if packed:
        views = (rows.view(FP8), rows.view(torch.float32), rows.view(torch.bfloat16))
        _attend_packed_kernel[grid](
            q,
            *views,
            indices,
            sinks,
            parts,
            tops,
            totals,
            scale_log2,
            heads,
            picks,
            ROW=MLA_ROW_BYTES,
            **common,
            **launch,
        )
    else:
        half = torch.float16 in (q.dtype, rows.dtype) and torch.bfloat16 not in (q.dtype, rows.dtype)
        _attend_kernel[grid](
            q,
            rows,
            indices,
            sinks,
            parts,
            tops,
            totals,
            scale_log2,
            heads,
            picks,
            rows.stride(0),
            K_DIM=k_dim,
            V_DIM=v_dim,
            V_PADDED=max(16, triton.next_power_of_2(v_dim)),
            REST_PADDED=0 if k_dim == v_dim else max(16, triton.next_power_of_2(k_dim - v_dim)),
            COMPUTE=tl.float32 if exact else tl.float16 if half else tl.bfloat16,
            PRECISION="tf32x3" if exact else "tf32",
            **common,
            **launch,
        )
    if splits > 1:
        merge_parts(parts, tops, totals, out, scale, sink)
    return out


assert LATENT_DIM == 512 and ROPE_DIM == 64 and MLA_ROW_BYTES == 656, "the packed kernels spell these numbers out"
