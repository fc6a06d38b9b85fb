"""A measured popularity: `counts`, one number per expert, for example tokens per expert of a layer from an engine.

topk different experts per token in proportion to the counts; experts with 0 are never picked. What a histogram cannot
tell is which experts a token picks together: use a recording for that.
"""

import math
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.types import MoeDims
from serving.gates import Draw, Options
from serving.gates._pick import by_popularity

OPTIONS = ("counts",)


def create(moe: MoeDims, options: Options) -> Draw:
    counts = check_counts(options.get("counts"), moe)

    def draw(tokens: int, rng: Any) -> Any:
        return by_popularity(counts, moe, tokens, rng)

    return draw


def check_counts(counts: Any, moe: MoeDims) -> list[float]:
    """The counts as floats. Raises ConfigError for a wrong length, a value that is no count, or too few experts."""
    if counts is None or isinstance(counts, str) or not hasattr(counts, "__len__"):
        raise ConfigError(f"a histogram needs counts, one number for each of the {moe.num_experts} experts")
    if len(counts) != moe.num_experts:
        raise ConfigError(f"the histogram has {len(counts)} counts for {moe.num_experts} experts; one each is needed")
    for expert, count in enumerate(counts):
        if isinstance(count, bool) or not isinstance(count, int | float) or not math.isfinite(count) or count < 0:
            raise ConfigError(f"count {expert} of the histogram is {count!r}; it must be a finite number of at least 0")
    if (used := sum(count > 0 for count in counts)) < moe.topk:
        raise ConfigError(f"only {used} experts of the histogram have a count above 0; a token picks {moe.topk}")
    return [float(count) for count in counts]
