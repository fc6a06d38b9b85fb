"""Mixture of experts: the grouped top-k router and the grouped expert GEMM."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

from profiler.ops.checks import FLOATS, INTEGERS, check_positive, check_range, check_tensor, is_checked
from profiler.ops.layers import swiglu


def grouped_topk(
    logits: torch.Tensor,
    topk: int,
    *,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: Literal["sigmoid", "softmax"] = "sigmoid",
    bias: torch.Tensor | None = None,
    renormalize: bool = True,
    routed_scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing weights (T, topk) fp32 and expert ids (T, topk) int32 of router logits (T, E), best expert first.

    scores = sigmoid or softmax of the logits in fp32; the choice is by scores + bias (E,), the weights are the plain
    scores. A group's score is the sum of its two best choice values when there is a bias, else its best one; experts
    outside the topk_group best groups are left out. n_group = 1 is plain top-k. Ties go to the lower expert.
    Weights are renormalised to sum 1 on request, then multiplied by routed_scaling.
    Raises ValueError when n_group does not divide E, or the groups kept hold fewer than topk experts.
    """
    check_tensor("logits", logits, ("T", "E"), FLOATS)
    count, experts = logits.shape
    for name, value in (("topk", topk), ("n_group", n_group), ("topk_group", topk_group)):
        check_positive(name, value)
    if scoring not in ("sigmoid", "softmax"):
        raise ValueError(f"scoring: expected 'sigmoid' or 'softmax', found {scoring!r}")
    if experts % n_group or topk_group > n_group:
        raise ValueError(f"n_group: {n_group} groups, {topk_group} of them kept, do not fit {experts} experts")
    if topk > experts // n_group * topk_group:
        raise ValueError(f"topk: {topk} exceeds the {experts // n_group * topk_group} experts of the groups kept")
    wide = logits.float()
    scores = wide.sigmoid() if scoring == "sigmoid" else wide.softmax(-1)
    choice = scores
    if bias is not None:
        check_tensor("bias", bias, (experts,), FLOATS, logits.device)
        choice = scores + bias.float()
    if n_group > 1:
        grouped = choice.unflatten(-1, (n_group, experts // n_group))
        best = 1 if bias is None else min(2, experts // n_group)
        group_scores = grouped.topk(best, dim=-1).values.sum(-1)
        order = torch.sort(group_scores, dim=-1, descending=True, stable=True).indices[:, :topk_group]
        kept = torch.zeros(count, n_group, dtype=torch.bool, device=logits.device).scatter_(1, order, True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routed_scaling, ids.to(torch.int32)


def _by_expert(expert_ids: torch.Tensor, experts: int, first_expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order of the (token, expert) pairs grouped by local expert, and the end of each group; others sort last."""
    local = expert_ids.flatten().long() - first_expert
    local = torch.where((local >= 0) & (local < experts), local, experts)
    order = torch.sort(local, stable=True).indices
    counts = torch.zeros(experts + 1, dtype=torch.long, device=local.device)
    counts.scatter_add_(0, local, torch.ones_like(local))
    return order, counts[:experts].cumsum(0)


def expert_gemm(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    first_expert: int = 0,
    activation: Callable[[torch.Tensor], torch.Tensor] = swiglu,
    checked: bool | None = None,
) -> torch.Tensor:
    """Weighted sum of the local experts' outputs, (T, hidden) in the dtype of x.

    x (T, hidden), expert_ids (T, k) global ids, expert_weights (T, k), w13 (E, 2 I, hidden) gate then up, w2
    (E, hidden, I): the E experts first_expert .. first_expert + E - 1 that this rank holds; pairs of other ranks add
    nothing. One grouped GEMM per projection on CUDA in bf16, else one GEMM per activated expert.
    Raises ValueError on other shapes or dtypes, and in the checked mode on a negative expert id.
    """
    check_tensor("x", x, ("T", "hidden"), FLOATS)
    count, hidden = x.shape
    check_tensor("expert_ids", expert_ids, (count, "k"), INTEGERS, x.device)
    check_tensor("expert_weights", expert_weights, expert_ids.shape, FLOATS, x.device)
    check_tensor("w13", w13, ("E", "2I", hidden), (x.dtype,), x.device)
    experts, double = w13.shape[:2]
    check_tensor("w2", w2, (experts, hidden, double // 2), (x.dtype,), x.device)
    if is_checked(checked, x):
        check_range("expert_ids", expert_ids, 0, 1 << 31)
    order, ends = _by_expert(expert_ids, experts, first_expert)
    token = order // expert_ids.shape[1]
    if x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm"):
        offsets = ends.to(torch.int32)
        gathered = activation(F.grouped_mm(x[token], w13.transpose(1, 2), offs=offsets))
        pair_out = F.grouped_mm(gathered, w2.transpose(1, 2), offs=offsets)
        # Rows past the last local pair are not written by the grouped GEMM.
        local = torch.arange(order.shape[0], device=x.device)[:, None] < ends[-1]
        pair_out = torch.where(local, pair_out, 0)
    else:
        pair_out = x.new_zeros(order.shape[0], hidden)
        start = 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                rows = activation(x[token[start:end]] @ w13[expert].t())
                pair_out[start:end] = rows @ w2[expert].t()
            start = end
    scaled = pair_out.float() * expert_weights.flatten()[order].float()[:, None]
    return x.new_zeros(count, hidden, dtype=torch.float32).index_add_(0, token, scaled).to(x.dtype)
