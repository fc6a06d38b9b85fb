"""vLLM V1 scheduling at a cost per step that does not depend on the number of decoding requests.

The rules are those of tests/reference/scheduler.py, which spells them out request by request; a property test keeps
the two equal. Here a step touches only what changes in it: requests that enter or leave the decode set, prefill
chunks, and admissions. When blocks run out or the token budget ends among the decodes, the step is composed request by
request (`_walk`), since then it matters who comes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from serving.core.blocks import BlockPool
from serving.core.decode_set import DecodeSet
from serving.core.request import NEVER, Request
from serving.core.shape import StepShape


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one engine. long_prefill_threshold_tokens = 0 switches that cut off."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len_tokens: int
    long_prefill_threshold_tokens: int = 0
    chunked_prefill: bool = True


class Asked(NamedTuple):
    """What a policy sees of a request; the length of its output is not known when it is queued.

    position: number of its queueing at this engine, which no other request has.
    """

    position: int
    arrival_ns: int
    prompt_tokens: int
    priority: int


class Policy(Protocol):
    """Order of the waiting queue, and whom a block shortage hits. A module with this function is one."""

    def rank(self, asked: Asked) -> tuple[int, ...]:
        """Requests wait in ascending order of it; of the running ones the highest is preempted first.

        It must be different for every position.
        """
        ...


class Scheduler:
    """One engine's waiting queue, running requests and KV blocks.

    asynchronous: steps are composed while the one before is running, so `compose(step)` may come before
    `end_step(step - 1)`. attended_cap_tokens: see DecodeSet. keeps_finished: finished requests keep their blocks until
    `let_go`. reserved: requests that hold blocks without running, those and the ones of `reserve`.
    """

    def __init__(
        self,
        limits: Limits,
        blocks: BlockPool,
        policy: Policy,
        *,
        attended_cap_tokens: int | None = None,
        asynchronous: bool = False,
        keeps_finished: bool = False,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.asynchronous = asynchronous
        self.keeps_finished = keeps_finished
        self.reserved = 0
        self.decodes = DecodeSet(blocks.block_tokens, attended_cap_tokens)
        self.waiting: list[tuple[tuple[int, ...], Request]] = []
        self.running: list[Request] = []
        self.repeated_tokens = 0
        self.preempted = False
        self._rank = policy.rank
        self._prefills: list[Request] = []
        self._ending: dict[int, list[Request]] = {}
        self._resumed: list[Request] = []
        self._late: list[tuple[Request, int]] = []
        self._loaded = 0
        self._queued = 0
        self._admitted = 0
        self._ascending = True

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
        heappush(self.waiting, (request.rank, request))

    def compose(self, step: int, now_ns: int) -> StepShape | None:
        """Choose and account the step number `step` at `now_ns`; None when nothing can run in it.

        Step numbers rise by one with every step that the engine's group runs; a number for which the whole group had
        nothing to run is used again, unless a request was preempted (`preempted` says so afterwards). `repeated_tokens`
        is then how many of the step's tokens follow one of the step before in their request.
        """
        decodes, limits = self.decodes, self.limits
        self.blocks.begin(now_ns)
        if not self.running and not self.waiting and not self._resumed:
            self.preempted = False
            self.repeated_tokens = 0
            return None
        self._loaded = 0
        for request in self._ending.get(step - 1, ()):
            if request.decoding and request.last_step == step - 1:
                decodes.leave(request, step)
        decodes.cross(step)

        left = limits.max_num_batched_tokens - decodes.count
        opening = decodes.opening(step)
        alone = not (self._prefills or self.waiting or self._resumed or decodes.tracks)
        if alone and left >= 0 and opening <= self.blocks.free_blocks:
            # Nothing but decodes, the usual step of most ranks of a group.
            if opening:
                self.blocks.take(opening)
            self.preempted = False
            self.repeated_tokens = decodes.count
            return decodes.shape(step)
        chunks: Sequence[tuple[Request, int]] | None = ()
        needed = opening
        if self._prefills:
            chunks = self._chunks(left)
            for request, new_tokens in chunks or ():
                needed += self._new_blocks(request.computed_tokens, new_tokens)
        skipped: Sequence[Request] = ()
        self.preempted = False
        if left < 0 or chunks is None or needed > self.blocks.free_blocks:
            chunks, skipped, left = self._walk(step)
        else:
            self.blocks.take(needed)
            for _, new_tokens in chunks:
                left -= new_tokens

        rows: list[tuple[int, int]] = []
        single_kv: list[int] = []
        complete: list[Request] = []
        if decodes.tracks:
            self._track(step, chunks)
        for request, new_tokens in chunks:
            self._prefill(request, new_tokens, rows, single_kv, complete)
        if complete:
            self._prefills = [one for one in self._prefills if one not in complete]
        if self.waiting and left and not self.preempted:
            self._admit(now_ns, left, rows, single_kv, complete)

        repeated = decodes.count
        if self._resumed:
            repeated -= sum(1 for one in self._resumed if one.decoding and one.run_start == step)
            self._resumed = []
        self.repeated_tokens = repeated
        shape = self._shape(step, rows, single_kv, len(complete))
        for request in complete:
            self._first_token(request, step)
        for request in skipped:
            self._resume(request, step)
        return shape

    def end_step(self, step: int) -> list[Request]:
        """`step` has run: release the requests whose last token it yields, and return them."""
        ending = self._ending.pop(step, None)
        if self._late:
            for request, tokens in self._late:
                self.blocks.add_keys(request, tokens)
            self._late = []
        if ending is None:
            return []
        finished = [request for request in ending if request.last_step == step]
        if len(finished) > 1:
            finished.sort(key=_order)
        for request in finished:
            if request.decoding:
                self.decodes.leave(request, step + 1)
            request.close_run(step)
            if request in self.running:
                self.running.remove(request)
                self.reserved += 1
                if not self.keeps_finished:
                    self.let_go(request)
            else:
                self.waiting = [entry for entry in self.waiting if entry[1] is not request]
                heapify(self.waiting)
        return finished

    def let_go(self, request: Request) -> None:
        """Release the blocks of a request that has finished and kept them."""
        computed = request.computed_tokens
        self.reserved -= 1
        self.blocks.release(request, self.blocks.blocks_for(computed), computed)

    def reserve(self, request: Request) -> int | None:
        """Blocks for a prompt whose cache comes from elsewhere, all but its last token: how many are to be filled.

        None when it has to wait: for a place among max_num_seqs, behind a preempted request, or for the blocks of its
        whole prompt. Those that the prefix cache holds need no filling.
        """
        blocks, prompt = self.blocks, request.prompt_tokens
        if self.waiting or len(self.running) + self.reserved >= self.limits.max_num_seqs:
            return None
        hits, _ = blocks.lookup(request, prompt)
        if blocks.blocks_for(prompt) - len(hits) + blocks.revived(hits, 0) > blocks.free_blocks:
            return None
        if hits:
            blocks.reuse(request, hits, 0)
        held = blocks.blocks_for(prompt - 1)
        blocks.take(held - len(hits))
        blocks.grow(request, held)
        self.reserved += 1
        return held - len(hits)

    def receive(self, request: Request) -> None:
        """The cache of a request of `reserve` has arrived: it runs its last prompt token in the next step."""
        self.reserved -= 1
        request.rank = self._rank(Asked(self._queued, request.arrival_ns, request.prompt_tokens, request.priority))
        self._queued += 1
        request.computed_tokens = request.prompt_tokens - 1
        request.received = True
        self.blocks.add_keys(request, request.computed_tokens)
        self._enter(request)
        self._prefills.append(request)

    def _enter(self, request: Request) -> None:
        running = self.running
        self._ascending = not running or (self._ascending and running[-1].rank < request.rank)
        running.append(request)
        self._admitted += 1
        request.order = self._admitted

    def _wanted(self, missing_tokens: int) -> int:
        threshold = self.limits.long_prefill_threshold_tokens
        if threshold and missing_tokens > threshold and len(self.running) + len(self.waiting) > 1:
            return threshold
        return missing_tokens

    def _new_blocks(self, computed_tokens: int, new_tokens: int) -> int:
        size = self.blocks.block_tokens
        return -(-(computed_tokens + new_tokens) // size) + -computed_tokens // size

    def _chunks(self, left: int) -> list[tuple[Request, int]] | None:
        """The chunk of each running prefill, or None when that depends on requests between them."""
        prefills = self._prefills
        wanted = [(one, self._wanted(one.prompt_tokens + one.emitted_tokens - one.computed_tokens)) for one in prefills]
        if sum(tokens for _, tokens in wanted) <= left:
            return wanted
        if prefills[0] is not self.running[-len(prefills)]:
            return None
        cut = []
        for request, tokens in wanted:
            if left <= 0:
                break
            cut.append((request, min(tokens, left)))
            left -= tokens
        return cut

    def _walk(self, step: int) -> tuple[list[tuple[Request, int]], list[Request], int]:
        """The running requests one by one, in order of admission, preempting when blocks run out.

        Takes the blocks and returns the chunks of prefills, the decodes that got no token, and the budget left.
        Afterwards the decode set holds the decodes of this step.
        """
        running, blocks, decodes = self.running, self.blocks, self.decodes
        budget = self.limits.max_num_batched_tokens
        given: dict[Request, int] = {}
        stuck = False
        at = 0
        while at < len(running) and budget and not stuck:
            request = running[at]
            if request.decoding:
                computed, new_tokens = request.base + step, 1
            elif request.last_step == step - 1 and request.last_step != NEVER:
                at += 1
                continue
            else:
                computed = request.computed_tokens
                new_tokens = min(self._wanted(request.prompt_tokens + request.emitted_tokens - computed), budget)
            needed = self._new_blocks(computed, new_tokens)
            while needed > blocks.free_blocks:
                self.preempted = True
                position = self._victim()
                victim = running.pop(position)
                if position < at:
                    at -= 1
                if self.asynchronous and victim in given and victim.block_keys:
                    self._key_until(victim, given, step)
                taken_back = given.pop(victim, 0)
                budget += taken_back
                self._preempt(victim, step, taken_back)
                if victim is request:
                    stuck = True
                    break
            else:
                blocks.take(needed)
                given[request] = new_tokens
                budget -= new_tokens
                at += 1
        skipped = [one for one in running if one.decoding and one not in given]
        for one in skipped:
            decodes.leave(one, step)
        return [(one, tokens) for one, tokens in given.items() if not one.decoding], skipped, budget

    def _key_until(self, victim: Request, given: dict[Request, int], step: int) -> None:
        """Keys of the requests that a step was given, up to a victim among them, in that order.

        The first of several blocks with the same content is the one that is found.
        """
        blocks = self.blocks
        for request, new_tokens in given.items():
            if request.decoding:
                computed = request.base + step
                known = computed + (request.decode_from > step)
            else:
                computed = request.computed_tokens
                known = computed + new_tokens
            blocks.grow(request, blocks.blocks_for(computed + new_tokens))
            blocks.add_keys(request, known)
            if request is victim:
                return

    def _victim(self) -> int:
        running = self.running
        if self._ascending:
            return len(running) - 1
        return max(range(len(running)), key=lambda position: running[position].rank)

    def _preempt(self, request: Request, step: int, taken_back: int) -> None:
        """Free the blocks of `request`, which was given `taken_back` tokens in the step that is being composed."""
        in_flight = self.asynchronous and not taken_back and NEVER < request.decode_from < step
        if request.decoding:
            self.decodes.leave(request, step)
        else:
            self._prefills = [one for one in self._prefills if one is not request]
        computed = request.computed_tokens
        self.blocks.drop_keys(request, computed)
        # When the step in flight was composed, the token that it reads was not known yet, nor the content of its block.
        self.blocks.release(request, self.blocks.blocks_for(computed + taken_back), computed - in_flight)
        request.close_run(step - 1)
        if request.last_step != step - 1:
            request.last_step = NEVER
        request.decode_from = NEVER
        request.received = False
        request.computed_tokens = 0
        request.preemptions += 1
        heappush(self.waiting, (request.rank, request))

    def _track(self, step: int, chunks: Sequence[tuple[Request, int]]) -> None:
        """Chains of decodes: the block that this step opens, and the keys of the one that it fills.

        Under asynchronous scheduling the last token of a block is known one step later, but for a request that got no
        token in the step before. Prefill chunks of the same step get their keys here too, where both have to be in
        order of admission.
        """
        blocks, size = self.blocks, self.blocks.block_tokens
        keyed: list[tuple[int, Request, int]] = []
        for request in self.decodes.tracked_at(step):
            computed = request.base + step
            blocks.grow(request, computed // size + 1)
            if self.asynchronous:
                keyed.append((request.order, request, computed))
        if self.asynchronous:
            for request in self._resumed:
                if request.decoding and request.run_start == step and request.block_keys:
                    keyed.append((request.order, request, request.base + step + 1))
        else:
            keyed += [(one.order, one, one.base + step + 1) for one in self.decodes.tracked_at(step + 1)]
        for request, new_tokens in chunks:
            after = request.computed_tokens + new_tokens
            blocks.grow(request, blocks.blocks_for(after))
            keyed.append((request.order, request, after))
        for _, request, tokens in sorted(keyed, key=lambda entry: entry[0]):
            blocks.add_keys(request, tokens)

    def _prefill(
        self,
        request: Request,
        new_tokens: int,
        rows: list[tuple[int, int]],
        single_kv: list[int],
        complete: list[Request],
    ) -> None:
        """Account one chunk whose blocks are taken."""
        context = request.computed_tokens
        after = context + new_tokens
        if new_tokens > 1 or (context < request.prompt_tokens and not request.received):
            rows.append((new_tokens, context))
        else:
            single_kv.append(after)
        request.computed_tokens = after
        if request.block_keys:
            self.blocks.grow(request, self.blocks.blocks_for(after))
            self.blocks.add_keys(request, after)
        if after == request.prompt_tokens + request.emitted_tokens:
            complete.append(request)

    def _admit(
        self,
        now_ns: int,
        left: int,
        rows: list[tuple[int, int]],
        single_kv: list[int],
        complete: list[Request],
    ) -> None:
        """Waiting requests, from the head only."""
        blocks, limits, waiting, running = self.blocks, self.limits, self.waiting, self.running
        while left and waiting and len(running) < limits.max_num_seqs:
            request = waiting[0][1]
            total = request.prompt_tokens + request.emitted_tokens
            hits, tail_blocks = blocks.lookup(request, total)
            cached = len(hits) + tail_blocks
            loaded = blocks.in_host(request, total, len(hits), now_ns)
            hit_tokens = (cached + loaded) * blocks.block_tokens
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
            blocks.admitted(request, total, len(hits), loaded)
            self._loaded += loaded
            self._enter(request)
            request.computed_tokens = hit_tokens
            if request.scheduled_ns is None:
                request.scheduled_ns = now_ns
                request.prefix_hit_tokens = hit_tokens
            left -= new_tokens
            before = len(complete)
            self._prefill(request, new_tokens, rows, single_kv, complete)
            if len(complete) == before:
                self._prefills.append(request)

    def _shape(self, step: int, rows: list[tuple[int, int]], single_kv: list[int], complete: int) -> StepShape | None:
        decodes = self.decodes
        count = decodes.count
        if not (count or rows or single_kv):
            return None
        total, capped = decodes.kv_sum_tokens(step), decodes.kv_capped_sum_tokens(step)
        longest = decodes.kv_max_tokens(step)
        if single_kv:
            cap = decodes.cap_tokens
            total += sum(single_kv)
            capped += sum(single_kv if cap is None else [min(kv, cap) for kv in single_kv])
            longest = max(longest, *single_kv)
        shape = StepShape(tuple(rows), count + len(single_kv), total, longest, capped, count + complete)
        return shape._replace(loaded_blocks=self._loaded) if self._loaded else shape

    def _first_token(self, request: Request, step: int) -> None:
        """All tokens of `request` are computed by `step`, which yields its next one."""
        request.run_start = step
        request.last_step = step + request.output_tokens - request.emitted_tokens - 1
        self._ending.setdefault(request.last_step, []).append(request)
        request.decode_from = NEVER
        if request.last_step > step:
            self.decodes.enter(request, request.computed_tokens, step + 1)

    def _resume(self, request: Request, step: int) -> None:
        """A decode that got no token in `step` goes on in the next one."""
        if self.asynchronous and request.chain and request.computed_tokens % self.blocks.block_tokens == 0:
            self._late.append((request, request.computed_tokens))
        request.close_run(step - 1)
        request.run_start = step + 1
        request.last_step = step + request.output_tokens - request.emitted_tokens
        self._ending.setdefault(request.last_step, []).append(request)
        self._resumed.append(request)
        self.decodes.enter(request, request.computed_tokens, step + 1)
        request.decode_from = step + 2  # the token that the next step reads is known when that is composed


def _order(request: Request) -> int:
    return request.order
