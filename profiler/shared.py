"""Tables that serve every tensor-parallel degree: measured at one, kept beside the tables of the others.

Which ones is told by `profiler.sweep.shared_categories`. Where such a table is from stands in meta.yaml, under
`grid.tpN/CATEGORY.from`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from profiler.core.bundle import Bundle, Table
from profiler.core.types import Category, ModelSpec
from profiler.sweep import shared_categories
from profiler.tabulate import Acquired

Cells = dict[tuple[int, Category], Table]


class Shared(NamedTuple):
    """Tables by (tp, category) to be written beside those acquired, and their entries in meta.yaml's grid."""

    tables: Cells
    grid: dict[str, Any]


def shared_tables(bundle: Bundle | None, acquired: Acquired, spec: ModelSpec, force: bool) -> Shared:
    """What the bundle's tables of other degrees give to the one acquired, and that one to them.

    A table that the bundle has at this degree stays unless `force` is given; copies of a table acquired anew follow it.
    """
    found = Shared({}, {})
    if bundle is None:
        return found
    grid, tp = bundle.meta["grid"], acquired.tp
    for category in shared_categories(spec, (tp, *bundle.tps)):
        if category in acquired.tables:
            for other in bundle.tps:
                if other != tp and _lender(grid, other, category) == tp:
                    _take(found, acquired.tables[category], acquired.grid, tp, other, category)
        elif category not in acquired.refused and (force or (tp, category) not in bundle.tables):
            lenders = [t for t in bundle.tps if t != tp and (t, category) in bundle.tables]
            own = [t for t in lenders if _lender(grid, t, category) is None]
            if own:
                _take(found, bundle.tables[own[0], category], grid, own[0], tp, category)
    return found


def _lender(grid: Mapping[str, Any], tp: int, category: Category) -> int | None:
    """The degree at which the table of this one was measured, None where it is its own."""
    origin = (grid.get(f"tp{tp}/{category}") or {}).get("from") or {}
    return origin.get("tp")


def _take(into: Shared, table: Table, grid: Mapping[str, Any], source: int, tp: int, category: Category) -> None:
    entry = grid.get(f"tp{source}/{category}") or {}
    into.tables[tp, category] = table
    into.grid[f"tp{tp}/{category}"] = {**entry, "from": {"tp": source}}
