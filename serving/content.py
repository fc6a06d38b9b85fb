"""What the KV blocks of a trace hold: equal keys for equal content behind an equal prefix."""

from collections.abc import Sequence

from serving.traces import TraceRequest


def block_keys(requests: Sequence[TraceRequest], block_tokens: int) -> list[tuple[int, ...]]:
    """Per request one key for each leading full block of `block_tokens` tokens whose ids the trace gives.

    Keys number the distinct (key of the block before, token ids) pairs from 0 in order of first appearance, so they
    are exact: no two contents share one. Output ids extend a prompt whose ids are known. Requests without ids get ().
    """
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    return [_chain(request, block_tokens, known) for request in requests]


def _chain(request: TraceRequest, block_tokens: int, known: dict[tuple[int, tuple[int, ...]], int]) -> tuple[int, ...]:
    if request.prompt_ids is None:
        return ()
    ids = request.prompt_ids + (request.output_ids or ())
    keys: list[int] = []
    parent = -1
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        parent = known.setdefault((parent, ids[start : start + block_tokens]), len(known))
        keys.append(parent)
    return tuple(keys)
