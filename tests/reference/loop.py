"""The event loop of the specification: at every instant the arrivals first, then the step ends by group."""

from collections.abc import Callable, Sequence

from reference.engine import Engine, Group
from reference.request import Request


def run(
    groups: Sequence[Group],
    requests: Sequence[Request],
    route: Callable[[Sequence[Engine], Request], int],
    *,
    horizon_ns: int | None = None,
    observe: Callable[[int, Group], None] | None = None,
) -> None:
    """Replay `requests`, sorted by arrival_ns; what has not finished by `horizon_ns` stays unfinished."""
    engines = [engine for group in groups for engine in group.engines]
    group_of = [number for number, group in enumerate(groups) for _ in group.engines]
    ends: dict[int, int] = {}
    waiting = list(requests)
    while waiting or ends:
        next_end = min(ends.items(), key=lambda item: (item[1], item[0]), default=None)
        if waiting and (next_end is None or waiting[0].arrival_ns <= next_end[1]):
            now_ns = waiting[0].arrival_ns
            if horizon_ns is not None and now_ns > horizon_ns:
                return
            woken = set()
            while waiting and waiting[0].arrival_ns == now_ns:
                request = waiting.pop(0)
                position = route(engines, request)
                engines[position].submit(request)
                woken.add(group_of[position])
            numbers = [number for number in sorted(woken) if number not in ends]
            durations = {number: groups[number].wake(now_ns) for number in numbers}
        else:
            assert next_end is not None
            number, now_ns = next_end
            if horizon_ns is not None and now_ns > horizon_ns:
                return
            del ends[number]
            durations = {number: groups[number].end_step(now_ns)}
            if observe is not None:
                observe(now_ns, groups[number])
        for number, duration_ns in durations.items():
            if duration_ns is not None:
                ends[number] = now_ns + duration_ns
