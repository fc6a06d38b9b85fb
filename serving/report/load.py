"""What the points of a sweep differ in: requests per second, or users who wait for each answer before they go on."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Row = Mapping[str, Any]
_TOO_FEW: Final = 2
_ENOUGH: Final = 10


def load_of(row: Row) -> float | None:
    """The users of a point, or its requests per second; None or 0 where it has neither."""
    return row.get("concurrency") or row.get("rate_per_s")


def of_users(rows: Iterable[Row]) -> bool:
    return any(row.get("concurrency") for row in rows)


def amount(row: Row) -> str:
    """A load as a cell of a table."""
    return f"{row['concurrency']:,}" if row.get("concurrency") else f"{row['rate_per_s']:.4g}"


def load_text(row: Row) -> str:
    """A load in a sentence."""
    if not row.get("concurrency"):
        return f"{amount(row)} requests/s"
    return f"{amount(row)} user{'s' * (row['concurrency'] > 1)}"


def by_load(rows: Iterable[Row]) -> dict[float, list[Row]]:
    """The rows that have a load, lowest first."""
    groups: dict[float, list[Row]] = defaultdict(list)
    for row in rows:
        if load := load_of(row):
            groups[load].append(row)
    return dict(sorted(groups.items()))


def mean_of(rows: Sequence[Row], name: str) -> float | None:
    """Of the rows that have the figure."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def requests_of(row: Row) -> int:
    """All requests of a replay, calls of sessions each by itself."""
    return int(row["finished"] + row["rejected"] + row["unfinished"])


def doubts(rows: Iterable[Row]) -> list[str]:
    """What is to be said of points of users whose replay was too short, or that kept fewer users busy than named."""
    points = [row for row in rows if row["status"] == "done" and row.get("concurrency")]
    few = [row for row in points if requests_of(row) < _TOO_FEW * row["concurrency"]]
    busy = [row for row in points if row not in few and row["in_flight_mean"] is not None]
    idle = [row for row in busy if row["in_flight_mean"] < row["concurrency"] / 2]
    found = []
    if few:
        least = max(row["concurrency"] for row in few) * _ENOUGH
        found.append(
            f"Too short: with {_users(few)} there were fewer than {_TOO_FEW} requests per user, so that the start, "
            f"when all come at once, and the end are most of the replay. Take at least {_ENOUGH} per user, here "
            f"{least:,} requests."
        )
    if idle:
        found.append(
            f"With {_users(idle)} fewer than half of them had a request in flight on average: the end of the replay, "
            "rejected requests, or sessions that wait for their tools, are much of it."
        )
    return found


def _users(rows: Sequence[Row]) -> str:
    counts = sorted({int(row["concurrency"]) for row in rows})
    listed = ", ".join(f"{one:,}" for one in counts[:-1])
    return f"{listed} and {counts[-1]:,} users" if listed else f"{counts[0]:,} user{'s' * (counts[0] > 1)}"
