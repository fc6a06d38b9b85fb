# mypy: ignore-errors
# Kernels are a language of their own: Triton's parameters and decorators carry no Python types.
"""Splitting the picks of a query over programs, and adding up their parts."""

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
_MULTIPROCESSORS = 132
# Stands for minus infinity in a running maximum: differences with it stay finite.
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def finish(acc, total, top, sink, out_at, mask, HAS_SINK: tl.constexpr, scale_log2):
    """Divide by the denominator, the sink's share included, and store."""
    if HAS_SINK:
        highest = tl.maximum(top, sink * scale_log2)
        shrink = tl.exp2(top - highest)
        share = shrink / (total * shrink + tl.exp2(sink * scale_log2 - highest))
    else:
        share = 1.0 / tl.where(total == 0.0, 1.0, total)
    tl.store(out_at, (acc * share[:, None]).to(out_at.dtype.element_ty), mask=mask)


@triton.jit
def _merge_kernel(
    parts,
    tops,
    totals,
    sinks,
    out,
    scale_log2,
    heads,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """Add the parts of one query and head: parts (T, SPLITS, H, V) and totals in units of exp2(tops)."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    value = tl.arange(0, V_PADDED)
    top = tl.full((1,), _LOWEST, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, V_PADDED), tl.float32)
    for split in range(SPLITS):
        piece = (query * SPLITS + split) * heads + head
        part_top = tl.load(tops + piece)
        new_top = tl.maximum(top, part_top)
        mine = tl.exp2(part_top - new_top)
        others = tl.exp2(top - new_top)
        part = tl.load(parts + piece * V_DIM + value, mask=value < V_DIM, other=0.0)
        total = total * others + tl.load(totals + piece) * mine
        acc = acc * others[:, None] + part[None, :] * mine[:, None]
        top = new_top
    sink = tl.load(sinks + head + tl.arange(0, 1)).to(tl.float32) if HAS_SINK else 0.0
    out_at = out + (query * heads + head) * V_DIM + value[None, :]
    finish(acc, total, top, sink, out_at, (value < V_DIM)[None, :], HAS_SINK, scale_log2)


def split_count(programs: int, picks: int, block: int, resident: int = 1) -> int:
    """A power of two of splits that brings a grid near `resident` programs per multiprocessor of an H200.

    A split keeps two tiles of `block` picks at least.
    """
    wanted = _MULTIPROCESSORS * resident // max(1, programs)
    most = max(1, picks // (2 * block))
    return 1 << max(0, min(wanted, most).bit_length() - 1)


def merge_parts(
    parts: torch.Tensor,
    tops: torch.Tensor,
    totals: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
) -> None:
    """Write out (T, H, V): parts (T, SPLITS, H, V) fp32 added up, over their denominators and the sink's share.

    tops and totals (T, SPLITS, H) fp32: a part is in units of exp2(tops), and so is its sum of weights, totals.
    """
    queries, splits, heads, v_dim = parts.shape
    _merge_kernel[(queries, heads)](
        parts,
        tops,
        totals,
        out if sink is None else sink.contiguous(),
        out,
        scale * LOG2E,
        heads,
        V_DIM=v_dim,
        V_PADDED=triton.next_power_of_2(v_dim),
        SPLITS=splits,
        HAS_SINK=sink is not None,
        num_warps=4,
    )
