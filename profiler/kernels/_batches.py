"""Prefill and decode shots over chunk x context and requests x kv, shared by the attention-like categories."""

from collections.abc import Iterable, Iterator

from profiler.core.shots import Fill, Regime, Shot
from profiler.core.types import Category, ModelSpec
from profiler.kernels._axes import Limits


def prefill_cells(limits: Limits, longest: int, cap: int | None = None) -> Iterator[tuple[int, int]]:
    """(chunk, context) pairs whose total is at most `longest` tokens.

    cap: every chunk also has the contexts with which it ends and begins there, None for no such point.
    """
    extra = (cap,) if cap is not None else ()
    yield from _cells(limits, longest, limits.axes.chunk_tokens, limits.axes.context_tokens, cap, extra)


def dense_prefill_cells(limits: Limits, cap: int) -> Iterator[tuple[int, int]]:
    """(chunk, context) pairs of the dense prefill below the cap, every chunk up to the context that ends at it."""
    longest = min(limits.longest, cap)
    yield from _cells(limits, longest, limits.axes.dense_chunk_tokens, limits.axes.dense_context_tokens, longest, ())


def _cells(
    limits: Limits, longest: int, chunks: Iterable[int], contexts: Iterable[int], end: int | None, also: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    for chunk in limits.up_to(chunks, min(limits.max_num_batched_tokens, longest)):
        extra = also if end is None else (*also, end - chunk)
        for context in _with(limits.up_to(contexts, longest - chunk), extra, longest - chunk):
            yield chunk, context


def decode_cells(limits: Limits, cap: int | None = None) -> Iterator[tuple[int, int]]:
    """(requests, kv) pairs; kv counts the new token. cap: also on both sides of it."""
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    for requests in limits.up_to(limits.axes.decode_requests, most):
        keys = limits.up_to(limits.axes.decode_kv_tokens, limits.longest)
        for kv in _with(keys, [] if cap is None else [cap, cap + 1], limits.longest):
            yield requests, kv


def _with(values: Iterable[int], extra: Iterable[int], most: int) -> list[int]:
    return sorted({*values, *(value for value in extra if 0 <= value <= most)})


def cap_point(spec: ModelSpec, limits: Limits) -> int | None:
    """Where the grid has points on both sides of the cap on attended keys; None when it has none there."""
    return spec.indexer.attended_cap_tokens if limits.axes.at_the_cap and spec.indexer else None


def prefill_shot(category: Category, names: tuple[str, ...], chunk: int, context: int, regime: Regime) -> Shot:
    fill = Fill(category, (chunk, context, 0, 0, 0), names)
    return Shot(fills=(fill,), requests=((chunk, context),), regime=regime)


def decode_shot(category: Category, names: tuple[str, ...], requests: int, kv: int) -> Shot:
    fill = Fill(category, (0, 0, requests, kv, 1), names)
    return Shot(fills=(fill,), requests=((1, kv - 1),) * requests)
