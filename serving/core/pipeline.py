"""Engines cut into pipeline stages: a group with several steps in flight.

Steps are composed, one after the other at the same instant, until as many are in flight as there are stages or nothing
can be scheduled; then the oldest is waited for (vLLM's batch queue). A step passes the stages in order and enters one
when it has arrived there and the step before has left it.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from serving.core.engine import StepTimes
from serving.core.request import Request
from serving.core.shape import StepShape
from serving.core.walk import Given, WalkEngine


class StagedCost(Protocol):
    """Prices steps by pipeline stage. Implementations are pure."""

    def stages_ns(self, shapes: Sequence[StepShape | None]) -> Sequence[tuple[int, int]]:
        """Per stage, the nanoseconds of the step in it and those of the transfer to the next (0 behind the last).

        shapes as in serving.core.shape.StepCost.
        """
        ...


class PipelineGroup:
    """Data-parallel engines in lockstep with `stages` pipeline stages each; the interface is that of Group.

    The engines' schedulers are made with `pipelined`. Ranks without work pass a dummy batch (a None shape). Waves end
    as those of Group do, with steps counted as they are composed. idle_ns: per stage, how long it stood still between
    its first and its last step.
    """

    def __init__(self, engines: Sequence[WalkEngine], cost: StagedCost, stages: int, *, sync_steps: int = 1) -> None:
        self.engines = tuple(engines)
        self.cost = cost
        self.stages = stages
        self.sync_steps = sync_steps if len(self.engines) > 1 else 1
        self.times = StepTimes()
        self.composed = 0
        self.dummy_steps = 0
        self.idle_ns = [0] * stages
        self._free_ns = [0] * stages
        self._wave_steps = 0
        self._in_flight: deque[tuple[int, list[list[Given]]]] = deque()

    @property
    def steps(self) -> int:
        """Steps that have run."""
        return len(self.times)

    def wake(self, now_ns: int, left: list[Request]) -> int | None:
        """Start stepping at `now_ns`; nanoseconds to the end of the first step, None without work."""
        self._wave_steps = 0
        return self._go_on(now_ns, left)

    def end_step(self, now_ns: int, left: list[Request]) -> int | None:
        """The oldest step in flight ends at `now_ns`; nanoseconds to the end of the next one, None without any."""
        _, batches = self._in_flight.popleft()
        self.times.end_ns.append(now_ns)
        self.times.gap_ns.append(0)
        self.times.repeated_tokens.append(0)
        for engine, batch in zip(self.engines, batches, strict=True):
            finished = engine.walk.emit(batch, now_ns)
            engine.assigned -= len(finished)
            for request in finished:
                request.outcome = "finished"
                engine.assigned_tokens -= request.prompt_tokens
            left += finished
        return self._go_on(now_ns, left)

    def _go_on(self, now_ns: int, left: list[Request]) -> int | None:
        for engine in self.engines:
            if engine.inbox:
                engine.take_in(now_ns, left)
        in_flight = self._in_flight
        while len(in_flight) < self.stages:
            composed = [engine.walk.compose(now_ns) for engine in self.engines]
            if any(batch for batch, _ in composed):
                self._launch(now_ns, [shape for _, shape in composed], [batch for batch, _ in composed])
            elif in_flight or not any(engine.running or engine.waiting for engine in self.engines):
                break
        if not in_flight and self._wave_steps and (self._wave_steps - 1) % self.sync_steps:
            self.dummy_steps += 1
            self._launch(now_ns, [None] * len(self.engines), [[] for _ in self.engines])
        return in_flight[0][0] - now_ns if in_flight else None

    def _launch(self, now_ns: int, shapes: Sequence[StepShape | None], batches: list[list[Given]]) -> None:
        self.composed += 1
        self._wave_steps += 1
        at_ns = now_ns
        for stage, (compute_ns, send_ns) in enumerate(self.cost.stages_ns(shapes)):
            if compute_ns <= 0:
                raise ValueError(f"a step must take at least 1 ns in a stage, the cost model says {compute_ns}")
            free_ns = self._free_ns[stage]
            if free_ns and at_ns > free_ns:
                self.idle_ns[stage] += at_ns - free_ns
            left_ns = max(at_ns, free_ns) + compute_ns
            self._free_ns[stage] = left_ns
            at_ns = left_ns + send_ns
        self._in_flight.append((at_ns, batches))
