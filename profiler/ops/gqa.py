"""Grouped-query attention over a paged cache, through torch's own SDPA."""

import torch

from profiler.ops.checks import FLOATS, INTEGERS, check_range, check_tensor, is_checked
from profiler.ops.mla import causal_sdpa


def gqa_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last T of S positions, (T, H, D): q (T, H, D), k and v (S, Hkv, D), Hkv dividing H."""
    check_tensor("q", q, ("T", "H", "D"), FLOATS)
    heads, width = q.shape[1:]
    check_tensor("k", k, ("S", "Hkv", width), (q.dtype,), q.device)
    check_tensor("v", v, (*k.shape[:2], "V"), (q.dtype,), q.device)
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"k: {k.shape[1]} KV heads do not divide {heads} query heads")
    return causal_sdpa(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), scale).transpose(0, 1)


def gqa_decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    *,
    checked: bool | None = None,
) -> torch.Tensor:
    """Attention of one decode row per request over its pages, (R, H, D), zeros for a row of length 0.

    q (R, H, D), k_pages and v_pages (pages, page_tokens, Hkv, D), page_table (R, P) page ids, lengths (R,) keys visible
    to each row, its own included. Fixed shapes and no host sync in the unchecked mode.
    Raises ValueError on other shapes, and in the checked mode on a page that does not exist or a length past the table.
    """
    check_tensor("q", q, ("R", "H", "D"), FLOATS)
    requests, heads, width = q.shape
    check_tensor("k_pages", k_pages, ("pages", "page_tokens", "Hkv", width), (q.dtype,), q.device)
    check_tensor("v_pages", v_pages, k_pages.shape, (q.dtype,), q.device)
    check_tensor("page_table", page_table, (requests, "P"), INTEGERS, q.device)
    check_tensor("lengths", lengths, (requests,), INTEGERS, q.device)
    tokens, kv_heads = k_pages.shape[1:3]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"k_pages: {kv_heads} KV heads do not divide {heads} query heads")
    span = page_table.shape[1] * tokens
    if is_checked(checked, q):
        check_range("page_table", page_table, 0, k_pages.shape[0])
        check_range("lengths", lengths, 0, span + 1)
    hidden = torch.arange(span, device=q.device) >= lengths[:, None]
    # Slots past the length may be unwritten memory; zero them, since 0 x NaN would be NaN.
    keys = k_pages[page_table.long()].flatten(1, 2).masked_fill(hidden[..., None, None], 0.0)
    values = v_pages[page_table.long()].flatten(1, 2).masked_fill(hidden[..., None, None], 0.0)
    # A row of length 0 keeps one (zero) key visible, so that its softmax is defined.
    visible = ~hidden
    visible[:, 0] = True
    out = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None],
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=visible[:, None, None, :],
        scale=scale,
        enable_gqa=kv_heads != heads,
    )
    return out[:, :, 0]
