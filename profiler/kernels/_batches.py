"""Prefill and decode shots over chunk x context and requests x kv, shared by the attention-like categories."""

from collections.abc import Iterator

from profiler.core.shots import Fill, Regime, Shot
from profiler.core.types import Category
from profiler.kernels._axes import Limits


def prefill_cells(limits: Limits, longest: int, to_the_end: bool = False) -> Iterator[tuple[int, int]]:
    """(chunk, context) pairs whose total is at most `longest` tokens.

    to_the_end: every chunk also has the context with which it ends at `longest`, whatever the grid.
    """
    for chunk in limits.up_to(limits.axes.chunk_tokens, min(limits.max_num_batched_tokens, longest)):
        contexts = limits.up_to(limits.axes.context_tokens, longest - chunk)
        if to_the_end and longest - chunk not in contexts:
            contexts.append(longest - chunk)
        for context in contexts:
            yield chunk, context


def decode_cells(limits: Limits) -> Iterator[tuple[int, int]]:
    """(requests, kv) pairs; kv counts the new token."""
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    for requests in limits.up_to(limits.axes.decode_requests, most):
        for kv in limits.up_to(limits.axes.decode_kv_tokens, limits.longest):
            yield requests, kv


def prefill_shot(category: Category, names: tuple[str, ...], chunk: int, context: int, regime: Regime) -> Shot:
    fill = Fill(category, (chunk, context, 0, 0, 0), names)
    return Shot(fills=(fill,), requests=((chunk, context),), regime=regime)


def decode_shot(category: Category, names: tuple[str, ...], requests: int, kv: int) -> Shot:
    fill = Fill(category, (0, 0, requests, kv, 1), names)
    return Shot(fills=(fill,), requests=((1, kv - 1),) * requests)
