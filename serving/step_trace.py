"""The steps of a replay as a trace in the Chrome event format, which Perfetto and chrome://tracing show.

One process per group of engines, one thread per engine, one slice per step with its batch, and counters of requests and
KV use at the start of each step. Times are microseconds of the simulated clock.
"""

import json
from collections.abc import Sequence
from typing import IO, Any, Final

from profiler.core.errors import ConfigError
from profiler.core.units import NS_PER_S, NS_PER_US
from serving.core.shape import StepCost, StepShape
from serving.result import Result
from serving.watch import WatchedGroup

MAX_EVENTS: Final = 300_000


class StepTrace:
    """Watches a replay (serving.watch.Watch): keeps the steps that begin within the window, up to `max_events` events.

    window_ns: first and last nanosecond at which a step may begin. left_out: events past max_events.
    """

    def __init__(self, window_ns: tuple[int, int | None] = (0, None), max_events: int = MAX_EVENTS) -> None:
        self.window_ns = window_ns
        self.max_events = max_events
        self.left_out = 0
        self.now_ns = 0
        self.events: list[dict[str, Any]] = []
        self.groups: Sequence[WatchedGroup] = ()
        self._wrapped = 0
        self._ends_ns: dict[int, int] = {}

    def open(self, groups: Sequence[WatchedGroup]) -> None:
        self.groups = groups

    def advance(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def close(self) -> None:
        return

    def wrap(self, cost: StepCost) -> StepCost:
        """The cost of the next group, in their order, so that its steps are seen here."""
        self._wrapped += 1
        return _Seen(cost, self._wrapped - 1, self)

    def add(self, group: int, duration_ns: int, shapes: Sequence[StepShape | None]) -> None:
        """A step of `group` begins now, or, launched ahead, when the one before ends."""
        first_ns, last_ns = self.window_ns
        start_ns = max(self.now_ns, self._ends_ns.get(group, 0))
        self._ends_ns[group] = start_ns + duration_ns
        if start_ns < first_ns or (last_ns is not None and start_ns > last_ns):
            return
        engines = self.groups[group].engines
        if len(self.events) + 3 * len(engines) > self.max_events:
            self.left_out += 3 * len(engines)
            return
        start_us = start_ns / NS_PER_US
        for engine, shape in zip(engines, shapes, strict=True):
            where = {"pid": group, "tid": engine.index, "ts": start_us}
            self.events.append(
                {"name": _name(shape), "cat": "step", "ph": "X", "dur": duration_ns / NS_PER_US, **where,
                 "args": _batch(shape)}
            )  # fmt: skip
            requests = {"running": engine.running, "waiting": engine.waiting}
            self.events.append({"name": f"requests {engine.index}", "ph": "C", **where, "args": requests})
            usage = {"share": round(engine.kv_usage, 6)}
            self.events.append({"name": f"KV use {engine.index}", "ph": "C", **where, "args": usage})


class _Seen:
    """A step cost with an onlooker."""

    def __init__(self, cost: StepCost, group: int, trace: StepTrace) -> None:
        self.cost = cost
        self.group = group
        self.trace = trace

    def step_ns(self, shapes: Sequence[StepShape | None]) -> int:
        duration_ns = self.cost.step_ns(shapes)
        self.trace.add(self.group, duration_ns, shapes)
        return duration_ns


def _name(shape: StepShape | None) -> str:
    if shape is None:
        return "dummy"
    if shape.prefills:
        return "mixed" if shape.decode_requests else "prefill"
    return "decode"


def _batch(shape: StepShape | None) -> dict[str, int]:
    if shape is None:
        return {}
    return {
        "prefill_requests": len(shape.prefills),
        "prefill_tokens": sum(chunk for chunk, _ in shape.prefills),
        "prefill_context_tokens": sum(context for _, context in shape.prefills),
        "decode_requests": shape.decode_requests,
        "decode_kv_tokens": shape.decode_kv_sum_tokens,
        "decode_kv_max_tokens": shape.decode_kv_max_tokens,
        "sampled_sequences": shape.sampled_sequences,
    }


def parse_window(text: str) -> tuple[int, int | None]:
    """`START:END` in simulated seconds, either may be empty, as nanoseconds. Raises ConfigError for anything else."""
    start, colon, end = text.partition(":")
    try:
        first_ns = round(float(start or 0) * NS_PER_S)
        last_ns = round(float(end) * NS_PER_S) if end else None
    except (ValueError, OverflowError):
        colon = ""
        first_ns, last_ns = 0, None
    if not colon or first_ns < 0 or (last_ns is not None and last_ns < first_ns):
        raise ConfigError(f"--trace-window {text}: give START:END in seconds, such as 10:20, with END not before START")
    return first_ns, last_ns


def write_trace(trace: StepTrace, result: Result, stream: IO[str]) -> None:
    """The trace as JSON."""
    names = {engine: one for one in result.deployments for engine in one.engines}
    events: list[dict[str, Any]] = []
    for number, group in enumerate(trace.groups):
        first = names[group.engines[0].index]
        label = f"group {number}: {first.model} on {first.hardware}"
        events.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": label}})
        for engine in group.engines:
            thread = {"name": "thread_name", "ph": "M", "pid": number, "tid": engine.index}
            events.append({**thread, "args": {"name": f"instance {engine.index}"}})
    other = {
        "cluster": result.cluster,
        "window_ns": list(trace.window_ns),
        "events": len(trace.events),
        "events_left_out": trace.left_out,
    }
    stream.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(other) + ', "traceEvents": [\n')
    stream.write(",\n".join(json.dumps(event, allow_nan=False) for event in (*events, *trace.events)))
    stream.write("\n]}\n")
