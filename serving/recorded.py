"""Recorded runs of a real engine: requests.jsonl, timeseries.csv and meta.json in one folder.

requests.jsonl holds one request per line in the order of sending: request_id, input_toks, output_toks, arrival_time
(wall clock of the load generator), queued_ts, scheduled_ts, first_token_ts, last_token_ts (monotonic clock of the
engine). The two clocks have different origins, so everything is counted from queued_ts, when the engine's scheduler
took the request in.
"""

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.load import read_mapping, read_text
from profiler.core.units import NS_PER_S

_STAMPS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
_COUNTS = ("input_toks", "output_toks")
_TICKS = ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct")


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """Times in nanoseconds after the run's first queueing."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    queued_ns: int
    scheduled_ns: int
    first_token_ns: int
    finish_ns: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The engine's own statistics, once per interval: requests running and waiting, time since the start."""

    time_ns: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded run. ticks is empty where no time series was kept."""

    path: Path
    meta: Mapping[str, Any]
    requests: tuple[RecordedRequest, ...]
    ticks: tuple[Tick, ...]


def read_recorded(path: Path) -> Recorded:
    """Reads the folder of a recorded run, or one that holds it as `vllm`.

    Raises ConfigError naming the file and line that is missing or malformed.
    """
    folder = path / "vllm" if (path / "vllm" / "requests.jsonl").is_file() else path
    rows = _requests(folder / "requests.jsonl")
    start = min(row["queued_ts"] for row in rows)
    requests = tuple(
        RecordedRequest(
            str(row["request_id"]),
            row["input_toks"],
            row["output_toks"],
            *(round((row[key] - start) * NS_PER_S) for key in _STAMPS),
        )
        for row in rows
    )
    series = folder / "timeseries.csv"
    return Recorded(folder, read_mapping(folder / "meta.json"), requests, _ticks(series) if series.is_file() else ())


def _requests(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, text in enumerate(read_text(path).splitlines(), start=1):
        if text.strip():
            rows.append(_request(text, f"{path}:{number}"))
    if not rows:
        raise ConfigError(f"{path}: no requests")
    return rows


def _request(text: str, at: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{at}: not valid JSON: {error.msg}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{at}: a request must be a JSON object, found {type(row).__name__}")
    for key in (*_COUNTS, *_STAMPS):
        legal = int if key in _COUNTS else (int, float)
        value = row.get(key)
        if isinstance(value, bool) or not isinstance(value, legal) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{at}: {key} must be a positive {'integer' if key in _COUNTS else 'number'}: {value!r}")
    stamps = [row[key] for key in _STAMPS]
    if stamps != sorted(stamps):
        raise ConfigError(f"{at}: {', '.join(_STAMPS)} must not decrease")
    if not isinstance(row.get("request_id"), str):
        raise ConfigError(f"{at}: request_id must be a text, found {row.get('request_id')!r}")
    return row


def _ticks(path: Path) -> tuple[Tick, ...]:
    lines = csv.reader(io.StringIO(read_text(path)))
    if tuple(next(lines, [])) != _TICKS:
        raise ConfigError(f"{path}:1: the header must be {','.join(_TICKS)}")
    ticks = []
    for row in lines:
        try:
            time, running, waiting = float(row[0]), int(row[3]), int(row[4])
        except (ValueError, IndexError):
            raise ConfigError(f"{path}:{lines.line_num}: needs numbers for {', '.join(_TICKS)}") from None
        ticks.append(Tick(round(time * NS_PER_S), running, waiting))
    return tuple(ticks)


def retimed(dataset: Path, recorded: Recorded) -> str:
    """The JSONL trace `dataset` with the recorded queueing times as its arrivals, sorted by them.

    A request keeps its id; without one it gets its row number in `dataset`, so that it can be paired again.
    Raises ConfigError when the rows are not those of the recorded run.
    """
    rows = [(number, text) for number, text in enumerate(read_text(dataset).splitlines(), start=1) if text.strip()]
    if len(rows) != len(recorded.requests):
        raise ConfigError(f"{dataset}: {len(rows)} requests, the recorded run has {len(recorded.requests)}")
    lines = []
    for position, ((number, text), request) in enumerate(zip(rows, recorded.requests, strict=True)):
        at = f"{dataset}:{number}"
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{at}: not valid JSON: {error.msg}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{at}: a request must be a JSON object, found {type(row).__name__}")
        asked = row.get("input_toks"), row.get("output_toks")
        if asked != (request.prompt_tokens, request.output_tokens):
            raise ConfigError(
                f"{at}: input and output of {asked[0]} and {asked[1]} tokens, the recorded request has "
                f"{request.prompt_tokens} and {request.output_tokens}"
            )
        row = {"request_id": str(position)} | row | {"arrival_time_ns": request.queued_ns}
        lines.append((request.queued_ns, json.dumps(row) + "\n"))
    return "".join(text for _, text in sorted(lines, key=lambda line: line[0]))
