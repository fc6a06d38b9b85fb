"""Routed experts of one rank: under an even load, or of the busiest rank that a routing gives."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from profiler.core.grid import Grid
from profiler.core.types import MoeDims
from serving.cost.lines import Line, line
from serving.routing import BusiestRank


def local_pairs(moe: MoeDims, ep: int, tokens: int) -> float:
    """(token, expert) pairs per rank when the load is even: tokens x topk / ep."""
    return tokens * moe.topk / ep


def activated_experts(moe: MoeDims, ep: int, tokens: int) -> float:
    """Expected distinct experts of a rank that `tokens` independent tokens reach: E/ep (1 - (1 - topk/E)^tokens).

    A token picks topk distinct experts, and with an even load each expert with probability topk / E, whatever groups
    the router has; so this is exact for independent tokens.
    """
    local = moe.num_experts / ep
    if moe.topk >= moe.num_experts:
        return local
    return -local * math.expm1(tokens * math.log1p(-moe.topk / moe.num_experts))


@dataclass(frozen=True, slots=True)
class Experts:
    """The expert kernel of a rank: `count` MoE layers, experts split over `ep` ranks.

    busiest: how much more than an even load the busiest rank gets, for which all others wait; None for an even load.
    """

    name: str
    count: int
    moe: MoeDims
    ep: int
    grid: Grid
    provenance: str
    busiest: BusiestRank | None = None

    def load(self, tokens: int) -> tuple[float, float]:
        """(pairs, distinct experts) of the rank that is priced."""
        pairs, reached = local_pairs(self.moe, self.ep, tokens), activated_experts(self.moe, self.ep, tokens)
        if self.busiest is None or not tokens:
            return pairs, reached
        more_pairs, more_reached = self.busiest.factors(tokens)
        return pairs * more_pairs, min(reached * more_reached, self.moe.num_experts / self.ep)

    def line(self, tokens: int) -> Line:
        """Price for `tokens` tokens of the whole group, as an all-gather back end gives them to every rank."""
        return line(self.name, self.count, self.grid.at(*self.load(tokens)), self.provenance)


def expert_lines(experts: tuple[Experts, ...]) -> Callable[[int], list[Line]]:
    """Prices all expert kernels at a number of gathered tokens."""

    def lines(tokens: int) -> list[Line]:
        return [one.line(tokens) for one in experts]

    return lines
