"""The requests of a point: a trace, or a description, at a rate and for a seed."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Final

from profiler.core.errors import ConfigError
from serving.trace_tools.edit import factor_for_rate, rescaled
from serving.traces import Trace, TraceRequest, read_trace
from serving.workload_description import Description, is_description, read_description, requests_of

_BLOCK_ROWS: Final = 50


@dataclass(frozen=True, slots=True)
class Traffic:
    """Where requests come from. Exactly one of trace and description is set."""

    path: Path
    trace: Trace | None
    description: Description | None

    @property
    def requests(self) -> int | None:
        """Rows of the trace, None for a description, which has no end."""
        return len(self.trace.requests) if self.trace else None

    @property
    def sessions(self) -> bool:
        """True for a trace with agentic sessions."""
        return self.trace is not None and any(row.call_index is not None for row in self.trace.requests)

    @property
    def refuses_drawing(self) -> str:
        return f"{self.path}: agentic sessions are not drawn from, only replayed as they are: use seed 0 alone"

    def at(self, rate_per_s: float | None, seed: int, rows: int) -> Trace:
        """`rows` requests (sessions, of a description that has them) at a mean rate of arrivals.

        rate_per_s None keeps the source's own, 0 lets all arrive at once. Equal arguments give equal requests.
        Of a trace, seed 0 is its first rows in their order; any other seed draws runs of 50 rows from it with their
        gaps (circular block bootstrap), which keeps bursts and neighbours together.
        Raises ConfigError when seed 0 asks for more rows than the trace has.
        """
        if self.description is not None:
            made = tuple(requests_of(self.description, rows, seed, rate_per_s or None))
            found = Trace("description", made)
        else:
            assert self.trace is not None
            found = Trace(self.trace.format, self._rows(self.trace.requests, seed, rows), self.trace.skipped)
        if rate_per_s == 0:
            return replace(found, requests=tuple(replace(row, arrival_ns=0) for row in found.requests))
        if rate_per_s is None or len(found.requests) < 2:
            return found
        factor = factor_for_rate(found.requests, Fraction(rate_per_s))
        return replace(found, requests=tuple(rescaled(found.requests, factor)))

    def _rows(self, own: Sequence[TraceRequest], seed: int, rows: int) -> tuple[TraceRequest, ...]:
        if seed == 0:
            if rows > len(own):
                raise ConfigError(
                    f"{self.path}: has {len(own)} requests, {rows} are asked for; ask for at most {len(own)}, or "
                    "leave out seed 0: other seeds draw from the trace as often as needed"
                )
            return tuple(own[:rows])
        if self.sessions:
            raise ConfigError(self.refuses_drawing)
        return _resampled(own, seed, rows)


def open_traffic(path: Path) -> Traffic:
    """A trace of any format, or a YAML workload description. Raises ConfigError for either one's faults."""
    if is_description(path):
        return Traffic(path, None, read_description(path))
    return Traffic(path, read_trace(path, sessions=True), None)


def _resampled(own: Sequence[TraceRequest], seed: int, rows: int) -> tuple[TraceRequest, ...]:
    """Runs of consecutive rows, each with the gap before it; the first row of all has the gap of the last before it."""
    draw = random.Random(f"resample {seed}")
    gaps = [max(0, after.arrival_ns - before.arrival_ns) for before, after in itertools.pairwise(own)]
    mean_ns = sum(gaps) // len(gaps) if gaps else 0
    made: list[TraceRequest] = []
    now_ns = 0
    while len(made) < rows:
        start = draw.randrange(len(own))
        for offset in range(min(_BLOCK_ROWS, rows - len(made))):
            place = (start + offset) % len(own)
            now_ns += gaps[place - 1] if place else mean_ns
            made.append(replace(own[place], request_id=str(len(made)), arrival_ns=now_ns))
    return tuple(made)
