"""Cells unlike their neighbours: measured a second time while the engine is there, and judged when tables are built."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from profiler.bind import Row, bind
from profiler.core.bundle import Table, make_table
from profiler.core.shots import Key
from profiler.core.tables import KEY_COLUMNS
from profiler.core.types import Category, ModelSpec
from profiler.engines.base import Binding, EngineInfo
from profiler.quality import AGREEMENT, OUTLIER_FACTOR, outliers
from profiler.samples import Run
from profiler.visits import Latest, latest, one_engine

# Most shots that are measured a second time; more than that is not a few bad moments.
MOST_AGAIN: Final = 64


@dataclass(frozen=True, slots=True)
class Unlike:
    """Cells unlike their neighbours. refused: why, line by line. confirmed: those that two measurements agree on."""

    refused: Mapping[Category, tuple[str, ...]]
    confirmed: Mapping[Category, tuple[str, ...]]


def suspects(runs: Sequence[Run], spec: ModelSpec, binding: Binding) -> list[int]:
    """Shots of the last run, by index, with a cell unlike its neighbours that was measured once; at most MOST_AGAIN."""
    measured = latest(runs)
    bound = bind(measured.results.values(), measured.shots, spec, one_engine(runs), binding)
    cells: dict[Category, dict[tuple[str, Key], float]] = defaultdict(dict)
    for row in bound.rows:
        cells[row.category].setdefault((row.name, row.key), row.time_us)
    shot_of = {(fill.category, fill.key): index for index, shot in enumerate(measured.shots) for fill in shot.fills}
    found: set[int] = set()
    for category, own in cells.items():
        rows = [(name, *key, time, float("nan")) for (name, key), time in own.items()]
        for _, key in _unlike(make_table(category, rows), spec):
            found.add(shot_of[category, key])
    batches = [measured.shots[index].requests for index in sorted(found - measured.looks.keys())]
    regimes = [measured.shots[index].regime for index in sorted(found - measured.looks.keys())]
    wanted = set(zip(batches, regimes, strict=True))
    again = [i for i, shot in enumerate(runs[-1].shots) if shot.moe is None and (shot.requests, shot.regime) in wanted]
    return again[:MOST_AGAIN]


def _unlike(table: Table, spec: ModelSpec) -> list[tuple[str, Key]]:
    names = KEY_COLUMNS[table.category]
    found = []
    for row in outliers(table, spec):
        name, *key = (table.columns[column][row] for column in names)
        found.append((str(name), tuple(value for value in key if not isinstance(value, float))))
    return found


def check_outliers(
    tables: Mapping[Category, Table], measured: Latest, spec: ModelSpec, info: EngineInfo, binding: Binding
) -> Unlike:
    """Judges every cell that is OUTLIER_FACTOR off its neighbours: two measurements that agree confirm it."""
    refused: dict[Category, list[str]] = defaultdict(list)
    confirmed: dict[Category, list[str]] = defaultdict(list)
    suspicious = {category: found for category, table in tables.items() if (found := _unlike(table, spec))}
    if not suspicious:
        return Unlike({}, {})
    first, second = (
        _times(bind([pair[which] for pair in measured.looks.values()], measured.shots, spec, info, binding).rows)
        for which in (0, 1)
    )
    for category, cells in suspicious.items():
        for name, key in cells:
            at = ", ".join(f"{c}={v}" for c, v in zip(KEY_COLUMNS[category][1:], key, strict=True))
            before, after = first.get((category, name, key)), second.get((category, name, key))
            what = f"{name} at {at} is more than {OUTLIER_FACTOR:g} times off its neighbours"
            if before is None or after is None:
                refused[category].append(f"{what} and was measured once")
            elif abs(after - before) > AGREEMENT * min(before, after):
                refused[category].append(f"{what}; two measurements gave {before:.2f} and {after:.2f} us")
            else:
                confirmed[category].append(f"{name} at {at}: {before:.2f} and {after:.2f} us")
    return Unlike({c: tuple(x) for c, x in refused.items()}, {c: tuple(x) for c, x in confirmed.items()})


def _times(rows: Sequence[Row]) -> dict[tuple[Category, str, Key], float]:
    return {(row.category, row.name, row.key): row.time_us for row in rows}
