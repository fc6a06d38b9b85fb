"""Edits of a stream of requests. The calls of a session stay together and are kept or dropped as one."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from profiler.core.errors import ConfigError
from profiler.core.units import NS_PER_S
from serving.traces import PrefixHashes, TraceRequest
from serving.traces._rows import MAX_NS

Unit = tuple[TraceRequest, ...]


def units(requests: Iterable[TraceRequest]) -> Iterator[Unit]:
    """Requests one by one, the calls of a session as one tuple."""
    calls: list[TraceRequest] = []
    for request in requests:
        if calls and not request.call_index:
            yield tuple(calls)
            calls = []
        calls.append(request)
    if calls:
        yield tuple(calls)


def rescaled(requests: Iterable[TraceRequest], factor: Fraction) -> Iterator[TraceRequest]:
    """Arrivals times `factor`, to the nearest nanosecond. Tool durations stay: they are not the arrivals'.

    Raises ConfigError for an arrival beyond 2**63 ns.
    """
    for request in requests:
        arrival_ns = round(request.arrival_ns * factor)
        if arrival_ns > MAX_NS:
            raise ConfigError(f"request {request.request_id!r} would arrive at {arrival_ns} ns, later than 2**63 ns")
        yield replace(request, arrival_ns=arrival_ns)


def factor_for_rate(requests: Sequence[TraceRequest], rate_per_s: Fraction) -> Fraction:
    """The factor that brings the arrivals to a mean rate: those after the first, over the time from first to last.

    Raises ConfigError where all arrive at once, since no factor spreads them.
    """
    arrivals = [request.arrival_ns for request in requests if not request.call_index]
    span_ns = max(arrivals) - min(arrivals)
    if not span_ns:
        raise ConfigError("all requests arrive at one time: no factor gives them a rate")
    return (len(arrivals) - 1) * NS_PER_S / (rate_per_s * span_ns)


@dataclass(frozen=True, slots=True)
class Window:
    """Arrivals in [start_ns, stop_ns), then past the first `skip` rows at most `count` of them. None: no limit."""

    start_ns: int | None = None
    stop_ns: int | None = None
    skip: int = 0
    count: int | None = None


def cut(requests: Iterable[TraceRequest], window: Window, keep_times: bool = False) -> Iterator[TraceRequest]:
    """The rows in a window of a trace in order of arrival.

    Unless times are kept they count from the start of the window, or from the first row where rows were skipped.
    """
    place = 0
    origin_ns = window.start_ns or 0
    for unit in units(requests):
        arrival_ns = unit[0].arrival_ns
        if window.stop_ns is not None and arrival_ns >= window.stop_ns:
            return
        if window.start_ns is not None and arrival_ns < window.start_ns:
            continue
        place += 1
        if place <= window.skip:
            continue
        if window.count is not None and place > window.skip + window.count:
            return
        if window.skip and place == window.skip + 1:
            origin_ns = arrival_ns
        for call in unit:
            yield call if keep_times else replace(call, arrival_ns=call.arrival_ns - origin_ns)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Legal lengths in tokens, both ends included. None: no limit."""

    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    min_output_tokens: int | None = None
    max_output_tokens: int | None = None
    max_total_tokens: int | None = None

    def fit(self, request: TraceRequest) -> bool:
        prompt_tokens, output_tokens = request.prompt_tokens, request.output_tokens
        return (
            (self.min_prompt_tokens is None or prompt_tokens >= self.min_prompt_tokens)
            and (self.max_prompt_tokens is None or prompt_tokens <= self.max_prompt_tokens)
            and (self.min_output_tokens is None or output_tokens >= self.min_output_tokens)
            and (self.max_output_tokens is None or output_tokens <= self.max_output_tokens)
            and (self.max_total_tokens is None or prompt_tokens + output_tokens <= self.max_total_tokens)
        )


def filtered(requests: Iterable[TraceRequest], lengths: Lengths) -> Iterator[TraceRequest]:
    """The rows that fit; a session fits when all its calls do."""
    for unit in units(requests):
        if all(lengths.fit(call) for call in unit):
            yield from unit


def merged(traces: Sequence[Iterable[TraceRequest]], shared_content: bool = False) -> Iterator[TraceRequest]:
    """Several traces as one, in order of arrival; of equal arrivals the earlier trace's come first.

    Request and session ids get the position of their trace in front ("0:17"). Equal hash ids of two traces mean nothing
    unless `shared_content` says that both come from one source, so they are told apart; token ids are content itself.
    """
    streams = [
        ((unit[0].arrival_ns, position, unit) for unit in units(_own(requests, position, len(traces), shared_content)))
        for position, requests in enumerate(traces)
    ]
    for _, _, unit in heapq.merge(*streams, key=lambda entry: entry[:2]):
        yield from unit


def _own(requests: Iterable[TraceRequest], position: int, traces: int, shared: bool) -> Iterator[TraceRequest]:
    for request in requests:
        prefix = request.prefix
        if prefix is not None and not shared:
            prefix = PrefixHashes(
                tuple(one * traces + position for one in prefix.ids), prefix.block_tokens, prefix.tokens
            )
        yield replace(
            request,
            request_id=f"{position}:{request.request_id}",
            session_id=None if request.session_id is None else f"{position}:{request.session_id}",
            prefix=prefix,
        )


def by_arrival(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """In order of arrival; rows of equal arrival keep their order."""
    ordered = sorted(units(requests), key=lambda unit: unit[0].arrival_ns)
    return [call for unit in ordered for call in unit]
