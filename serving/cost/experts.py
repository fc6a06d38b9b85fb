"""Routed experts of one rank: under an even load, or of the busiest rank that a routing gives."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from profiler.core.even_load import activated_experts, local_pairs
from profiler.core.grid import Grid
from profiler.core.types import MoeDims
from serving.cost.lines import Line, line
from serving.routing import BusiestRank


@dataclass(frozen=True, slots=True)
class Experts:
    """The expert kernel of a rank: `count` MoE layers, experts split over `ep` ranks.

    slots: experts of the slice that the grid was measured with. busiest: how much more than an even load the busiest
    rank gets, for which all others wait; None for an even load.
    """

    name: str
    count: int
    moe: MoeDims
    ep: int
    grid: Grid
    provenance: str
    slots: int
    busiest: BusiestRank | None = None

    def load(self, tokens: int) -> tuple[float, float]:
        """(pairs, distinct experts) of the rank that is priced."""
        pairs, reached = local_pairs(self.moe, self.ep, tokens), activated_experts(self.moe, self.ep, tokens)
        if self.busiest is None or not tokens:
            return pairs, reached
        more_pairs, more_reached = self.busiest.factors(tokens)
        return pairs * more_pairs, min(reached * more_reached, self.busiest.most_experts)

    def line(self, tokens: int) -> Line:
        """Price for `tokens` tokens of the whole group, as an all-gather back end gives them to every rank."""
        return line(self.name, self.count, self._us(*self.load(tokens)), self.provenance)

    def _us(self, pairs: float, reached: float) -> float:
        """One call, in microseconds. Copies of experts may take a rank beyond the slice that was measured: the same
        pairs then read more weights, which takes longer as long as reading is what takes the time."""
        if reached <= self.slots:
            return self.grid.at(pairs, reached)
        # So few pairs reach all experts of the slice but half a one, and reading them is all that they cost.
        reading_us = self.grid.at(self.slots * math.log(2 * self.slots), self.slots)
        return max(self.grid.at(pairs, self.slots), reading_us * reached / self.slots)


def expert_lines(experts: tuple[Experts, ...]) -> Callable[[int], list[Line]]:
    """Prices all expert kernels at a number of gathered tokens."""

    def lines(tokens: int) -> list[Line]:
        return [one.line(tokens) for one in experts]

    return lines
