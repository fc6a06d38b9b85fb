"""Columns of a bundle's CSV tables, in file order. A reader accepts exactly these (or a peer's, see profiler/formats).

Every time is the median GPU time of one call in microseconds, launch gaps excluded; `spread_rel` is
(p90 - p10) / median over the repeats, in rows of several whole passes over these.
"""

from typing import Final

from profiler.core.types import Category

COST_COLUMNS: Final = ("time_us", "spread_rel")

KEY_COLUMNS: Final[dict[Category, tuple[str, ...]]] = {
    # layer: component name; tokens: rows of the batch.
    "dense": ("layer", "tokens"),
    # sequences: sampled rows.
    "per_sequence": ("layer", "sequences"),
    # kernel: component name. Pure prefill rows have decode_requests = 0: one request with a chunk of
    # prefill_chunk_tokens new tokens behind prefill_context_tokens cached ones. Pure decode rows have
    # prefill_chunk_tokens = 0: decode_requests requests of decode_query_tokens new tokens each, decode_kv_tokens keys
    # visible to the last of them. Measured mixed rows fill both.
    **dict.fromkeys(
        ("attention", "indexer", "sparse_attention"),
        (
            "kernel",
            "prefill_chunk_tokens",
            "prefill_context_tokens",
            "decode_requests",
            "decode_kv_tokens",
            "decode_query_tokens",
        ),
    ),
    # ep: expert-parallel degree whose slice of experts was measured; tokens: tokens given to the rank's expert kernel
    # (all tokens of the group under an all-gather back end); activated_experts: distinct local experts they reach, in
    # rows of whole passes (profiler/passes.py) those expected of independent tokens, to a hundredth; local_pairs:
    # (token, expert) pairs computed on the rank.
    "moe": ("layer", "ep", "tokens", "activated_experts", "local_pairs"),
    # Batches of unequal requests, for the kernels of the three tables above. prefills, decodes: the batch as
    # profiler/core/batch_text.py writes it; use: what the row serves, one of SKEW_USES.
    "skew": ("kernel", "prefills", "decodes", "use"),
}

# fit: decode requests of two lengths, from which the correction is fitted. held_out: other numbers and distributions of
# lengths, on which it is judged. joint: a prefill beside decode requests. prefills: several prefills in one step.
SKEW_USES: Final = ("fit", "held_out", "joint", "prefills")


def columns(category: Category) -> tuple[str, ...]:
    return KEY_COLUMNS[category] + COST_COLUMNS
