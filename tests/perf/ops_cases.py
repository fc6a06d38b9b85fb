"""Shapes of sparse attention and of the selection, shared by bench_ops.py and tune_ops.py: inputs, a call, a check."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from profiler.ops.formats import SparseKVFormat, dequantize_mla_rows, quantize_mla_rows
from profiler.ops.indexer import select_topk_causal_naive
from profiler.ops.mla import attend_picked_naive

SAMPLE_ROWS = 8
TOPK = 2048
DEVICE = "cuda"


@dataclass(frozen=True)
class Setup:
    """One shape on the card. call takes launch options; check gives the relative error of a result against float64.

    flops and bytes: operations of unmasked pairs; every input and output once, rows counted once per pick in a decode
    (requests share none) and once per row of the cache in a prefill.
    """

    name: str
    shape: str
    flops: float
    bytes: float
    call: Callable[..., Any]
    check: Callable[[Any], float]
    tolerance: float
    library: Callable[[], Any] | None = None


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def sample_rows(count: int) -> torch.Tensor:
    return torch.linspace(0, count - 1, min(count, SAMPLE_ROWS), device=DEVICE).long()


def _causal_picks(queries: int, tokens: int) -> torch.Tensor:
    """Random picks of the last `queries` of `tokens` positions, ascending, -1 padded: position t picks among 0 .. t."""
    scores = torch.rand(queries, tokens, device=DEVICE)
    row = torch.arange(tokens - queries, tokens, device=DEVICE)
    scores.masked_fill_(torch.arange(tokens, device=DEVICE) > row[:, None], -1.0)
    best = scores.topk(min(TOPK, tokens), dim=-1)
    picks = torch.where(best.values < 0, tokens, best.indices).sort(-1).values
    return torch.where(picks == tokens, -1, picks).int()


def prefill(heads: int, queries: int = 8192, tokens: int = 8192) -> Setup:
    """The last `queries` of a prompt of `tokens`, bf16 rows."""
    from profiler.ops.triton.mla import attend_picked_kernel

    bf16 = SparseKVFormat.BF16
    q = torch.randn(queries, heads, 576, device=DEVICE).bfloat16()
    rows = torch.randn(tokens, 576, device=DEVICE).bfloat16()
    indices = _causal_picks(queries, tokens)
    sample = sample_rows(queries)
    expected = attend_picked_naive(q[sample].double(), rows.double(), indices[sample], 512, 0.06, bf16)
    return Setup(
        "sparse MLA prefill bf16",
        f"q {queries}, {heads} heads, top-k {TOPK}, causal",
        float((indices >= 0).sum()) * heads * (576 + 512) * 2,
        tokens * 1152 + queries * (heads * (1152 + 1024) + 4 * TOPK),
        lambda **launch: attend_picked_kernel(q, rows, indices, 512, 0.06, bf16, **launch),
        lambda out: relative_error(out[sample], expected),
        1e-2,
    )


def decode(packed: bool, heads: int, batch: int = 64, context: int = 8192) -> Setup:
    """One query per request, each with a cache of its own."""
    from profiler.ops.triton.mla import attend_picked_kernel

    latents = torch.randn(batch * context, 576, device=DEVICE).bfloat16()
    kv_format = SparseKVFormat.FP8_PACKED if packed else SparseKVFormat.BF16
    rows = quantize_mla_rows(latents) if packed else latents
    own = torch.rand(batch, context, device=DEVICE).topk(TOPK, dim=-1).indices.sort(-1).values
    indices = (own + torch.arange(batch, device=DEVICE)[:, None] * context).int()
    q = torch.randn(batch, heads, 576, device=DEVICE).bfloat16()
    sample = sample_rows(batch)
    used = indices[sample].long()
    # Only the sampled requests' rows in float64: packed rows stand for code x scale, which bf16 does not hold.
    picked = dequantize_mla_rows(rows[used.flatten()], torch.float64) if packed else rows[used.flatten()].double()
    own_rows = torch.arange(picked.shape[0], device=DEVICE).view(used.shape).int()
    expected = attend_picked_naive(q[sample].double(), picked, own_rows, 512, 0.06, SparseKVFormat.BF16)
    return Setup(
        f"sparse MLA decode {kv_format.value}",
        f"batch {batch}, {heads} heads, top-k {TOPK}",
        batch * TOPK * heads * (576 + 512) * 2.0,
        batch * (TOPK * ((656 if packed else 1152) + 4) + heads * (1152 + 1024)),
        lambda **launch: attend_picked_kernel(q, rows, indices, 512, 0.06, kv_format, **launch),
        lambda out: relative_error(out[sample], expected),
        1e-2,
    )


def _ascending(picks: torch.Tensor) -> torch.Tensor:
    return torch.where(picks < 0, torch.iinfo(torch.int32).max, picks).sort(-1).values


def selection(rows: int, width: int, causal: bool = False, ties: bool = False) -> Setup:
    """The TOPK best of scores that lie independently; with ties, half of them are 0."""
    from profiler.ops.triton.select import select_topk

    scores = torch.randn(rows, width, device=DEVICE)
    if ties:
        scores.relu_()
    last = torch.full((rows,), width - 1, device=DEVICE)
    if causal:
        last = torch.arange(width - rows, width, device=DEVICE)
    sample = sample_rows(rows)
    expected = _ascending(select_topk_causal_naive(scores[sample], last[sample], TOPK))
    masked = scores
    if causal:
        masked = scores.masked_fill(torch.arange(width, device=DEVICE) > last[:, None], float("-inf"))
    return Setup(
        f"top-{TOPK} selection",
        f"rows {rows}, width {width}{', causal' if causal else ''}{', half tied at zero' if ties else ''}",
        0.0,
        4.0 * (float((last + 1).sum()) + rows * TOPK),
        lambda **launch: select_topk(scores, last, TOPK, **launch),
        lambda out: float((_ascending(out[sample]) != expected).double().mean()),
        0.0,
        lambda: masked.topk(TOPK, dim=-1, sorted=False),
    )
