"""The time of one launch over unequal requests; the report of the profiler and the price of a step both read it here.

Decode requests, from their number, their mean and their longest:

    mean_max  t(n, mean) + alpha (t(n, longest) - t(n, mean))
    longest   t(n, mean) + alpha max(0, t(few, longest) - t(n, mean))

t(n, x) is the kernel's own table at n requests of x keys each. The first form compares with a batch in which every
request is the longest one. In the second the longest one runs beside others on a multiprocessor of its own, as in a
kernel with one block per request: it is done no sooner than in the smallest batch that the same kernel runs (few), and
the batch no sooner than one of equal requests with as many keys.

Several prefills in a step:

    once      added, the fixed part of the launch counted once
    together  as `once`, but a part costs no more than its share of a chunk as long as all parts
    tiles     until the last tile of all parts ends, where it is known what tiles they have (profiler.core.launch)

A short chunk alone leaves most of the card idle, and several of them fill it together. The share is that of the work in
keys, and the middle of the longer chunk lies where that of the part does; where that would begin before the first
token, the chunk is as long as its beginning allows.

Prefills beside decode requests add to these:

    sum     what they take without them
    beside  what the kernel takes that runs them there, where another one runs short chunks alone
    launch  as `sum`, the fixed part of the launch counted once, but no less than until the last tile of both ends
            (profiler.core.launch)
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profiler.core.grid import Grid
from profiler.core.grid_work import Work
from profiler.core.launch import Passes, Prefill, Tiles


@dataclass(frozen=True, slots=True)
class Skew:
    """alpha of decode requests of unequal lengths, alone and beside a prefill chunk (mixed, form mean_max).

    Linear between the measured shapes and constant beyond them: the shapes themselves are bounded by the kernel's
    table. longest_at: the smallest batch of each of the kernel's ways of working, for the form `longest`; without any
    the form is mean_max.
    """

    requests: tuple[float, ...]
    alphas: tuple[float, ...]
    chunks: tuple[float, ...]
    rows: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]
    longest_at: tuple[int, ...] = ()

    def decode(self, requests: float) -> float:
        return _held(self.requests, self.alphas, requests)

    def mixed(self, chunk: float, requests: float) -> float:
        return _held(self.chunks, [_held(*row, requests) for row in self.rows], chunk)

    def decode_us(self, grid: Grid, requests: int, keys: float, longest: float) -> float:
        """A batch of that many requests, of `keys` on average."""
        mean = grid.at(requests, keys)
        if longest <= keys or not (alpha := self.decode(requests)):
            return mean
        few = self.beside(requests)
        if few is None:
            return mean + alpha * (grid.at(requests, longest) - mean)
        return mean + alpha * max(0.0, grid.at(few, longest) - mean)

    def beside(self, requests: int) -> int | None:
        """Requests of the batch in which the longest one of so many is looked up; None for the form mean_max."""
        if not self.longest_at:
            return None
        return min(self.longest_at[max(0, bisect_right(self.longest_at, requests) - 1)], requests)


def _held(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    i = bisect_left(xs, x)
    if i == 0:
        return ys[0] if ys else 0.0
    if i == len(xs):
        return ys[-1]
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


def make_skew(points: Iterable[tuple[int, int, float]], longest_at: Sequence[int] = ()) -> Skew | None:
    """From (prefill_chunk_tokens, decode_requests, alpha) points; None without points."""
    rows: dict[int, list[tuple[int, float]]] = {}
    for chunk, requests, alpha in sorted(points):
        rows.setdefault(chunk, []).append((requests, alpha))
    if not rows:
        return None
    alone = rows.pop(0, [])
    return Skew(
        requests=tuple(n for n, _ in alone),
        alphas=tuple(alpha for _, alpha in alone),
        chunks=tuple(rows),
        rows=tuple((tuple(n for n, _ in row), tuple(alpha for _, alpha in row)) for row in rows.values()),
        longest_at=tuple(longest_at),
    )


@dataclass(frozen=True, slots=True)
class Together:
    """What the form `together` knows of a kernel.

    work: of queries one after the other, without waves and parts. steps: last chunks before another kernel takes over,
    ascending; a short chunk is never read as part of one that another kernel runs. even_behind: the context from which
    on a query's work grows by the same for every key before it, or not at all.
    """

    work: Work
    steps: tuple[int, ...]
    even_behind: int

    def share_us(self, grid: Grid, fixed_us: float, prefill: Prefill, tokens: int) -> float:
        """Microseconds of one part of a step of so many prefill tokens, the fixed part of the launch left out."""
        chunk, context = prefill
        own = max(0.0, grid.at(chunk, context) - fixed_us)
        longer = min(tokens, chunk + 2 * context)
        idle = self.work.select_beyond
        if idle and chunk + context <= idle:
            longer = min(tokens, idle)  # no query selects, wherever it lies
        for step in self.steps:
            if chunk <= step:
                longer = min(longer, step)
                break
        if longer <= chunk:
            return own
        start = context + (chunk - longer) / 2
        if idle and chunk + context <= idle:
            start = max(0.0, min(start, idle - longer))
        if not grid.covers(longer, start):
            return own
        if start >= self.even_behind:
            share = chunk / longer  # chunks around one middle have equal work for each query there
        else:
            share = self.work.prefill(chunk, context) / self.work.prefill(longer, start)
        return min(own, max(0.0, grid.at(longer, start) - fixed_us) * share)


def beyond_fixed_us(
    grid: Grid, fixed_us: float, together: Together | Tiles | Passes | None, prefills: Sequence[Prefill]
) -> float:
    """Prefills of one launch without its fixed part; the form is `once` where `together` is None."""
    if together is None:
        at = grid.at
        return sum(max(0.0, at(chunk, context) - fixed_us) for chunk, context in prefills)
    if isinstance(together, Tiles | Passes):
        return together.beyond_fixed_us(grid, fixed_us, prefills)
    tokens = sum(chunk for chunk, _ in prefills)
    return sum(together.share_us(grid, fixed_us, prefill, tokens) for prefill in prefills)


@dataclass(frozen=True, slots=True)
class Beside:
    """Prefills beside decode requests in the form `beside`.

    grid: chunk x context of the kernel that runs them there. fixed_us: of its launch. together: None for `once`.
    """

    grid: Grid
    fixed_us: float
    together: Together | None

    def us(self, prefills: Sequence[Prefill]) -> float:
        """Microseconds that the prefills of a step add to its decodes. Raises CoverageError outside the table."""
        if len(prefills) == 1:
            return self.grid.at(*prefills[0])
        return self.fixed_us + beyond_fixed_us(self.grid, self.fixed_us, self.together, prefills)


@dataclass(frozen=True, slots=True)
class Forms:
    """Forms that a bundle's meta.yaml chose for one kernel; None where it chose none, which is mean_max, once and, of
    prefills beside decodes (joint), sum."""

    decode: str | None = None
    longest_at: tuple[int, ...] = ()
    prefills: str | None = None
    joint: str | None = None


def forms_of(meta: Mapping[str, Any], tp: int, kernel: str) -> Forms:
    entry = (meta.get("grid") or {}).get(f"tp{tp}/skew") or {}
    found = (entry.get("fit") or {}).get(kernel) or {}
    decode, prefills, joint = (found.get(use) or {} for use in ("decode", "prefills", "joint"))
    return Forms(decode.get("form"), tuple(decode.get("longest_at") or ()), prefills.get("form"), joint.get("form"))
