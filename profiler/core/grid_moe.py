"""Time of one rank's routed experts against its (token, expert) pairs and the distinct experts that they reach."""

import math
from bisect import bisect_left

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

    One row per token count, over the experts that its draws reached. Reading no expert costs nothing, which is the
    first point of each row; above the most experts of a row its time grows in proportion, as reading weights does,
    by at most 15 %. What few experts cost at many pairs, which uneven draws were measured for at some token counts, the
    rows between have from these (`_few_experts`). Below the smallest pair count the first row answers. Raises
    CoverageError when no row has this ep.
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
    for x, row in _few_experts(_by_pairs(rows), _uneven(rows)).items():
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


def _uneven(rows: dict[int, list[tuple[float, float, float]]]) -> dict[float, tuple[float, float]]:
    """(experts, time) of the draw that reaches fewest experts, by pairs, where it has as many as the most even one."""
    found = {}
    for row in rows.values():
        most, pairs, _ = max(row)
        experts, own_pairs, time = min(row)
        if own_pairs == pairs and experts < most:
            found[pairs] = experts, time
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


def _by_pairs(rows: dict[int, list[tuple[float, float, float]]]) -> dict[float, list[tuple[float, float]]]:
    """Rows keyed by their local pairs, with (experts, time) ascending.

    The row of a token count stands at the pairs of its most even draw, the one that reaches most experts. Token counts
    that stand at the same pairs, which happens when a slice hardly sees a token, are averaged.
    """
    merged: dict[float, dict[float, list[float]]] = {}
    for row in rows.values():
        _, x, _ = max(row)
        for experts, _, time in row:
            merged.setdefault(x, {}).setdefault(experts, []).append(time)
    return {
        x: [(experts, sum(times) / len(times)) for experts, times in sorted(points.items())]
        for x, points in sorted(merged.items())
    }
