"""Multi-head latent attention: over picked latents (sparse), over a paged cache (dense decode), and expanded (prefill).

Absorbed form: the query of a head is projected into the latent space (q_nope W_UK), so that every head reads the same
cached row of kv_lora_rank + rope features, whose first kv_lora_rank features are also the value.
"""

import torch
import torch.nn.functional as F

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
from profiler.ops.formats import MLA_DIM, MLA_ROW_BYTES, SparseKVFormat, dequantize_mla_rows

# Gathered fp32 elements that one naive piece holds.
NAIVE_PIECE_ELEMENTS = 1 << 25


def check_rows(name: str, rows: torch.Tensor, k_dim: int, kv_format: SparseKVFormat) -> None:
    """Refuse cache rows whose dtype or width is not that of `kv_format` for queries of k_dim features."""
    if not isinstance(kv_format, SparseKVFormat):
        raise ValueError(f"kv_format: expected a SparseKVFormat, found {kv_format!r}")
    if kv_format is SparseKVFormat.FP8_PACKED:
        if k_dim != MLA_DIM:
            raise ValueError(f"q: packed rows hold {MLA_DIM} features, the queries have {k_dim}")
        check_tensor(name, rows, ("N", MLA_ROW_BYTES), (torch.uint8,))
    elif kv_format is SparseKVFormat.FP8_RAW:
        check_tensor(name, rows, ("N", k_dim), (FP8,))
    else:
        check_tensor(name, rows, ("N", k_dim), FLOATS)


def widen_rows(rows: torch.Tensor, kv_format: SparseKVFormat, dtype: torch.dtype) -> torch.Tensor:
    """Cache rows as (..., K_DIM) features of `dtype`, whatever their storage."""
    return dequantize_mla_rows(rows, dtype) if kv_format is SparseKVFormat.FP8_PACKED else rows.to(dtype)


def attend_picked_naive(
    q: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    v_dim: int,
    scale: float,
    kv_format: SparseKVFormat,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend_picked` in plain torch, fp32 inside (float64 for float64 queries)."""
    count, heads, k_dim = q.shape
    picks = indices.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty(count, heads, v_dim, dtype=q.dtype, device=q.device)
    step = max(1, NAIVE_PIECE_ELEMENTS // max(1, picks * k_dim))
    for start in range(0, count, step):
        piece = slice(start, start + step)
        valid = indices[piece] >= 0
        # A masked pick reads row 0, which may be unwritten memory: zero it, since 0 x NaN would be NaN.
        picked = widen_rows(rows[indices[piece].clamp(min=0).long()], kv_format, wide)
        picked = picked.masked_fill_(~valid[..., None], 0.0)
        logits = torch.bmm(q[piece].to(wide), picked.transpose(1, 2)) * scale
        logits = logits.masked_fill_(~valid[:, None, :], float("-inf"))
        if sink is not None:
            column = (sink.to(wide) * scale)[None, :, None].expand(logits.shape[0], heads, 1)
            logits = torch.cat((logits, column), dim=-1)
        top = logits.amax(-1, keepdim=True)
        weights = torch.exp(logits - top.masked_fill(top == float("-inf"), 0.0))
        total = weights.sum(-1, keepdim=True)
        mixed = torch.bmm(weights[..., :picks], picked[..., :v_dim])
        out[piece] = (mixed / total.masked_fill(total == 0, 1.0)).to(q.dtype)
    return out


def attend_picked(
    q: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    v_dim: int,
    *,
    scale: float,
    kv_format: SparseKVFormat = SparseKVFormat.BF16,
    sink: torch.Tensor | None = None,
    checked: bool | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """softmax(q . rows[indices] * scale) . rows[indices][:v_dim] per query and head, (T, H, v_dim) in the dtype of q.

    q (T, H, K_DIM) bf16, fp8 or wider; rows (N, K_DIM), or (N, 656) uint8 for the packed format; indices (T, K) int32
    rows of the cache, negative where there is no pick (at the end of a row for the Triton path to skip it); sink (H,),
    multiplied by scale and added to the denominator only. A query without a pick gives zeros.
    Raises ValueError on other shapes, dtypes or formats, and in the checked mode on an index outside the cache.
    """
    check_tensor("q", q, ("T", "H", "K_DIM"), (*FLOATS, FP8))
    count, heads, k_dim = q.shape
    check_rows("rows", rows, k_dim, kv_format)
    check_tensor("rows", rows, rows.shape, (), q.device)
    check_tensor("indices", indices, (count, "K"), (torch.int32,), q.device)
    check_positive("v_dim", v_dim)
    if v_dim > k_dim:
        raise ValueError(f"v_dim: {v_dim} is wider than the {k_dim} features of a row")
    if sink is not None:
        check_tensor("sink", sink, (heads,), FLOATS, q.device)
    if is_checked(checked, q):
        check_range("indices", indices.clamp(min=-1), -1, rows.shape[0])
    if use_triton(backend, q):
        from profiler.ops.triton.mla import attend_picked_kernel

        return attend_picked_kernel(q, rows, indices, v_dim, scale, kv_format, sink)
    return attend_picked_naive(q, rows, indices, v_dim, scale, kv_format, sink)


def sparse_mla(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    latents: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    *,
    kv_format: SparseKVFormat = SparseKVFormat.BF16,
    sink: torch.Tensor | None = None,
    checked: bool | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Absorbed MLA of each row over its picked latents, (T, H, kv_lora_rank).

    q_nope (T, H, kv_lora_rank) already in the latent space, q_pe (T, H, rope), latents (N, kv_lora_rank + rope) or
    packed rows, indices (T, K) int32 cache rows with -1 for none. Errors as in `attend_picked`.
    """
    check_tensor("q_nope", q_nope, ("T", "H", "R"), FLOATS)
    check_tensor("q_pe", q_pe, (*q_nope.shape[:2], "P"), (q_nope.dtype,), q_nope.device)
    q = torch.cat((q_nope, q_pe), dim=-1)
    return attend_picked(
        q,
        latents,
        indices,
        q_nope.shape[-1],
        scale=sm_scale,
        kv_format=kv_format,
        sink=sink,
        checked=checked,
        backend=backend,
    )


def absorb_q(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """Queries in the latent space, (T, H, R), of q_nope (T, H, N) and the key up-projection w_uk (H, N, R)."""
    check_tensor("q_nope", q_nope, ("T", "H", "N"), FLOATS)
    check_tensor("w_uk", w_uk, (q_nope.shape[1], q_nope.shape[2], "R"), (q_nope.dtype,), q_nope.device)
    return torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)


def absorb_v(attended: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Head outputs (T, H, V) of attended latents (T, H, R) and the value up-projection w_uv (H, R, V)."""
    check_tensor("attended", attended, ("T", "H", "R"), FLOATS)
    check_tensor("w_uv", w_uv, (attended.shape[1], attended.shape[2], "V"), (attended.dtype,), attended.device)
    return torch.bmm(attended.transpose(0, 1), w_uv).transpose(0, 1)


def causal_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """torch's SDPA of the last T of S positions, (H, T, V): q (H, T, D), k (Hkv, S, D), v (Hkv, S, V), S >= T.

    Query t sees keys 0 .. S - T + t. Hkv may divide H (grouped heads).
    """
    from torch.nn.attention.bias import causal_lower_right

    heads, count, width = q.shape
    length = k.shape[1]
    if length < count:
        raise ValueError(f"k: {length} keys for {count} queries; the keys must include the queries' own")
    value_width = v.shape[-1]
    if q.is_cuda and value_width < width:
        # The fused CUDA kernels want equal widths.
        v = F.pad(v, (0, width - value_width))
    grouped = k.shape[0] != heads
    if count == 1:
        mask, causal = None, False
    elif count == length:
        mask, causal = None, True
    elif grouped or not q.is_cuda:
        mask, causal = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count), False
    else:
        mask, causal = causal_lower_right(count, length), False
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return out[0, ..., :value_width]


def mla_prefill(
    q_nope: torch.Tensor, q_pe: torch.Tensor, latents: torch.Tensor, kv_b: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """Dense MLA prefill: expand keys and values of every head, then SDPA. Returns (T, H, V) in the dtype of q_nope.

    q_nope (T, H, N), q_pe (T, H, P): T new tokens, the last of the S that latents (S, R + P) hold; kv_b (H, N + V, R)
    the up-projection of keys and values. Raises ValueError when fewer latents than queries are given.
    """
    check_tensor("q_nope", q_nope, ("T", "H", "N"), FLOATS)
    count, heads, nope = q_nope.shape
    check_tensor("q_pe", q_pe, (count, heads, "P"), (q_nope.dtype,), q_nope.device)
    check_tensor("kv_b", kv_b, (heads, "N+V", "R"), (q_nope.dtype,), q_nope.device)
    rank, rope = kv_b.shape[2], q_pe.shape[2]
    check_tensor("latents", latents, ("S", rank + rope), (q_nope.dtype,), q_nope.device)
    if kv_b.shape[1] <= nope:
        raise ValueError(f"kv_b: expected more than {nope} outputs per head (keys, then values), found {kv_b.shape[1]}")
    latent, key_pe = latents.split((rank, rope), dim=-1)
    expanded = torch.matmul(latent, kv_b.transpose(1, 2))
    key_nope, value = expanded.split((nope, kv_b.shape[1] - nope), dim=-1)
    key = torch.cat((key_nope, key_pe[None].expand(heads, -1, -1)), dim=-1)
    query = torch.cat((q_nope, q_pe), dim=-1).transpose(0, 1)
    return causal_sdpa(query, key, value, sm_scale).transpose(0, 1)


def page_slots(page_table: torch.Tensor, lengths: torch.Tensor, page_tokens: int, width: int) -> torch.Tensor:
    """Cache rows of positions 0 .. lengths - 1 of each request, (R, width) int32, -1 past the length.

    page_table (R, P) integer page ids, lengths (R,), width at most P x page_tokens.
    """
    check_tensor("page_table", page_table, ("R", "P"), INTEGERS)
    check_tensor("lengths", lengths, (page_table.shape[0],), INTEGERS, page_table.device)
    check_positive("page_tokens", page_tokens)
    if width > page_table.shape[1] * page_tokens:
        raise ValueError(f"width: {width} positions exceed {page_table.shape[1]} pages of {page_tokens} tokens")
    position = torch.arange(width, device=page_table.device)
    slots = page_table[:, position // page_tokens] * page_tokens + position % page_tokens
    return slots.masked_fill(position >= lengths[:, None], -1).to(torch.int32)


def mla_decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    latent_layer: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    sm_scale: float,
    *,
    kv_format: SparseKVFormat = SparseKVFormat.BF16,
    checked: bool | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Dense absorbed MLA of one decode row per request over a paged cache, (R, H, kv_lora_rank).

    q_nope (R, H, kv_lora_rank), q_pe (R, H, rope), latent_layer (pages, page_tokens, row), page_table (R, P), lengths
    (R,) keys visible to each row, its own included. Every key is attended: the pick is the whole page table.
    """
    check_tensor("latent_layer", latent_layer, ("pages", "page_tokens", "row"), ())
    tokens = latent_layer.shape[1]
    if is_checked(checked, q_nope):
        check_range("lengths", lengths, 0, page_table.shape[1] * tokens + 1)
    slots = page_slots(page_table, lengths, tokens, page_table.shape[1] * tokens)
    rows = latent_layer.flatten(0, 1)
    return sparse_mla(q_nope, q_pe, rows, slots, sm_scale, kv_format=kv_format, checked=checked, backend=backend)
