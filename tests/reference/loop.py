"""The event loop of the specification: at every instant the arrivals first, then the step ends by group."""

from collections.abc import Callable, Sequence

from reference.engine import Engine, Group
from reference.request import Request

NEVER = -1


def run(
    groups: Sequence[Group],
    requests: Sequence[Request],
    route: Callable[[Sequence[Engine], Request], int],
    *,
    horizon_ns: int | None = None,
    observe: Callable[[int, Group], None] | None = None,
    max_concurrency: int | None = None,
) -> None:
    """Replay `requests`, sorted by arrival_ns; what has not finished by `horizon_ns` stays unfinished.

    A call of a session follows the one before it: it arrives its tool's duration after that one's last token, behind
    the requests of that instant that came by themselves. All calls after a rejected one are rejected. What would be one
    more than `max_concurrency` in flight is held, and arrives in turn when one leaves, like a call.
    """
    held: list[Request] = []
    try:
        _run(groups, requests, route, horizon_ns, observe, max_concurrency, held)
    finally:
        for request in held:
            request.arrival_ns = NEVER


def _run(
    groups: Sequence[Group],
    requests: Sequence[Request],
    route: Callable[[Sequence[Engine], Request], int],
    horizon_ns: int | None,
    observe: Callable[[int, Group], None] | None,
    max_concurrency: int | None,
    held: list[Request],
) -> None:
    going: list[Request] = []
    engines = [engine for group in groups for engine in group.engines]
    group_of = [number for number, group in enumerate(groups) for _ in group.engines]
    ends: dict[int, int] = {}
    waiting = list(requests)
    calls: list[Request] = []
    followed = [request for request in requests if request.following is not None]
    while waiting or calls or ends:
        next_end = min(ends.items(), key=lambda item: (item[1], item[0]), default=None)
        arrivals = [*waiting[:1], *sorted(calls, key=lambda call: (call.arrival_ns, call.index))[:1]]
        next_ns = min((request.arrival_ns for request in arrivals), default=None)
        if next_ns is not None and (next_end is None or next_ns <= next_end[1]):
            now_ns = next_ns
            if horizon_ns is not None and now_ns > horizon_ns:
                return
            woken = set()
            together = [request for request in waiting if request.arrival_ns == now_ns]
            together += sorted((call for call in calls if call.arrival_ns == now_ns), key=lambda call: call.index)
            waiting = [request for request in waiting if request not in together]
            calls = [call for call in calls if call not in together]
            for request in together:
                if max_concurrency is not None and not any(one is request for one in going):
                    if len(going) >= max_concurrency:
                        held.append(request)
                        continue
                    going.append(request)
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
        for gone in [request for request in going if request.outcome != "unfinished"]:
            going.remove(gone)
            if held:
                nxt = held.pop(0)
                nxt.arrival_ns = now_ns
                going.append(nxt)
                calls.append(nxt)
        left = [request for request in followed if request.outcome != "unfinished"]
        followed = [request for request in followed if request not in left]
        while left:
            request = left.pop(0)
            call = request.following
            if request.outcome == "finished":
                call.arrival_ns = now_ns + call.tool_duration_ns
                calls.append(call)
            else:
                call.outcome = "rejected"
            if call.following is not None:
                (followed if request.outcome == "finished" else left).append(call)
