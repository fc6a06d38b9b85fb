"""One line of a step's price list."""

from typing import NamedTuple


class Line(NamedTuple):
    """`calls` calls of `component` take `us` microseconds together.

    provenance: "measured", "imported" or "projected" tables, "computed" from formulas, "stated" by the user,
    "hardware file" from a GPU's description.
    """

    component: str
    calls: int
    us: float
    provenance: str


def line(component: str, calls: int, us_each: float, provenance: str) -> Line:
    """A line whose sum is a whole number of nanoseconds, so that lines add up to the step without a remainder."""
    return Line(component, calls, round(calls * us_each * 1e3) / 1e3, provenance)


def nanoseconds(entry: Line) -> int:
    return round(entry.us * 1e3)
