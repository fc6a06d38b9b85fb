"""Who reaches which expert-parallel rank: gates, exact probabilities, and the load of the busiest rank.

Two definitions of "a token reaches a rank" for a model with expert groups, and they differ:

- independent groups: topk_group of the groups at random, then topk of their experts at random. `reach_probability`
  is its exact value; the gate `random_groups` draws it. DeepSeek-V3.2 at EP 8: 0.453626.
- the model's rule on independent scores: groups win by the sum of their two best members, so that the picks spread over
  the chosen groups more evenly. No closed form; the gate `grouped_topk` draws it. DeepSeek-V3.2 at EP 8: 0.4956.

Without groups (GLM-5, MiniMax-M3) both are the same number.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from pathlib import Path
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.types import MoeDims
from serving.expert_placement import ExpertPlacement, linear
from serving.gates import Draw, check_dims, create_gate
from serving.gates.grouped_topk import check_bias
from serving.gates.histogram import check_counts
from serving.gates.recorded import check_row

QUANTILES = (0.5, 0.9, 0.99)
_DRAWN_TOKENS = _REACH_TOKENS = 16_384


def reach_probability(moe: MoeDims, ranks: int) -> Fraction:
    """Probability that a token reaches a given rank: independent groups, uniform experts, linear placement; exact.

    With S = topk_group x E / n_group selectable experts and r = E / ranks of them on a rank: where a rank lies within
    one group, topk_group / n_group x (1 - C(S - r, k) / C(S, k)); where it holds g whole groups, the mean of
    1 - C(S - j E / n_group, k) / C(S, k) over j ~ Hypergeometric(n_group, g, topk_group).

    Raises ConfigError when ranks do not divide the experts, or groups and ranks cut each other.
    """
    check_dims(moe)
    experts, groups, chosen, k = moe.num_experts, moe.n_group, moe.topk_group, moe.topk
    if ranks < 1 or experts % ranks:
        raise ConfigError(f"{ranks} ranks do not divide {experts} experts")
    local, size = experts // ranks, experts // groups
    selectable = chosen * size
    if size % local and local % size:
        raise ConfigError(f"ranks of {local} experts and groups of {size} cut each other: no closed form")
    if size % local == 0:
        return Fraction(chosen, groups) * (1 - Fraction(comb(selectable - local, k), comb(selectable, k)))
    held = local // size
    total = Fraction(0)
    for found in range(max(0, chosen - groups + held), min(held, chosen) + 1):
        weight = Fraction(comb(held, found) * comb(groups - held, chosen - found), comb(groups, chosen))
        total += weight * (1 - Fraction(comb(selectable - found * size, k), comb(selectable, k)))
    return total


def expected_pairs(moe: MoeDims, ranks: int, tokens: int) -> float:
    """Mean (token, expert) pairs of a rank, whatever the groups: tokens x topk / ranks."""
    return tokens * moe.topk / ranks


def expected_distinct(moe: MoeDims, ranks: int, tokens: int) -> float:
    """Mean distinct experts of a rank that tokens reach: E / ranks x (1 - (1 - topk / E)^tokens).

    Exact for independent tokens and equally popular experts, whatever the groups.
    """
    return moe.num_experts / ranks * (1.0 - (1.0 - moe.topk / moe.num_experts) ** tokens)


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One batch. Per rank: distinct tokens that reach it, (token, expert) pairs, and distinct experts reached."""

    tokens: tuple[int, ...]
    pairs: tuple[int, ...]
    distinct: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean of draws, and their quantiles in the order of QUANTILES."""

    mean: float
    quantiles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Many batches of `tokens` tokens.

    reach: mean share of the tokens that reach a rank. ranks_per_token: mean ranks that a token reaches. mean_*: per
    rank; busiest_tokens, busiest_pairs, busiest_distinct: the largest of all ranks in each batch, each count on its
    own. imbalance: mean pairs of the busiest rank over the mean of all.
    """

    tokens: int
    draws: int
    reach: float
    ranks_per_token: float
    mean_tokens: float
    mean_pairs: float
    mean_distinct: float
    busiest_tokens: Spread
    busiest_pairs: Spread
    busiest_distinct: Spread

    @property
    def imbalance(self) -> float:
        return self.busiest_pairs.mean / self.mean_pairs


def rank_load(picks: Any, placement: ExpertPlacement) -> RankLoad:
    """Loads of one batch. picks: int (tokens, topk) expert ids. Replicas of an expert take its picks in turn."""
    import numpy as np

    tokens, k = picks.shape
    slots, ranks = _slots(placement), placement.ranks
    first, count, owner = slots
    flat = picks.reshape(-1)
    turn = (np.arange(flat.size) // k) % count[flat]
    slot = first[flat] + turn
    rank = owner[slot]
    reached = np.zeros((tokens, ranks), dtype=bool)
    reached[np.repeat(np.arange(tokens), k), rank] = True
    used = np.bincount(slot, minlength=owner.size) > 0
    return RankLoad(
        tokens=tuple(map(int, reached.sum(axis=0))),
        pairs=tuple(map(int, np.bincount(rank, minlength=ranks))),
        distinct=tuple(map(int, np.bincount(owner[used], minlength=ranks))),
    )


def _slots(placement: ExpertPlacement) -> tuple[Any, Any, Any]:
    """Replicas numbered expert by expert: the first of each expert, how many it has, and the rank of each."""
    import numpy as np

    homes = placement.homes()
    count = np.array([len(home) for home in homes])
    first = np.concatenate(([0], np.cumsum(count)[:-1]))
    return first, count, np.array([rank for home in homes for rank in home])


def simulate(draw: Draw, placement: ExpertPlacement, tokens: int, *, draws: int = 100, seed: int = 0) -> Load:
    """Loads of `draws` batches of `tokens` tokens. Equal arguments give equal results. Raises ConfigError."""
    import numpy as np

    if tokens < 1 or draws < 1:
        raise ConfigError(f"tokens and draws must be at least 1, found {tokens} and {draws}")
    rng = np.random.Generator(np.random.PCG64([seed, tokens, placement.ranks]))
    loads = [rank_load(draw(tokens, rng), placement) for _ in range(draws)]
    by_rank = {name: np.array([getattr(load, name) for load in loads]) for name in ("tokens", "pairs", "distinct")}
    busiest = {name: _spread(values.max(axis=1)) for name, values in by_rank.items()}
    mean = {name: float(values.mean()) for name, values in by_rank.items()}
    return Load(
        tokens=tokens,
        draws=draws,
        reach=mean["tokens"] / tokens,
        ranks_per_token=mean["tokens"] * placement.ranks / tokens,
        mean_tokens=mean["tokens"],
        mean_pairs=mean["pairs"],
        mean_distinct=mean["distinct"],
        busiest_tokens=busiest["tokens"],
        busiest_pairs=busiest["pairs"],
        busiest_distinct=busiest["distinct"],
    )


def _spread(values: Any) -> Spread:
    import numpy as np

    return Spread(float(values.mean()), tuple(float(q) for q in np.quantile(values, QUANTILES)))


def popularity(draw: Draw, num_experts: int, *, tokens: int = 16_384, seed: int = 0) -> list[float]:
    """Picks per expert in one batch: the load that a balancer would have seen."""
    import numpy as np

    picks = draw(tokens, np.random.Generator(np.random.PCG64([seed, tokens])))
    return [float(count) for count in np.bincount(picks.reshape(-1), minlength=num_experts)]


@dataclass(frozen=True, slots=True)
class BusiestRank:
    """The busiest rank against the even load, by tokens of the group.

    tokens ascending; pairs and distinct: mean over draws of the largest pairs and distinct experts of a rank, over the
    expectation of an even gate. Between two counts the factors are read along the logarithm of the tokens; beyond the
    last they stay as they are there. most_experts: of the fullest rank, copies included.
    """

    tokens: tuple[int, ...]
    pairs: tuple[float, ...]
    distinct: tuple[float, ...]
    most_experts: int

    def factors(self, tokens: int) -> tuple[float, float]:
        """(pairs, distinct experts) of the busiest rank over those of an even load."""
        from bisect import bisect_left
        from math import log

        if tokens <= self.tokens[0]:
            return self.pairs[0], self.distinct[0]
        if tokens >= self.tokens[-1]:
            return self.pairs[-1], self.distinct[-1]
        right = bisect_left(self.tokens, tokens)
        low, high = self.tokens[right - 1], self.tokens[right]
        share = log(tokens / low) / log(high / low)
        pairs, distinct = (v[right - 1] + share * (v[right] - v[right - 1]) for v in (self.pairs, self.distinct))
        return pairs, distinct


def busiest_rank(
    draw: Draw, moe: MoeDims, placement: ExpertPlacement, most_tokens: int, *, seed: int = 0
) -> BusiestRank:
    """The busiest rank for 1 to `most_tokens` tokens of a group, at powers of two up to 16,384.

    Each point draws some 16,000 tokens, in 4 to 100 batches: the factors carry a sampling error of about 1 %.
    """
    counts = [1 << power for power in range(min(most_tokens, _DRAWN_TOKENS).bit_length())]
    pairs, distinct = [], []
    for tokens in counts:
        found = simulate(draw, placement, tokens, draws=max(4, min(100, _DRAWN_TOKENS // tokens)), seed=seed)
        pairs.append(found.busiest_pairs.mean / expected_pairs(moe, placement.ranks, tokens))
        distinct.append(found.busiest_distinct.mean / expected_distinct(moe, placement.ranks, tokens))
    return BusiestRank(tuple(counts), tuple(pairs), tuple(distinct), placement.most_slots)


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """What a routing means for the cost of a step. reach: share of the group's tokens at the rank that gets most."""

    busiest: BusiestRank
    reach: float


def expert_load(draw: Draw, moe: MoeDims, placement: ExpertPlacement, most_tokens: int, *, seed: int = 0) -> ExpertLoad:
    """The load that a gate puts on a placement, for steps of up to `most_tokens` tokens of a group."""
    found = simulate(draw, placement, _REACH_TOKENS, draws=1, seed=seed)
    reach = found.busiest_tokens.mean / _REACH_TOKENS
    return ExpertLoad(busiest_rank(draw, moe, placement, most_tokens, seed=seed), reach)


def own_reach(moe: MoeDims, ranks: int) -> float:
    """Probability that a token reaches a rank of a linear placement under the model's own rule.

    Exact without expert groups, else drawn (16,384 tokens, a fixed seed).
    """
    if moe.n_group == 1 and moe.num_experts % ranks == 0:
        return float(reach_probability(moe, ranks))
    placement = linear(moe.num_experts, ranks)
    return simulate(create_gate("grouped_topk", moe), placement, _REACH_TOKENS, draws=1).reach


def read_counts(path: Path, moe: MoeDims) -> list[float]:
    """A histogram file: a JSON list of numbers, one per expert. Raises ConfigError naming the file."""
    return _numbers(path, moe, check_counts)


def read_bias(path: Path, moe: MoeDims) -> list[float]:
    """A router's correction bias: a JSON list of numbers, one per expert. Raises ConfigError naming the file."""
    return _numbers(path, moe, check_bias)


def _numbers(path: Path, moe: MoeDims, check: Callable[[Any, MoeDims], list[float]]) -> list[float]:
    try:
        return check(_json(path.read_text(encoding="utf-8"), str(path)), moe)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None


def read_picks(path: Path, moe: MoeDims) -> list[list[int]]:
    """A routing file: JSON lines, one list of topk expert ids per token. Raises ConfigError naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    picks = [
        check_row(_json(line, f"{path}:{number}"), moe, f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not picks:
        raise ConfigError(f"{path}: no tokens")
    return picks


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None


def imbalance_of(load: Sequence[float], placement: ExpertPlacement) -> float:
    """Load of the busiest rank over the mean, each expert's load shared evenly by its replicas."""
    homes = placement.homes()
    sums = [0.0] * placement.ranks
    for expert, ranks in enumerate(homes):
        for rank in ranks:
            sums[rank] += load[expert] / len(ranks)
    total = sum(sums)
    if total <= 0:
        raise ConfigError("the load of all experts is 0")
    return max(sums) * placement.ranks / total
