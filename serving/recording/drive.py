"""Play a trace against an engine in real time: requests enter at their arrival, the engine steps while it has work."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from serving.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class Finished:
    """Times of one request. arrival_time is wall clock, the stamps are the engine's monotonic clock, all in seconds."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float


class EngineLike(Protocol):
    """What a play needs of an engine; the vLLM driver is one, tests have another."""

    def add(self, request: TraceRequest) -> None: ...

    def step(self) -> list[Finished]: ...

    def has_work(self) -> bool: ...


def play(
    engine: EngineLike,
    requests: Sequence[TraceRequest],
    report: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Finished]:
    """Plays the requests and returns them in trace order, each finished.

    report(finished, total) is called after every step. The engine runs in this thread: a request that arrives during a
    step enters when the step ends, as an engine's input queue would give it.
    """
    order = {request.request_id: index for index, request in enumerate(requests)}
    finished: list[Finished] = []
    started, next_index = clock(), 0
    while next_index < len(requests) or engine.has_work():
        now_ns = (clock() - started) * 1e9
        while next_index < len(requests) and requests[next_index].arrival_ns <= now_ns:
            engine.add(requests[next_index])
            next_index += 1
        if engine.has_work():
            finished += engine.step()
            report(len(finished), len(requests))
        else:
            sleep(min(0.005, max(0.0, requests[next_index].arrival_ns / 1e9 - (clock() - started))))
    return sorted(finished, key=lambda one: order[one.request_id])
