"""First come, first served.

A preempted request goes back in front of all that were queued after it, and the last admitted request, which was queued
last of those running, is preempted first.
"""

from serving.core.scheduler import Asked


def rank(asked: Asked) -> tuple[int, ...]:
    return (asked.position,)
