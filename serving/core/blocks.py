"""KV blocks of one engine: counts, the prefix cache and its eviction.

Blocks without findable content are only counted. Findable ones that nobody holds wait in the order of their release
and are reused last, the first released first. Two kinds of entry wait there: a block whose content the trace tells,
which any request with the same prefix can hit, and the tail of one request, a number of blocks that only this request
can hit again (after a preemption). A tail shrinks from its end, since the end of a sequence is released before its
head. So no operation depends on the number of blocks that the cache holds.
"""

from collections import OrderedDict
from collections.abc import Sequence

from serving.core.request import Request

_UNKEYED, _TAIL = -1, -2


class Cached:
    """A block of a chain (blocks = 1, `references` holders, key >= 0 once findable) or the tail of one request."""

    __slots__ = ("blocks", "key", "references")

    def __init__(self, key: int, blocks: int, references: int) -> None:
        self.key = key
        self.blocks = blocks
        self.references = references


class BlockPool:
    """`num_blocks` counts block 0, the null block, which is never handed out. `block_tokens` is tokens per block."""

    def __init__(self, num_blocks: int, block_tokens: int, prefix_caching: bool) -> None:
        self.total_blocks = num_blocks - 1
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self.free_blocks = self.total_blocks
        self._findable = 0
        self._released: OrderedDict[Cached, None] = OrderedDict()
        self._holders: dict[int, list[Cached]] = {}
        self._changes = 0
        self._last_lookup: tuple[int, int, int, list[Cached]] = (-1, -1, -1, [])

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - self.free_blocks

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def lookup(self, request: Request, total_tokens: int) -> tuple[Sequence[Cached], int]:
        """The chain blocks and the number of tail blocks that hold the longest known prefix of a waiting request.

        At least one of its `total_tokens` is left out: the last token is always computed, because its output is needed.
        """
        keys = request.block_keys
        if not self.prefix_caching or not (keys or request.tail):
            return (), 0
        most = (total_tokens - 1) // self.block_tokens
        found: list[Cached] = []
        if keys:
            last = self._last_lookup
            if last[0] == self._changes and last[1] == request.index and last[2] == most:
                found = last[3]
            else:
                holders = self._holders
                for position in range(min(most, len(keys))):
                    same = holders.get(keys[position])
                    if same is None:
                        break
                    found.append(same[0])
                self._last_lookup = self._changes, request.index, most, found
        tail = request.tail
        if tail is None or len(found) < len(keys):
            return found, 0
        return found, tail.blocks

    def findable_blocks(self, request: Request) -> int:
        """Blocks that a lookup for a request that has not run yet would find; for routers, changes nothing."""
        found = 0
        if self.prefix_caching:
            most = (request.prompt_tokens - 1) // self.block_tokens
            for key in request.block_keys[:most]:
                if key not in self._holders:
                    break
                found += 1
        return found

    def begin(self, now_ns: int) -> None:
        """A step is composed at `now_ns`; for pools with a second tier."""

    def in_host(self, request: Request, total_tokens: int, found: int, now_ns: int) -> int:
        """Blocks behind the `found` ones of a lookup that a second tier can load."""
        return 0

    def admitted(self, request: Request, total_tokens: int, found: int, loaded: int) -> None:
        """A waiting request enters with that many blocks found and loaded; for pools with a second tier."""

    def revived(self, hits: Sequence[Cached], tail_blocks: int) -> int:
        """How many of the blocks that a lookup found are free now and would be taken by their reuse."""
        return tail_blocks + sum(1 for block in hits if not block.references)

    def reuse(self, request: Request, hits: Sequence[Cached], tail_blocks: int) -> None:
        """Give a request the blocks that its lookup found."""
        for block in hits:
            if not block.references:
                del self._released[block]
                self._findable -= 1
                self.free_blocks -= 1
            block.references += 1
        request.chain.extend(hits)
        request.keyed = len(hits)
        if request.tail is not None:
            if tail_blocks:
                del self._released[request.tail]
                self._findable -= tail_blocks
                self.free_blocks -= tail_blocks
            request.tail = None
        self._changes += 1

    def take(self, count: int) -> None:
        """Hand out `count` blocks, which must be free: blank ones first, then the longest released."""
        blank = self.free_blocks - self._findable
        self.free_blocks -= count
        if count <= blank:
            return
        count -= blank
        self._findable -= count
        self._changes += 1
        released = self._released
        while count:
            oldest = next(iter(released))
            if oldest.blocks > count:
                oldest.blocks -= count
                return
            count -= oldest.blocks
            del released[oldest]
            if oldest.key == _TAIL:
                oldest.blocks = 0
            else:
                self._hold_no_more(oldest)

    def grow(self, request: Request, blocks: int) -> None:
        """Blocks taken for a request, up to `blocks` in all: those whose content the trace tells join its chain."""
        if self.prefix_caching:
            chain = request.chain
            for _ in range(len(chain), min(blocks, len(request.block_keys))):
                chain.append(Cached(_UNKEYED, 1, 1))

    def add_keys(self, request: Request, tokens: int) -> None:
        """Make the chain's full blocks within the first `tokens` tokens findable."""
        keys = request.block_keys
        full = min(tokens // self.block_tokens, len(keys))
        if self.prefix_caching and full > request.keyed:
            for position in range(request.keyed, full):
                block = request.chain[position]
                block.key = keys[position]
                self._holders.setdefault(block.key, []).append(block)
            request.keyed = full
            self._changes += 1

    def drop_keys(self, request: Request, tokens: int) -> None:
        """Forget the content of the chain's blocks past the first `tokens` tokens: they will not be computed."""
        full = tokens // self.block_tokens
        if full >= request.keyed:
            return
        for block in request.chain[full : request.keyed]:
            self._hold_no_more(block)
            block.key = _UNKEYED
        request.keyed = full
        self._changes += 1

    def _hold_no_more(self, block: Cached) -> None:
        holders = self._holders[block.key]
        holders.remove(block)
        if not holders:
            del self._holders[block.key]

    def release(self, request: Request, blocks: int, keyed_tokens: int) -> None:
        """Drop the `blocks` blocks of a request, the last first; those within `keyed_tokens` tokens stay findable."""
        self.free_blocks += blocks
        if not self.prefix_caching:
            return
        own = keyed_tokens // self.block_tokens - len(request.block_keys)
        if own > 0:
            request.tail = Cached(_TAIL, own, 0)
            self._released[request.tail] = None
            self._findable += own
        chain = request.chain
        if not chain:
            return
        self.add_keys(request, keyed_tokens)
        released = self._released
        for block in reversed(chain):
            block.references -= 1
            if block.references:
                self.free_blocks -= 1
            elif block.key >= 0:
                released[block] = None
                self._findable += 1
        chain.clear()
        request.keyed = 0
        self._changes += 1
