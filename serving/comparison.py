"""A simulated run against a recorded one, or against another simulated one, request by request."""

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from profiler.core.errors import ConfigError
from profiler.core.load import read_text
from profiler.core.units import NS_PER_MS, NS_PER_S
from serving.core.runlog import percentile
from serving.metrics import COLUMNS
from serving.recorded import Recorded, RecordedRequest
from serving.result import Result

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
    """One statistic of one metric in both runs, in milliseconds. `recorded_ms` is the second run's where two simulated
    runs are compared."""

    metric: str
    statistic: str
    simulated_ms: float
    recorded_ms: float

    @property
    def difference_percent(self) -> float:
        return 100.0 * (self.simulated_ms / self.recorded_ms - 1.0)


@dataclass(frozen=True, slots=True)
class Paired:
    """One request in both runs: milliseconds of each metric that it has. start_s: when it began in the first run."""

    request_id: str
    start_s: float
    prompt_tokens: int
    output_tokens: int
    simulated_ms: Mapping[str, float]
    recorded_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures; the makespan is from the first queueing to the last token.

    error_ms: mean absolute difference per request of each metric. load: mean absolute difference in requests running
    and waiting at the recorded ticks, None without ticks. left_out: requests that did not finish in both of two
    simulated runs, which enter nothing.
    """

    requests: int
    figures: tuple[Figure, ...]
    error_ms: dict[str, float]
    load: dict[str, float] | None
    pairs: tuple[Paired, ...] = ()
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class _Times:
    """One side of a pair, in nanoseconds of its own clock."""

    start_ns: int
    first_token_ns: int
    finish_ns: int


def read_run(path: Path) -> list[SimulatedRequest]:
    """The rows of a replay's CSV, in trace order.

    Raises ConfigError naming file and line when it is malformed or a request did not finish.
    """
    found = []
    for line, row in _rows(path):
        if row["outcome"] != "finished":
            raise ConfigError(f"{path}:{line}: outcome is {row['outcome']!r}; only finished requests can be compared")
        found.append(_simulated(path, line, row))
    return found


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    lines = csv.reader(io.StringIO(read_text(path)))
    if tuple(next(lines, [])) != COLUMNS:
        raise ConfigError(f"{path}:1: not the CSV of a replay; its header is {','.join(COLUMNS)}")
    for cells in lines:
        if len(cells) != len(COLUMNS):
            raise ConfigError(f"{path}:{lines.line_num}: {len(cells)} cells, a row has {len(COLUMNS)}")
        yield lines.line_num, dict(zip(COLUMNS, cells, strict=True))


def _simulated(path: Path, line: int, row: Mapping[str, str]) -> SimulatedRequest:
    try:
        numbers = (int(row[name]) for name in SimulatedRequest.__slots__[1:])
        return SimulatedRequest(row["request_id"], *numbers)
    except ValueError:
        raise ConfigError(f"{path}:{line}: times and counts must be integers") from None


def compare(run: Path, recorded: Recorded, since: str = "queued") -> Comparison:
    """Pairs the rows of a replay's CSV with the recorded requests: by the recorded ids where the run has the same,
    else by number where its ids count from 0 (which they do unless the trace names its requests), else by row.

    since: "queued" counts the simulated TTFT and latency from queued_ns, when the simulated scheduler took the request
    in, as the recording does; "arrival" counts them from arrival_ns, for traces whose arrivals are queueing times.
    Raises ConfigError when the two runs are not of the same requests.
    """
    return compare_requests(str(run), read_run(run), recorded, since)


def compare_requests(
    run: str, requests: list[SimulatedRequest], recorded: Recorded, since: str = "queued"
) -> Comparison:
    """The same of rows that are read already; `run` names them in messages."""
    simulated = _paired(run, requests, recorded)
    sides = []
    for ours, theirs in zip(simulated, recorded.requests, strict=True):
        if (ours.prompt_tokens, ours.output_tokens) != (theirs.prompt_tokens, theirs.output_tokens):
            raise ConfigError(
                f"{run}: request {ours.request_id} has {ours.prompt_tokens} tokens in and {ours.output_tokens} out, "
                f"its recorded counterpart {theirs.request_id} {theirs.prompt_tokens} and {theirs.output_tokens}"
            )
        sides.append((_times(ours, since), _Times(theirs.queued_ns, theirs.first_token_ns, theirs.finish_ns)))
    spans = _span(simulated), _span(recorded.requests)
    return _compared(simulated, sides, spans, _load(simulated, recorded), 0)


def compare_runs(first: Path, second: Path, since: str = "arrival") -> Comparison:
    """Two replays of one trace, paired by request_id; the second stands where `compare` has the recording.

    since: from which time of each run TTFT and latency count, "arrival" or "queued". Requests that did not finish in
    both are left out and counted. Raises ConfigError when the runs are not of the same requests, or none is left.
    """
    runs = []
    for path in (first, second):
        rows = {row["request_id"]: (line, row) for line, row in _rows(path)}
        if len(rows) < sum(1 for _ in _rows(path)):
            raise ConfigError(f"{path}: a request_id appears twice")
        runs.append(rows)
    if odd := runs[0].keys() ^ runs[1].keys():
        name = min(odd)
        raise ConfigError(
            f"{first} and {second} are not of the same requests: only {first if name in runs[0] else second} has "
            f"request {name!r} ({len(odd)} such requests)"
        )
    ours, sides, others = [], [], []
    for name, (line, row) in runs[0].items():
        other_line, other = runs[1][name]
        if (row["outcome"], other["outcome"]) != ("finished", "finished"):
            continue
        one, two = _simulated(first, line, row), _simulated(second, other_line, other)
        if (one.prompt_tokens, one.output_tokens) != (two.prompt_tokens, two.output_tokens):
            raise ConfigError(
                f"{first}:{line} and {second}:{other_line}: request {name!r} has {one.prompt_tokens} tokens in and "
                f"{one.output_tokens} out in one, {two.prompt_tokens} and {two.output_tokens} in the other"
            )
        ours.append(one)
        others.append(two)
        sides.append((_times(one, since), _times(two, since)))
    if not ours:
        raise ConfigError(f"{first} and {second}: no request finished in both")
    return _compared(ours, sides, (_span(ours), _span(others)), None, len(runs[0]) - len(ours))


def _times(one: SimulatedRequest, since: str) -> _Times:
    return _Times(one.queued_ns if since == "queued" else one.arrival_ns, one.first_token_ns, one.finish_ns)


def _span(rows: Sequence[SimulatedRequest] | Sequence[RecordedRequest]) -> float:
    """Milliseconds from the first queueing to the last token."""
    return (max(one.finish_ns for one in rows) - min(one.queued_ns for one in rows)) / NS_PER_MS


def _compared(
    requests: Sequence[SimulatedRequest],
    sides: Sequence[tuple[_Times, _Times]],
    spans: tuple[float, float],
    load: dict[str, float] | None,
    left_out: int,
) -> Comparison:
    origin_ns = min(one.start_ns for one, _ in sides)
    values: dict[str, list[tuple[int, int]]] = {metric: [] for metric in METRICS}
    pairs = []
    for asked, (one, two) in zip(requests, sides, strict=True):
        found = _metrics(one, asked.output_tokens), _metrics(two, asked.output_tokens)
        for metric in found[0]:
            values[metric].append((found[0][metric], found[1][metric]))
        in_ms = [{metric: ns / NS_PER_MS for metric, ns in side.items()} for side in found]
        start_s = (one.start_ns - origin_ns) / NS_PER_S
        pairs.append(Paired(asked.request_id, start_s, asked.prompt_tokens, asked.output_tokens, *in_ms))
    figures = [figure for metric in METRICS if values[metric] for figure in _figures(metric, values[metric])]
    figures.append(Figure("makespan", "total", *spans))
    errors = {
        metric: sum(abs(a - b) for a, b in found) / len(found) / NS_PER_MS for metric, found in values.items() if found
    }
    return Comparison(len(pairs), tuple(figures), errors, load, tuple(pairs), left_out)


def _metrics(one: _Times, output_tokens: int) -> dict[str, int]:
    """Nanoseconds of each metric; none for the time between tokens of a single one."""
    found = {"ttft": one.first_token_ns - one.start_ns, "latency": one.finish_ns - one.start_ns}
    if output_tokens > 1:
        found["tpot"] = round((one.finish_ns - one.first_token_ns) / (output_tokens - 1))
    return found


def simulated_requests(result: Result) -> list[SimulatedRequest]:
    """What read_run would read of a finished replay. Raises ConfigError when a request did not finish."""
    found = []
    for asked, got in zip(result.trace.requests, result.records, strict=True):
        times = got.arrival_ns, got.queued_ns, got.scheduled_ns, got.first_token_ns, got.finish_ns
        known = [one for one in times if one is not None]
        if got.outcome != "finished" or len(known) < len(times):
            raise ConfigError(f"request {asked.request_id}: outcome is {got.outcome!r}; only finished ones compare")
        found.append(SimulatedRequest(asked.request_id, asked.prompt_tokens, asked.output_tokens, *known))
    return found


def _paired(run: str, simulated: list[SimulatedRequest], recorded: Recorded) -> list[SimulatedRequest]:
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
