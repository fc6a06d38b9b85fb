"""What a report is made of, apart from how it is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_COLOURS: Final = ("#1f5fa8", "#d1651a", "#2b8a55", "#a3324f", "#6b4fa0", "#7a6a2f", "#3a8fa3", "#888888")


@dataclass(frozen=True, slots=True)
class Table:
    """numeric: columns to align right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Plot:
    """A plotly figure: traces and layout as JSON-ready mappings. name: id in the page."""

    name: str
    traces: tuple[Mapping[str, Any], ...]
    layout: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """text: paragraphs. Everything is plain text; the writers escape it."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    title: str
    verdict: tuple[str, ...]
    projected: bool
    sections: tuple[Section, ...] = field(default=())


def axes(x: str, y: str) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}, "automargin": True}, "yaxis": {"title": {"text": y}, "automargin": True}}


def colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def short(value: float) -> float:
    return float(f"{value:.5g}")


def rounded(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
