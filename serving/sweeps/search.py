"""The highest rate at which one layout keeps an SLO, by bisection on replays."""

import math
from dataclasses import dataclass, replace
from typing import Any, Final

from serving.sweeps.measure import measured
from serving.sweeps.points import Job

_LOWEST_SHARE: Final = 1 / 50
_FINEST: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Search:
    """job: the point whose rate is searched; its own rate is unused. tolerance: relative width of the last bracket.

    around_per_s: where the limit is expected, as of another seed; None starts from the saturated rate.
    """

    job: Job
    tolerance: float
    around_per_s: float | None = None

    @property
    def key(self) -> str:
        return f"search {replace(self.job, rate_per_s=0.0).key} {self.tolerance:g}"


def searched(search: Search) -> dict[str, Any]:
    """{"row", "detail", "points"}: what was found, and every replay on the way as in serving.sweeps.measure.

    The row's highest_rate_per_s is a rate whose replay keeps the SLO; one `tolerance` above it (failed_rate_per_s) a
    replay does not. The rate at which all requests at once are worked off bounds the search: above it queues grow for
    as long as the load lasts, whatever a short replay says; saturated tells that this bound was reached. None where
    even 1/50 of it breaks the SLO. The search takes for granted that a higher rate is never kept better.
    """
    points: list[dict[str, Any]] = []

    def run(rate_per_s: float) -> dict[str, Any]:
        slo = None if rate_per_s == 0 else search.job.slo
        point = measured(replace(search.job, rate_per_s=float(f"{rate_per_s:.6g}"), slo=slo, steps=not points))
        points.append(point)
        return dict(point["row"])

    first = run(0.0)
    if first["status"] != "done":
        return {"row": first | {"search": search.key}, "detail": {}, "points": []}
    ceiling = first["requests_per_s"]
    found = first | {"search": search.key, "saturated_rate_per_s": ceiling, "saturated": False}
    low, high = _bracket(search, ceiling, run)
    while low is not None and high is not None and high / low > 1 + search.tolerance:
        middle = math.sqrt(low * high)
        if run(middle)["slo_met"]:
            low = middle
        else:
            high = middle
    rows = [point["row"] for point in points[1:]]
    kept = [row for row in rows if row["slo_met"]]
    shown = max(kept, key=lambda row: row["rate_per_s"]) if kept else min(rows, key=lambda row: row["rate_per_s"])
    found |= shown | {
        "highest_rate_per_s": shown["rate_per_s"] if kept else None,
        "failed_rate_per_s": min((row["rate_per_s"] for row in rows if not row["slo_met"]), default=None),
        "saturated": bool(kept) and high is None,
    }
    limit = min((row for row in rows if not row["slo_met"]), key=lambda row: row["rate_per_s"], default=None)
    found["slo_limiting"] = limit["slo_limiting"] if limit else "throughput"
    return {"row": found, "detail": {}, "points": points}


def _bracket(search: Search, ceiling: float, run: Any) -> tuple[float | None, float | None]:
    """(a rate that keeps the SLO, one that does not); None where the ceiling keeps it or the lowest rate does not."""
    around = search.around_per_s
    if around is not None and around < ceiling / 1.1:
        low, high = around / 1.1, around * 1.1
        while run(low)["slo_met"] is False:
            if low < ceiling * _FINEST:
                return None, low
            high, low = low, low / 1.3
        if high != around * 1.1:
            return low, high
        while run(high)["slo_met"]:
            if high >= ceiling:
                return high, None
            low, high = high, min(high * 1.3, ceiling)
        return low, high
    if run(ceiling)["slo_met"]:
        return ceiling, None
    low = ceiling * _LOWEST_SHARE
    return (low, ceiling) if run(low)["slo_met"] else (None, low)
