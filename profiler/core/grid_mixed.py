"""Steps of one prefill and a decode batch that run in one kernel launch and were measured together."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from profiler.core.grid import TILE_TOKENS, BatchRow, Grid, Outside, equal_end, make_grid, number, repeat_first_keys

_AXES = ("prefill_context_tokens", "decode_kv_tokens")


@dataclass(frozen=True, slots=True)
class MixedGrid:
    """Steps with one prefill and a decode batch in one kernel launch, measured together.

    slices[(chunk, requests)]: full rectangles of context x keys, finest first. chunks_from lists, for ascending
    smallest key counts, the chunks whose rectangles begin there or earlier.
    """

    requests: tuple[float, ...]
    slices: dict[tuple[float, float], tuple[Grid, ...]]
    chunks_from: tuple[tuple[float, tuple[float, ...]], ...]
    outside: Outside

    def at(self, chunk: float, context: float, requests: float, kv: float) -> float:
        """Microseconds of one prefill of `chunk` tokens behind `context` with `requests` decodes of `kv` keys each.

        Raises CoverageError outside the table.
        """
        chunks = self.chunks_from[0][1]
        for lowest, names in self.chunks_from:
            if kv >= lowest:
                chunks = names
        c0, c1, u = _bracket(chunks, chunk)
        n0, n1, w = _bracket(self.requests, requests)
        if not (chunks[0] <= chunk <= chunks[-1] and self.requests[0] <= requests <= self.requests[-1]):
            self._refuse(chunk, context, requests, kv)
        t0 = self._slice(c0, n0, context, kv)
        if u:
            t0 += (self._slice(c1, n0, context, kv) - t0) * u
        if not w:
            return max(0.0, t0)
        t1 = self._slice(c0, n1, context, kv)
        if u:
            t1 += (self._slice(c1, n1, context, kv) - t1) * u
        return max(0.0, t0 + (t1 - t0) * w)

    def _slice(self, chunk: float, requests: float, context: float, kv: float) -> float:
        grids = self.slices[chunk, requests]
        for grid in grids:
            if grid.ys[0][0] <= kv <= grid.ys[0][-1] and grid.xs[0] <= context <= grid.xs[-1]:
                return grid.at(context, kv)
        self._refuse(chunk, context, requests, kv)
        return grids[-1].at(context, kv)

    def _refuse(self, chunk: float, context: float, requests: float, kv: float) -> None:
        chunks = self.chunks_from[-1][1]
        grids = self.slices[min(chunks, key=lambda c: abs(c - chunk)), self.requests[-1]]
        bounds = (
            f"prefill_chunk_tokens {number(chunks[0])} to {number(chunks[-1])}, prefill_context_tokens "
            f"{number(min(g.xs[0] for g in grids))} to {number(max(g.xs[-1] for g in grids))}, decode_requests "
            f"{number(self.requests[0])} to {number(self.requests[-1])}, decode_kv_tokens "
            f"{number(min(g.ys[0][0] for g in grids))} to {number(max(g.ys[0][-1] for g in grids))}"
        )
        point = [
            ("prefill_chunk_tokens", chunk),
            ("prefill_context_tokens", context),
            ("decode_requests", requests),
            ("decode_kv_tokens", kv),
        ]
        self.outside.refuse(point, bounds)


def _bracket(xs: Sequence[float], x: float) -> tuple[float, float, float]:
    """Neighbours of x and its place between them; the end segment when x is outside."""
    if len(xs) == 1:
        return xs[0], xs[0], 0.0
    i = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    u = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return (xs[i], xs[i], 0.0) if u == 1.0 else (xs[i - 1], xs[i], u)


def mixed_grid(rows: Iterable[BatchRow], outside: Outside) -> MixedGrid | None:
    """The measured mixed steps of a kernel, or None when its table has none.

    A table may lay several rectangles over one another (two refinements of the context and key axes); each stays one.
    """
    cells: dict[tuple[float, float], list[tuple[float, float, float]]] = {}
    for row in rows:
        if row.chunk and row.requests:
            point = (float(row.context), float(row.kv), row.time_us)
            cells.setdefault((float(row.chunk), float(row.requests)), []).append(point)
    if not cells:
        return None
    smallest = min(chunk for chunk, _ in cells)
    if 1 < smallest <= TILE_TOKENS:
        cells |= {(1.0, n): points for (chunk, n), points in cells.items() if chunk == smallest}
    slices = {key: _rectangles(points, outside) for key, points in cells.items()}
    requests = tuple(sorted({n for _, n in slices}))
    lowest: dict[float, float] = {}
    for chunk, n in slices:
        starts = min(grid.ys[0][0] for grid in slices[chunk, n])
        lowest[chunk] = max(starts, lowest.get(chunk, 0.0))
    whole = [chunk for chunk in sorted(lowest) if all((chunk, n) in slices for n in requests)]
    levels = sorted({lowest[chunk] for chunk in whole})
    chunks_from = tuple((level, tuple(c for c in whole if lowest[c] <= level)) for level in levels)
    return MixedGrid(requests, slices, chunks_from, outside)


def _rectangles(points: list[tuple[float, float, float]], outside: Outside) -> tuple[Grid, ...]:
    """Full rectangles whose union is the given points: one per distinct set of key counts that holds no other."""
    keys_at: dict[float, set[float]] = {}
    for context, kv, _ in points:
        keys_at.setdefault(context, set()).add(kv)
    distinct = {frozenset(keys) for keys in keys_at.values()}
    minimal = [keys for keys in distinct if not any(other < keys for other in distinct)]
    grids = []
    for keys in minimal:
        inside = [(c, k, t) for c, k, t in points if k in keys and keys <= keys_at[c]]
        grids.append(
            make_grid(("prefill_context_tokens", "decode_kv_tokens"), repeat_first_keys(inside), equal_end, outside)
        )
    # The rectangle that begins later is the finer one where both answer.
    return tuple(sorted(grids, key=lambda grid: -grid.ys[0][0]))
