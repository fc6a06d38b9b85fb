"""One launch whose tiles run in order on the card's multiprocessors: forms `tiles` and `launch` of unequal requests.

A kernel's own rules (LaunchWork) say which tiles a batch has and when the last one ends, in blocks one after the other.
What a block costs is read off the kernel's table, and differs with the number of tiles that run at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from profiler.core.grid import Grid
from profiler.core.grid_work import PrefillWork

Prefill = tuple[int, int]
# (requests, keys of each), of one new token.
Decodes = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Launched:
    """work: blocks one after the other until the last tile ends. tokens: of a chunk whose tiles are as many as run at a
    time on average."""

    work: float
    tokens: float


class LaunchWork(PrefillWork, Protocol):
    """The tiles of several prefills in one launch."""

    def launched(self, prefills: Sequence[Prefill]) -> Launched: ...


class TogetherWork(PrefillWork, Protocol):
    """The tiles of several prefills in launches that each hold those of all."""

    def together(self, prefills: Sequence[Prefill]) -> float: ...


class JointWork(PrefillWork, Protocol):
    """The tiles of decodes and prefills in one launch, decodes first."""

    def filled(self, decodes: Decodes, prefills: Sequence[Prefill]) -> float:
        """The share of the multiprocessors that the tiles of the decodes have, at most 1."""
        ...

    def joint(self, decodes: Decodes, prefills: Sequence[Prefill], slower: float) -> float:
        """Blocks one after the other. slower: how many a block of a decode counts as."""
        ...


@dataclass(frozen=True, slots=True)
class Tiles:
    """Several prefills in the form `tiles`.

    A block costs what it does in a chunk that keeps as many tiles running and ends where the prefill with the most work
    does. apart: chunks up to this length are run by another kernel and cost what they do alone.
    """

    work: LaunchWork
    apart: int = 0

    def beyond_fixed_us(self, grid: Grid, fixed_us: float, prefills: Sequence[Prefill]) -> float:
        """Microseconds without the fixed part of the launch. Raises CoverageError outside the table."""
        alone = [prefill for prefill in prefills if prefill[0] <= self.apart]
        rest = [prefill for prefill in prefills if prefill[0] > self.apart]
        if len(rest) < 2:
            alone, rest = [*alone, *rest], []
        total = sum(max(0.0, grid.at(*prefill) - fixed_us) for prefill in alone)
        return total + self._together_us(grid, fixed_us, rest) if rest else total

    def _together_us(self, grid: Grid, fixed_us: float, prefills: Sequence[Prefill]) -> float:
        most = max(prefills, key=lambda prefill: self.work.prefill(*prefill))
        all_of_them = self.work.launched(prefills)
        chunk = max(float(most[0]), min(all_of_them.tokens, sum(tokens for tokens, _ in prefills)))
        context = max(0.0, sum(most) - chunk)
        if not grid.covers(chunk, context):
            chunk, context = most
        alike_us = max(0.0, grid.at(chunk, context) - fixed_us)
        return alike_us * all_of_them.work / self.work.prefill(chunk, context)


@dataclass(frozen=True, slots=True)
class Passes:
    """Several prefills in the form `tiles`, of a kernel that is several launches.

    What the prefills take one by one, in the ratio of the work of all together to the work of each: no single chunk has
    the tiles of all, since a longer one would also read more of what stands before it.
    """

    work: TogetherWork

    def beyond_fixed_us(self, grid: Grid, fixed_us: float, prefills: Sequence[Prefill]) -> float:
        """Microseconds without the fixed part of the launches. Raises CoverageError outside the table."""
        total = sum(max(0.0, grid.at(*prefill) - fixed_us) for prefill in prefills)
        if len(prefills) < 2:
            return total
        return total * self.work.together(prefills) / sum(self.work.prefill(*prefill) for prefill in prefills)


@dataclass(frozen=True, slots=True)
class JointLaunch:
    """Prefills beside decodes in the form `launch`: what both take, the launch counted once, and at least as long as
    the tiles of all.

    Where long requests are split only as far as the longest chunk of the launch allows, an unsplit decode keeps one
    multiprocessor busy long after the others are done. block_us: of a block that waits for nothing (least_block_us).
    Blocks of decodes, which no two tiles share, cost as much more as the decodes alone show, by the share of the card
    that reads them at a time.
    """

    work: JointWork
    block_us: float
    fixed_us: float

    def added_us(self, decode_us: float, prefill_us: float) -> float:
        """Microseconds of decodes and prefills, each of which had a launch of its own, in one."""
        return max(decode_us, prefill_us, decode_us + prefill_us - self.fixed_us)

    def us(self, decode_us: float, requests: int, keys: float, longest: float, prefills: Sequence[Prefill]) -> float:
        """Microseconds of a launch. decode_us: of its decodes alone, which have `keys` on average."""
        decodes: Decodes = ((requests, keys),)
        if requests > 1 and longest > keys:
            decodes = ((1, longest), (requests - 1, (requests * keys - longest) / (requests - 1)))
        alone = self.block_us * self.work.joint(decodes, (), 1.0)
        fuller = self.work.filled(decodes, prefills) / self.work.filled(decodes, ())
        slower = max(1.0, (decode_us - self.fixed_us) / alone * fuller)
        return self.fixed_us + self.block_us * self.work.joint(decodes, prefills, slower)


class CapturedWork(Protocol):
    """A kernel that divides its decode rows by the longest of the batch, or of what a graph was captured for."""

    def captured_keys(self, requests: float, keys: float, longest: float) -> float:
        """Keys of the batch in which a part of a row has as much to do as in a graph for `longest` keys."""
        ...


@dataclass(frozen=True, slots=True)
class Captured:
    """What an engine that captures whole decode steps does otherwise than tables, which are measured without graphs.

    tokens: of the largest captured step. keys: the most of a request, which graphs are captured for. work: None for a
    kernel that divides its decode rows alike either way.
    """

    tokens: int
    keys: int
    work: CapturedWork | None

    def keys_of(self, grid: Grid, requests: int, keys: float) -> float:
        """What a batch of decodes alone is looked up at, within the row of the table that has as many requests."""
        if self.work is None or requests > self.tokens:
            return keys
        ends = [row[-1] for x, row in zip(grid.xs, grid.ys, strict=True) if x >= requests]
        longest = min(self.keys, ends[0]) if ends else keys
        return self.work.captured_keys(requests, keys, longest)


def least_block_us(grid: Grid, work: PrefillWork) -> float:
    """Microseconds of a block: the least that any chunk's time grows by from its first context to its last, since what
    else a tile waits for, or a lower clock, only adds. 0 where no chunk tells."""
    found = []
    for chunk, contexts, times in zip(grid.xs, grid.ys, grid.ts, strict=True):
        grown = work.prefill(chunk, contexts[-1]) - work.prefill(chunk, contexts[0])
        if grown > 0 and times[-1] > times[0]:
            found.append((times[-1] - times[0]) / grown)
    return min(found, default=0.0)
