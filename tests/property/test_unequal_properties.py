"""Unequal batches against cards that are run query by query, and prices from sums against prices from lists.

A card has so many multiprocessors; a query takes a time of its own, and the next one starts where one is free. The
card's table is that of single chunks and of equal requests, as the profiler measures them.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from profiler.core.grid_work import Work
from profiler.core.unequal import Together, beyond_fixed_us, make_skew
from serving.core.shape import StepShape
from serving.cost.kernels import Kernel

FIXED = 3.0
PER_KEY = 0.01


def runs_until(times: Sequence[float], card: int) -> float:
    """When the last query is done, each started in turn where a multiprocessor is free."""
    free = [0.0] * card
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)


def keys_of(chunk: int, context: float, cap: int | None) -> list[float]:
    return [min(context + i, cap or 10**9) for i in range(1, chunk + 1)]


@dataclass(frozen=True)
class Card:
    """A table of single chunks (prefill) or of equal requests (decode), exact everywhere."""

    processors: int
    cap: int | None = None
    decodes: bool = False

    def at(self, x: int, y: float) -> float:
        return self.run([y] * x if self.decodes else keys_of(x, y, self.cap))

    def covers(self, x: int, y: float) -> bool:
        return True

    def run(self, keys: Sequence[float]) -> float:
        return FIXED + runs_until([PER_KEY * one for one in keys], self.processors)


CHUNKS = st.tuples(st.integers(1, 150), st.integers(0, 600))
CARDS = st.builds(Card, st.integers(1, 40), st.sampled_from([None, 100, 400]))


def prices(card: Card, prefills: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """(once, together, the batch itself), all without the fixed part."""
    together = Together(Work(cap_keys=card.cap), (), card.cap or 0)
    every = [one for prefill in prefills for one in keys_of(*prefill, card.cap)]
    return (
        beyond_fixed_us(card, FIXED, None, prefills),  # type: ignore[arg-type]
        beyond_fixed_us(card, FIXED, together, prefills),  # type: ignore[arg-type]
        card.run(every) - FIXED,
    )


@given(CARDS, st.lists(CHUNKS, min_size=1, max_size=6))
def test_prefills_together_lie_between_a_full_card_and_one_after_the_other(
    card: Card, prefills: list[tuple[int, int]]
) -> None:
    once, together, _ = prices(card, prefills)
    full = PER_KEY * sum(sum(keys_of(*prefill, card.cap)) for prefill in prefills) / card.processors
    assert full * (1 - 1e-9) <= together <= once * (1 + 1e-9)
    if len(prefills) == 1:
        assert together == once


@given(CARDS, st.integers(1, 40), st.integers(0, 600), st.integers(2, 12))
def test_equal_short_chunks_take_as_long_as_the_card_that_runs_their_queries(
    card: Card, chunk: int, context: int, count: int
) -> None:
    """Within two queries of the longest per longer chunk that stands for them."""
    once, together, itself = prices(card, [(chunk, context)] * count)
    longest = PER_KEY * min(context + chunk, card.cap or 10**9)
    longer = min(count * chunk, chunk + 2 * context)
    # The longer chunk has later queries, which a cap shortens.
    last = PER_KEY * min(context + (chunk + longer) / 2, card.cap or 10**9)
    assert abs(together - itself) <= (longest + last) * count * chunk / longer + 1e-9
    assert itself <= once + 1e-9


@given(st.integers(1, 16), st.lists(st.integers(1, 5000), min_size=1, max_size=80))
def test_requests_on_multiprocessors_of_their_own_wait_for_the_longest_or_for_the_sum(
    processors: int, keys: list[int]
) -> None:
    """List scheduling ends within twice the larger of both, and an equal batch within twice its share of the sum."""
    card, skew = Card(processors, decodes=True), make_skew([(0, 1, 1.0)], (1,))
    assert skew is not None
    price = skew.decode_us(card, len(keys), sum(keys) / len(keys), max(keys)) - FIXED  # type: ignore[arg-type]
    itself = card.run(keys) - FIXED
    assert itself / 2 * (1 - 1e-9) <= price <= itself * 2 * (1 + 1e-9)
    if len(keys) <= processors:
        assert abs(price - itself) < 1e-9


LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=40)
FITS = st.dictionaries(st.integers(1, 40), st.floats(0, 1), min_size=1, max_size=4)


@given(LENGTHS, FITS, st.sets(st.integers(1, 30), max_size=3), st.sampled_from([0, 700]))
def test_a_step_is_priced_from_sums_as_from_the_list_of_its_requests(
    keys: list[int], fits: dict[int, float], few: set[int], cap: int
) -> None:
    card = Card(7, decodes=True)
    kernel = Kernel(
        name="k",
        count=1,
        prefill=None,
        decode=card,  # type: ignore[arg-type]
        mixed=None,
        skew=make_skew([(0, n, alpha) for n, alpha in fits.items()], sorted(few)),
        together=None,
        fixed_us=0.0,
        cap_tokens=cap,
        prefill_when="never",
        provenance="measured",
    )
    capped = [min(one, 700) for one in keys]
    shape = StepShape((), len(keys), sum(keys), max(keys), sum(capped), len(keys))
    read, n = capped if cap else keys, len(keys)
    mean, longest = card.at(n, sum(read) / n), max(read)
    if few:
        rows = max((one for one in few if one <= n), default=n)
        rise = max(0.0, card.at(rows, longest) - mean)
    else:
        rise = card.at(n, longest) - mean
    expected = mean + alpha_of(fits, n) * rise
    assert abs(kernel.us(shape, ()) - expected) <= 1e-9 * expected


def alpha_of(fits: dict[int, float], n: int) -> float:
    below = max((m for m in fits if m <= n), default=min(fits))
    above = min((m for m in fits if m >= n), default=max(fits))
    if above <= below:
        return fits[below if below <= n else above]
    return fits[below] + (fits[above] - fits[below]) * (n - below) / (above - below)
