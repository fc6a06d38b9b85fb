"""The work of a batch, in keys: between two measured chunks or batches time runs straight in it, not in their size.

A chunk of n tokens behind a context shows query i (from 1) context + i keys, so twice the chunk is more than twice the
work; and a kernel that gives each multiprocessor a tile of queries runs in waves, of which the last one takes as long
as the others however few queries it holds.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Protocol

# Points that follow a curve between two bends: chords of a square then deviate by 6 % of its rise at most.
_ON_A_CURVE = 1


# (share of the slots that are taken, time), ascending.
Curve = tuple[tuple[float, float], ...]


class PrefillWork(Protocol):
    """What the time of a chunk behind a context runs straight in, in any unit: `Work`, which has the contracts,
    or a kernel's own rules."""

    def prefill(self, chunk: float, context: float) -> float: ...

    def bends(self, chunk: int, last_context: float) -> Iterator[float]: ...

    def straight_until(self, chunk: int) -> float: ...


class DecodeWork(Protocol):
    """The same of equal requests of one new token each."""

    def decode(self, requests: float, keys: float) -> float: ...

    def decode_bends(self, requests: int, last_keys: float) -> Iterator[float]: ...


def first_free(tiles: Iterable[tuple[int, float]], slots: int) -> float:
    """When the last tile ends, each taken in order by the first slot that is free. tiles: (how many, length)."""
    free, ends, last = {0.0: slots}, [0.0], 0.0
    for count, length in tiles:
        while count:
            start = ends[0]
            took = min(count, free[start])
            count -= took
            free[start] -= took
            if not free[start]:
                del free[heappop(ends)]
            end = start + length
            if end in free:
                free[end] += took
            else:
                free[end] = took
                heappush(ends, end)
            last = max(last, end)
    return last


def in_parts(chunk: float, context: float, most_pairs: int) -> Iterator[tuple[float, float]]:
    """(queries, context) of each launch of a chunk, cut where its queries x keys, those of the last query, exceed
    `most_pairs`: as many queries as fit."""
    part = chunk if chunk * (chunk + context) <= most_pairs else max(1.0, most_pairs // (chunk + context))
    done = 0.0
    while done < chunk:
        own = min(part, chunk - done)
        yield own, context + done
        done += own


def in_waves(tiles: float, slots: int, first: Curve, later: Curve) -> float:
    """What equal tiles take, in waves that fill every slot.

    Fewer tiles than slots are each faster than in a full wave: first and later have a wave's time against the share of
    the slots that it takes, where it is the first one and where it begins as others end. Points of a curve ascend; of
    two at one share the first one holds there, the second behind it.
    """
    whole, rest = divmod(tiles, slots)
    if not rest:
        return whole
    share = rest / slots
    for (x0, y0), (x1, y1) in pairwise(later if whole else first):
        if share <= x1:
            return whole + y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return whole + 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """How the time of a kernel grows with its queries and their keys.

    wave_queries: queries that run at the same time, 1 for the sum over all. cap_keys: most keys that a query reads.
    splits_keys: queries of less than one wave each spread their keys over as many multiprocessors as there are for
    them. select_beyond: a query of no more keys than that costs idle_keys, one of more its keys and row_keys.
    split_pairs: a chunk with more queries x keys (those of its last query) runs in parts of as many queries as fit,
    each with waves of its own. whole_below: chunks up to this length, and every decode where it is not 0, read cap_keys
    for every query, whatever there is.
    """

    wave_queries: int = 1
    cap_keys: int | None = None
    splits_keys: bool = False
    select_beyond: int = 0
    idle_keys: float = 0.0
    row_keys: float = 0.0
    split_pairs: int | None = None
    whole_below: int = 0

    def prefill(self, chunk: float, context: float) -> float:
        """Keys of a chunk behind a context that are read one after the other."""
        if self.select_beyond:
            return self._selecting(chunk, context)
        if self.split_pairs is None:
            return self._waves(chunk, context)
        return sum(self._waves(*part) for part in in_parts(chunk, context, self.split_pairs))

    def decode(self, requests: float, keys: float) -> float:
        """Keys of equal requests of one query each that are read one after the other."""
        if self.cap_keys is not None:
            keys = self.cap_keys if self.whole_below else min(keys, self.cap_keys)
        return self._share(requests) * keys

    def _share(self, queries: float) -> float:
        """Waves that so many queries take; less than one where their keys are split."""
        if self.splits_keys and queries < self.wave_queries:
            return 1.0 / (self.wave_queries // queries)
        return math.ceil(queries / self.wave_queries)

    def _waves(self, chunk: float, context: float) -> float:
        """Sum over the waves of the keys of the last query in each."""
        size, cap = self.wave_queries, self.cap_keys
        if cap is not None and (chunk <= self.whole_below or context >= cap):
            return self._share(chunk) * cap
        last = context + chunk if cap is None else min(context + chunk, cap)
        if chunk <= size:
            return self._share(chunk) * last
        before = math.ceil(chunk / size) - 1
        growing = before if cap is None else max(0, min(before, math.ceil((cap - context) / size) - 1))
        return growing * context + size * growing * (growing + 1) / 2 + (before - growing) * (cap or 0) + last

    def _selecting(self, chunk: float, context: float) -> float:
        idle = max(0.0, min(chunk, self.select_beyond - context))
        busy = chunk - idle
        return idle * self.idle_keys + busy * (context + idle + (busy + 1) / 2 + self.row_keys)

    def bends(self, chunk: int, last_context: float) -> Iterator[float]:
        """Contexts of at most `last_context` between which time runs straight for this chunk, while it runs whole."""
        for cap in (self.cap_keys, self.select_beyond):
            if cap and chunk > self.whole_below:
                first = max(0.0, float(cap - chunk))
                yield from (first + (cap - first) * share / (_ON_A_CURVE + 1) for share in range(_ON_A_CURVE + 2))

    def straight_until(self, chunk: int) -> float:
        """The longest context at which the chunk runs whole; behind it parts and their waves come and go."""
        return math.inf if self.split_pairs is None else self.split_pairs // chunk - chunk

    def decode_bends(self, requests: int, last_keys: float) -> Iterator[float]:
        """Numbers of keys between which time runs straight for so many requests."""
        if self.cap_keys is not None and not self.whole_below:
            yield self.cap_keys
