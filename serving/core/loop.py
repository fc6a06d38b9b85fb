"""The event loop: arrivals and step ends in one total order, on an integer nanosecond clock."""

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

from serving.core.engine import Engine, Group
from serving.core.request import Request
from serving.core.runlog import RunLog


class Router(Protocol):
    """Chooses the engine of an arriving request; returns its position in `engines`."""

    def __call__(self, engines: Sequence[Engine], request: Request) -> int: ...


Observer = Callable[[int, Group], None]


def run(
    groups: Sequence[Group],
    requests: Sequence[Request],
    route: Router,
    log: RunLog,
    *,
    horizon_ns: int | None = None,
    observe: Observer | None = None,
) -> None:
    """Replay `requests`, sorted by arrival_ns, and record every one of them in `log`.

    Events at equal times: arrivals in trace order, then step ends by group. A request that arrives while its group
    is in a step is queued when that step ends. Nothing after `horizon_ns` happens: what has not finished by then is
    recorded as unfinished. `observe(now_ns, group)` is called after each step end, before the next step begins.
    """
    engines = [engine for group in groups for engine in group.engines]
    group_of = [number for number, group in enumerate(groups) for _ in group.engines]
    step_ends: list[tuple[int, int]] = []
    stepping = [False] * len(groups)

    def begin(number: int, now_ns: int) -> None:
        duration_ns, refused = groups[number].begin_step(now_ns)
        stepping[number] = duration_ns is not None
        if duration_ns is not None:
            heapq.heappush(step_ends, (now_ns + duration_ns, number))
        for request in refused:
            log.record(request)

    arrived = 0
    while arrived < len(requests) or step_ends:
        if arrived < len(requests) and (not step_ends or requests[arrived].arrival_ns <= step_ends[0][0]):
            now_ns = requests[arrived].arrival_ns
            if horizon_ns is not None and now_ns > horizon_ns:
                break
            woken: dict[int, None] = {}
            while arrived < len(requests) and requests[arrived].arrival_ns == now_ns:
                position = route(engines, requests[arrived])
                engines[position].submit(requests[arrived])
                woken[group_of[position]] = None
                arrived += 1
            for number in sorted(woken):
                if not stepping[number]:
                    begin(number, now_ns)
        else:
            now_ns, number = step_ends[0]
            if horizon_ns is not None and now_ns > horizon_ns:
                break
            heapq.heappop(step_ends)
            for request in groups[number].end_step(now_ns):
                log.record(request)
            if observe is not None:
                observe(now_ns, groups[number])
            begin(number, now_ns)

    for request in requests:
        if request.outcome == "unfinished":
            log.record(request)
