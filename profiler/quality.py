"""How good a table is: repeat spread, error of interpolation, order along the keys, cells unlike their neighbours.

Everything here is computed from a table and, where samples are at hand, the device functions behind its rows.

Leave-one-out: each inner point of a row is predicted from its two neighbours along that axis as lookups do, straight in
the work between them (profiler.kernels._placement), and compared with what was measured. Neighbours are twice as far
apart there as in a lookup, so the error is an upper bound of the error between points where time is smooth (a quarter
of it for a constant curvature).

Where a kernel changes its way of working (`profiler.kernels._breaks`) no line leads across, and none is judged.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from profiler.core.bundle import Table
from profiler.core.grid import cost_of_work, straight
from profiler.core.tables import KEY_COLUMNS
from profiler.core.types import ModelSpec
from profiler.kernels._breaks import breaks, jumps
from profiler.kernels._components import ATTENTION_LIKE
from profiler.kernels._placement import Ran, decode_straight, prefill_straight
from profiler.timing import percentile

# Below this a cell is a few launches of the shortest kernels, and its spread that of the clock.
JUDGED_FROM_US: Final = 20.0
# A cell this many times its neighbours' value is taken for a mistake until a second measurement says the same.
OUTLIER_FACTOR: Final = 2.0
# A second measurement confirms a cell when both agree within this share.
AGREEMENT: Final = 0.25
# Two points one token apart are two kernels when the second is this much faster, or slower than work that grows with
# the square of the coordinate would be.
STEP: Final = 1.1
# Shorter with more keys counts when it is beyond the spread that repeats may have.
ORDER_TOLERANCE: Final = 0.03

_PREFILL_AXES: Final = ("prefill_chunk_tokens", "prefill_context_tokens")
_DECODE_AXES: Final = ("decode_requests", "decode_kv_tokens")


@dataclass(frozen=True, slots=True)
class Point:
    """One cell on a line: its coordinate along the line's axis, microseconds, spread and row number in the table.
    functions: what ran there, that of most time first; empty where it is not known."""

    at: float
    time_us: float
    spread_rel: float
    row: int
    functions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """The cells of one kernel along one axis, all other coordinates equal, ascending.

    breaks: coordinates behind which the kernel works otherwise. plane: the first and the last cell of the kernel over
    both axes, as (coordinates in the order of the table, microseconds), from which lookups take what work costs.
    """

    kernel: str
    axis: str
    other: float
    points: tuple[Point, ...]
    breaks: tuple[int, ...]
    plane: tuple[tuple[float, float, float], ...] = ()

    def crosses(self, low: float, high: float) -> bool:
        """Whether the kernel changes between two coordinates: at a known place, by a step within one token, or since
        another function runs."""
        return any(low <= at < high for at in self.breaks) or any(
            low <= a.at and b.at <= high and (_steps(a, b) or _others(a, b)) for a, b in pairwise(self.points)
        )


def _steps(low: Point, high: Point) -> bool:
    ratio = high.time_us / low.time_us
    return high.at - low.at == 1.0 and not 1 / STEP <= ratio <= STEP * (high.at / max(low.at, 1.0)) ** 2


def _others(low: Point, high: Point) -> bool:
    """Whether the main function of neither ran at the other."""
    a, b = low.functions, high.functions
    return bool(a and b) and a[0] not in b and b[0] not in a


def lines(table: Table, spec: ModelSpec, ran_there: Mapping[int, tuple[str, ...]] | None = None) -> Iterator[Line]:
    """Every line of a table along each of its axes. Tables of experts and of unequal batches have none.

    ran_there: the functions behind each row number, where they are known.
    """
    ran_there = ran_there or {}
    if table.category in ("moe", "skew"):
        return
    columns = table.columns
    names = [str(name) for name in columns[KEY_COLUMNS[table.category][0]]]
    if table.category not in ATTENTION_LIKE:
        axis = KEY_COLUMNS[table.category][1]
        yield from _along(table, spec, axis, None, range(len(names)), names, ran_there)
        return
    chunks, requests = columns["prefill_chunk_tokens"], columns["decode_requests"]
    for axes, rows in (
        (_PREFILL_AXES, [i for i in range(len(names)) if chunks[i] and not requests[i]]),
        (_DECODE_AXES, [i for i in range(len(names)) if requests[i] and not chunks[i]]),
    ):
        for axis, other in (axes, axes[::-1]):
            yield from _along(table, spec, axis, other, rows, names, ran_there, _planes(table, axes, rows, names))


def _planes(
    table: Table, axes: tuple[str, str], rows: Sequence[int], names: Sequence[str]
) -> dict[str, tuple[tuple[float, float, float], ...]]:
    """The first and the last cell of each kernel over both axes."""
    cells: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    xs, ys, times = (table.columns[column] for column in (*axes, "time_us"))
    for row in rows:
        cells[names[row]].append((float(xs[row]), float(ys[row]), float(times[row])))
    return {name: (min(found), max(found)) for name, found in cells.items()}


def _along(
    table: Table,
    spec: ModelSpec,
    axis: str,
    other: str | None,
    rows: Iterable[int],
    names: Sequence[str],
    ran_there: Mapping[int, tuple[str, ...]],
    planes: Mapping[str, tuple[tuple[float, float, float], ...]] | None = None,
) -> Iterator[Line]:
    times, spreads = table.columns["time_us"], table.columns["spread_rel"]
    found: dict[tuple[str, float], list[Point]] = defaultdict(list)
    for row in rows:
        beside = float(table.columns[other][row]) if other else 0.0
        at = float(table.columns[axis][row])
        found[names[row], beside].append(Point(at, float(times[row]), float(spreads[row]), row, ran_there.get(row, ())))
    for (name, beside), points in found.items():
        ordered = tuple(sorted(points, key=lambda point: point.at))
        yield Line(name, axis, beside, ordered, breaks(spec, name, axis, int(beside)), (planes or {}).get(name, ()))


def _inner(line: Line) -> Iterator[tuple[Point, Point, Point]]:
    """Points between two neighbours with no change of kernel among the three."""
    for low, point, high in zip(line.points, line.points[1:], line.points[2:], strict=False):
        if not line.crosses(low.at, high.at):
            yield low, point, high


def leave_one_out(line: Line, ran: Ran | None = None) -> list[float]:
    """Relative errors of what lookups make of each inner point from its neighbours. ran: what ran the kernels."""
    work, per_work = _work_along(line, ran)
    errors = []
    for low, point, high in _inner(line):
        share = (point.at - low.at) / (high.at - low.at)
        works = work(low.at), work(point.at), work(high.at)
        predicted = straight(low.time_us, high.time_us, works, share, per_work)
        errors.append(abs(predicted - point.time_us) / point.time_us)
    return errors


def _work_along(line: Line, ran: Ran | None) -> tuple[Callable[[float], float], float]:
    """What time runs straight in along the line, and what that costs over the whole table."""
    at: Callable[[float, float], float] | None = None
    if line.axis in _PREFILL_AXES and (prefill := prefill_straight(line.kernel, ran)) is not None:
        at = prefill.prefill
    elif line.axis in _DECODE_AXES and (decode := decode_straight(line.kernel, ran)) is not None:
        at = decode.decode
    if at is None:
        return (lambda x: x), 0.0
    work, cost = at, cost_of_work(line.plane, at) if line.plane else 0.0
    if line.axis in (_PREFILL_AXES[0], _DECODE_AXES[0]):
        return (lambda x: work(x, line.other)), cost
    return (lambda x: work(line.other, x)), cost


def _off(line: Line) -> Iterator[tuple[Point, bool]]:
    """(inner point, whether it is more than OUTLIER_FACTOR off the log-log line of its neighbours)."""
    for low, point, high in _inner(line):
        # One is added so that an axis that begins at zero has a logarithm.
        share = math.log((point.at + 1) / (low.at + 1)) / math.log((high.at + 1) / (low.at + 1))
        predicted = math.exp(math.log(low.time_us) + math.log(high.time_us / low.time_us) * share)
        yield point, not 1 / OUTLIER_FACTOR <= point.time_us / predicted <= OUTLIER_FACTOR


def outliers(table: Table, spec: ModelSpec) -> tuple[int, ...]:
    """Row numbers of cells that are unlike their neighbours along every axis on which they have two."""
    votes: dict[int, list[bool]] = defaultdict(list)
    for line in lines(table, spec):
        for point, off in _off(line):
            votes[point.row].append(off)
    return tuple(sorted(row for row, found in votes.items() if all(found)))


def disorder(line: Line) -> tuple[int, int]:
    """(neighbouring pairs in which more keys take less time, pairs) of a line along the keys."""
    wrong = pairs = 0
    for low, high in pairwise(line.points):
        if line.crosses(low.at, high.at):
            continue
        pairs += 1
        spreads = [point.spread_rel for point in (low, high) if math.isfinite(point.spread_rel)]
        wrong += high.time_us < low.time_us * (1 - max(ORDER_TOLERANCE, *spreads, 0.0))
    return wrong, pairs


def open_changes(line: Line) -> int:
    """Changes of kernel within the line that a lookup leads across: a step without points at both its sides, a bend
    without a point on it, two functions more than one apart with no such place between them."""
    has = {point.at for point in line.points}
    needed = (0, 1) if jumps(line.kernel, line.axis) else (0,)
    first, last = line.points[0].at, line.points[-1].at
    known = sum(first <= at < last and not all(at + step in has for step in needed) for at in line.breaks)
    return known + sum(
        _others(a, b) and b.at > a.at + 1 and not any(a.at <= at < b.at for at in line.breaks)
        for a, b in pairwise(line.points)
    )


def quality(
    table: Table, spec: ModelSpec, ran: Ran | None = None, ran_there: Mapping[int, tuple[str, ...]] | None = None
) -> dict[str, Any]:
    """What meta.yaml keeps of a table. Shares are relative; a figure without any value behind it is left out.

    spread: p50 and p90 over the cells of JUDGED_FROM_US and more. leave_one_out: p50, p90 and number of errors, over
    all axes, for each, and of an attention-like table for each kernel along each. disorder: pairs in which more keys
    take less time, and all pairs. outliers: cells unlike their neighbours. open_changes: kernel changes without a point
    on both sides, per kernel and axis. ran: what ran the kernels. ran_there: the functions behind each row number.
    """
    times, spreads = table.columns["time_us"], table.columns["spread_rel"]
    judged = [
        float(spread)
        for time, spread in zip(times, spreads, strict=True)
        if float(time) >= JUDGED_FROM_US and math.isfinite(float(spread))
    ]
    found: dict[str, Any] = {}
    if judged:
        found["spread_from_20_us"] = _percentiles(judged)
    errors: dict[str, list[float]] = defaultdict(list)
    by_kernel: dict[str, list[float]] = defaultdict(list)
    wrong = pairs = 0
    open_at: dict[str, int] = defaultdict(int)
    for line in lines(table, spec, ran_there):
        own = leave_one_out(line, ran)
        errors[line.axis] += own
        by_kernel[f"{line.kernel} {line.axis}"] += own
        if line.axis in (_PREFILL_AXES[1], _DECODE_AXES[1]):
            wrong, pairs = (a + b for a, b in zip((wrong, pairs), disorder(line), strict=True))
        if changes := open_changes(line):
            open_at[f"{line.kernel} {line.axis}"] += changes
    together = [error for one in errors.values() for error in one]
    if together:
        found["leave_one_out"] = _percentiles(together) | {
            axis: _percentiles(one) for axis, one in errors.items() if one
        }
        if len(by_kernel) > len(errors) and table.category in ATTENTION_LIKE:
            found["leave_one_out"]["kernels"] = {name: _percentiles(one) for name, one in by_kernel.items() if one}
    if pairs:
        found["disorder"] = {"pairs": pairs, "wrong": wrong}
    found["outliers"] = len(outliers(table, spec))
    if open_at:
        found["open_changes"] = dict(open_at)
    return found


def _percentiles(values: Sequence[float]) -> dict[str, Any]:
    return {
        "p50": round(percentile(values, 50), 4),
        "p90": round(percentile(values, 90), 4),
        "cells": len(values),
    }
