"""What a run leaves behind: one record per request, and every gap between two tokens."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from serving.core.request import Outcome, Request


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has left the run. Times are nanoseconds of the simulated clock, None where never reached.

    itl_p50_ns, itl_p99_ns: percentiles of the times between its consecutive tokens; None below two tokens.
    prefix_hit_tokens: prompt tokens found in the prefix cache when it was first scheduled.
    """

    index: int
    engine_index: int
    outcome: Outcome
    queued_ns: int | None
    scheduled_ns: int | None
    first_token_ns: int | None
    finish_ns: int | None
    emitted_tokens: int
    preemptions: int
    prefix_hit_tokens: int
    itl_p50_ns: int | None
    itl_p99_ns: int | None


class RunLog:
    """Records by trace index, and how often each gap between two tokens occurred over all requests."""

    def __init__(self) -> None:
        self.records: dict[int, RequestRecord] = {}
        self.gaps_ns: Counter[int] = Counter()

    def record(self, request: Request) -> None:
        """Keep the outcome of `request` and drop its token times."""
        times = request.token_ns
        gaps = Counter(after - before for before, after in pairwise(times))
        self.gaps_ns.update(gaps)
        self.records[request.index] = RequestRecord(
            index=request.index,
            engine_index=request.engine_index,
            outcome=request.outcome,
            queued_ns=request.queued_ns,
            scheduled_ns=request.scheduled_ns,
            first_token_ns=times[0] if times else None,
            finish_ns=times[-1] if request.outcome == "finished" else None,
            emitted_tokens=request.emitted_tokens,
            preemptions=request.preemptions,
            prefix_hit_tokens=max(0, request.prefix_hit_tokens),
            itl_p50_ns=round(percentile(gaps, 50)) if gaps else None,
            itl_p99_ns=round(percentile(gaps, 99)) if gaps else None,
        )
        request.token_ns = []


def percentile(counts: Mapping[int, int], percent: float) -> float:
    """Percentile of a non-empty multiset given as value -> count, linear between the two nearest ranks.

    The same definition as numpy.percentile's default: rank (n - 1) * percent / 100, counted from 0.
    """
    rank = (sum(counts.values()) - 1) * percent / 100
    below = int(rank)
    seen = 0
    values = sorted(counts)
    for position, value in enumerate(values):
        seen += counts[value]
        if seen > below:
            following = value if seen > below + 1 or position + 1 == len(values) else values[position + 1]
            return value + (following - value) * (rank - below)
    raise ValueError("percentile of an empty multiset")
