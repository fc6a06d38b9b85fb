"""Arrival processes: seeded times at which requests come."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

PROCESSES: Final = ("poisson", "gamma", "constant", "at-once")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """rate_per_s: mean requests per second, unused by "at-once" (all at time 0).

    burstiness: shape of the gamma distribution of the gaps; their squared coefficient of variation is 1 / burstiness,
    so 1 is Poisson, below 1 is burstier, above 1 more even. "constant" has equal gaps.
    """

    process: str
    rate_per_s: float
    seed: int
    burstiness: float = 1.0


def problem(arrivals: Arrivals) -> str | None:
    """What is wrong with the values, None for nothing."""
    if arrivals.process not in PROCESSES:
        return f"arrivals must be one of {', '.join(PROCESSES)}, found {arrivals.process!r}"
    if not 1e-6 <= arrivals.rate_per_s <= 1e9:
        return f"rate_per_s must be from 1e-6 to 1e9, found {arrivals.rate_per_s}"
    if not 1e-3 <= arrivals.burstiness <= 1e6:
        return f"burstiness must be from 1e-3 to 1e6, found {arrivals.burstiness}"
    return None


def times_ns(arrivals: Arrivals) -> Iterator[int]:
    """Endless arrival times in nanoseconds, in order. The first one is a gap after time 0."""
    draw = random.Random(f"arrivals {arrivals.seed}")
    at_s = 0.0
    while True:
        if arrivals.process == "at-once":
            gap_s = 0.0
        elif arrivals.process == "constant":
            gap_s = 1.0 / arrivals.rate_per_s
        elif arrivals.process == "poisson":
            gap_s = -math.log(1.0 - draw.random()) / arrivals.rate_per_s
        else:
            shape = arrivals.burstiness
            gap_s = draw.gammavariate(shape, 1.0 / (arrivals.rate_per_s * shape))
        at_s += gap_s
        yield round(at_s * 1e9)
