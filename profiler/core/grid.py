"""Tables as grids: piecewise linear lookups over nested lists, with bounds that are never crossed silently.

Why piecewise linear: on the stored tables, leaving out every inner point and predicting it from its neighbours, linear
interpolation has a median error of 1 to 2 % along keys and requests and beats log-log interpolation, since real kernels
grow in tiles and waves rather than smoothly. Where these are known, time runs straight in the work of a batch rather
than in its size (profiler.core.grid_work), and the lookup is a line through the bends of that work. Work need not grow
with the size: kernels that split their keys take longer for 24 queries than for 32.

What happens off the full rectangle. A grid is a list of rows (one per chunk, batch or pair count), each with points
of its own. Between two rows both are read at the same second coordinate. Where one of them has no point there, both
are read along the direction in which real tables end: equal last position for prefill (chunk + context), equal total
of keys for decode (requests x keys), equal fill of the experts for MoE. Where that fails for prefill too, a point
between the lines that join the ends of both rows is read at equal shares of the way between these ends, which keeps
the corner of a triangular table (chunk + context up to a limit) inside. Anything else is outside.

Below the first point: a chunk of less than one tensor-core tile costs as much as a whole tile, and decode kernels read
their keys in blocks of the cache, so the first point answers for smaller ones when it is no larger than TILE_TOKENS or,
for the keys of a decode, PAGE_TOKENS. Everything else outside is refused, or continued linearly and counted when
extrapolation was asked for.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from profiler.core.bundle import Table
from profiler.core.errors import CoverageError
from profiler.core.grid_work import DecodeWork, PrefillWork

# Rows (queries) and columns (keys) of the smallest tensor-core product, m16n8k16, in tokens.
TILE_TOKENS = 16
# Keys that a decode kernel over a paged cache takes at a time at least (blocks of 64 keys in DSA caches).
PAGE_TOKENS = 64

# Works of points that are kept: those of a table's rows are needed again and again.
_REMEMBERED = 4096
# Works that differ by less than this share do not tell what work costs.
_ALIKE = 0.2

Slide = Callable[[float, float, float], float]


@dataclass(frozen=True, slots=True)
class Outside:
    """What to do with a point outside a table.

    kernel and command make the message; extrapolated counts the points per kernel that were continued linearly.
    longest_tokens: the longest context that `command` measures, None for any; `instead` is the command for longer ones.
    """

    kernel: str
    command: str
    allow_extrapolation: bool = False
    extrapolated: Counter[str] = field(default_factory=Counter)
    longest_tokens: int | None = None
    instead: str = ""

    def refuse(self, point: Sequence[tuple[str, float]], bounds: str) -> None:
        """Counts the point when extrapolation is allowed, else raises CoverageError."""
        if self.allow_extrapolation:
            self.extrapolated[self.kernel] += 1
            return
        where = ", ".join(f"{name} {number(value)}" for name, value in point)
        options = _options(point)
        outside = f"{self.kernel}: {where} is outside its table ({bounds})"
        goes_on = "A replay goes on with --allow-extrapolation (a sweep with allow_extrapolation: true). "
        if "local_pairs" in dict(point):
            # The profiler measures no more tokens at a time than memory holds: measuring may not help.
            goes_on += "Pairs are of all ranks' tokens together; a lower max_num_batched_tokens makes them fewer. "
        if self.longest_tokens is not None and options.get("--max-model-len", 0) > self.longest_tokens:
            raise CoverageError(
                f"{outside}, which is of a model of the same kernels and of at most {self.longest_tokens:,} tokens. "
                f"{goes_on}Measure the model itself with: {self.instead}"
            )
        wanted = "".join(f" {option} {value}" for option, value in options.items())
        raise CoverageError(f"{outside}. {goes_on}Measure it with: {self.command}{wanted}")


def number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.2f}"


def _options(point: Sequence[tuple[str, float]]) -> dict[str, int]:
    """The limits of `python -m profiler profile` that the point needs."""
    at = dict(point)
    chunk, end = (
        at.get("prefill_chunk_tokens", 0),
        at.get("prefill_chunk_tokens", 0) + at.get("prefill_context_tokens", 0),
    )
    needed = {
        "--max-num-batched-tokens": max(at.get("tokens", 0), chunk),
        "--max-num-seqs": max(at.get("sequences", 0), at.get("decode_requests", 0)),
        "--max-model-len": max(end, at.get("decode_kv_tokens", 0)),
    }
    return {option: math.ceil(value) for option, value in needed.items() if value}


@dataclass(frozen=True, slots=True)
class Curve:
    """Time against one coordinate. xs ascending, ts microseconds."""

    axis: str
    xs: tuple[float, ...]
    ts: tuple[float, ...]
    outside: Outside

    def at(self, x: float) -> float:
        """Microseconds at x. Raises CoverageError outside the table."""
        xs = self.xs
        if x < xs[0] or x > xs[-1]:
            self.outside.refuse([(self.axis, x)], f"{self.axis} {number(xs[0])} to {number(xs[-1])}")
        return max(0.0, _line(xs, self.ts, x))


def _line(xs: Sequence[float], ts: Sequence[float], x: float) -> float:
    """Piecewise linear through the points; the end segments continue outside. A single point is constant."""
    if len(xs) == 1:
        return ts[0]
    i = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    x0, t0 = xs[i - 1], ts[i - 1]
    return t0 + (ts[i] - t0) * (x - x0) / (xs[i] - x0)


def straight(low: float, high: float, works: tuple[float, float, float], share: float, per_work: float) -> float:
    """Time between two points of known times, straight in the work of the three: low's, here, high's.

    share: of the way in the coordinate. Where the works of both points are too much alike to tell what work costs, or
    what is here is far from both, work costs as much as over the whole table (per_work), and what remains is straight
    in the coordinate.
    """
    first, here, last = works
    grown = last - first
    if abs(grown) > _ALIKE * max(first, last):
        in_work = (here - first) / grown
        if -0.5 <= in_work <= 1.5:
            return max(0.0, low + (high - low) * in_work)
    return max(0.0, low + (high - low) * share + per_work * (here - first - grown * share))


def cost_of_work(points: Iterable[tuple[float, float, float]], work: Callable[[float, float], float]) -> float:
    """Microseconds of a unit of work from the first of the points (x, y, microseconds) to the last, at least zero."""
    ordered = sorted(points)
    (x0, y0, t0), (x1, y1, t1) = ordered[0], ordered[-1]
    grown = work(x1, y1) - work(x0, y0)
    return max(0.0, (t1 - t0) / grown) if grown > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Grid:
    """Time against two coordinates, as rows of points. A full rectangle keeps one `ys` for all rows.

    slide(x, y, other_x): the second coordinate at which another row answers for (x, y) where rows end unevenly.
    place: the monotone function of the first coordinate in which time runs straight between two rows read that way;
    None where it is the coordinate itself. work(x, y): what time runs straight in between two neighbouring points, at
    per_work microseconds a unit where these do not tell; bends(x, last): second coordinates up to `last` between which
    it is straight at one x, and straight_until(x) how far.
    """

    axes: tuple[str, str]
    xs: tuple[float, ...]
    ys: tuple[tuple[float, ...], ...]
    ts: tuple[tuple[float, ...], ...]
    slide: Slide
    outside: Outside
    rectangular: bool
    place: Callable[[float], float] | None = None
    work: Callable[[float, float], float] | None = None
    bends: Callable[[int, float], Iterable[float]] | None = None
    straight_until: Callable[[int], float] | None = None
    per_work: float = 0.0
    _shared: dict[tuple[int, int], list[float]] = field(default_factory=dict, compare=False, repr=False)
    _cuts: dict[float, tuple[Sequence[float], list[float | None]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def at(self, x: float, y: float) -> float:
        """Microseconds at (x, y). Raises CoverageError outside the table."""
        if type(x) is int:
            cut = self._cuts.get(x)
            if cut is None:
                cut = self._cuts[x] = self._cut(x)
            ys, ts = cut
            if ys and ys[0] <= y <= ys[-1]:
                j = bisect_left(ys, y) or 1
                y0, t0, t1 = ys[j - 1], ts[j - 1], ts[j]
                if t0 is None:
                    t0 = ts[j - 1] = self._at(x, y0)
                if t1 is None:
                    t1 = ts[j] = self._at(x, ys[j])
                return t0 + (t1 - t0) * (y - y0) / (ys[j] - y0)
        return self._at(x, y)

    def _cut(self, x: float) -> tuple[Sequence[float], list[float | None]]:
        """The points of the line through the grid at `x` where both neighbouring rows are read at the same y.

        Lookups come at few different x, which are whole numbers, so that most of them need only this line. Its times
        are read when they are needed.
        """
        xs = self.xs
        i = bisect_left(xs, x)
        if i == len(xs) or (i == 0 and xs[0] != x):
            return (), []
        first = i if xs[i] == x else i - 1
        ys = self._shared.get((first, i))
        if ys is None:
            ys = self._shared[first, i] = self._shared_points(first, i)
        if len(ys) < 2:
            return (), []
        if self.straight_until is not None and (end := self.straight_until(int(x))) < ys[-1]:
            ys = [*(y for y in ys if y < end), end]
            if len(ys) < 2:
                return (), []
        return ys, [None] * len(ys)

    def _shared_points(self, first: int, last: int) -> list[float]:
        """Every point and bend of two rows where both have an answer."""
        low = max(self.ys[first][0], self.ys[last][0])
        high = min(self.ys[first][-1], self.ys[last][-1])
        points = {*self.ys[first], *self.ys[last]}
        if self.bends is not None:
            points.update(*(self.bends(int(self.xs[i]), high) for i in (first, last)))
        return sorted(y for y in points if low <= y <= high)

    def _at(self, x: float, y: float) -> float:
        xs = self.xs
        i = bisect_left(xs, x)
        if i < len(xs) and xs[i] == x:
            return self._row(i, x, y)
        if i == 0 or i == len(xs):
            return self._beyond(x, y)
        u = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        ys = self.ys[i]
        if self.work is None and self.rectangular and ys[0] <= y <= ys[-1] and len(ys) > 1:
            j = bisect_left(ys, y) or 1
            v = (y - ys[j - 1]) / (ys[j] - ys[j - 1])
            low, high = self.ts[i - 1], self.ts[i]
            a, b = low[j - 1], high[j - 1]
            a += (low[j] - a) * v
            return a + (b + (high[j] - b) * v - a) * u
        return self._between(i, u, x, y)

    def covers(self, x: float, y: float) -> bool:
        """True when `at` answers without extrapolation."""
        i = bisect_left(self.xs, x)
        if i < len(self.xs) and self.xs[i] == x:
            return self._holds(i, y)
        return 0 < i < len(self.xs) and self._reading(i, x, y) is not None

    def _holds(self, i: int, y: float) -> bool:
        return self.ys[i][0] <= y <= self.ys[i][-1]

    def _reading(self, i: int, x: float, y: float) -> tuple[float, float] | None:
        """The second coordinates at which rows i-1 and i are read for (x, y)."""
        if self._holds(i - 1, y) and self._holds(i, y):
            return y, y
        low, high = self.slide(x, y, self.xs[i - 1]), self.slide(x, y, self.xs[i])
        if self._holds(i - 1, low) and self._holds(i, high):
            return low, high
        return self._within_hull(i, x, y) if self.slide is equal_end else None

    def _within_hull(self, i: int, x: float, y: float) -> tuple[float, float] | None:
        """Equal shares of the way between the ends of both rows, for a point between the lines that join these ends."""
        u = (x - self.xs[i - 1]) / (self.xs[i] - self.xs[i - 1])
        low, high = self.ys[i - 1], self.ys[i]
        first, last = low[0] + (high[0] - low[0]) * u, low[-1] + (high[-1] - low[-1]) * u
        if not first <= y <= last:
            return None
        share = (y - first) / (last - first) if last > first else 0.0
        return low[0] + (low[-1] - low[0]) * share, high[0] + (high[-1] - high[0]) * share

    def _between(self, i: int, u: float, x: float, y: float) -> float:
        reading = self._reading(i, x, y)
        if reading is None:
            self._refuse(x, y)
            reading = y, y
        elif self.work is not None:
            works = self.work(self.xs[i - 1], reading[0]), self.work(x, y), self.work(self.xs[i], reading[1])
            return straight(self._read(i - 1, reading[0]), self._read(i, reading[1]), works, u, self.per_work)
        elif self.place is not None and reading[0] != reading[1]:
            first = self.place(self.xs[i - 1])
            u = (self.place(x) - first) / (self.place(self.xs[i]) - first)
        low = self._read(i - 1, reading[0])
        return max(0.0, low + (self._read(i, reading[1]) - low) * u)

    def _read(self, i: int, y: float) -> float:
        """Row i at y."""
        ys, ts, work = self.ys[i], self.ts[i], self.work
        if work is None or not ys[0] <= y <= ys[-1] or len(ys) == 1:
            return _line(ys, ts, y)
        j = bisect_left(ys, y) or 1
        x, y0, y1 = self.xs[i], ys[j - 1], ys[j]
        works = work(x, y0), work(x, y), work(x, y1)
        return straight(ts[j - 1], ts[j], works, (y - y0) / (y1 - y0), self.per_work)

    def _row(self, i: int, x: float, y: float) -> float:
        if not self._holds(i, y):
            self._refuse(x, y)
        return max(0.0, self._read(i, y))

    def _beyond(self, x: float, y: float) -> float:
        self._refuse(x, y)
        if len(self.xs) == 1:
            return max(0.0, _line(self.ys[0], self.ts[0], y))
        i = 1 if x < self.xs[0] else len(self.xs) - 1
        u = (x - self.xs[i - 1]) / (self.xs[i] - self.xs[i - 1])
        low, high = _line(self.ys[i - 1], self.ts[i - 1], y), _line(self.ys[i], self.ts[i], y)
        return max(0.0, low + (high - low) * u)

    def _refuse(self, x: float, y: float) -> None:
        near = [i for i in (bisect_left(self.xs, x) - 1, bisect_left(self.xs, x)) if 0 <= i < len(self.xs)]
        rows = "; ".join(
            f"at {self.axes[0]} {number(self.xs[i])}: {self.axes[1]} {number(self.ys[i][0])} to "
            f"{number(self.ys[i][-1])}"
            for i in near
        )
        bounds = f"{self.axes[0]} {number(self.xs[0])} to {number(self.xs[-1])}; {rows}"
        self.outside.refuse([(self.axes[0], x), (self.axes[1], y)], bounds)


def make_grid(
    axes: tuple[str, str],
    points: Iterable[tuple[float, float, float]],
    slide: Slide,
    outside: Outside,
    place: Callable[[float], float] | None = None,
    work: Callable[[float, float], float] | None = None,
    bends: Callable[[int, float], Iterable[float]] | None = None,
    straight_until: Callable[[int], float] | None = None,
    per_work: float = 0.0,
) -> Grid:
    """A grid from (x, y, microseconds). Raises CoverageError when there is no point."""
    rows: dict[float, dict[float, float]] = {}
    for x, y, t in points:
        rows.setdefault(x, {})[y] = t
    if not rows:
        raise CoverageError(f"{outside.kernel}: no measured points. Measure them with: {outside.command}")
    xs = tuple(sorted(rows))
    ys = tuple(tuple(sorted(rows[x])) for x in xs)
    ts = tuple(tuple(rows[x][y] for y in row) for x, row in zip(xs, ys, strict=True))
    return Grid(axes, xs, ys, ts, slide, outside, len(set(ys)) == 1, place, work, bends, straight_until, per_work)


def equal_end(x: float, y: float, other: float) -> float:
    """Prefill: a chunk of `other` tokens that ends at the same position."""
    return x + y - other


def equal_total(x: float, y: float, other: float) -> float:
    """Decode: a batch of `other` requests that reads as many keys altogether."""
    return x * y / other


def curve(table: Table, name: str, outside: Outside) -> Curve:
    """The rows of one component of a one-coordinate table (dense by tokens, per_sequence by sequences)."""
    _, axis, *_ = table.columns
    points = sorted(
        (float(x), float(t))
        for component, x, t in zip(*(table.columns[c] for c in (*table.columns,)[:3]), strict=True)
        if component == name
    )
    if not points:
        raise CoverageError(f"{outside.kernel}: no measured points. Measure them with: {outside.command}")
    return Curve(axis, tuple(x for x, _ in points), tuple(t for _, t in points), outside)


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One measured batch of an attention-like kernel."""

    chunk: int
    context: int
    requests: int
    kv: int
    time_us: float


def batch_rows(table: Table, name: str, decode_query_tokens: int = 1) -> list[BatchRow]:
    """Rows of one kernel: pure prefill, pure decode with that many query tokens per request, and mixed ones."""
    columns = table.columns
    return [
        BatchRow(int(chunk), int(context), int(requests), int(kv), float(time))
        for kernel, chunk, context, requests, kv, query, time in zip(
            columns["kernel"],
            columns["prefill_chunk_tokens"],
            columns["prefill_context_tokens"],
            columns["decode_requests"],
            columns["decode_kv_tokens"],
            columns["decode_query_tokens"],
            columns["time_us"],
            strict=True,
        )
        if kernel == name and (not requests or query == decode_query_tokens)
    ]


def prefill_grid(
    rows: Iterable[BatchRow], outside: Outside, work: PrefillWork | None = None, steps: Sequence[int] = ()
) -> Grid:
    """Chunk x context of one request alone in the step. steps: last chunks before another kernel takes over."""
    measured = [(float(r.chunk), float(r.context), r.time_us) for r in rows if r.chunk and not r.requests]
    points = repeat_behind_steps(repeat_first_chunk(measured), steps)
    axes = ("prefill_chunk_tokens", "prefill_context_tokens")
    if work is None or not measured:
        return make_grid(axes, points, equal_end, outside)
    at = lru_cache(_REMEMBERED)(work.prefill)
    cost, until = cost_of_work(measured, at), work.straight_until
    return make_grid(axes, points, equal_end, outside, work=at, bends=work.bends, straight_until=until, per_work=cost)


def decode_grid(rows: Iterable[BatchRow], outside: Outside, work: DecodeWork | None = None) -> Grid:
    """Requests x keys per request of a step without prefill."""
    measured = [(float(r.requests), float(r.kv), r.time_us) for r in rows if r.requests and not r.chunk]
    points = repeat_first_keys(measured)
    axes = ("decode_requests", "decode_kv_tokens")
    if work is None or not measured:
        return make_grid(axes, points, equal_total, outside)
    at = lru_cache(_REMEMBERED)(work.decode)
    cost = cost_of_work(measured, at)
    return make_grid(axes, points, equal_total, outside, work=at, bends=work.decode_bends, per_work=cost)


def repeat_first_chunk(points: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Repeats the smallest chunk's row at one token when that chunk is within one tile."""
    first = min((x for x, _, _ in points), default=math.inf)
    if not 1 < first <= TILE_TOKENS:
        return points
    return points + [(1.0, y, t) for x, y, t in points if x == first]


def repeat_behind_steps(
    points: list[tuple[float, float, float]], steps: Sequence[int]
) -> list[tuple[float, float, float]]:
    """Repeats the first chunk behind a step right behind it when that chunk is within one tile: what lies between runs
    its kernel, not that before the step."""
    chunks = {x for x, _, _ in points}
    for step in steps:
        behind = min((x for x in chunks if x > step), default=math.inf)
        if step in chunks and step + 1 < behind <= TILE_TOKENS:
            points = points + [(step + 1.0, y, t) for x, y, t in points if x == behind]
    return points


def repeat_first_keys(points: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Repeats each row's smallest key count at one key when that count is within one block of the cache."""
    lowest: dict[float, tuple[float, float]] = {}
    for x, y, t in points:
        if x not in lowest or y < lowest[x][0]:
            lowest[x] = (y, t)
    return points + [(x, 1.0, t) for x, (y, t) in lowest.items() if 1 < y <= PAGE_TOKENS]


def fixed_us(grid: Grid, steps: Sequence[int] = ()) -> float:
    """The part of a launch that does not depend on its work, from the grid's two smallest chunks at its first context.

    The intercept of the line through both, at least zero and at most the smaller of the two times. Chunks up to the
    first of `steps` are of another kernel.
    """
    first = [
        (x, ts[0])
        for x, ys, ts in zip(grid.xs, grid.ys, grid.ts, strict=True)
        if ys[0] == grid.ys[0][0] and x > min(steps, default=0)
    ]
    if len(first) > 2 and first[0][1] == first[1][1]:
        first = first[1:]  # the repeated row of a tile
    if len(first) < 2:
        return 0.0
    (x0, t0), (x1, t1) = first[:2]
    return min(max(0.0, t0 - (t1 - t0) * x0 / (x1 - x0)), t0, t1)
