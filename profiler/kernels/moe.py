"""The routed experts of one rank.

Their cost follows the (token, expert) pairs computed and the distinct experts whose weights are read, so every cell
carries both, counted on the routing that was really run.
"""

from typing import Any, Final

from profiler.core.errors import ConfigError
from profiler.core.shots import Fill, MoeBatch, Shot
from profiler.core.types import Category, ModelSpec, MoeDims
from profiler.kernels._axes import MAX_MOE_TOKENS, Limits
from profiler.kernels._components import names_of
from profiler.kernels._work import WEIGHT_BYTES, Work

CATEGORY: Final[Category] = "moe"
UNITS: Final = {"ep": "ranks", "tokens": "tokens", "activated_experts": "experts", "local_pairs": "pairs"}
DRIVERS: Final = ("tokens",)

_SKEW_EVERY: Final = 4
_SMALL_BATCH_TOKENS: Final = 64
_TRIED_SEEDS: Final = 64
_ROWS_AT_ONCE: Final = 16_384


def kv_cap_tokens(spec: ModelSpec) -> int | None:
    return None


def local_experts(moe: MoeDims, ep: int) -> int:
    """Whole experts of one rank. Raises ConfigError when ep does not divide them."""
    if ep < 1 or moe.num_experts % ep:
        raise ConfigError(f"ep {ep} does not divide {moe.num_experts} experts into whole ones")
    return moe.num_experts // ep


def topk_ids(moe: MoeDims, batch: MoeBatch) -> Any:
    """The experts of every token: int32 array (tokens, topk) of global ids, drawn by the model's own selection rule.

    Scores are independent and uniform per token and expert, times a log-normal popularity per expert of deviation
    `skew`. With expert groups a group counts the sum of its two best scores, the best `topk_group` groups stay, and
    the top-k is taken among them. Equal arguments give equal arrays on every machine (numpy's PCG64).
    """
    import numpy as np

    rng = np.random.Generator(np.random.PCG64([batch.seed, batch.tokens, batch.ep]))
    popularity = np.exp(batch.skew * rng.standard_normal(moe.num_experts)).astype(np.float32)
    chosen = np.empty((batch.tokens, moe.topk), dtype=np.int32)
    size = moe.num_experts // moe.n_group
    for first in range(0, batch.tokens, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, batch.tokens - first)
        scores = rng.random((rows, moe.num_experts), dtype=np.float32) * popularity
        if moe.topk_group < moe.n_group:
            grouped = scores.reshape(rows, moe.n_group, size)
            best_two = np.partition(grouped, size - 2, axis=2)[:, :, size - 2 :].sum(axis=2)
            dropped = np.argpartition(best_two, moe.n_group - moe.topk_group, axis=1)[:, : moe.n_group - moe.topk_group]
            np.put_along_axis(grouped, dropped[:, :, None], np.float32(-1.0), axis=1)
        kth = moe.num_experts - moe.topk
        chosen[first : first + rows] = np.argpartition(scores, kth, axis=1)[:, kth:]
    return chosen


def local_load(moe: MoeDims, batch: MoeBatch) -> tuple[int, int]:
    """(distinct local experts reached, local pairs) of a batch on rank 0, which holds the first ids."""
    import numpy as np

    ids = topk_ids(moe, batch)
    local = ids[ids < local_experts(moe, batch.ep)]
    return int(np.unique(local).size), int(local.size)


def _typical(moe: MoeDims, ep: int, tokens: int, skew: float) -> tuple[MoeBatch, int, int]:
    """The draw to measure: any for a large batch; for a small one that whose pairs come closest to the mean.

    The mean of local pairs is tokens x topk / ep; a slice that no token reaches is not a cell, so at least one.
    """
    if tokens > _SMALL_BATCH_TOKENS:
        batch = MoeBatch(ep, tokens, skew)
        return batch, *local_load(moe, batch)
    goal = max(1.0, tokens * moe.topk / ep)
    drawn = []
    for seed in range(_TRIED_SEEDS):
        batch = MoeBatch(ep, tokens, skew, seed)
        drawn.append((batch, *local_load(moe, batch)))
    return min((found for found in drawn if found[2]), key=lambda found: (abs(found[2] - goal), found[0].seed))


def shots(spec: ModelSpec, limits: Limits) -> list[Shot]:
    """Per expert slice, token counts up to those that ep ranks gather; every fourth power of two also with skewed
    popularity.

    Measured with whole experts, so at tp 1 only: a wider tp looks its experts up by pairs and activated experts.
    """
    if spec.moe is None or limits.tp != 1:
        return []
    names = names_of(spec, CATEGORY)
    found: list[Shot] = []
    for ep in limits.ep_degrees:
        most = min(limits.max_num_batched_tokens * ep, MAX_MOE_TOKENS)
        seen: set[tuple[int, ...]] = set()
        for tokens in limits.up_to(limits.axes.moe_tokens, most):
            for skew in limits.axes.moe_skews:
                if skew and not _run_skewed(tokens):
                    continue
                batch, activated, pairs = _typical(spec.moe, ep, tokens, skew)
                key = (ep, tokens, activated, pairs)
                if pairs and key not in seen:
                    seen.add(key)
                    found.append(Shot(fills=(Fill(CATEGORY, key, names),), moe=batch))
    return found


def _run_skewed(tokens: int) -> bool:
    return tokens.bit_count() == 1 and (tokens.bit_length() - 1) % _SKEW_EVERY == 0


def work(spec: ModelSpec, name: str, key: tuple[int, ...], weights: str) -> Work | None:
    """Least work of one call; key as in UNITS. Three matrices per expert: gate, up and down."""
    if spec.moe is None or name != "experts":
        return None
    _, tokens, activated, pairs = key
    matrix = spec.hidden * spec.moe.intermediate
    reached = min(tokens, pairs)
    return Work(6.0 * pairs * matrix, 3.0 * activated * matrix * WEIGHT_BYTES[weights], 4.0 * reached * spec.hidden)
