"""The event loop: arrivals and step ends in one total order, on an integer nanosecond clock."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Protocol

from serving.core.engine import Engine, Group
from serving.core.pipeline import PipelineGroup
from serving.core.request import Request
from serving.core.runlog import RunLog
from serving.core.window import Window


class Router(Protocol):
    """Chooses the engine of an arriving request; returns its position in `engines`."""

    def __call__(self, engines: Sequence[Engine], request: Request) -> int: ...


AnyGroup = Group | PipelineGroup
Observer = Callable[[int, AnyGroup], None]


def run(
    groups: Sequence[AnyGroup],
    requests: Iterable[Request],
    route: Router,
    log: RunLog,
    *,
    horizon_ns: int | None = None,
    observe: Observer | None = None,
    advance: Callable[[int], None] | None = None,
    max_concurrency: int | None = None,
) -> None:
    """Replay `requests`, given in order of arrival_ns, and record every one of them in `log`.

    max_concurrency: most requests in flight; the others arrive, in order, when one leaves (serving.core.window).
    The calls of a session come as the first of them, each with the next as its `following`: a call is released
    `tool_duration_ns` after the one before it has finished, and all that follow a rejected call are rejected with it.
    Events at equal times: arrivals in the order given, then released calls by index, then step ends by group; a call
    released at the very end of a step finds the next step begun. A request that arrives while its group is in a step is
    queued when that step ends. Nothing after `horizon_ns` happens: what has not finished by then is recorded as
    unfinished. `observe(now_ns, group)` is called after each step end, once the next step is composed;
    `advance(now_ns)` before the events of `now_ns`, with everything before them done.
    Raises ValueError for requests out of order.
    """
    engines = [engine for group in groups for engine in group.engines]
    group_of = [number for number, group in enumerate(groups) for _ in group.engines]
    log.open(groups)
    step_ends: list[tuple[int, int]] = []
    stepping = [False] * len(groups)
    left: list[Request] = []
    alive: dict[int, Request] = {}
    arrivals = iter(requests)
    arriving = next(arrivals, None)
    released: list[tuple[int, int, Request]] = []
    window = Window(max_concurrency)
    next_ns = _next_ns(arriving, released)
    now_ns = 0
    while step_ends or next_ns != inf:
        if not step_ends or next_ns <= step_ends[0][0]:
            if next_ns < now_ns:
                raise ValueError(f"request {arriving.index if arriving else -1} arrives before the one given before it")
            now_ns = int(next_ns)
            if horizon_ns is not None and now_ns > horizon_ns:
                break
            if advance is not None:
                advance(now_ns)
            woken: set[int] = set()
            while next_ns == now_ns:
                if arriving is not None and arriving.arrival_ns == now_ns:
                    request, arriving = arriving, next(arrivals, None)
                else:
                    request = heapq.heappop(released)[2]
                next_ns = _next_ns(arriving, released)
                if not window.admits(request):
                    continue
                position = route(engines, request)
                engines[position].submit(request)
                alive[request.index] = request
                woken.add(group_of[position])
            for number in sorted(woken):
                if not stepping[number]:
                    duration_ns = groups[number].wake(now_ns, left)
                    stepping[number] = duration_ns is not None
                    if duration_ns is not None:
                        heapq.heappush(step_ends, (now_ns + duration_ns, number))
        else:
            now_ns, number = step_ends[0]
            if horizon_ns is not None and now_ns > horizon_ns:
                break
            if advance is not None:
                advance(now_ns)
            duration_ns = groups[number].end_step(now_ns, left)
            if duration_ns is not None:
                heapq.heapreplace(step_ends, (now_ns + duration_ns, number))
            else:
                heapq.heappop(step_ends)
                stepping[number] = False
            if observe is not None:
                observe(now_ns, groups[number])
        if left:
            for request in left:
                del alive[request.index]
                log.record(request)
                window.leave(now_ns, released)
                if request.following is not None:
                    release(request, now_ns, released, log)
            next_ns = _next_ns(arriving, released)
            left.clear()

    for request in [*alive.values(), *(call for *_, call in sorted(released)), *window.held()]:
        record_all(request, log)
    while arriving is not None:
        record_all(arriving, log)
        arriving = next(arrivals, None)


def _next_ns(arriving: Request | None, released: Sequence[tuple[int, int, Request]]) -> float:
    """When the next request arrives, of the trace or of a session; infinite when none is known."""
    next_ns = inf if arriving is None else arriving.arrival_ns
    return min(next_ns, released[0][0]) if released else next_ns


def release(request: Request, now_ns: int, released: list[tuple[int, int, Request]], log: RunLog) -> None:
    """`request` has left at `now_ns`: its next call arrives after the tool, or the rest of its session is rejected."""
    call = request.following
    assert call is not None
    if request.outcome == "finished":
        call.arrival_ns = now_ns + call.tool_duration_ns
        heapq.heappush(released, (call.arrival_ns, call.index, call))
        return
    rest: Request | None = call
    while rest is not None:
        rest.outcome = "rejected"
        rest = rest.following
    record_all(call, log)


def record_all(request: Request | None, log: RunLog) -> None:
    """Record a request and the calls that follow it."""
    while request is not None:
        log.record(request)
        request = request.following
