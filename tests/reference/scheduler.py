"""vLLM V1 scheduling in its plain O(batch) form: which requests run in a step, and with how many tokens.

Rules, in order: running requests first, in the order of their admission, each with all the tokens that it lacks, cut
to the long-prefill threshold, the remaining token budget and the model length; when blocks run out a victim is
preempted by recompute; waiting requests enter only in steps without preemption, only from the head, and only when the
blocks of their whole sequence are free. Progress is counted when a step is scheduled.

With `pipelined` several steps are in flight at once: a request whose token is in flight gets no further step until it
is known, and once preempted it is not admitted again before. Chunks of a prompt follow each other at once.

With `speculative_tokens` k, a request that has emitted a token has k draft tokens, which run with its last token in one
step, as many of them as fit. Those that `acceptance` accepts are emitted with one more token; what was rejected is not
computed. Every allocation has k more tokens in view, up to the model length. A preempted request loses its
drafts. Contents become findable when the next tokens are allocated.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from reference.blocks import BlockManager
from reference.request import Request
from serving.core.acceptance import Acceptance
from serving.core.scheduler import Limits


class Scheduled(NamedTuple):
    """new_tokens of `request` run in the step, behind context_tokens in its cache; emits: they yield a token.

    drafts: how many of them are drafts.
    """

    request: Request
    new_tokens: int
    context_tokens: int
    emits: bool
    drafts: int = 0


class FirstCome:
    """First come, first served; the last admitted request is preempted first and goes back to the front."""

    def __init__(self) -> None:
        self.queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self.queue)

    def add(self, request: Request) -> None:
        self.queue.append(request)

    def readd(self, request: Request) -> None:
        self.queue.appendleft(request)

    def head(self) -> Request:
        return self.queue[0]

    def pop(self) -> Request:
        return self.queue.popleft()

    def remove(self, request: Request) -> None:
        self.queue.remove(request)

    def victim(self, running: list[Request]) -> int:
        return len(running) - 1


class Priority:
    """The lowest (priority, arrival) first; the highest is preempted first and takes its place in the queue again."""

    def __init__(self) -> None:
        self.heap: list[tuple[tuple[int, int, int], int, Request]] = []

    @staticmethod
    def key(request: Request) -> tuple[int, int, int]:
        return request.priority, request.arrival_ns, request.position

    def __len__(self) -> int:
        return len(self.heap)

    def add(self, request: Request) -> None:
        heapq.heappush(self.heap, (self.key(request), id(request), request))

    readd = add

    def head(self) -> Request:
        return self.heap[0][2]

    def pop(self) -> Request:
        return heapq.heappop(self.heap)[2]

    def remove(self, request: Request) -> None:
        self.heap = [entry for entry in self.heap if entry[2] is not request]
        heapq.heapify(self.heap)

    def victim(self, running: list[Request]) -> int:
        return max(range(len(running)), key=lambda i: self.key(running[i]))


QUEUES = {"fcfs": FirstCome, "priority": Priority}


class Scheduler:
    def __init__(
        self,
        limits: Limits,
        blocks: BlockManager,
        policy: str = "fcfs",
        pipelined: bool = False,
        speculative_tokens: int = 0,
        acceptance: Acceptance | None = None,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.pipelined = pipelined
        self.speculative_tokens = speculative_tokens
        self.acceptance = acceptance
        self.waiting = QUEUES[policy]()
        self.running: list[Request] = []
        self.queued = 0

    def can_ever_run(self, request: Request) -> bool:
        """False when the request outgrows the model length or, alone in the engine, the KV blocks."""
        longest_tokens = request.prompt_tokens + request.output_tokens
        return (
            longest_tokens <= self.limits.max_model_len_tokens
            and self.blocks.blocks_for(self._peak_tokens(request)) <= self.blocks.total_blocks
        )

    def _peak_tokens(self, request: Request) -> int:
        """Most tokens that it ever needs blocks for: its last verification begins one token before the last."""
        ahead = self.speculative_tokens * (2 if request.output_tokens > 1 else 1)
        return min(request.peak_tokens + ahead, self.limits.max_model_len_tokens)

    def add(self, request: Request) -> None:
        request.position = self.queued
        self.queued += 1
        self.waiting.add(request)

    def schedule(self, now_ns: int) -> list[Scheduled]:
        """Choose and account one step that is composed at `now_ns`."""
        batch: list[Scheduled] = []
        budget = self.limits.max_num_batched_tokens
        preempted = False
        at = 0

        while at < len(self.running) and budget:
            request = self.running[at]
            if request.draining or (self.pipelined and request.in_flight):
                at += 1
                continue
            new_tokens = min(self._wanted(request, request.computed_tokens), budget)
            while not self._allocate(request, new_tokens):
                preempted = True
                position = self.waiting.victim(self.running)
                victim = self.running.pop(position)
                if position < at:
                    at -= 1
                taken_back = next((one for one in batch if one.request is victim), None)
                if taken_back is not None:
                    batch.remove(taken_back)
                    budget += taken_back.new_tokens
                    self._unaccount(taken_back)
                self._preempt(victim)
                if victim is request:
                    break
            else:
                budget -= new_tokens
                batch.append(self._account(request, new_tokens))
                at += 1
                continue
            break

        while not preempted and budget and self.waiting and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting.head()
            if self.pipelined and request.in_flight:
                break
            cached = self.blocks.cached_prefix(request)
            hit_tokens = len(cached) * self.blocks.block_tokens
            wanted_tokens = self._wanted(request, hit_tokens)
            if wanted_tokens > budget and not self.limits.chunked_prefill:
                break
            new_tokens = min(wanted_tokens, budget)
            if not self._allocate(request, new_tokens, cached, request.total_tokens):
                break
            self.running.append(self.waiting.pop())
            request.computed_tokens = hit_tokens
            if request.scheduled_ns is None:
                request.scheduled_ns = now_ns
                request.prefix_hit_tokens = hit_tokens
            budget -= new_tokens
            batch.append(self._account(request, new_tokens))
        return batch

    def _allocate(self, request: Request, new_tokens: int, cached: Sequence[int] = (), reserve_tokens: int = 0) -> bool:
        ahead, most = self.speculative_tokens, self.limits.max_model_len_tokens
        return self.blocks.allocate(request, new_tokens, cached, reserve_tokens, ahead, most)

    def emit(self, request: Request, now_ns: int, drafts: int = 0) -> bool:
        """One more token of `request` is known, and the accepted ones of `drafts`; True when it was the last."""
        request.in_flight -= 1
        accepted = 0
        if drafts:
            assert self.acceptance is not None
            drawn = self.acceptance.accepted(request.index, request.emitted_tokens, request.total_tokens)
            accepted = min(drafts, drawn)
            request.computed_tokens -= drafts - accepted
        tokens = min(1 + accepted, request.output_tokens - request.emitted_tokens)
        request.emitted_tokens += tokens
        request.token_ns += [now_ns] * tokens
        request.drafts = self.speculative_tokens
        if request in self.running and not self.speculative_tokens:
            # What has run so far is findable: all that is scheduled except the tokens still in flight.
            self.blocks.add_keys(request, request.computed_tokens - request.in_flight)
        if request.emitted_tokens < request.output_tokens:
            return False
        if request in self.running:
            self.running.remove(request)
            self.blocks.release(request)
        else:
            self.waiting.remove(request)
        return True

    def _wanted(self, request: Request, computed_tokens: int) -> int:
        new_tokens = request.total_tokens + request.in_flight + request.drafts - computed_tokens
        threshold = self.limits.long_prefill_threshold_tokens
        if threshold and len(self.running) + len(self.waiting) > 1:
            new_tokens = min(new_tokens, threshold)
        return min(new_tokens, self.limits.max_model_len_tokens - 1 - computed_tokens)

    def _account(self, request: Request, new_tokens: int) -> Scheduled:
        context_tokens = request.computed_tokens
        request.computed_tokens += new_tokens
        emits = request.computed_tokens >= request.total_tokens + request.in_flight
        drafts = request.computed_tokens - request.total_tokens - request.in_flight if emits else 0
        request.in_flight += emits
        return Scheduled(request, new_tokens, context_tokens, emits, drafts)

    def _unaccount(self, scheduled: Scheduled) -> None:
        """Take back what a request was given in the step that is being composed, and what that made findable.

        What it had computed before stays findable, up to its last accepted draft: those tokens were known when its
        blocks were allocated. vLLM leaves the keys of the tokens that will not be computed as well, and would hit
        blocks without content.
        """
        request = scheduled.request
        request.in_flight -= scheduled.emits
        request.computed_tokens = scheduled.context_tokens
        self.blocks.drop_keys(request, request.computed_tokens)

    def _preempt(self, request: Request) -> None:
        self.blocks.release(request)
        request.computed_tokens = 0
        request.drafts = 0
        request.preemptions += 1
        self.waiting.readd(request)
