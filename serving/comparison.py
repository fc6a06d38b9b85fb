"""A simulated run against a recorded one, request by request."""

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from profiler.core.errors import ConfigError
from profiler.core.load import read_text
from profiler.core.units import NS_PER_MS
from serving.core.runlog import percentile
from serving.metrics import COLUMNS
from serving.recorded import Recorded

STATISTICS = ("mean", "p50", "p90", "p99")
METRICS = ("ttft", "tpot", "latency")


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One row of a run's CSV; times are nanoseconds of the simulated clock."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    arrival_ns: int
    queued_ns: int
    scheduled_ns: int
    first_token_ns: int
    finish_ns: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One statistic of one metric in both runs, in milliseconds."""

    metric: str
    statistic: str
    simulated_ms: float
    recorded_ms: float

    @property
    def difference_percent(self) -> float:
        return 100.0 * (self.simulated_ms / self.recorded_ms - 1.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures; the makespan is from the first queueing to the last token.

    error_ms: mean absolute difference per request of each metric. load: mean absolute difference in requests running
    and waiting at the recorded ticks, None without ticks.
    """

    requests: int
    figures: tuple[Figure, ...]
    error_ms: dict[str, float]
    load: dict[str, float] | None


def read_run(path: Path) -> list[SimulatedRequest]:
    """The rows of a replay's CSV, in trace order.

    Raises ConfigError naming file and line when it is malformed or a request did not finish.
    """
    lines = csv.reader(io.StringIO(read_text(path)))
    if tuple(next(lines, [])) != COLUMNS:
        raise ConfigError(f"{path}:1: not the CSV of a replay; its header is {','.join(COLUMNS)}")
    found = []
    for cells in lines:
        row = dict(zip(COLUMNS, cells, strict=False))
        if row.get("outcome") != "finished":
            raise ConfigError(
                f"{path}:{lines.line_num}: outcome is {row.get('outcome')!r}; only finished requests can be compared"
            )
        try:
            numbers = (int(row[name]) for name in SimulatedRequest.__slots__[1:])
            found.append(SimulatedRequest(row["request_id"], *numbers))
        except (ValueError, KeyError):
            raise ConfigError(f"{path}:{lines.line_num}: times and counts must be integers") from None
    return found


def compare(run: Path, recorded: Recorded, since: str = "queued") -> Comparison:
    """Pairs the rows of a replay's CSV with the recorded requests: by the recorded ids where the run has the same,
    else by number where its ids count from 0 (which they do unless the trace names its requests), else by row.

    since: "queued" counts the simulated TTFT and latency from queued_ns, when the simulated scheduler took the request
    in, as the recording does; "arrival" counts them from arrival_ns, for traces whose arrivals are queueing times.
    Raises ConfigError when the two runs are not of the same requests.
    """
    simulated = _paired(run, read_run(run), recorded)
    values: dict[str, list[tuple[int, int]]] = {metric: [] for metric in METRICS}
    for ours, theirs in zip(simulated, recorded.requests, strict=True):
        if (ours.prompt_tokens, ours.output_tokens) != (theirs.prompt_tokens, theirs.output_tokens):
            raise ConfigError(
                f"{run}: request {ours.request_id} has {ours.prompt_tokens} tokens in and {ours.output_tokens} out, "
                f"its recorded counterpart {theirs.request_id} {theirs.prompt_tokens} and {theirs.output_tokens}"
            )
        start = ours.queued_ns if since == "queued" else ours.arrival_ns
        values["ttft"].append((ours.first_token_ns - start, theirs.first_token_ns - theirs.queued_ns))
        values["latency"].append((ours.finish_ns - start, theirs.finish_ns - theirs.queued_ns))
        if ours.output_tokens > 1:
            gaps = ours.output_tokens - 1
            one, other = ours.finish_ns - ours.first_token_ns, theirs.finish_ns - theirs.first_token_ns
            values["tpot"].append((round(one / gaps), round(other / gaps)))
    figures = [figure for metric in METRICS if values[metric] for figure in _figures(metric, values[metric])]
    ends = [
        max(one.finish_ns for one in rows) - min(one.queued_ns for one in rows)
        for rows in (simulated, recorded.requests)
    ]
    figures.append(Figure("makespan", "total", ends[0] / NS_PER_MS, ends[1] / NS_PER_MS))
    errors = {
        metric: sum(abs(a - b) for a, b in pairs) / len(pairs) / NS_PER_MS for metric, pairs in values.items() if pairs
    }
    return Comparison(len(simulated), tuple(figures), errors, _load(simulated, recorded))


def _paired(run: Path, simulated: list[SimulatedRequest], recorded: Recorded) -> list[SimulatedRequest]:
    """The simulated requests in the order of the recorded ones."""
    if len(simulated) != len(recorded.requests):
        raise ConfigError(f"{run}: {len(simulated)} requests, the recorded run has {len(recorded.requests)}")
    by_id = {one.request_id: one for one in simulated}
    for names in ([one.request_id for one in recorded.requests], [str(n) for n in range(len(simulated))]):
        if by_id.keys() == set(names):
            return [by_id[name] for name in names]
    return simulated


def _figures(metric: str, pairs: Sequence[tuple[int, int]]) -> list[Figure]:
    sides = list(zip(*pairs, strict=True))
    figures = []
    for statistic in STATISTICS:
        ours, theirs = (_statistic(statistic, side) / NS_PER_MS for side in sides)
        figures.append(Figure(metric, statistic, ours, theirs))
    return figures


def _statistic(name: str, values: Sequence[int]) -> float:
    return sum(values) / len(values) if name == "mean" else percentile(Counter(values), float(name[1:]))


def _load(simulated: Sequence[SimulatedRequest], recorded: Recorded) -> dict[str, float] | None:
    if not recorded.ticks:
        return None
    start = min(one.queued_ns for one in simulated)
    running = waiting = 0
    for tick in recorded.ticks:
        now = start + tick.time_ns
        running += abs(sum(one.scheduled_ns <= now < one.finish_ns for one in simulated) - tick.running)
        waiting += abs(sum(one.queued_ns <= now < one.scheduled_ns for one in simulated) - tick.waiting)
    return {"running": running / len(recorded.ticks), "waiting": waiting / len(recorded.ticks)}
