"""Prefill chunks beside decode requests, where another kernel runs them than one that runs short chunks alone.

From 32 heads per rank on, vLLM's FLASHMLA_SPARSE gives the decode kernel the leading requests of a step that have
equally many new tokens, up to a threshold (0.26: split_decodes_and_prefills with require_uniform,
v1/attention/backends/utils.py, and _build_fp8_separate_prefill_decode, v1/attention/backends/mla/flashmla_sparse.py). A
short chunk alone is such a request. Beside decodes, which lead with one new token each, it is a prefill: its context is
widened to bf16, and FlashMLA's prefill kernel runs it. Among chunks alone a table has that kernel behind the threshold
only; below, its times are continued.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

from profiler.core.grid import BatchRow, Outside, fixed_us, prefill_grid
from profiler.core.grid_work import Work
from profiler.core.types import ModelSpec
from profiler.core.unequal import Beside
from profiler.kernels._placement import Ran, prefill_work
from profiler.kernels._unequal import together_of

# Chunks up to this many times the threshold say what tokens and keys cost; longer ones fill the card better.
_FITTED_UP_TO: Final = 2


class _Costs(NamedTuple):
    """Microseconds of a token, whatever it reads, and of a unit of work."""

    token_us: float
    work_us: float


def beside_of(
    rows: Sequence[BatchRow], name: str, spec: ModelSpec, ran: Ran | None, outside: Outside, together: bool
) -> Beside | None:
    """Prices of prefills beside decodes; None where they are those of the prefills alone, or where fewer than two chunk
    lengths behind the threshold were measured.

    rows: of the kernel. together: several prefills are priced by that form. Raises CoverageError as prefill_grid.
    """
    whole = prefill_work(name, ran) if name == "sparse_mla" else None
    if ran is None or whole is None or not ran.tiles or not ran.decodes_apart:
        return None
    step = ran.whole_below
    long = [row for row in rows if row.chunk > step and not row.requests]
    # The prefill kernel has one block for each tile of heads of a query, and splits no keys.
    work = replace(whole, splits_keys=False, whole_below=0)
    costs = _costs([row for row in long if row.chunk <= _FITTED_UP_TO * step], work)
    if costs is None:
        return None
    grid = prefill_grid([*_continued(long, step, work, costs, outside), *long], outside, work)
    share = together_of(name, spec, ran) if together else None
    if share is not None:
        share = replace(
            share, work=replace(share.work, whole_below=0), steps=tuple(s for s in share.steps if s != step)
        )
    return Beside(grid, fixed_us(grid), share)


def _continued(long: Sequence[BatchRow], step: int, work: Work, costs: _Costs, outside: Outside) -> Iterator[BatchRow]:
    """Chunks up to `step` at the costs of the kernel that runs the long ones, from the shortest of these.

    Of one token, and on both sides of every wave; behind the contexts of that chunk and the one that ends where its
    last does.
    """
    first = min(row.chunk for row in long)
    contexts = sorted(row.context for row in long if row.chunk == first)
    grid = prefill_grid(long, outside, work)
    full = range(work.wave_queries, step, work.wave_queries)
    for chunk in sorted({1, *full, *(queries + 1 for queries in full), step}):
        for context in (*contexts, contexts[-1] + first - chunk):
            fewer = work.prefill(first, context) - work.prefill(chunk, context)
            less = costs.token_us * (first - chunk) + costs.work_us * fewer
            time = grid.at(first, min(context, contexts[-1])) - less
            yield BatchRow(chunk, context, 0, 0, max(0.0, time))


def _costs(rows: Sequence[BatchRow], work: Work) -> _Costs | None:
    """Least squares of the differences between neighbouring chunks behind equal contexts, each relative to the longer
    chunk's time; neither cost is below zero. None without a difference."""
    times = {(row.chunk, row.context): row.time_us for row in rows}
    terms = []
    for low, high in pairwise(sorted({row.chunk for row in rows})):
        for context in sorted(context for chunk, context in times if chunk == low and (high, context) in times):
            time = times[high, context]
            grown = work.prefill(high, context) - work.prefill(low, context)
            terms.append(((high - low) / time, grown / time, (time - times[low, context]) / time))
    if not terms:
        return None
    cc, cw, ww = (sum(t[i] * t[j] for t in terms) for i, j in ((0, 0), (0, 1), (1, 1)))
    cy, wy = (sum(t[i] * t[2] for t in terms) for i in (0, 1))
    det = cc * ww - cw * cw
    if det > 1e-9 * cc * ww:
        token, unit = (cy * ww - wy * cw) / det, (wy * cc - cy * cw) / det
        if token >= 0 and unit >= 0:
            return _Costs(token, unit)
        if unit < 0:
            return _Costs(max(0.0, cy / cc), 0.0)
    return _Costs(0.0, max(0.0, wy / ww)) if ww else _Costs(max(0.0, cy / cc), 0.0)
