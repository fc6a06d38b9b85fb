"""Groups of the specification whose engines are cut into pipeline stages."""

from collections.abc import Sequence

from reference.engine import Engine, Step, StepShape
from serving.core.pipeline import StagedCost


class PipelineGroup:
    """Data-parallel engines in lockstep, of `stages` pipeline stages each, with up to as many steps in flight.

    Steps are composed, one after the other at the same instant, until that many are in flight or nothing can be
    scheduled; then the oldest is waited for. Each passes the stages in order: it enters a stage when it has arrived
    there and the step before has left it.
    """

    def __init__(self, engines: Sequence[Engine], cost: StagedCost, stages: int) -> None:
        self.engines = tuple(engines)
        self.cost = cost
        self.stages = stages
        self.steps = 0
        self.shapes: list[list[StepShape | None]] = []
        self.in_flight: list[tuple[Step, int]] = []
        self.stage_free_ns = [0] * stages

    def wake(self, now_ns: int) -> int | None:
        return self._go_on(now_ns)

    def end_step(self, now_ns: int) -> int | None:
        """The oldest step ends: emit its tokens and fill the pipeline; time to the next end, or None without work."""
        step, end_ns = self.in_flight.pop(0)
        assert end_ns == now_ns
        self.steps += 1
        for engine, emitting in zip(self.engines, step.emitting, strict=True):
            for request, *_, drafts in emitting:
                if engine.scheduler.emit(request, now_ns, drafts):
                    request.outcome = "finished"
                    engine.assigned -= 1
                    engine.assigned_tokens -= request.prompt_tokens
        return self._go_on(now_ns)

    def _go_on(self, now_ns: int) -> int | None:
        for engine in self.engines:
            engine.take_in(now_ns)
        while len(self.in_flight) < self.stages:
            batches = [engine.scheduler.schedule(now_ns) for engine in self.engines]
            if any(batches):
                step = Step(batches, self.engines)
                self.shapes.append(step.shapes)
                self.in_flight.append((step, self._end_ns(now_ns, step)))
            elif self.in_flight or not any(engine.running or engine.waiting for engine in self.engines):
                break  # otherwise the composition only preempted
        return self.in_flight[0][1] - now_ns if self.in_flight else None

    def _end_ns(self, now_ns: int, step: Step) -> int:
        at_ns = now_ns
        for stage, (compute_ns, send_ns) in enumerate(self.cost.stages_ns(step.shapes)):
            left_ns = max(at_ns, self.stage_free_ns[stage]) + compute_ns
            self.stage_free_ns[stage] = left_ns
            at_ns = left_ns + send_ns
        return at_ns
