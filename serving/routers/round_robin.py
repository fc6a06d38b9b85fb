"""Each request goes to the engine after the one of the request before it."""

from collections.abc import Sequence

from serving.core.engine import Engine
from serving.core.loop import Router
from serving.core.request import Request


def create(seed: int = 0) -> Router:
    following = 0

    def route(engines: Sequence[Engine], request: Request) -> int:
        nonlocal following
        position = following % len(engines)
        following = position + 1
        return position

    return route
