"""How often a shot is timed: fewer runs of long passes that agree, more of short ones that do not."""

from collections import defaultdict
from collections.abc import Sequence

from profiler.engines.base import KernelSample
from profiler.timing import median, spread_rel

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
    """Timed runs to begin with. pass_ms: host time of a warm pass, which is at least that of the device."""
    return min(wanted, LONG_PASS_REPEATS) if pass_ms > LONG_PASS_MS else wanted


def further(samples: Sequence[KernelSample], wanted: int) -> range:
    """The repeats to add; empty when it is enough.

    A pass of more than LONG_PASS_MS on the device has enough when its runs so far spread by at most SPREAD_REL, or with
    those asked for. A shorter one gets those asked for, and while it spreads as many again, up to MOST_FACTOR times.
    """
    totals: dict[int, float] = defaultdict(float)
    for sample in samples:
        totals[sample.repeat] += sample.duration_us
    times = list(totals.values())
    if not times:
        return range(0)
    done, long = len(times), median(times) > LONG_PASS_MS * 1e3
    if done < wanted and not long:
        return range(done, wanted)
    if not spread_rel(times) > SPREAD_REL:
        return range(0)
    return range(done, min(done + wanted, wanted if long else MOST_FACTOR * wanted))
