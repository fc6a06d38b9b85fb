"""topk of all experts at random, every one equally likely; expert groups are ignored."""

from typing import Any

from profiler.core.types import MoeDims
from serving.gates import Draw, Options
from serving.gates._pick import by_popularity

OPTIONS = ()


def create(moe: MoeDims, options: Options) -> Draw:
    def draw(tokens: int, rng: Any) -> Any:
        return by_popularity([1.0] * moe.num_experts, moe, tokens, rng)

    return draw
