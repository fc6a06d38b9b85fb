"""Reading and checking the rows of CSV traces. Every check raises ValueError with what is legal."""

import csv
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Final

from profiler.core.errors import nearest
from serving.traces import BadRow, Row, TraceRequest
from serving.traces._rows import MAX_NS, to_ns

Cells = dict[str, str]
_DIGITS: Final = len(str(MAX_NS))


def columns_of(first_line: str) -> frozenset[str]:
    """The column names of a header, for recognising its format."""
    if first_line.lstrip().startswith("{"):
        return frozenset()
    try:
        return frozenset(one.strip() for one in _cells(first_line))
    except ValueError:
        return frozenset(one.strip(' "') for one in first_line.split(","))


def read_table(
    lines: Iterable[tuple[int, str]],
    needed: tuple[str, ...],
    optional: tuple[str, ...],
    request: Callable[[Cells, int], TraceRequest],
    missing: str = "",
) -> Iterator[tuple[int, Row]]:
    """The rows below a header, each made by `request(cells by column, row number from 0)`.

    A header that lacks a needed column, or has an unknown or a repeated one, is a bad row that cannot be skipped.
    missing: what to do about a needed column that is not there, for the message.
    """
    rows = iter(lines)
    line, text = next(rows)
    header: list[str] = []
    try:
        header = _cells(text)
        problem = _header_problem(header, needed, optional)
    except ValueError as error:
        problem = str(error)
    if problem:
        yield line, BadRow(problem + (missing if " is missing" in problem else ""), skippable=False)
        return
    for number, (line, text) in enumerate(rows):
        try:
            cells = _cells(text)
            if len(cells) != len(header):
                raise ValueError(f"{len(cells)} fields, the header has {len(header)} ({','.join(header)})")
            yield line, request(dict(zip(header, cells, strict=True)), number)
        except ValueError as error:
            yield line, BadRow(str(error))


def _cells(text: str) -> list[str]:
    text = text.rstrip("\r\n")
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise ValueError(f"not valid CSV: {error}") from None


def _header_problem(header: list[str], needed: tuple[str, ...], optional: tuple[str, ...]) -> str | None:
    known = needed + optional
    for column in needed:
        if column not in header:
            return f"column {column} is missing; the columns are {','.join(needed)}"
    for column in header:
        if column not in known:
            hint = nearest(column, known)
            return f"unknown column {column!r}{f'; did you mean {hint!r}?' if hint else ''} Known: {', '.join(known)}."
        if header.count(column) > 1:
            return f"column {column} appears twice"
    return None


def whole(cells: Cells, column: str, least: int) -> int:
    """An integer of at least `least` in plain digits."""
    text = cells[column]
    if text.isascii() and text.isdecimal() and len(text) <= _DIGITS and least <= (value := int(text)) <= MAX_NS:
        return value
    raise ValueError(f"{column} must be an integer of at least {least}, found {text[:40]!r}")


def seconds(cells: Cells, column: str) -> int:
    """A number of seconds of at least 0, in nanoseconds; beyond nine digits to the nearest nanosecond."""
    text = cells[column]
    try:
        ns = to_ns(Decimal(text)) if text and text[-1] in "0123456789." and "_" not in text else None
    except InvalidOperation:
        ns = None
    if ns is None:
        raise ValueError(f"{column} must be a number of seconds of at least 0, found {text[:40]!r}")
    return ns
