"""The engine with the least prompt to work through: what it has in flight, and what of this prompt it has not cached.

cost = prompt tokens of its requests in flight + prompt tokens of this request less the longest prefix that its cache
holds at this moment. A cached prefix thus draws a request until the engine has as many prompt tokens more in flight as
the prefix saves. Of equal costs the engine with fewer requests in flight wins, then the first, counted from a start
that moves on by one with every request. Without token ids or hashes in the trace nothing is ever found, and the rule
balances prompt tokens.

The cache is read directly: an index that learns of blocks from events would lag behind it.
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
        order = [position % len(engines) for position in range(start, start + len(engines))]
        start = (start + 1) % len(engines)
        return min(order, key=lambda position: (cost_tokens(engines[position], request), engines[position].assigned))

    return route


def cost_tokens(engine: Engine, request: Request) -> int:
    return engine.assigned_tokens + request.prompt_tokens - engine.cached_tokens(request)
