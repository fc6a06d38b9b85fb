"""The token indexer of DeepSeek sparse attention: scores of every visible key, and the best of them.

The score of key s for row t is sum over heads h of weights[t, h] * relu(q[t, h] . keys[s]), in fp32. FP8 keys come with
one scale each, a factor of the whole score; the scale of an FP8 query is folded into the weight of its head.
"""

import torch

from profiler.ops.checks import (
    FLOATS,
    FP8,
    INTEGERS,
    Backend,
    check_positive,
    check_range,
    check_tensor,
    is_checked,
    use_triton,
)
from profiler.ops.formats import quantize_fp8

# Elements that a naive call holds per head-expanded piece, and that a piece of the score matrix holds on a GPU
# (the engine's own limit of 512 MiB of logits).
NAIVE_PIECE_ELEMENTS = 1 << 25
SCORE_PIECE_ELEMENTS = 1 << 27


def _check_indexer(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, key_scales: torch.Tensor | None) -> None:
    check_tensor("q", q, ("T", "H", "D"), (*FLOATS, FP8))
    rows, heads, width = q.shape
    check_tensor("weights", weights, (rows, heads), FLOATS, q.device)
    check_tensor("keys", keys, ("S", width), (*FLOATS, FP8), q.device)
    if key_scales is not None:
        check_tensor("key_scales", key_scales, (keys.shape[0],), (torch.float32,), q.device)


def quantize_queries(
    q: torch.Tensor, weights: torch.Tensor, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 queries (T, H, D) with one scale per head and row, and the weights (T, H) fp32 with it folded in."""
    check_tensor("q", q, ("T", "H", "D"), FLOATS)
    check_tensor("weights", weights, q.shape[:2], FLOATS, q.device)
    codes, scales = quantize_fp8(q, q.shape[-1], power_of_two=power_of_two)
    return codes, weights.float() * scales[..., 0]


def index_scores_naive(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, key_scales: torch.Tensor | None = None
) -> torch.Tensor:
    """`index_scores` in plain torch, in pieces of rows so that the head-expanded products stay small.

    Sums run in float64 and are rounded to fp32 once: in fp32 a CPU's matrix product gives a row other last bits beside
    another number of keys, which would let the packing of a batch decide near ties.
    """
    rows, heads, _ = q.shape
    count = keys.shape[0]
    scores = torch.empty(rows, count, dtype=torch.float32, device=q.device)
    wide = keys.double() if key_scales is None else keys.double() * key_scales.double()[:, None]
    step = max(1, NAIVE_PIECE_ELEMENTS // max(1, heads * count))
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        products = torch.matmul(q[piece].double(), wide.t()).relu_()
        scores[piece] = torch.bmm(weights[piece].double()[:, None, :], products)[:, 0]
    return scores


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Scores of every key for every row, (T, S) fp32, not masked.

    q (T, H, D), weights (T, H) with any scales of q folded in, keys (S, D), key_scales (S,) fp32 factors of FP8 keys.
    Raises ValueError on other shapes or dtypes.
    """
    _check_indexer(q, weights, keys, key_scales)
    if use_triton(backend, q):
        from profiler.ops.triton.indexer import index_scores_dense

        return index_scores_dense(q, weights, keys, key_scales)
    return index_scores_naive(q, weights, keys, key_scales)


def select_topk_causal_naive(scores: torch.Tensor, positions: torch.Tensor, topk: int) -> torch.Tensor:
    """`select_topk_causal` in plain torch: one stable sort for the whole batch."""
    rows, count = scores.shape
    column = torch.arange(count, device=scores.device)
    masked = scores.masked_fill(column > positions[:, None], float("-inf"))
    order = torch.sort(masked, dim=-1, descending=True, stable=True).indices[:, :topk]
    # Hidden keys follow every visible one: they are -inf and, among equals, later.
    order = order.masked_fill(column[: order.shape[1]] > positions[:, None], -1)
    picked = torch.full((rows, topk), -1, dtype=torch.int32, device=scores.device)
    picked[:, : order.shape[1]] = order
    return picked


def select_topk_causal(
    scores: torch.Tensor,
    positions: torch.Tensor,
    topk: int,
    *,
    checked: bool | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Key positions of the topk best scores of each row among keys 0 .. positions[row], (T, topk) int32.

    scores (T, S) fp32; what lies past a row's position is not looked at. positions (T,) integers; -1 marks a padding
    row, which sees nothing. Rows that see fewer than topk keys end in -1. Ties go to the earlier position, so a row's
    selection depends neither on the batch it is packed in nor on the device. The naive path lists the best score
    first, the Triton path lists the same positions in ascending order. No per-row launch and no host sync.

    Raises ValueError on other shapes or dtypes, and in the checked mode (the default on the CPU) when a position lies
    outside -1 .. S - 1.
    """
    check_tensor("scores", scores, ("T", "S"), (torch.float32,))
    check_tensor("positions", positions, (scores.shape[0],), INTEGERS, scores.device)
    check_positive("topk", topk)
    if is_checked(checked, scores):
        check_range("positions", positions, -1, scores.shape[1])
    if use_triton(backend, scores):
        from profiler.ops.triton.select import select_topk

        return select_topk(scores, positions, topk)
    return select_topk_causal_naive(scores, positions, topk)


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    topk: int,
    *,
    key_scales: torch.Tensor | None = None,
    checked: bool | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Positions of the topk best keys of each row, (T, topk) int32, -1 padded.

    q (T, H, D) and weights (T, H) are the indexer's queries and head weights, keys (S, D) one request's keys in
    position order with key_scales (S,) where they are FP8, positions (T,) the rows' own: a row sees keys 0 .. its
    position. Long inputs run in pieces of rows, so that the scores never take more than 512 MiB. Order and ties as in
    `select_topk_causal`; same errors.
    """
    _check_indexer(q, weights, keys, key_scales)
    rows, count = q.shape[0], keys.shape[0]
    check_tensor("positions", positions, (rows,), INTEGERS, q.device)
    check_positive("topk", topk)
    if is_checked(checked, q):
        check_range("positions", positions, -1, count)
    picked = torch.empty(rows, topk, dtype=torch.int32, device=q.device)
    step = max(1, SCORE_PIECE_ELEMENTS // max(1, count))
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        if use_triton(backend, q):
            from profiler.ops.triton.indexer import index_scores_dense

            scores = index_scores_dense(q[piece], weights[piece], keys, key_scales, positions[piece])
        else:
            scores = index_scores_naive(q[piece], weights[piece], keys, key_scales)
        picked[piece] = select_topk_causal(scores, positions[piece], topk, checked=False, backend=backend)
    return picked
