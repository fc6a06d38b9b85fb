"""How often a shot is timed: fewer runs of long passes that agree, more of short ones that do not."""

from collections import defaultdict
from collections.abc import Sequence

from profiler.engines.base import KernelSample
from profiler.timing import spread_rel

LONG_PASS_MS = 50.0
LONG_PASS_REPEATS = 3
SPREAD_REL = 0.03
MOST_FACTOR = 3

RULE = {
    "long_pass_ms": LONG_PASS_MS,
    "long_pass_repeats": LONG_PASS_REPEATS,
    "more_beyond_spread": SPREAD_REL,
    "most_factor": MOST_FACTOR,
}
"""As the engine reports it in settings["repeat_rule"]."""


def first(wanted: int, pass_ms: float) -> int:
    """Timed runs to begin with: those asked for, at most LONG_PASS_REPEATS of a pass beyond LONG_PASS_MS."""
    return min(wanted, LONG_PASS_REPEATS) if pass_ms > LONG_PASS_MS else wanted


def further(samples: Sequence[KernelSample], wanted: int, pass_ms: float) -> range:
    """The repeats to add while the device time of the pass spreads by more than SPREAD_REL; empty when it is enough.

    A long pass gets those asked for and no more, a short one as many again, up to MOST_FACTOR times those asked for.
    """
    totals: dict[int, float] = defaultdict(float)
    for sample in samples:
        totals[sample.repeat] += sample.duration_us
    done = len(totals)
    if done < 2 or not spread_rel(list(totals.values())) > SPREAD_REL:
        return range(0)
    most = wanted if pass_ms > LONG_PASS_MS else MOST_FACTOR * wanted
    return range(done, min(done + wanted, most))
