"""KV blocks of one engine of the specification: allocation, prefix cache, eviction.

The free queue of the engine has three parts, from the end that is reused first: blocks freed without a key, blocks
never used, and keyed blocks in the order of their release. The first two carry no content, so only the third can be
hit. A keyed block keeps its key until it is handed out again (lazy eviction).
"""

from collections import OrderedDict
from collections.abc import Sequence

from reference.request import Request


class BlockManager:
    """`num_blocks` counts block 0, the null block, which is never handed out. `block_tokens` is tokens per block."""

    def __init__(self, num_blocks: int, block_tokens: int, prefix_caching: bool) -> None:
        self.total_blocks = num_blocks - 1
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self._blank: list[int] = []
        self._fresh = 1
        self._released: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._key_of: dict[int, int] = {}
        self._blocks_of: dict[int, dict[int, None]] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._blank) + self.total_blocks + 1 - self._fresh + len(self._released)

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - self.free_blocks

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def cached_prefix(self, request: Request) -> list[int]:
        """Cached blocks that hold the longest known prefix, at least one token short of the whole request.

        The last token is always computed, because its output is needed.
        """
        found: list[int] = []
        if self.prefix_caching:
            for position in range((request.total_tokens - 1) // self.block_tokens):
                holders = self._blocks_of.get(_key(request, position))
                if holders is None:
                    break
                found.append(next(iter(holders)))
        return found

    def allocate(
        self,
        request: Request,
        new_tokens: int,
        cached: Sequence[int] = (),
        reserve_tokens: int = 0,
        lookahead_tokens: int = 0,
        most_tokens: int | None = None,
    ) -> bool:
        """Give `request` the blocks for `new_tokens` more tokens, on top of `cached` blocks of its prefix.

        reserve_tokens: the blocks of a sequence this long must be free, though only those of the new tokens are
        taken. lookahead_tokens: these many more get blocks too, up to most_tokens in all. Returns False, with nothing
        changed, when there are too few free blocks.
        """
        held = len(request.blocks) + len(cached)
        after_tokens = request.computed_tokens + len(cached) * self.block_tokens + new_tokens
        revived = sum(1 for block in cached if not self._references[block])
        slots = after_tokens + lookahead_tokens
        if most_tokens is not None:
            slots = min(slots, most_tokens)
        if self.blocks_for(max(slots, reserve_tokens)) - held + revived > self.free_blocks:
            return False
        for block in cached:
            self._references[block] += 1
            self._released.pop(block, None)
        request.blocks.extend(cached)
        request.keyed_blocks += len(cached)
        request.blocks.extend(self._take() for _ in range(self.blocks_for(slots) - held))
        self.add_keys(request, min(after_tokens, request.total_tokens))
        return True

    def release(self, request: Request) -> None:
        """Drop all blocks of `request`, the last first, so that the head of a prefix outlives its tail."""
        for block in reversed(request.blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key_of:
                self._released[block] = None
            else:
                self._blank.append(block)
        request.blocks.clear()
        request.keyed_blocks = 0

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        elif self._fresh <= self.total_blocks:
            block = self._fresh
            self._fresh += 1
        else:
            block, _ = self._released.popitem(last=False)
            key = self._key_of.pop(block)
            holders = self._blocks_of[key]
            del holders[block]
            if not holders:
                del self._blocks_of[key]
        self._references[block] = 1
        return block

    def add_keys(self, request: Request, tokens: int) -> None:
        """Make the full blocks of the first `tokens` tokens findable; the content of later ones is not known yet."""
        full_blocks = tokens // self.block_tokens if self.prefix_caching else 0
        for position in range(request.keyed_blocks, full_blocks):
            key = _key(request, position)
            block = request.blocks[position]
            self._key_of[block] = key
            self._blocks_of.setdefault(key, {})[block] = None
        request.keyed_blocks = max(request.keyed_blocks, full_blocks)

    def drop_keys(self, request: Request, tokens: int) -> None:
        """Forget the content of the blocks past the first `tokens` tokens: the step that was to fill them is undone."""
        full_blocks = tokens // self.block_tokens
        for position in range(full_blocks, request.keyed_blocks):
            block = request.blocks[position]
            holders = self._blocks_of[self._key_of.pop(block)]
            del holders[block]
            if not holders:
                del self._blocks_of[_key(request, position)]
        request.keyed_blocks = min(request.keyed_blocks, full_blocks)


def _key(request: Request, position: int) -> int:
    """Keys from the trace are at least 0; the negative ones are unique to (request, position)."""
    if position < len(request.block_keys):
        return request.block_keys[position]
    return -1 - (request.index << 32 | position)
