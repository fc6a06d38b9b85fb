"""vLLM V1 scheduling in its plain O(batch) form: which requests run in a step, and with how many tokens.

Rules, in order: running requests first, in the order of their admission, each with all the tokens that it lacks, cut
to the long-prefill threshold, the remaining token budget and the model length; when blocks run out the policy's
victim is preempted by recompute; waiting requests enter only in steps without preemption, only from the head, and
only when the blocks of their whole sequence are free. Progress is counted when a step is scheduled.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from serving.core.blocks import BlockManager
from serving.core.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one engine. long_prefill_threshold_tokens = 0 switches that cut off."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len_tokens: int
    long_prefill_threshold_tokens: int = 0
    chunked_prefill: bool = True


class Policy(Protocol):
    """Order of the waiting queue and choice of the victim. A module with these functions is one."""

    def enqueue(self, waiting: deque[Request], request: Request) -> None:
        """Place a new request."""

    def requeue(self, waiting: deque[Request], request: Request) -> None:
        """Place a preempted request."""

    def victim(self, running: Sequence[Request]) -> int:
        """Position of the request to preempt; it must not lie before a request that the step has scheduled."""


class Scheduled(NamedTuple):
    """new_tokens of `request` run in the step, behind context_tokens already in its cache."""

    request: Request
    new_tokens: int
    context_tokens: int


class Scheduler:
    def __init__(self, limits: Limits, blocks: BlockManager, policy: Policy) -> None:
        self.limits = limits
        self.blocks = blocks
        self.policy = policy
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def can_ever_run(self, request: Request) -> bool:
        """False when the request outgrows the model length or, alone in the engine, the KV blocks."""
        longest_tokens = request.prompt_tokens + request.output_tokens
        return (
            longest_tokens <= self.limits.max_model_len_tokens
            and self.blocks.blocks_for(request.peak_tokens) <= self.blocks.total_blocks
        )

    def add(self, request: Request) -> None:
        self.policy.enqueue(self.waiting, request)

    def schedule(self, now_ns: int) -> list[Scheduled]:
        """Choose and account one step that starts at `now_ns`. Empty only when no request is here."""
        batch: list[Scheduled] = []
        budget = self.limits.max_num_batched_tokens
        preempted = False

        while len(batch) < len(self.running) and budget:
            request = self.running[len(batch)]
            new_tokens = min(self._wanted(request, request.computed_tokens), budget)
            while not self.blocks.allocate(request, new_tokens):
                preempted = True
                victim = self._preempt()
                if victim is request:
                    break
            else:
                budget -= new_tokens
                batch.append(self._account(request, new_tokens))

        while not preempted and budget and self.waiting and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            cached = self.blocks.cached_prefix(request)
            hit_tokens = len(cached) * self.blocks.block_tokens
            wanted_tokens = self._wanted(request, hit_tokens)
            if wanted_tokens > budget and not self.limits.chunked_prefill:
                break
            new_tokens = min(wanted_tokens, budget)
            if not self.blocks.allocate(request, new_tokens, cached, reserve_tokens=request.total_tokens):
                break
            self.running.append(self.waiting.popleft())
            request.computed_tokens = hit_tokens
            if request.scheduled_ns is None:
                request.scheduled_ns = now_ns
                request.prefix_hit_tokens = hit_tokens
            budget -= new_tokens
            batch.append(self._account(request, new_tokens))
        return batch

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.release(request)

    def _wanted(self, request: Request, computed_tokens: int) -> int:
        new_tokens = request.total_tokens - computed_tokens
        threshold = self.limits.long_prefill_threshold_tokens
        if threshold and len(self.running) + len(self.waiting) > 1:
            new_tokens = min(new_tokens, threshold)
        return min(new_tokens, self.limits.max_model_len_tokens - 1 - computed_tokens)

    def _account(self, request: Request, new_tokens: int) -> Scheduled:
        scheduled = Scheduled(request, new_tokens, request.computed_tokens)
        request.computed_tokens += new_tokens
        return scheduled

    def _preempt(self) -> Request:
        request = self.running.pop(self.policy.victim(self.running))
        self.blocks.release(request)
        request.computed_tokens = 0
        request.preemptions += 1
        self.policy.requeue(self.waiting, request)
        return request
