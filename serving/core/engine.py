"""One engine: a scheduler with its inbox. A group: engines that step in lockstep and share one cost."""

from array import array
from collections.abc import Sequence

from serving.core.request import Request
from serving.core.scheduler import Scheduler
from serving.core.shape import StepCost, StepShape


class Engine:
    """`index` counts engines over the whole cluster; it is the instance_id of the output.

    assigned, assigned_tokens: requests handed over that have not left yet, and the tokens of their prompts.
    """

    def __init__(self, index: int, scheduler: Scheduler) -> None:
        self.index = index
        self.scheduler = scheduler
        self.assigned = 0
        self.assigned_tokens = 0
        self.inbox: list[Request] = []

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests that the scheduler has queued and not admitted."""
        return len(self.scheduler.waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use."""
        blocks = self.scheduler.blocks
        return blocks.used_blocks / blocks.total_blocks if blocks.total_blocks else 0.0

    def cached_tokens(self, request: Request) -> int:
        """Leading prompt tokens of a new request that the prefix cache holds now."""
        return self.scheduler.blocks.findable_blocks(request) * self.scheduler.blocks.block_tokens

    def submit(self, request: Request) -> None:
        """Hand over a request; the scheduler sees it when the next step is composed."""
        request.engine_index = self.index
        self.assigned += 1
        self.assigned_tokens += request.prompt_tokens
        self.inbox.append(request)

    def take_in(self, now_ns: int, left: list[Request]) -> None:
        """Queue the inbox; requests that can never run are rejected and join `left`."""
        for request in self.inbox:
            request.queued_ns = now_ns
            if self.scheduler.can_ever_run(request):
                self.scheduler.add(request)
            else:
                request.outcome = "rejected"
                self.assigned -= 1
                self.assigned_tokens -= request.prompt_tokens
                left.append(request)
        self.inbox.clear()


class StepTimes:
    """When each step of a group ended, by step number, and how many tokens followed one of the step before.

    gap_ns: time since the end of the step before, 0 for the first.
    """

    def __init__(self) -> None:
        self.end_ns = array("q")
        self.gap_ns = array("q")
        self.repeated_tokens = array("q")

    def __len__(self) -> int:
        return len(self.end_ns)


class Group:
    """Data-parallel engines in lockstep: all begin a step together and wait for the slowest.

    While one of them has work the others run a dummy batch (a None shape). The engines ask each other whether any has
    work after the first step of a wave and then after every `sync_steps` steps; a wave ends only there, and until then
    a group without any work runs dummy steps. A request that arrives during one starts after it. A group of one engine
    stops at once.
    With `asynchronous` scheduling a step is composed when the one before starts, on the results of the one before that,
    so a request that arrives or finishes during a step is seen one step later than without.

    composed: steps composed so far, which is the number of the next one. dummy_steps: those without any work.
    """

    def __init__(
        self, engines: Sequence[Engine], cost: StepCost, *, asynchronous: bool = False, sync_steps: int = 1
    ) -> None:
        self.engines = tuple(engines)
        self.sync_steps = sync_steps if len(self.engines) > 1 else 1
        self.cost = cost
        self.asynchronous = asynchronous
        self.times = StepTimes()
        self.composed = 0
        self.dummy_steps = 0
        self._void = 0
        self._wave_steps = 0
        self._current: tuple[Sequence[StepShape | None], int] | None = None
        self._following: tuple[Sequence[StepShape | None], int] | None = None

    @property
    def steps(self) -> int:
        """Steps that have run."""
        return len(self.times) - self._void

    def wake(self, now_ns: int, left: list[Request]) -> int | None:
        """Start stepping at `now_ns`; the duration of the first step in nanoseconds, None without work.

        Requests that leave the run, here the rejected ones, are appended to `left`.
        """
        for engine in self.engines:
            if engine.inbox:
                engine.take_in(now_ns, left)
        self._wave_steps = 0
        self._current = self._compose(now_ns)
        return self._launch(now_ns, left)

    def end_step(self, now_ns: int, left: list[Request]) -> int | None:
        """The running step ends at `now_ns` and the next one starts; its duration, or None without work."""
        assert self._current is not None
        self._end(self._current[1], now_ns, left)
        self._current, self._following = self._following, None
        if self._current is None:
            self._current = self._compose(now_ns)
        return self._launch(now_ns, left)

    def _end(self, repeated_tokens: int, now_ns: int, left: list[Request]) -> None:
        times = self.times
        step = len(times.end_ns)
        times.gap_ns.append(now_ns - times.end_ns[-1] if step else 0)
        times.end_ns.append(now_ns)
        times.repeated_tokens.append(repeated_tokens)
        for engine in self.engines:
            finished = engine.scheduler.end_step(step)
            if finished:
                engine.assigned -= len(finished)
                for request in finished:
                    request.outcome = "finished"
                    engine.assigned_tokens -= request.prompt_tokens
                left += finished
            if engine.inbox:
                engine.take_in(now_ns, left)

    def _launch(self, now_ns: int, left: list[Request]) -> int | None:
        while self._current is not None and not any(self._current[0]):
            self._void += 1
            self._end(0, now_ns, left)
            self._current = self._compose(now_ns)
        if self._current is None:
            if any(engine.waiting and not engine.scheduler.reserved for engine in self.engines):
                raise RuntimeError("the scheduler left waiting requests without scheduling any")
            if not self._wave_steps or (self._wave_steps - 1) % self.sync_steps == 0:
                return None
            self._current = [None] * len(self.engines), 0
            self.composed += 1
            self.dummy_steps += 1
        elif self.asynchronous:
            self._following = self._compose(now_ns)
        self._wave_steps += 1
        duration_ns = self.cost.step_ns(self._current[0])
        if duration_ns <= 0:
            raise ValueError(f"a step must take at least 1 ns, the cost model says {duration_ns}")
        return duration_ns

    def _compose(self, now_ns: int) -> tuple[Sequence[StepShape | None], int] | None:
        """The next step; None when there is nothing to run.

        A step in which requests were preempted and none was scheduled has only None shapes and takes no time.
        """
        step = self.composed
        engines = self.engines
        if len(engines) == 1:
            scheduler = engines[0].scheduler
            shape = scheduler.compose(step, now_ns)
            if shape is None and not scheduler.preempted:
                return None
            self.composed += 1
            return (shape,), scheduler.repeated_tokens
        shapes = [engine.scheduler.compose(step, now_ns) for engine in engines]
        if not any(shapes) and not any(engine.scheduler.preempted for engine in engines):
            return None
        self.composed += 1
        return shapes, sum(engine.scheduler.repeated_tokens for engine in engines)
