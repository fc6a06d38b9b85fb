"""At most so many requests in flight, as clients keep it that send the next one when one is done."""

import heapq
from collections import deque
from collections.abc import Iterator

from serving.core.request import NEVER, Request


class Window:
    """Who may go in, and who goes in next. limit: None for any number.

    A request whose time has come when `limit` others are in flight is held, in order, and arrives when one of them
    leaves. Its place is kept until then, so that none that arrives at that very time goes before it.
    """

    __slots__ = ("_held", "_in_flight", "_limit", "_places")

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._in_flight = 0
        self._held: deque[Request] = deque()
        self._places: set[int] = set()

    def admits(self, request: Request) -> bool:
        """`request` arrives: True when it goes in, False when it is held."""
        if self._limit is None:
            return True
        if request.index in self._places:
            self._places.discard(request.index)
            return True
        if self._in_flight >= self._limit:
            self._held.append(request)
            return False
        self._in_flight += 1
        return True

    def leave(self, now_ns: int, released: list[tuple[int, int, Request]]) -> None:
        """One left: the first that is held is put among the released calls, arriving now."""
        if self._limit is None:
            return
        if not self._held:
            self._in_flight -= 1
            return
        request = self._held.popleft()
        request.arrival_ns = now_ns
        self._places.add(request.index)
        heapq.heappush(released, (now_ns, request.index, request))

    def held(self) -> Iterator[Request]:
        """Those that never went in; they have not arrived."""
        for request in self._held:
            request.arrival_ns = NEVER
            yield request
