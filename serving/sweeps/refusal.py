"""The error with which a sweep or a search without any result ends, and so its exit code (docs/guide/sweep.md)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from profiler.core.errors import CapacityError, ConfigError, ContractError, CoverageError, SparsightError
from serving.report.figures import counts, label

_ERRORS: Final[Mapping[str, type[SparsightError]]] = {
    "capacity": CapacityError,
    "coverage": CoverageError,
    "contract": ContractError,
    "worker": SparsightError,
}
_RULES: Final = ("illegal", "not launchable", "left out")


def nothing_ran(rows: Sequence[Mapping[str, Any]]) -> SparsightError | None:
    """What to raise for rows of results of which none is done or fits; None where one is, or where there are none.

    The rows that came furthest decide: points that were begun, else layouts that no rule forbids, else all. Where they
    agree the error is that of their refusal, else ConfigError; points that failed decide alone, with SparsightError.
    """
    found = [row for row in rows if row["status"] in ("refused", "failed")]
    if not found or len(found) < len(rows):
        return None
    decisive = (
        [row for row in found if row["status"] == "failed"]
        or [row for row in found if row["key"] is not None]
        or [row for row in found if row["kind"] not in _RULES]
        or found
    )
    classes = {_ERRORS.get(str(row["kind"]), ConfigError) for row in decisive}
    error = classes.pop() if len(classes) == 1 else ConfigError
    nearest = max(decisive, key=_room)
    tally = ", ".join(f"{times} {status}" for status, times in sorted(counts(found).items()))
    return error(f"no point ran ({tally}); nearest: {label(nearest, found)}: {nearest['reason']}")


def _room(row: Mapping[str, Any]) -> float:
    """GiB of KV per rank, by which the nearest of refused layouts is told."""
    room = row.get("kv_available_gib")
    return -math.inf if room is None else float(room)
