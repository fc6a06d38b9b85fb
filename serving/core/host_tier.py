"""A second tier of KV blocks in host memory, behind the prefix cache of one engine.

Every block whose content the trace tells is written to the host once its tokens are computed, in the background, one
block after the other; it can be loaded when it has been written. The least recently used one goes when the host is
full. A waiting request first looks in the engine's own prefix cache; the blocks that follow there and lie in the host
are loaded, at admission, and the step that admits the request waits for them.
"""

from collections import OrderedDict
from dataclasses import dataclass

from serving.core.blocks import BlockPool
from serving.core.request import Request


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Of one rank. blocks: how many fit. block_ns: to move one block in either direction. latency_ns: per load."""

    blocks: int
    block_ns: int
    latency_ns: int


@dataclass(slots=True)
class HostUse:
    """Blocks over a run. asked, hit_gpu, hit_host: of admissions, full blocks of known content that could be found,
    and those that were. stored, evicted: in the host. longest_backlog_ns: most that a write had to wait."""

    asked: int = 0
    hit_gpu: int = 0
    hit_host: int = 0
    stored: int = 0
    evicted: int = 0
    longest_backlog_ns: int = 0


class TieredPool(BlockPool):
    """A BlockPool with host memory. steps_ahead: steps composed before the results of one are known, 1 or 2."""

    def __init__(self, num_blocks: int, block_tokens: int, host: HostMemory, steps_ahead: int) -> None:
        super().__init__(num_blocks, block_tokens, prefix_caching=True)
        self.host = host
        self.use = HostUse()
        self._written_ns: OrderedDict[int, int] = OrderedDict()
        self._fresh: list[list[int]] = [[] for _ in range(steps_ahead)]
        self._writer_free_ns = 0

    def begin(self, now_ns: int) -> None:
        """A step is composed at `now_ns`: what an earlier one was to compute is there, and begins to be written."""
        done = self._fresh.pop(0)
        self._fresh.append([])
        for key in done:
            self._store(key, now_ns)

    def _store(self, key: int, now_ns: int) -> None:
        there = self._written_ns
        if key in there:
            there.move_to_end(key)
            return
        use, free_ns = self.use, max(now_ns, self._writer_free_ns)
        use.longest_backlog_ns = max(use.longest_backlog_ns, free_ns - now_ns)
        if len(there) >= self.host.blocks:
            there.popitem(last=False)
            use.evicted += 1
        use.stored += 1
        self._writer_free_ns = there[key] = free_ns + self.host.block_ns

    def add_keys(self, request: Request, tokens: int) -> None:
        before = request.keyed
        super().add_keys(request, tokens)
        if request.keyed > before:
            self._fresh[-1].extend(request.block_keys[before : request.keyed])

    def drop_keys(self, request: Request, tokens: int) -> None:
        for key in request.block_keys[tokens // self.block_tokens : request.keyed]:
            self._fresh[-1].remove(key)
        super().drop_keys(request, tokens)

    def in_host(self, request: Request, total_tokens: int, found: int, now_ns: int) -> int:
        """Blocks behind the first `found` ones of a waiting request that can be loaded now."""
        keys, there = request.block_keys, self._written_ns
        most = min(len(keys), (total_tokens - 1) // self.block_tokens)
        position = found
        while position < most:
            written_ns = there.get(keys[position])
            if written_ns is None or written_ns > now_ns:
                break
            position += 1
        return position - found

    def admitted(self, request: Request, total_tokens: int, found: int, loaded: int) -> None:
        """A request enters with `found` blocks of the prefix cache and `loaded` ones of the host."""
        use = self.use
        use.asked += min(len(request.block_keys), (total_tokens - 1) // self.block_tokens)
        use.hit_gpu += found
        use.hit_host += loaded
        for key in request.block_keys[found : found + loaded]:
            self._written_ns.move_to_end(key)
