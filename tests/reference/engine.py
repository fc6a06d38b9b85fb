"""Engines and lockstep groups of the specification."""

from collections.abc import Sequence

from reference.request import Request
from reference.scheduler import Scheduled, Scheduler
from serving.core.shape import StepCost, StepShape


class Engine:
    """`index` counts engines over the whole cluster. attended_cap_tokens: most keys that one query attends, or None.

    verify_as: see step_shape.
    """

    def __init__(
        self, index: int, scheduler: Scheduler, attended_cap_tokens: int | None, verify_as: str = "prefill"
    ) -> None:
        self.index = index
        self.scheduler = scheduler
        self.attended_cap_tokens = attended_cap_tokens
        self.verify_as = verify_as
        self.assigned = 0
        self.assigned_tokens = 0
        self.inbox: list[Request] = []

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def kv_usage(self) -> float:
        blocks = self.scheduler.blocks
        return blocks.used_blocks / blocks.total_blocks if blocks.total_blocks else 0.0

    def cached_tokens(self, request: Request) -> int:
        blocks = self.scheduler.blocks
        return len(blocks.cached_prefix(request)) * blocks.block_tokens

    def submit(self, request: Request) -> None:
        request.engine_index = self.index
        self.assigned += 1
        self.assigned_tokens += request.prompt_tokens
        self.inbox.append(request)

    def take_in(self, now_ns: int) -> None:
        for request in self.inbox:
            request.queued_ns = now_ns
            if self.scheduler.can_ever_run(request):
                self.scheduler.add(request)
            else:
                request.outcome = "rejected"
                self.assigned -= 1
                self.assigned_tokens -= request.prompt_tokens
        self.inbox.clear()


class Step:
    """A composed step of a group: one batch and one shape per engine, and which of each batch emit a token."""

    def __init__(self, batches: list[list[Scheduled]], engines: Sequence[Engine]) -> None:
        self.batches = batches
        self.shapes = [
            step_shape(batch, one.attended_cap_tokens, one.scheduler.speculative_tokens, one.verify_as)
            if batch
            else None
            for batch, one in zip(batches, engines, strict=True)
        ]
        self.emitting = [[one for one in batch if one.emits] for batch in batches]


class Group:
    """Data-parallel engines in lockstep. With `asynchronous` scheduling a step is composed when the one before starts.

    A request that arrives or finishes meanwhile is therefore seen one step later than without.
    """

    def __init__(self, engines: Sequence[Engine], cost: StepCost, asynchronous: bool = False) -> None:
        self.engines = tuple(engines)
        self.cost = cost
        self.asynchronous = asynchronous
        self.steps = 0
        self.shapes: list[list[StepShape | None]] = []
        self.current: Step | None = None
        self.following: Step | None = None

    def wake(self, now_ns: int) -> int | None:
        """Start stepping at `now_ns`: the duration of the first step, or None without work."""
        self._take_in(now_ns)
        self.current = self._compose(now_ns)
        return self._launch(now_ns)

    def end_step(self, now_ns: int) -> int | None:
        """The running step ends at `now_ns`: emit its tokens and start the next; its duration, or None without work."""
        assert self.current is not None
        self.steps += 1
        for engine, emitting in zip(self.engines, self.current.emitting, strict=True):
            for request, *_, drafts in emitting:
                if engine.scheduler.emit(request, now_ns, drafts):
                    request.outcome = "finished"
                    engine.assigned -= 1
                    engine.assigned_tokens -= request.prompt_tokens
        self.current, self.following = self.following, None
        self._take_in(now_ns)
        if self.current is None:
            self.current = self._compose(now_ns)
        return self._launch(now_ns)

    def _launch(self, now_ns: int) -> int | None:
        while self.current is None and any(engine.running or engine.waiting for engine in self.engines):
            self.current = self._compose(now_ns)  # the step before only preempted
        if self.current is None:
            return None
        if self.asynchronous:
            self.following = self._compose(now_ns)
        self.shapes.append(self.current.shapes)
        return self.cost.step_ns(self.current.shapes)

    def _take_in(self, now_ns: int) -> None:
        for engine in self.engines:
            engine.take_in(now_ns)

    def _compose(self, now_ns: int) -> Step | None:
        batches = [engine.scheduler.schedule(now_ns) for engine in self.engines]
        return Step(batches, self.engines) if any(batches) else None


def step_shape(
    batch: Sequence[Scheduled], attended_cap_tokens: int | None, speculative_tokens: int = 0, verify_as: str = "prefill"
) -> StepShape:
    """The shape of a batch that was just composed.

    verify_as: what a request behind its prompt counts as when it runs drafts: "prefill", a prefill of its tokens;
    "rows", one decode row per token; "table", one decode row of 1 + speculative_tokens query tokens (with fewer a
    prefill).
    """
    prefills = []
    kv_tokens = []
    query_tokens = 1 + speculative_tokens if verify_as == "table" else 1
    for one in batch:
        new, context = one.new_tokens, one.context_tokens
        if context < one.request.prompt_tokens:
            prefills.append((new, context))
        elif verify_as == "rows":
            kv_tokens += [context + row for row in range(1, new + 1)]
        elif new == query_tokens:
            kv_tokens.append(context + new)
        else:
            prefills.append((new, context))
    drafted = [one.context_tokens + one.new_tokens + 1 for one in batch] if speculative_tokens else []
    return StepShape(
        prefills=tuple(prefills),
        **_decodes(kv_tokens, attended_cap_tokens),
        sampled_sequences=sum(one.emits + one.drafts for one in batch),
        decode_query_tokens=query_tokens,
        drafted=StepShape((), **_decodes(drafted, attended_cap_tokens), sampled_sequences=len(drafted))
        if drafted
        else None,
    )


def _decodes(kv_tokens: Sequence[int], cap_tokens: int | None) -> dict[str, int]:
    return {
        "decode_requests": len(kv_tokens),
        "decode_kv_sum_tokens": sum(kv_tokens),
        "decode_kv_max_tokens": max(kv_tokens, default=0),
        "decode_kv_capped_sum_tokens": sum(min(kv, cap_tokens) for kv in kv_tokens) if cap_tokens else sum(kv_tokens),
    }
