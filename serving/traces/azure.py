"""Azure LLM inference traces of 2023 and 2024: CSV of arrivals and lengths.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10

Up to nine digits of a second, with or without a time zone (all rows alike). Times count from the first row's.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from profiler.core.units import NS_PER_S
from serving.traces import Row, TraceRequest
from serving.traces._rows import in_units
from serving.traces._table import Cells, columns_of, read_table, whole

NAME: Final = "azure"
FIELDS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
OWN_IDS: Final = False
HASH_BLOCK_TOKENS: Final = None
KEEPS: Final[frozenset[str]] = frozenset()
RESOLUTION_NS: Final = 100
_STAMP: Final = re.compile(
    r"(\d{4}-\d{2}-\d{2})[ T](\d{2}:\d{2}:\d{2})(?:\.(\d{1,9}))?(Z|[+-]\d{2}:\d{2})?", flags=re.ASCII
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_WRITTEN_FROM: Final = datetime(2000, 1, 1, tzinfo=UTC)


def claims(first_line: str) -> bool:
    """True for a header with one of the columns."""
    return not columns_of(first_line).isdisjoint(FIELDS)


def read(lines: Iterable[tuple[int, str]], hash_block_tokens: int = 0) -> Iterator[tuple[int, Row]]:
    start: tuple[int, bool] | None = None

    def request(cells: Cells, number: int) -> TraceRequest:
        nonlocal start
        stamp_ns, zoned = _stamp(cells["TIMESTAMP"])
        start = start or (stamp_ns, zoned)
        if zoned != start[1]:
            raise ValueError("TIMESTAMP must have a time zone in all rows or in none")
        if stamp_ns < start[0]:
            raise ValueError(f"TIMESTAMP {cells['TIMESTAMP']} is before the first row's")
        prompt_tokens = whole(cells, "ContextTokens", 1)
        return TraceRequest(str(number), stamp_ns - start[0], prompt_tokens, whole(cells, "GeneratedTokens", 1))

    return read_table(lines, FIELDS, (), request)


def _stamp(text: str) -> tuple[int, bool]:
    """Nanoseconds since 1970, and whether a time zone was given (UTC is taken where it was not)."""
    match = _STAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        day, time, fraction, zone = match.groups()
        moment = datetime.fromisoformat(f"{day}T{time}{zone or '+00:00'}")
    except ValueError:
        raise ValueError(
            f"TIMESTAMP must be YYYY-MM-DD HH:MM:SS with up to nine digits of a second, found {text[:40]!r}"
        ) from None
    since = moment - _EPOCH
    return (since.days * 86_400 + since.seconds) * NS_PER_S + int((fraction or "").ljust(9, "0")), zone is not None


def write(requests: Iterable[TraceRequest], hash_block_tokens: int = 0) -> Iterator[str]:
    """The rows, as if the trace had begun at 2000-01-01; times to the nearest 100 ns."""
    yield ",".join(FIELDS) + "\n"
    for request in requests:
        whole_s, ticks = divmod(in_units(request.arrival_ns, RESOLUTION_NS), NS_PER_S // RESOLUTION_NS)
        moment = _WRITTEN_FROM + timedelta(seconds=whole_s)
        yield f"{moment:%Y-%m-%d %H:%M:%S}.{ticks:07d},{request.prompt_tokens},{request.output_tokens}\n"
