"""vLLM V1 scheduling request by request, for engines that the step clock of serving.core.scheduler does not fit:
those with several steps in flight, whose requests do not all run in every step, and those with draft tokens, whose
requests gain several tokens in one.

The rules are those of tests/reference/scheduler.py, and a property test keeps the two equal. A step costs time in
proportion to the running requests. Blocks are counted by serving.core.blocks as in the step clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple, cast

from serving.core.acceptance import Acceptance
from serving.core.blocks import BlockPool
from serving.core.engine import Engine
from serving.core.request import Request
from serving.core.scheduler import Asked, Limits, Policy, Scheduler
from serving.core.shape import StepShape

VerifyAs = Literal["table", "prefill", "rows"]


class Given(NamedTuple):
    """new_tokens of `request` run in a step; emits: they yield a token. drafts: how many of them are drafts."""

    request: Request
    new_tokens: int
    emits: bool
    drafts: int


@dataclass(frozen=True, slots=True)
class Speculation:
    """tokens: drafts per request and step. verify_as: what a request that verifies drafts counts as in a shape.

    "table": a decode request of 1 + tokens query tokens (with fewer, a prefill). "prefill": a prefill of its tokens.
    "rows": one decode request per token.
    """

    tokens: int
    acceptance: Acceptance
    verify_as: VerifyAs = "table"


class WalkScheduler:
    """One engine's waiting queue, running requests and KV blocks.

    pipelined: a request whose token is in flight gets no further step, and is not admitted again after a preemption,
    until that token is known. attended_cap_tokens: most keys that one query attends, None for all.

    speculation: a request that has emitted a token has that many drafts, which run with its last token in one step, as
    many of them as fit; the accepted ones are emitted with one more token, the rejected ones do not count as computed.
    Every allocation has as many more tokens in view, up to the model length; a preemption drops the drafts; contents
    become findable when the next tokens are allocated, and stay so as far as they are computed when that allocation is
    taken back in the same step. verifications[i]: how many had i drafts accepted.
    """

    def __init__(
        self,
        limits: Limits,
        blocks: BlockPool,
        policy: Policy,
        *,
        attended_cap_tokens: int | None = None,
        pipelined: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.pipelined = pipelined
        self.speculation = speculation
        self.ahead_tokens = speculation.tokens if speculation else 0
        self.verifications = [0] * (1 + self.ahead_tokens)
        self.waiting: list[tuple[tuple[int, ...], Request]] = []
        self.running: list[Request] = []
        self._cap = attended_cap_tokens
        verify_as = speculation.verify_as if speculation else "prefill"
        self._by_row = verify_as == "rows"
        self._query_tokens = 1 + self.ahead_tokens if verify_as == "table" else 1
        self._rank = policy.rank
        self._queued = 0
        self._admitted = 0

    def can_ever_run(self, request: Request) -> bool:
        """False when the request outgrows the model length or, alone in the engine, the KV blocks."""
        longest_tokens = request.prompt_tokens + request.output_tokens
        return (
            longest_tokens <= self.limits.max_model_len_tokens
            and self.blocks.blocks_for(self._peak_tokens(request)) <= self.blocks.total_blocks
        )

    def _peak_tokens(self, request: Request) -> int:
        """Most tokens that it ever needs blocks for: its last verification begins one token before the last."""
        ahead = self.ahead_tokens * (2 if request.output_tokens > 1 else 1)
        return min(request.peak_tokens + ahead, self.limits.max_model_len_tokens)

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
        for request, _, emits, drafts in batch:
            if not emits:
                continue
            assert request.token_ns is not None
            tokens = 1 + (self._accepted(request, drafts) if drafts else 0)
            tokens = min(tokens, request.output_tokens - request.emitted_tokens)
            request.token_ns += [now_ns] * tokens
            request.in_flight = False
            request.drafts = self.ahead_tokens
            request.emitted_tokens += tokens
            if request.emitted_tokens == request.output_tokens:
                finished.append(request)
        for request in finished:
            if request in self.running:
                self.running.remove(request)
                self._release(request)
            else:
                self.waiting = [entry for entry in self.waiting if entry[1] is not request]
                heapify(self.waiting)
        return finished

    def _accepted(self, request: Request, drafts: int) -> int:
        """Accepted ones of `drafts`, the others taken back."""
        assert self.speculation is not None
        total = request.prompt_tokens + request.emitted_tokens
        accepted = self.speculation.acceptance.accepted(request.index, request.emitted_tokens, total)
        accepted = min(drafts, accepted)
        request.computed_tokens -= drafts - accepted
        self.verifications[accepted] += 1
        return accepted

    def _wanted(self, missing_tokens: int, computed_tokens: int) -> int:
        threshold = self.limits.long_prefill_threshold_tokens
        if threshold and missing_tokens > threshold and len(self.running) + len(self.waiting) > 1:
            missing_tokens = threshold
        return min(missing_tokens, self.limits.max_model_len_tokens - 1 - computed_tokens)

    def _slots(self, tokens: int) -> int:
        """Blocks for a sequence of `tokens` tokens and what is kept in view beyond them."""
        if self.ahead_tokens:
            tokens = min(tokens + self.ahead_tokens, self.limits.max_model_len_tokens)
        return self.blocks.blocks_for(tokens)

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
            computed = request.computed_tokens
            missing = request.prompt_tokens + request.emitted_tokens + request.drafts - computed
            new_tokens = min(self._wanted(missing, computed), budget)
            needed = max(0, self._slots(computed + new_tokens) - request.held_blocks)
            while needed > blocks.free_blocks:
                preempted = True
                position = max(range(len(running)), key=lambda place: running[place].rank)
                victim = running.pop(position)
                if position < at:
                    at -= 1
                if taken_back := given.pop(victim, 0):
                    budget += taken_back
                    victim.known_tokens = victim.computed_tokens
                    blocks.drop_keys(victim, victim.known_tokens)
                self._preempt(victim)
                if victim is request:
                    stuck = True
                    break
            else:
                blocks.take(needed)
                request.held_blocks += needed
                self._make_findable(request, computed + new_tokens)
                given[request] = new_tokens
                budget -= new_tokens
                at += 1
        return list(given.items()), budget, preempted

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.computed_tokens = 0
        request.drafts = 0
        request.preemptions += 1
        heappush(self.waiting, (request.rank, request))

    def _release(self, request: Request) -> None:
        self.blocks.release(request, request.held_blocks, request.known_tokens)
        request.held_blocks = request.known_tokens = 0

    def _make_findable(self, request: Request, after_tokens: int) -> None:
        """What its first `after_tokens` tokens will hold: drafts among them are not known yet."""
        request.known_tokens = min(after_tokens, request.prompt_tokens + request.emitted_tokens)
        if request.block_keys:
            self.blocks.grow(request, request.held_blocks)
            self.blocks.add_keys(request, request.known_tokens)

    def _account(
        self,
        request: Request,
        new_tokens: int,
        batch: list[Given],
        rows: list[tuple[int, int]],
        keys: list[int],
    ) -> None:
        """Account tokens whose blocks are taken and findable."""
        context = request.computed_tokens
        after = context + new_tokens
        if context < request.prompt_tokens:
            rows.append((new_tokens, context))
        elif new_tokens == self._query_tokens:
            keys.append(after)
        elif self._by_row:
            keys += range(context + 1, after + 1)
        else:
            rows.append((new_tokens, context))
        total = request.prompt_tokens + request.emitted_tokens
        request.computed_tokens = after
        request.in_flight = after >= total
        batch.append(Given(request, new_tokens, after >= total, max(0, after - total)))

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
            new_tokens = self._wanted(total - hit_tokens, hit_tokens)
            if new_tokens > left:
                if not limits.chunked_prefill:
                    return
                new_tokens = left
            held = self._slots(hit_tokens + new_tokens)
            taken = max(held, blocks.blocks_for(total)) - cached
            if cached:
                taken += blocks.revived(hits, tail_blocks)
            if taken > blocks.free_blocks:
                return
            heappop(waiting)
            if cached or request.tail is not None:
                blocks.reuse(request, hits, tail_blocks)
            blocks.take(held - cached)
            request.held_blocks = held
            running.append(request)
            self._admitted += 1
            request.order = self._admitted
            request.computed_tokens = hit_tokens
            if request.scheduled_ns is None:
                request.scheduled_ns = now_ns
                request.prefix_hit_tokens = hit_tokens
            left -= new_tokens
            self._make_findable(request, hit_tokens + new_tokens)
            self._account(request, new_tokens, batch, rows, keys)

    def _shape(self, batch: Sequence[Given], rows: list[tuple[int, int]], keys: list[int]) -> StepShape:
        drafted = None
        if self.ahead_tokens:
            lengths = [request.computed_tokens + 1 for request, *_ in batch]
            drafted = self._decodes((), lengths, len(lengths), 1, None)
        sampled = sum(one.emits + one.drafts for one in batch)
        return self._decodes(tuple(rows), keys, sampled, self._query_tokens, drafted)

    def _decodes(
        self,
        rows: tuple[tuple[int, int], ...],
        keys: Sequence[int],
        sampled: int,
        query_tokens: int,
        drafted: StepShape | None,
    ) -> StepShape:
        cap, total = self._cap, sum(keys)
        longest = max(keys, default=0)
        capped = total if cap is None or longest <= cap else sum([min(key, cap) for key in keys])
        return StepShape(rows, len(keys), total, longest, capped, sampled, query_tokens, drafted)


class WalkEngine(Engine):
    """An engine whose scheduler is `walk`; its inbox and its load work as those of any engine."""

    def __init__(self, index: int, walk: WalkScheduler) -> None:
        super().__init__(index, cast(Scheduler, walk))  # Engine itself asks only for what both have
        self.walk = walk
