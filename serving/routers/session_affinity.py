"""All requests of a session go to the engine that had its first one; anything else to the least loaded engine.

The engine of a session keeps what its calls have in common in its prefix cache. Requests without a session have nothing
to come back to. A session stays where it is however loaded that engine becomes.
"""

from collections.abc import Sequence

from serving.core.engine import Engine
from serving.core.loop import Router
from serving.core.request import Request
from serving.routers import least_loaded


def create(seed: int = 0) -> Router:
    fallback = least_loaded.create()
    home: dict[str, int] = {}

    def route(engines: Sequence[Engine], request: Request) -> int:
        session = request.session
        if session is None:
            return fallback(engines, request)
        if session not in home:
            home[session] = fallback(engines, request)
        return home[session]

    return route
