"""Where along an axis a kernel changes its way of working, so that no interpolation may lead across."""

from profiler.core.types import ModelSpec

# Kernels whose work begins, or ends growing, where a query sees more keys than it attends.
_AT_THE_CAP = frozenset({"index_topk", "sparse_mla", "sparse_gqa"})
# Selection, and on the prefill side another attention kernel, begin beyond the top-k.
_TAIL = "dsa_attention_tail"
# What has other kernels for one new token, a decode, than for two, a prefill.
_DECODES_APART = frozenset({"index_scores", "index_topk", "block_scores", "block_topk", "sparse_gqa"})


def jumps(name: str, axis: str) -> bool:
    """Whether time steps at a kernel's breaks, so that points are needed at both b and b + 1; else it only bends."""
    return axis == "prefill_chunk_tokens" or (axis, name) in (
        ("prefill_context_tokens", _TAIL),
        ("decode_kv_tokens", _TAIL),
        ("prefill_context_tokens", "mla_dense_prefill"),
        ("decode_kv_tokens", "index_topk"),
    )


def breaks(spec: ModelSpec, name: str, axis: str, other: int) -> tuple[int, ...]:
    """Last coordinates before each change, ascending: the kernel at b works otherwise than that at b + 1.

    axis: the key column along which; other: the coordinate on the other axis of the same plane (chunk x context,
    requests x keys).
    """
    cap = spec.indexer.attended_cap_tokens if spec.indexer else 0
    if axis == "prefill_chunk_tokens" and name in _DECODES_APART:
        return (1,)
    if axis == "prefill_context_tokens" and name == "mla_dense_prefill":
        return (0,)  # a context is gathered, expanded and attended by a pass of its own
    if name == _TAIL and axis in ("prefill_context_tokens", "decode_kv_tokens"):
        return (cap,) if axis == "decode_kv_tokens" else (cap - other,) if other < cap else ()
    if name not in _AT_THE_CAP:
        return ()
    if axis == "decode_kv_tokens":
        return (cap,)
    if axis == "prefill_context_tokens":
        # From the chunk that ends at the cap to the one that begins there, more and more of its queries select.
        return (cap - other, cap) if other < cap else (cap,)
    return ()
