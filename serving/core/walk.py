"""vLLM V1 scheduling request by request, for engines that the step clock of serving.core.scheduler does not fit:
those with several steps in flight, whose requests do not all run in every step.

The rules are those of tests/reference/scheduler.py, and a property test keeps the two equal. A step costs time in
proportion to the running requests. Blocks are counted by serving.core.blocks as in the step clock.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, cast

from serving.core.blocks import BlockPool
from serving.core.engine import Engine
from serving.core.request import Request
from serving.core.scheduler import Asked, Limits, Policy, Scheduler
from serving.core.shape import StepShape


class Given(NamedTuple):
    """new_tokens of `request` run in a step; emits: they yield a token."""

    request: Request
    new_tokens: int
    emits: bool


class WalkScheduler:
    """One engine's waiting queue, running requests and KV blocks.

    pipelined: a request whose token is in flight gets no further step, and is not admitted again after a preemption,
    until that token is known. attended_cap_tokens: most keys that one query attends, None for all.
    """

    def __init__(
        self,
        limits: Limits,
        blocks: BlockPool,
        policy: Policy,
        *,
        attended_cap_tokens: int | None = None,
        pipelined: bool = False,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.pipelined = pipelined
        self.waiting: list[tuple[tuple[int, ...], Request]] = []
        self.running: list[Request] = []
        self._cap = attended_cap_tokens
        self._rank = policy.rank
        self._queued = 0
        self._admitted = 0

    def can_ever_run(self, request: Request) -> bool:
        """False when the request outgrows the model length or, alone in the engine, the KV blocks."""
        longest_tokens = request.prompt_tokens + request.output_tokens
        return (
            longest_tokens <= self.limits.max_model_len_tokens
            and self.blocks.blocks_for(request.peak_tokens) <= self.blocks.total_blocks
        )

    def add(self, request: Request) -> None:
        asked = Asked(self._queued, request.arrival_ns, request.prompt_tokens, request.priority)
        self._queued += 1
        request.rank = self._rank(asked)
        request.token_ns = []
        heappush(self.waiting, (request.rank, request))

    def compose(self, now_ns: int) -> tuple[list[Given], StepShape | None]:
        """Choose and account one step at `now_ns`: its batch in order, and its shape, None for an empty batch."""
        chunks, left, preempted = self._walk()
        batch: list[Given] = []
        rows: list[tuple[int, int]] = []
        keys: list[int] = []
        for request, new_tokens in chunks:
            self._account(request, new_tokens, batch, rows, keys)
        if self.waiting and left and not preempted:
            self._admit(now_ns, left, batch, rows, keys)
        return batch, self._shape(batch, rows, keys) if batch else None

    def emit(self, batch: Sequence[Given], now_ns: int) -> list[Request]:
        """The step of `batch` has run: its tokens are known at `now_ns`. Releases and returns finished requests."""
        finished = []
        for request, _, emits in batch:
            if not emits:
                continue
            assert request.token_ns is not None
            request.token_ns.append(now_ns)
            request.in_flight = False
            request.emitted_tokens += 1
            if request.emitted_tokens == request.output_tokens:
                finished.append(request)
        for request in finished:
            if request in self.running:
                self.running.remove(request)
                self._release(request, 0)
            else:
                self.waiting = [entry for entry in self.waiting if entry[1] is not request]
                heapify(self.waiting)
        return finished

    def _wanted(self, missing_tokens: int) -> int:
        threshold = self.limits.long_prefill_threshold_tokens
        if threshold and missing_tokens > threshold and len(self.running) + len(self.waiting) > 1:
            return threshold
        return missing_tokens

    def _new_blocks(self, computed_tokens: int, new_tokens: int) -> int:
        size = self.blocks.block_tokens
        return -(-(computed_tokens + new_tokens) // size) + -computed_tokens // size

    def _walk(self) -> tuple[list[tuple[Request, int]], int, bool]:
        """The running requests in order of admission: their new tokens, the budget left, whether one was preempted."""
        running, blocks = self.running, self.blocks
        budget = self.limits.max_num_batched_tokens
        given: dict[Request, int] = {}
        preempted = stuck = False
        at = 0
        while at < len(running) and budget and not stuck:
            request = running[at]
            if request.in_flight:
                at += 1
                continue
            missing = request.prompt_tokens + request.emitted_tokens - request.computed_tokens
            new_tokens = min(self._wanted(missing), budget)
            needed = self._new_blocks(request.computed_tokens, new_tokens)
            while needed > blocks.free_blocks:
                preempted = True
                position = max(range(len(running)), key=lambda place: running[place].rank)
                victim = running.pop(position)
                if position < at:
                    at -= 1
                taken_back = given.pop(victim, 0)
                budget += taken_back
                self._preempt(victim, taken_back)
                if victim is request:
                    stuck = True
                    break
            else:
                blocks.take(needed)
                given[request] = new_tokens
                budget -= new_tokens
                at += 1
        return list(given.items()), budget, preempted

    def _preempt(self, request: Request, taken_back: int) -> None:
        self._release(request, taken_back)
        request.computed_tokens = 0
        request.preemptions += 1
        heappush(self.waiting, (request.rank, request))

    def _release(self, request: Request, taken_back: int) -> None:
        """taken_back: tokens whose blocks it got in the step that is being composed."""
        computed = request.computed_tokens
        self.blocks.release(request, self.blocks.blocks_for(computed + taken_back), computed)

    def _account(
        self,
        request: Request,
        new_tokens: int,
        batch: list[Given],
        rows: list[tuple[int, int]],
        keys: list[int],
    ) -> None:
        """Account tokens whose blocks are taken."""
        context = request.computed_tokens
        after = context + new_tokens
        if new_tokens > 1 or context < request.prompt_tokens:
            rows.append((new_tokens, context))
        else:
            keys.append(after)
        request.computed_tokens = after
        if request.block_keys:
            self.blocks.grow(request, self.blocks.blocks_for(after))
            self.blocks.add_keys(request, after)
        emits = after == request.prompt_tokens + request.emitted_tokens
        request.in_flight = emits
        batch.append(Given(request, new_tokens, emits))

    def _admit(
        self,
        now_ns: int,
        left: int,
        batch: list[Given],
        rows: list[tuple[int, int]],
        keys: list[int],
    ) -> None:
        """Waiting requests, from the head only."""
        blocks, limits, waiting, running = self.blocks, self.limits, self.waiting, self.running
        while left and waiting and len(running) < limits.max_num_seqs:
            request = waiting[0][1]
            if request.in_flight:
                return
            total = request.prompt_tokens + request.emitted_tokens
            hits, tail_blocks = blocks.lookup(request, total)
            cached = len(hits) + tail_blocks
            hit_tokens = cached * blocks.block_tokens
            new_tokens = self._wanted(total - hit_tokens)
            if new_tokens > left:
                if not limits.chunked_prefill:
                    return
                new_tokens = left
            taken = blocks.blocks_for(total) - cached
            if cached:
                taken += blocks.revived(hits, tail_blocks)
            if taken > blocks.free_blocks:
                return
            heappop(waiting)
            if cached or request.tail is not None:
                blocks.reuse(request, hits, tail_blocks)
            blocks.take(blocks.blocks_for(hit_tokens + new_tokens) - cached)
            running.append(request)
            self._admitted += 1
            request.order = self._admitted
            request.computed_tokens = hit_tokens
            if request.scheduled_ns is None:
                request.scheduled_ns = now_ns
                request.prefix_hit_tokens = hit_tokens
            left -= new_tokens
            self._account(request, new_tokens, batch, rows, keys)

    def _shape(self, batch: Sequence[Given], rows: list[tuple[int, int]], keys: list[int]) -> StepShape:
        cap = self._cap
        return StepShape(
            prefills=tuple(rows),
            decode_requests=len(keys),
            decode_kv_sum_tokens=sum(keys),
            decode_kv_max_tokens=max(keys, default=0),
            decode_kv_capped_sum_tokens=sum(keys) if cap is None else sum(min(key, cap) for key in keys),
            sampled_sequences=sum(one.emits for one in batch),
        )


class WalkEngine(Engine):
    """An engine whose scheduler is `walk`; its inbox and its load work as those of any engine."""

    def __init__(self, index: int, walk: WalkScheduler) -> None:
        super().__init__(index, cast(Scheduler, walk))  # Engine itself asks only for what both have
        self.walk = walk
