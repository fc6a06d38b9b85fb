"""Attention-like kernels of the ranks of a step, priced once for every cost that needs them."""

from collections.abc import Sequence
from typing import NamedTuple

from serving.core.shape import StepShape


class RankKernels(NamedTuple):
    """What one rank's batch asks of the kernels, whatever it computes in all.

    dense_tokens: those that take dense prefill. us: microseconds of one call of each kernel, 0 where it does not run.
    """

    dense_tokens: int
    us: Sequence[float]


class StepKernels:
    """The kernels of the last step, which the cost of a whole model looks up and those of its parts read."""

    __slots__ = ("_found", "_shapes")

    def __init__(self) -> None:
        self._shapes: tuple[StepShape | None, ...] = ()
        self._found: list[RankKernels | None] = []

    def of(self, shapes: Sequence[StepShape | None], *, anew: bool) -> list[RankKernels | None]:
        """By rank; those that are None are for the caller to fill in. anew: all of them, as lookups are counted."""
        asked = tuple(shapes)
        if anew or asked != self._shapes:
            self._found = [None] * len(asked)
            self._shapes = asked
        return self._found
