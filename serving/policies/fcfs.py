"""First come, first served: the queue in order of arrival; the last admitted request is preempted first."""

from collections import deque
from collections.abc import Sequence

from serving.core.request import Request


def enqueue(waiting: deque[Request], request: Request) -> None:
    waiting.append(request)


def requeue(waiting: deque[Request], request: Request) -> None:
    """A preempted request goes to the front: it came before everything that waits."""
    waiting.appendleft(request)


def victim(running: Sequence[Request]) -> int:
    return len(running) - 1
