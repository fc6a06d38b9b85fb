"""What tokens ask of a rank's routed experts where every expert is as popular as any other."""

import math

from profiler.core.types import MoeDims


def local_pairs(moe: MoeDims, ep: int, tokens: int) -> float:
    """(token, expert) pairs per rank when the load is even: tokens x topk / ep."""
    return tokens * moe.topk / ep


def activated_experts(moe: MoeDims, ep: int, tokens: int) -> float:
    """Expected distinct experts of a rank that `tokens` independent tokens reach: E/ep (1 - (1 - topk/E)^tokens).

    A token picks topk distinct experts, and with an even load each expert with probability topk / E, whatever groups
    the router has; so this is exact for independent tokens.
    """
    local = moe.num_experts / ep
    if moe.topk >= moe.num_experts:
        return local
    return -local * math.expm1(tokens * math.log1p(-moe.topk / moe.num_experts))
