"""The event loop: arrivals and step ends in one total order, on an integer nanosecond clock."""

import heapq
from collections.abc import Callable, Iterable, Sequence
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
    requests: Iterable[Request],
    route: Router,
    log: RunLog,
    *,
    horizon_ns: int | None = None,
    observe: Observer | None = None,
) -> None:
    """Replay `requests`, given in order of arrival_ns, and record every one of them in `log`.

    Events at equal times: arrivals in the order given, then step ends by group. A request that arrives while its group
    is in a step is queued when that step ends. Nothing after `horizon_ns` happens: what has not finished by then is
    recorded as unfinished. `observe(now_ns, group)` is called after each step end, once the next step is composed.
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
    now_ns = 0
    while arriving is not None or step_ends:
        if arriving is not None and (not step_ends or arriving.arrival_ns <= step_ends[0][0]):
            if arriving.arrival_ns < now_ns:
                raise ValueError(f"request {arriving.index} arrives before the one given before it")
            now_ns = arriving.arrival_ns
            if horizon_ns is not None and now_ns > horizon_ns:
                break
            woken: set[int] = set()
            while arriving is not None and arriving.arrival_ns == now_ns:
                position = route(engines, arriving)
                engines[position].submit(arriving)
                alive[arriving.index] = arriving
                woken.add(group_of[position])
                arriving = next(arrivals, None)
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
            left.clear()

    for request in alive.values():
        log.record(request)
    while arriving is not None:
        log.record(arriving)
        arriving = next(arrivals, None)
