"""The decoding requests of one engine as aggregates of the step number.

In every step each decoding request runs one token, so base = computed tokens - step stays constant while it decodes,
and what a step needs follows from a few sums that change only when a request enters or leaves: the keys of all
requests (sum of bases + count x step), the longest (a heap of bases), the keys within the attention cap (a request
counts as short until the step in which it crosses the cap, which is known when it enters), and the blocks to open (one
counter per residue of the base modulo the block length).
"""

from heapq import heappop, heappush

from serving.core.request import Request
from serving.core.shape import StepShape


class DecodeSet:
    """attended_cap_tokens: most keys that one query attends, None where attention reads all of them."""

    def __init__(self, block_tokens: int, attended_cap_tokens: int | None) -> None:
        self.count = 0
        self.cap_tokens = attended_cap_tokens
        self._block_tokens = block_tokens
        self._base_sum = 0
        self._short = 0
        self._short_base_sum = 0
        self._residues = [0] * block_tokens
        self._longest: list[tuple[int, int, int, Request]] = []
        self._crossings: dict[int, list[tuple[int, Request]]] = {}
        self._tracked: dict[int, dict[int, Request]] = {}

    def enter(self, request: Request, computed_tokens: int, step: int) -> None:
        """`request` decodes from `step` on, in which it has `computed_tokens` tokens before."""
        base = computed_tokens - step
        request.base = base
        request.decoding = True
        request.decode_from = step
        self.count += 1
        self._base_sum += base
        self._residues[base % self._block_tokens] += 1
        heappush(self._longest, (-base, request.order, request.entry, request))
        cap = self.cap_tokens
        if cap is not None and computed_tokens + 1 < cap:
            request.short = True
            self._short += 1
            self._short_base_sum += base
            self._crossings.setdefault(cap - 1 - base, []).append((request.entry, request))
        if len(request.block_keys) * self._block_tokens > computed_tokens:
            self._tracked.setdefault(base % self._block_tokens, {})[request.order] = request

    def leave(self, request: Request, step: int) -> None:
        """`request` does not run in `step` any more; its computed_tokens are brought up to date."""
        base = request.base
        request.computed_tokens = base + step
        request.decoding = False
        request.entry += 1
        self.count -= 1
        self._base_sum -= base
        residue = base % self._block_tokens
        self._residues[residue] -= 1
        if request.short:
            request.short = False
            self._short -= 1
            self._short_base_sum -= base
        if residue in self._tracked:
            same = self._tracked[residue]
            same.pop(request.order, None)
            if not same:
                del self._tracked[residue]
        if not self.count:
            self._longest.clear()
            self._crossings.clear()

    def cross(self, step: int) -> None:
        """Bring the short requests up to date for `step`; call it in every step with a request."""
        if self._crossings:
            for entry, request in self._crossings.pop(step, ()):
                if request.entry == entry and request.decoding:
                    request.short = False
                    self._short -= 1
                    self._short_base_sum -= request.base

    def opening(self, step: int) -> int:
        """Requests whose token of `step` is the first of a block."""
        return self._residues[-step % self._block_tokens]

    def tracked_at(self, step: int) -> list[Request]:
        """Those among them whose trace tells the content of blocks to come, in order of admission."""
        return [one for _, one in sorted(self._tracked.get(-step % self._block_tokens, {}).items())]

    @property
    def tracks(self) -> bool:
        return bool(self._tracked)

    def shape(self, step: int) -> StepShape | None:
        """The batch of `step` when these requests alone run in it."""
        count = self.count
        if not count:
            return None
        total = self._base_sum + count * (step + 1)
        capped, cap = total, self.cap_tokens
        if cap is not None:
            capped = self._short_base_sum + self._short * (step + 1) + (count - self._short) * cap
        return StepShape((), count, total, self.kv_max_tokens(step), capped, count)

    def kv_sum_tokens(self, step: int) -> int:
        """Keys visible to the tokens of `step`, the tokens themselves included."""
        return self._base_sum + self.count * (step + 1)

    def kv_capped_sum_tokens(self, step: int) -> int:
        """Sum over requests of min(keys, cap)."""
        if self.cap_tokens is None:
            return self._base_sum + self.count * (step + 1)
        return self._short_base_sum + self._short * (step + 1) + (self.count - self._short) * self.cap_tokens

    def kv_max_tokens(self, step: int) -> int:
        """Keys of the longest request; 0 when there is none."""
        longest = self._longest
        while longest:
            negative, _, entry, request = longest[0]
            if request.entry == entry:
                return step + 1 - negative
            heappop(longest)
        return 0
