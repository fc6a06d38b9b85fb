"""Popularities drawn from a Pareto distribution: P(popularity > x) = x^-alpha for x >= 1; expert groups are ignored.

A smaller alpha is a heavier tail; the uniform gate is the limit of a large one. Drawn once, from `popularity_seed`.
"""

from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.types import MoeDims
from serving.gates import Draw, Options, number
from serving.gates._pick import by_popularity

OPTIONS = ("alpha", "popularity_seed")


def create(moe: MoeDims, options: Options) -> Draw:
    import numpy as np

    alpha = number(options, "alpha", 2.0)
    if alpha == 0:
        raise ConfigError("alpha is 0; a power law needs a positive one")
    own = np.random.Generator(np.random.PCG64(int(number(options, "popularity_seed", 0))))
    popularity = (1.0 - own.random(moe.num_experts)) ** (-1.0 / alpha)

    def draw(tokens: int, rng: Any) -> Any:
        return by_popularity(popularity, moe, tokens, rng)

    return draw
