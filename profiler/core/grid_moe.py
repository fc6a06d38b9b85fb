"""Time of one rank's routed experts against its (token, expert) pairs and the distinct experts that they reach."""

import math
from bisect import bisect_left
from itertools import accumulate

from profiler.core.bundle import Table
from profiler.core.errors import CoverageError
from profiler.core.grid import Grid, Outside, make_grid

# How far above the most experts that a row was measured with its time may be scaled: routing draws scatter.
_EXPERT_MARGIN = 1.15

# Pairs that take as long to compute as one more expert's weights take to read, roughly, on cards of 200 to 400 FLOP
# per byte. It only places a count between two measured ones: by experts while they are few, by pairs once all are hit.
_PAIRS_PER_EXPERT = 200.0


def natural_experts(local_experts: float, local_pairs: float) -> float:
    """Distinct local experts that so many independent, uniform pairs reach on average: n (1 - (1 - 1/n)^pairs)."""
    if local_experts <= 1:
        return min(1.0, local_pairs)
    return -local_experts * math.expm1(local_pairs * math.log1p(-1.0 / local_experts))


def moe_grid(table: Table, name: str, ep: int, local_experts: int, outside: Outside) -> Grid:
    """The experts of the slice measured at `ep`: a grid over local pairs and activated experts.

    One row per token count (`row_places`), over the experts that its draws reached. Reading no expert costs nothing,
    which is the first point of each row; above the most experts of a row its time grows in proportion, as reading
    weights does, by at most 15 %. What few experts cost at many pairs, which uneven draws were measured for at some
    token counts, the rows between have from these (`_few_experts`). Below the smallest pair count the first row
    answers. Raises CoverageError when no row has this ep.
    """
    columns = table.columns
    rows: dict[int, list[tuple[float, float, float]]] = {}
    for layer, degree, tokens, experts, pairs, time in zip(
        columns["layer"],
        columns["ep"],
        columns["tokens"],
        columns["activated_experts"],
        columns["local_pairs"],
        columns["time_us"],
        strict=True,
    ):
        if layer == name and degree == ep:
            rows.setdefault(int(tokens), []).append((float(experts), float(pairs), float(time)))
    if not rows:
        degrees = sorted({int(d) for d in columns["ep"]})
        raise CoverageError(
            f"{outside.kernel}: no rows for ep {ep}; measured: {', '.join(map(str, degrees))}. "
            f"Measure them with: {outside.command} --ep {ep}"
        )
    points: list[tuple[float, float, float]] = []
    places = row_places(rows, ep)
    lines = _few_experts(_by_pairs(rows, places), _uneven(rows, places))
    for x, row in _up_to_usual(lines, local_experts).items():
        at = (x, 0.0) if not points else (x,)
        for pairs in at:
            points += [(pairs, 0.0, 0.0), *((pairs, experts, time) for experts, time in row)]
            experts, time = row[-1]
            top = min(experts * _EXPERT_MARGIN, float(local_experts))
            if top > experts:
                points.append((pairs, top, time * top / experts))

    def equal_fill(x: float, y: float, other: float) -> float:
        mine = natural_experts(local_experts, x)
        return y * natural_experts(local_experts, other) / mine if mine else y

    def place(pairs: float) -> float:
        return natural_experts(local_experts, pairs) + pairs / _PAIRS_PER_EXPERT

    return make_grid(("local_pairs", "activated_experts"), points, equal_fill, outside, place)


def row_places(rows: dict[int, list[tuple[float, float, float]]], ep: int) -> dict[int, float]:
    """The pairs at which the row of every token count stands: those of its most even draw, which reaches most experts.

    Draws scatter, and the kernel goes by the tokens: a quarter of DeepSeek-V3.2's experts drew 127 pairs for 64 tokens
    and 124 for 65, behind which tiles are larger (625 and 739 us on an H200). Rows that would not be in the order of
    their tokens therefore stand at the pairs that so many tokens have on average, tokens x topk / ep, and so does the
    last one, lest an even load of as many tokens lie outside the table.
    """
    found = {tokens: max(row)[1] for tokens, row in sorted(rows.items())}
    last = max(found)
    topk = max(1, round(ep * found[last] / last))
    found[last] = last * topk / ep
    moved = {last}
    while True:
        most = list(accumulate(found.values(), max))
        fewest = list(accumulate(reversed(found.values()), min))[::-1]
        wrong = {n for n, high, low in zip(found, most, fewest, strict=True) if not low == found[n] == high}
        if wrong <= moved:
            return found
        found |= {tokens: tokens * topk / ep for tokens in wrong}
        moved |= wrong


def _uneven(
    rows: dict[int, list[tuple[float, float, float]]], places: dict[int, float]
) -> dict[float, tuple[float, float]]:
    """(experts, time) of the draw that reaches fewest experts, by the place of its row, where it has as many pairs as
    the most even one."""
    found = {}
    for tokens, row in rows.items():
        most, pairs, _ = max(row)
        experts, own_pairs, time = min(row)
        if own_pairs == pairs and experts < most:
            found[places[tokens]] = experts, time
    return found


def _few_experts(
    rows: dict[float, list[tuple[float, float]]], uneven: dict[float, tuple[float, float]]
) -> dict[float, list[tuple[float, float]]]:
    """Rows by pairs, each with a point of few experts where any row has one.

    A line to zero through the even draw alone would price few experts by the weights that they read, and they may have
    all pairs to compute: 46 of 256 experts take 92 % of the time of all at 32,768 pairs (DeepSeek-V3.2, H200). Between
    two uneven draws experts and time run straight in the pairs, as computing does; outside them both keep their share
    of the row's even draw.
    """
    at = sorted(uneven)
    if not at:
        return rows
    found = {}
    for x, row in rows.items():
        most, longest = row[-1]
        if x in uneven or len(row) > 1:
            point = None
        elif at[0] < x < at[-1]:
            i = bisect_left(at, x)
            share = (x - at[i - 1]) / (at[i] - at[i - 1])
            (low, low_us), (high, high_us) = uneven[at[i - 1]], uneven[at[i]]
            point = low + (high - low) * share, low_us + (high_us - low_us) * share
        else:
            near = at[0] if x < at[0] else at[-1]
            (experts, time), (most_there, longest_there) = uneven[near], rows[near][-1]
            point = most * experts / most_there, longest * time / longest_there
        found[x] = [point, *row] if point and point[0] < most and point[1] < longest else row
    return found


def _up_to_usual(
    rows: dict[float, list[tuple[float, float]]], local_experts: int
) -> dict[float, list[tuple[float, float]]]:
    """Rows by pairs; one whose draw reached far fewer experts than so many pairs do on average, as small draws may, has
    a point of that many too, on the line through the next draws around it that reached fewer and as many."""
    even = [row[-1] for row in rows.values()]
    found = dict(rows)
    for i, (x, row) in enumerate(rows.items()):
        (most, time), usual = even[i], natural_experts(local_experts, x)
        if most * _EXPERT_MARGIN >= usual:
            continue
        fewer = next((one for one in reversed(even[:i]) if one[0] < usual), (0.0, 0.0))
        more = next((one for one in even[i + 1 :] if one[0] >= usual), None)
        if more is not None:
            beside = fewer[1] + (more[1] - fewer[1]) * (usual - fewer[0]) / (more[0] - fewer[0])
            found[x] = [*row, (usual, max(time, beside))]
    return found


def _by_pairs(
    rows: dict[int, list[tuple[float, float, float]]], places: dict[int, float]
) -> dict[float, list[tuple[float, float]]]:
    """Rows keyed by their place, with (experts, time) ascending.

    Token counts that stand at the same pairs, which happens when a slice hardly sees a token, are averaged.
    """
    merged: dict[float, dict[float, list[float]]] = {}
    for tokens, row in rows.items():
        for experts, _, time in row:
            merged.setdefault(places[tokens], {}).setdefault(experts, []).append(time)
    return {
        x: [(experts, sum(times) / len(times)) for experts, times in sorted(points.items())]
        for x, points in sorted(merged.items())
    }
