"""One engine: a scheduler with its inbox. A group: engines that step in lockstep and share one cost."""

from collections.abc import Sequence

from serving.core.request import Request
from serving.core.scheduler import Scheduled, Scheduler
from serving.core.shape import StepCost, StepShape


class Engine:
    """`index` counts engines over the whole cluster; it is the instance_id of the output.

    attended_cap_tokens: most KV tokens that one query attends, None where attention reads all of them.
    """

    def __init__(self, index: int, scheduler: Scheduler, attended_cap_tokens: int | None) -> None:
        self.index = index
        self.scheduler = scheduler
        self.attended_cap_tokens = attended_cap_tokens
        self.assigned = 0
        self._inbox: list[Request] = []
        self._batch: list[Scheduled] = []

    @property
    def waiting(self) -> int:
        """Requests that the scheduler has not admitted, those still in the inbox included."""
        return len(self._inbox) + len(self.scheduler.waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use."""
        blocks = self.scheduler.blocks
        return blocks.used_blocks / blocks.total_blocks if blocks.total_blocks else 0.0

    def submit(self, request: Request) -> None:
        """Hand over a request; the scheduler sees it when the next step begins."""
        request.engine_index = self.index
        self.assigned += 1
        self._inbox.append(request)

    def take_in(self, now_ns: int) -> list[Request]:
        """Queue the inbox and return the requests refused because they can never run."""
        refused = []
        for request in self._inbox:
            request.queued_ns = now_ns
            if self.scheduler.can_ever_run(request):
                self.scheduler.add(request)
            else:
                request.outcome = "rejected"
                refused.append(request)
        self._inbox.clear()
        self.assigned -= len(refused)
        return refused

    def begin_step(self, now_ns: int) -> StepShape | None:
        """Schedule one step; None when there is nothing to run."""
        self._batch = self.scheduler.schedule(now_ns)
        return step_shape(self._batch, self.attended_cap_tokens) if self._batch else None

    def end_step(self, now_ns: int) -> list[Request]:
        """Emit a token for every request whose known tokens are all computed; return those that finish."""
        finished = []
        for request, _, _ in self._batch:
            if request.computed_tokens < request.total_tokens:
                continue
            request.emitted_tokens += 1
            request.token_ns.append(now_ns)
            if request.emitted_tokens == request.output_tokens:
                request.outcome = "finished"
                finished.append(request)
        for request in finished:
            self.scheduler.finish(request)
        self._batch = []
        self.assigned -= len(finished)
        return finished


def step_shape(batch: Sequence[Scheduled], attended_cap_tokens: int | None) -> StepShape:
    """The shape of a batch whose scheduled tokens are already counted as computed."""
    prefills = []
    kv_tokens = []
    sampled = 0
    for request, new_tokens, context_tokens in batch:
        if new_tokens > 1 or context_tokens < request.prompt_tokens:
            prefills.append((new_tokens, context_tokens))
        else:
            kv_tokens.append(context_tokens + 1)
        sampled += request.computed_tokens == request.total_tokens
    total_kv_tokens = sum(kv_tokens)
    capped = [min(kv, attended_cap_tokens) for kv in kv_tokens] if attended_cap_tokens else kv_tokens
    return StepShape(
        prefills=tuple(prefills),
        decode_requests=len(kv_tokens),
        decode_kv_sum_tokens=total_kv_tokens,
        decode_kv_max_tokens=max(kv_tokens, default=0),
        decode_kv_capped_sum_tokens=sum(capped),
        sampled_sequences=sampled,
    )


class Group:
    """Data-parallel engines in lockstep: all begin a step together and wait for the slowest.

    While one of them has work the others run a dummy batch (a None shape); a group without any work stops at once.
    """

    def __init__(self, engines: Sequence[Engine], cost: StepCost) -> None:
        self.engines = tuple(engines)
        self.cost = cost
        self.steps = 0

    def begin_step(self, now_ns: int) -> tuple[int | None, list[Request]]:
        """Start a step at `now_ns`: its duration in nanoseconds, None without work, and the requests refused."""
        refused = [request for engine in self.engines for request in engine.take_in(now_ns)]
        shapes = [engine.begin_step(now_ns) for engine in self.engines]
        if all(shape is None for shape in shapes):
            if any(engine.waiting for engine in self.engines):
                raise RuntimeError("the scheduler left waiting requests without scheduling any")
            return None, refused
        duration_ns = self.cost.step_ns(shapes)
        if duration_ns <= 0:
            raise ValueError(f"a step must take at least 1 ns, the cost model says {duration_ns}")
        self.steps += 1
        return duration_ns, refused

    def end_step(self, now_ns: int) -> list[Request]:
        return [request for engine in self.engines for request in engine.end_step(now_ns)]
