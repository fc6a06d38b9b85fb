"""Everything whose cost depends on one count alone, folded into one number per count."""

from collections.abc import Callable, Sequence

from profiler.core.grid import Curve, Outside
from serving.cost.lines import Line, line, nanoseconds


class Folded:
    """Sums of priced lines by an integer argument, each computed once.

    Values that needed extrapolation are computed every time, so that every use is counted.
    """

    def __init__(self, lines: Callable[[int], Sequence[Line]], outside: Sequence[Outside]) -> None:
        self.lines = lines
        self._outside = [one for one in outside if one.allow_extrapolation]
        self._known: dict[int, int] = {}

    def keeps(self, count: int) -> bool:
        """Whether the sum is known, so that asking again changes nothing."""
        return count in self._known

    def ns(self, count: int) -> int:
        known = self._known.get(count)
        if known is not None:
            return known
        before = sum(one.extrapolated.total() for one in self._outside)
        total = sum(map(nanoseconds, self.lines(count)))
        if before == sum(one.extrapolated.total() for one in self._outside):
            self._known[count] = total
        return total


def curve_lines(curves: Sequence[tuple[str, int, Curve]], provenance: str) -> Callable[[int], list[Line]]:
    """Prices (component, calls, curve) triples at a count; a count of zero runs nothing."""

    def lines(count: int) -> list[Line]:
        return [line(name, calls, one.at(count), provenance) for name, calls, one in curves] if count else []

    return lines
