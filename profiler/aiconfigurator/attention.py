"""Attention modules: AIConfigurator's rows of one layer as cells of ours, without those that cannot be right.

A row is one module of one layer on one rank, in milliseconds: `batch_size` prompts of `isl` new tokens behind `step`
cached ones (context), or `batch_size` requests of one new token behind `step` cached ones (generation).

Changes to the rows, each counted in `Cells.changes`:

* at_launch_floor: DSA prefills are timed without a CUDA graph, so a short one takes as long as its launches (1.2 to
  1.7 ms, up to 3 times the work of the device). A chunk of n tokens does not do more than n decode requests with as
  many keys, which are timed in a graph; where it is slower than they are, it takes their time. Longer chunks than any
  decode batch take their share of the smallest batch of such prompts whose share no longer falls.
* kept_at_launch_floor: such rows without either bound. They stay.
* dense_fallback: prefills from 1,024 tokens on below 2 % of the card's bf16 peak whose tokens grow dearer by half and
  more with each doubling are a reference path that attends every key (38 s for one cell of MiniMax-M3); they and the
  longer chunks of their table are left out.
* outlier: cells more than twice or less than half of what their neighbours along the context give, on both sides.
* beyond_index_range: contexts that end within 1 % of 2**20 tokens, where 32-bit offsets overflow.
* not_a_time: not a positive number.
* derived_context: a table with contexts up to 128 tokens alone gets further ones. The work of a query depends on its
  position only, so a chunk from c to c + n costs the whole prompt of c + n less that of c, and no less than the chunk
  without context. Beyond the longest prompt, only where asked for, the prompt's time continues as a parabola whose
  second derivative is that between its last three doublings.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from profiler.core.errors import CoverageError

if TYPE_CHECKING:
    import pandas as pd

CONTEXT_COLUMNS: Final = ("kv_cache_dtype", "num_heads", "batch_size", "isl", "step", "latency")
GENERATION_COLUMNS: Final = ("kv_cache_dtype", "num_heads", "batch_size", "step", "latency")
# Slower than its bound by more than the scatter of the tables (prefill p90 5.9 %, batching gains of about 10 %).
_TOLERANCE: Final = 1.15
_LEAST_EFFICIENCY: Final = 0.02
_LEAST_CHUNK_TOKENS: Final = 1024
_OUTLIER: Final = 2.0
_INDEX_RANGE_TOKENS: Final = 1 << 20
_FEW_CONTEXTS_TOKENS: Final = 128
_CONTEXTS: Final = (512, 1024, 2048, 4096, 8192, 16384, 24576, 32768, 49152, 65536, 98304, 131072, 196608, 262144)

Prefill = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cells:
    """Microseconds of a module. prefill: by (chunk, context) tokens. decode: by (requests, visible keys)."""

    prefill: dict[Prefill, float]
    decode: dict[tuple[int, int], float]
    changes: Counter[str] = field(default_factory=Counter)


def decode_cells(frame: "pd.DataFrame", changes: Counter[str]) -> dict[tuple[int, int], float]:
    """Visible keys are the cached ones and the new one."""
    rows = _median(frame, ("batch_size", "step"), changes)
    return {(batch, step + 1): us for (batch, step), us in rows.items()}


def prefill_cells(
    frame: "pd.DataFrame",
    decode: Mapping[tuple[int, int], float],
    changes: Counter[str],
    *,
    eager: bool,
    least_us: "LeastTime",
    extend_context_tokens: int | None,
) -> dict[Prefill, float]:
    """Cells of a single prompt in the step.

    eager: the rows were timed without a CUDA graph. least_us: time of a chunk at the card's bf16 peak. Raises
    CoverageError when no row is left.
    """
    rows = _median(frame, ("batch_size", "isl", "step"), changes)
    # A chunk of one token is a decode.
    rows = {key: us for key, us in rows.items() if key[1] > 1}
    batches: dict[Prefill, dict[int, float]] = {}
    for (batch, isl, step), us in rows.items():
        batches.setdefault((isl, step), {})[batch] = us
    single = {cell: found[1] for cell, found in batches.items() if 1 in found}
    changes["several_prompts_unused"] += len(rows) - len(single)
    single = _without(single, changes)
    single = _without_fallback(single, least_us, changes)
    if eager:
        single = {cell: _off_the_floor(cell, us, decode, batches[cell], changes) for cell, us in sorted(single.items())}
    if not single:
        raise CoverageError("no prefill row of a single prompt is left")
    return _with_contexts(single, extend_context_tokens, changes)


class LeastTime:
    """Microseconds of a (chunk, context) prefill at the peak of the card."""

    def __init__(self, flops: Mapping[Prefill, float] | None = None) -> None:
        self.known = dict(flops or {})

    def __call__(self, cell: Prefill) -> float:
        return self.known.get(cell, 0.0)


def _median(frame: "pd.DataFrame", names: tuple[str, ...], changes: Counter[str]) -> dict[tuple[int, ...], float]:
    """Microseconds by key; the median where one key has several rows."""
    times: dict[tuple[int, ...], list[float]] = {}
    columns = [frame[name].tolist() for name in names]
    for *key, latency in zip(*columns, frame["latency"].tolist(), strict=True):
        if not math.isfinite(latency) or latency <= 0:
            changes["not_a_time"] += 1
            continue
        times.setdefault(tuple(int(part) for part in key), []).append(float(latency) * 1e3)
    return {key: sorted(found)[(len(found) - 1) // 2] for key, found in times.items()}


def _without(single: Mapping[Prefill, float], changes: Counter[str]) -> dict[Prefill, float]:
    """Without cells at the end of the index range, and outliers along the context."""
    kept = {}
    for (isl, step), us in single.items():
        if isl + step > 0.99 * _INDEX_RANGE_TOKENS or step >= 0.95 * _INDEX_RANGE_TOKENS:
            changes["beyond_index_range"] += 1
        else:
            kept[isl, step] = us
    by_chunk: dict[int, list[int]] = {}
    for isl, step in sorted(kept):
        by_chunk.setdefault(isl, []).append(step)
    for isl, steps in by_chunk.items():
        for before, at, after in zip(steps, steps[1:], steps[2:], strict=False):
            near = kept.get((isl, before)), kept.get((isl, after))
            if near[0] is None or near[1] is None:
                continue
            if kept[isl, at] > _OUTLIER * max(near[0], near[1]) or kept[isl, at] * _OUTLIER < min(near[0], near[1]):
                changes["outlier"] += 1
                del kept[isl, at]
    return kept


def _without_fallback(
    single: Mapping[Prefill, float], least_us: LeastTime, changes: Counter[str]
) -> dict[Prefill, float]:
    bad = [
        cell[0]
        for cell, us in single.items()
        if cell[0] >= _LEAST_CHUNK_TOKENS
        and 0 < least_us(cell) < _LEAST_EFFICIENCY * us
        and _grows_faster_than_linear(single, cell)
    ]
    if not bad:
        return dict(single)
    kept = {cell: us for cell, us in single.items() if cell[0] < min(bad)}
    changes["dense_fallback"] += len(single) - len(kept)
    return kept


def _grows_faster_than_linear(single: Mapping[Prefill, float], cell: Prefill) -> bool:
    """True where a token of the chunk takes half as long again as one of a chunk of at most half its length."""
    chunk, context = cell
    halves = [isl for isl, step in single if step == context and isl <= chunk / 2]
    if not halves:
        return False
    half = max(halves)
    return single[cell] / chunk > 1.5 * single[half, context] / half


def _off_the_floor(
    cell: Prefill,
    us: float,
    decode: Mapping[tuple[int, int], float],
    batches: Mapping[int, float],
    changes: Counter[str],
) -> float:
    chunk, context = cell
    most = max((requests for requests, _ in decode), default=0)
    bound = between(decode, chunk, context + chunk / 2) if chunk <= most else None
    if bound is None:
        bound = _share(batches)
        if bound is None:
            changes["kept_at_launch_floor"] += chunk <= most
            return us
    if us <= _TOLERANCE * bound:
        return us
    changes["at_launch_floor"] += 1
    return bound


def _share(batches: Mapping[int, float]) -> float | None:
    """Time per prompt of the smallest batch whose share the next larger one does not undercut."""
    counts = sorted(batches)
    shares = [batches[count] / count for count in counts]
    for here, next_share in pairwise(shares):
        if here <= _TOLERANCE * next_share:
            return here
    return None


def between(cells: Mapping[tuple[int, int], float], x: float, y: float) -> float | None:
    """Bilinear between the cells around (x, y); the smallest key count answers for fewer. None outside."""
    rows: dict[int, list[int]] = {}
    for row, column in cells:
        rows.setdefault(row, []).append(column)
    xs = sorted(rows)
    if not xs or not xs[0] <= x <= xs[-1]:
        return None
    i = bisect_left(xs, x)
    around = [xs[i]] if xs[i] == x else [xs[i - 1], xs[i]]
    values = []
    for row in around:
        value = _along(sorted(rows[row]), row, cells, y)
        if value is None:
            return None
        values.append(value)
    if len(values) == 1:
        return values[0]
    share = (x - around[0]) / (around[1] - around[0])
    return values[0] + (values[1] - values[0]) * share


def _along(ys: list[int], row: int, cells: Mapping[tuple[int, int], float], y: float) -> float | None:
    y = max(y, ys[0])
    if y > ys[-1]:
        return None
    j = bisect_left(ys, y)
    if ys[j] == y:
        return cells[row, ys[j]]
    low, high = cells[row, ys[j - 1]], cells[row, ys[j]]
    return low + (high - low) * (y - ys[j - 1]) / (ys[j] - ys[j - 1])


def _with_contexts(
    single: Mapping[Prefill, float], extend_context_tokens: int | None, changes: Counter[str]
) -> dict[Prefill, float]:
    cells = dict(single)
    if max(step for _, step in cells) > _FEW_CONTEXTS_TOKENS:
        return cells
    whole = {isl: us for (isl, step), us in cells.items() if step == 0}
    if len(whole) < 3:
        return cells
    prompt = Prompt(whole)
    last = max(prompt.longest, extend_context_tokens or 0)
    for chunk in sorted(whole):
        contexts = {c for c in (*_CONTEXTS, prompt.longest - chunk, last - chunk) if c > _FEW_CONTEXTS_TOKENS}
        for context in sorted(c for c in contexts if c + chunk <= last):
            grown = prompt.us(context + chunk) - prompt.us(context)
            cells[chunk, context] = max(grown, whole[chunk], cells.get((chunk, _FEW_CONTEXTS_TOKENS), 0.0))
            changes["derived_context"] += 1
    return cells


class Prompt:
    """Time of a whole prompt by its length: straight between the measured ones, a parabola beyond."""

    def __init__(self, whole: Mapping[int, float]) -> None:
        self.lengths = sorted(whole)
        self.times = [whole[length] for length in self.lengths]
        self.longest = self.lengths[-1]
        b = self._at_most(self.longest / 2)
        a = self._at_most(b / 2)
        upper = self._slope(b, self.longest)
        lower = self._slope(a, b) if a < b else upper
        self.second = max(0.0, (upper - lower) / ((self.longest - a) / 2))
        self.end_slope = upper + self.second * (self.longest - b) / 2

    def _at_most(self, length: float) -> int:
        """The longest measured prompt of at most `length` tokens, else the shortest."""
        return max((x for x in self.lengths if x <= length), default=self.lengths[0])

    def _slope(self, a: int, b: int) -> float:
        return (self.us(b) - self.us(a)) / (b - a)

    def us(self, length: int) -> float:
        """Microseconds of a prompt of `length` tokens, proportional below the shortest."""
        xs, ts = self.lengths, self.times
        if length > xs[-1]:
            more = length - xs[-1]
            return ts[-1] + self.end_slope * more + self.second * more * more / 2
        if length <= xs[0]:
            return ts[0] * length / xs[0]
        i = bisect_left(xs, length)
        return ts[i - 1] + (ts[i] - ts[i - 1]) * (length - xs[i - 1]) / (xs[i] - xs[i - 1])


def table_rows(name: str, cells: Cells) -> Iterable[tuple[str, int, int, int, int, int, float, str]]:
    """Rows of the table `attention`; the spread of imported cells is unknown."""
    for (chunk, context), us in cells.prefill.items():
        yield name, chunk, context, 0, 0, 0, us, ""
    for (requests, keys), us in cells.decode.items():
        yield name, 0, 0, requests, keys, 1, us, ""
