"""The least loaded engine, scored as vLLM's internal load balancer scores data-parallel ranks.

score = max(requests in flight, waiting + running) + 6 * waiting * max(0, KV usage - 0.5), the second term only while
requests wait. Of equal scores the first wins, counted from a start that moves on by one with every request.
vLLM reads these counts from reports up to 100 ms old; here they are those of the moment.
"""

from collections.abc import Sequence

from serving.core.engine import Engine
from serving.core.loop import Router
from serving.core.request import Request


def create(seed: int = 0) -> Router:
    start = 0

    def route(engines: Sequence[Engine], request: Request) -> int:
        nonlocal start
        if len(engines) == 1:
            return 0
        order = range(start, start + len(engines))
        start = (start + 1) % len(engines)
        return min((position % len(engines) for position in order), key=lambda position: score(engines[position]))

    return route


def score(engine: Engine) -> float:
    waiting = engine.waiting
    in_flight = max(engine.assigned, waiting + engine.running)
    if not waiting:
        return in_flight
    return in_flight + 6 * waiting * max(0.0, engine.kv_usage - 0.5)
