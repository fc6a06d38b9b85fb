"""Picks without replacement, shared by the gates."""

from typing import Any

from profiler.core.types import MoeDims

# Tokens drawn at once: bounds the scores held in memory to some 16 MB for 256 experts.
ROWS = 16_384


def chunks(tokens: int) -> list[int]:
    """`tokens` in pieces of at most ROWS."""
    return [min(ROWS, tokens - start) for start in range(0, tokens, ROWS)]


def top(scores: Any, k: int) -> Any:
    """Columns of the k largest scores of every row, in no particular order: int32 (rows, k)."""
    import numpy as np

    kth = scores.shape[1] - k
    return np.argpartition(scores, kth, axis=1)[:, kth:].astype(np.int32)


def keep_groups(choice: Any, group_scores: Any, moe: MoeDims) -> None:
    """Sets `choice` (rows, experts) to -inf outside the topk_group best groups, in place."""
    import numpy as np

    if moe.topk_group == moe.n_group:
        return
    grouped = choice.reshape(len(choice), moe.n_group, -1)
    dropped = np.argpartition(group_scores, moe.n_group - moe.topk_group, axis=1)[:, : moe.n_group - moe.topk_group]
    np.put_along_axis(grouped, dropped[:, :, None], np.float32(-np.inf), axis=1)


def by_popularity(popularity: Any, moe: MoeDims, tokens: int, rng: Any) -> Any:
    """topk different experts per token, each next one with probability proportional to its popularity.

    Gumbel-top-k: the k largest of log p + Gumbel noise are a sample without replacement in proportion to p
    (Yellott 1977). Experts of popularity 0 are never picked. popularity: (experts,), at least topk positive values.
    """
    import numpy as np

    with np.errstate(divide="ignore"):
        logs = np.log(np.asarray(popularity, dtype=np.float64)).astype(np.float32)
    parts = [top(logs - _log_exponential(n, moe.num_experts, rng), moe.topk) for n in chunks(tokens)]
    return np.concatenate(parts) if parts else np.empty((0, moe.topk), np.int32)


def _log_exponential(rows: int, columns: int, rng: Any) -> Any:
    """Logarithms of exponential draws; float32 draws can be exactly 0, which has none."""
    import numpy as np

    drawn = rng.standard_exponential((rows, columns), dtype=np.float32)
    return np.log(np.maximum(drawn, np.finfo(np.float32).tiny))


def shuffled(ranked: Any, moe: MoeDims, seed: int) -> Any:
    """Popularities by rank of popularity, handed to experts in a seeded order, so that no expert id is special."""
    import numpy as np

    return np.asarray(ranked)[np.random.Generator(np.random.PCG64(seed)).permutation(moe.num_experts)]
