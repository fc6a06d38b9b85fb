"""What the KV blocks of a trace hold: equal keys for equal content behind an equal prefix."""

from collections.abc import Sequence

from serving.traces import TraceRequest

_Known = dict[tuple[int, int | tuple[int, ...]], int]


def tells_content(requests: Sequence[TraceRequest]) -> bool:
    """True when a request has token ids or prefix hashes."""
    return any(request.prompt_ids is not None or request.prefix is not None for request in requests)


def block_keys(requests: Sequence[TraceRequest], block_tokens: int) -> list[tuple[int, ...]]:
    """Per request one key for each leading full block of `block_tokens` tokens whose content the trace tells.

    Keys are exact: no two contents share one. They number the distinct (key of the block before, ids in the block)
    pairs from 0 in order of first appearance; a hash block that holds several blocks takes as many numbers. Output ids
    extend a prompt whose ids are known. Requests without ids or hashes get ().
    """
    keys = Keys(block_tokens)
    return [keys.of(request) for request in requests]


class Keys:
    """Numbers the blocks of `block_tokens` tokens of one request after another."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._known: _Known = {}
        self._next = 0

    def of(self, request: TraceRequest) -> tuple[int, ...]:
        """One key for each leading full block whose content the trace tells."""
        ids, unit_tokens, tokens, root = _told(request)
        blocks = tokens // self.block_tokens
        if unit_tokens > self.block_tokens and unit_tokens % self.block_tokens == 0:
            return self._expanded(ids, unit_tokens, blocks, root)
        keys: list[int] = []
        parent = root
        for position in range(blocks):
            start = position * self.block_tokens
            part = ids[start // unit_tokens : -(-(start + self.block_tokens) // unit_tokens)]
            parent = self._key(parent, part, 1)
            keys.append(parent)
        return tuple(keys)

    def of_prompt(self, request: TraceRequest) -> tuple[int, ...]:
        """One key for every block of the prompt, a part-filled last one included; own ones where nothing is told."""
        ids, unit_tokens, told_tokens, root = _told(request)
        full, rest_tokens = divmod(request.prompt_tokens, self.block_tokens)
        keys = self.of(request)[:full]
        if len(keys) < full:
            return keys + tuple(self._new(1) for _ in range(full - len(keys) + (rest_tokens > 0)))
        if rest_tokens and told_tokens < request.prompt_tokens:
            return (*keys, self._new(1))
        if rest_tokens:
            parent = keys[-1] if keys else root
            part = ids[full * self.block_tokens // unit_tokens : -(-request.prompt_tokens // unit_tokens)]
            return (*keys, self._key(parent, (*part, -rest_tokens), 1))
        return keys

    def _expanded(self, ids: tuple[int, ...], unit_tokens: int, blocks: int, root: int) -> tuple[int, ...]:
        """A hash block holds whole blocks: one look-up for all of them."""
        per_unit = unit_tokens // self.block_tokens
        keys: list[int] = []
        parent = root
        for one in ids:
            parent = self._key(parent, one, per_unit)
            keys.extend(range(parent, parent + per_unit))
        return tuple(keys[:blocks])

    def _key(self, parent: int, part: int | tuple[int, ...], count: int) -> int:
        key = self._known.get((parent, part))
        if key is None:
            key = self._known[parent, part] = self._new(count)
        return key

    def _new(self, count: int) -> int:
        first = self._next
        self._next += count
        return first


def _told(request: TraceRequest) -> tuple[tuple[int, ...], int, int, int]:
    """The ids that tell the content, the tokens that each stands for, the tokens that they cover, and the parent of the
    first block: another one for token ids and for hashes of every block length, whose equal ids mean nothing."""
    if request.prompt_ids is not None:
        ids = request.prompt_ids + (request.output_ids or ())
        return ids, 1, len(ids), -1
    if request.prefix is not None:
        return request.prefix.ids, request.prefix.block_tokens, request.prefix.tokens, -1 - request.prefix.block_tokens
    return (), 1, 0, -1
