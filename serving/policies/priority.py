"""Most urgent first (the lowest `priority` of the trace), then in order of arrival.

The least urgent, latest arrived request is preempted first, even when the step being composed has already included it.
"""

from serving.core.scheduler import Asked


def rank(asked: Asked) -> tuple[int, ...]:
    return asked.priority, asked.arrival_ns, asked.position
