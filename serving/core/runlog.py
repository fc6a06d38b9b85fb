"""What a run leaves behind: one record per request, and every gap between two tokens.

Mostly no token times are kept: a request's tokens come one per step in uninterrupted runs of steps, so its gaps are
read from the step ends of its group when it leaves. Where that is not so (serving.core.walk) the request brings them.
"""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from serving.core.request import Outcome, Request

if TYPE_CHECKING:
    from serving.core.engine import StepTimes
    from serving.core.loop import AnyGroup


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has left the run. Times are nanoseconds of the simulated clock, None where never reached.

    arrival_ns: None for the call of a session that was never released.
    itl_p50_ns, itl_p99_ns: percentiles of the times between its consecutive tokens; None below two tokens.
    prefix_hit_tokens: prompt tokens found in the prefix cache when it was first scheduled.
    """

    index: int
    engine_index: int
    outcome: Outcome
    arrival_ns: int | None
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
    """Records by trace index, and how often each gap between two tokens occurred over all requests.

    Within an uninterrupted run the gaps are the durations of the group's steps, which are counted from the step times;
    `pauses_ns` holds the others, those around a preemption or a step without a token and those of requests that bring
    their own token times. With `keep_itl`, `itl_ns` has the gaps of every request that emitted a token, in their order.
    """

    def __init__(self, *, keep_itl: bool = False) -> None:
        self.itl_ns: dict[int, array[int]] = {}
        self._keep_itl = keep_itl
        self.records: dict[int, RequestRecord] = {}
        self.pauses_ns: Counter[int] = Counter()
        self._groups: Sequence[AnyGroup] = ()
        self._times: list[StepTimes] = []

    def open(self, groups: Sequence["AnyGroup"]) -> None:
        """The groups whose requests will be recorded, by the engine's index."""
        self._groups = groups
        self._times = [group.times for group in groups for _ in group.engines]

    def record(self, request: Request) -> None:
        """Keep the outcome of `request`."""
        runs = request.runs
        first_ns = finish_ns = None
        emitted = 0
        gaps: list[int] = []
        if token_ns := request.token_ns:
            first_ns, emitted = token_ns[0], len(token_ns)
            gaps = [after - before for before, after in pairwise(token_ns)]
            self.pauses_ns.update(gaps)
            if request.outcome == "finished":
                finish_ns = token_ns[-1]
        elif runs or request.run_start >= 0:
            times = self._times[request.engine_index]
            if request.outcome != "finished":
                runs = _ended(request, len(times))
            if runs:
                first_ns = times.end_ns[runs[0][0]]
                gaps = self._gaps(runs, times)
                emitted = len(gaps) + 1
                if request.outcome == "finished":
                    finish_ns = times.end_ns[runs[-1][1]]
        if self._keep_itl and emitted:
            self.itl_ns[request.index] = array("q", gaps)
        gaps.sort()
        self.records[request.index] = RequestRecord(
            request.index,
            request.engine_index,
            request.outcome,
            request.arrival_ns if request.arrival_ns >= 0 else None,
            request.queued_ns,
            request.scheduled_ns,
            first_ns,
            finish_ns,
            emitted,
            request.preemptions,
            max(0, request.prefix_hit_tokens),
            round(rank_value(gaps, 50)) if gaps else None,
            round(rank_value(gaps, 99)) if gaps else None,
        )

    def _gaps(self, runs: Sequence[tuple[int, int]], times: "StepTimes") -> list[int]:
        gaps: list[int] = []
        before = -1
        for first, last in runs:
            if before >= 0:
                gaps.append(times.end_ns[first] - times.end_ns[before])
                self.pauses_ns[gaps[-1]] += 1
            gaps += times.gap_ns[first + 1 : last + 1]
            before = last
        return gaps

    def gaps(self) -> tuple["array[int]", "array[int]"]:
        """Every gap between two tokens of a request: values in nanoseconds and how often each occurred.

        Values are in no order and may repeat.
        """
        values, counts = array("q"), array("q")
        for group in self._groups:
            values.extend(group.times.gap_ns)
            counts.extend(group.times.repeated_tokens)
        values.extend(self.pauses_ns.keys())
        counts.extend(self.pauses_ns.values())
        return values, counts


def _ended(request: Request, steps: int) -> list[tuple[int, int]]:
    """The runs of an unfinished request as far as its group's steps have ended."""
    runs = [*request.runs, (request.run_start, steps)] if request.run_start >= 0 else request.runs
    return [(first, min(last, steps - 1)) for first, last in runs if first < steps]


def rank_value(ascending: Sequence[int], percent: float) -> float:
    """Percentile of a non-empty sorted sequence, linear between the two nearest ranks.

    The same definition as numpy.percentile's default: rank (n - 1) * percent / 100, counted from 0.
    """
    rank = (len(ascending) - 1) * percent / 100
    below = int(rank)
    value = ascending[below]
    if below + 1 == len(ascending):
        return float(value)
    return value + (ascending[below + 1] - value) * (rank - below)


def percentile(counts: Mapping[int, int], percent: float) -> float:
    """The same of a non-empty multiset given as value -> count."""
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
