"""Zipf popularity: the i-th most popular expert is picked in proportion to 1 / i^exponent; expert groups are ignored.

Which expert is how popular is a seeded shuffle (`popularity_seed`), so that a placement meets no order of ids.
"""

from typing import Any

from profiler.core.types import MoeDims
from serving.gates import Draw, Options, number
from serving.gates._pick import by_popularity, shuffled

OPTIONS = ("exponent", "popularity_seed")


def create(moe: MoeDims, options: Options) -> Draw:
    exponent = number(options, "exponent", 1.0)
    ranked = [1.0 / rank**exponent for rank in range(1, moe.num_experts + 1)]
    popularity = shuffled(ranked, moe, int(number(options, "popularity_seed", 0)))

    def draw(tokens: int, rng: Any) -> Any:
        return by_popularity(popularity, moe, tokens, rng)

    return draw
