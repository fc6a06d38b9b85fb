"""Which rank holds which experts: linear, round robin, and redundant experts chosen by load as EPLB does."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

from profiler.core.errors import ConfigError, unknown

STRATEGIES = ("linear", "round_robin", "eplb", "eplb_global")


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """slots: the expert ids that each rank holds, in the order of its slots. An expert may have several replicas."""

    num_experts: int
    slots: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.slots)

    @property
    def most_slots(self) -> int:
        """Experts of the fullest rank."""
        return max(map(len, self.slots))

    @property
    def redundant(self) -> int:
        """Replicas beyond one per expert."""
        return sum(map(len, self.slots)) - self.num_experts

    def homes(self) -> tuple[tuple[int, ...], ...]:
        """Per expert the ranks that hold it, one entry per replica, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.slots):
            for expert in experts:
                found[expert].append(rank)
        return tuple(map(tuple, found))


def linear(num_experts: int, ranks: int) -> ExpertPlacement:
    """Contiguous blocks; where they do not divide, the first ranks hold one expert more (vLLM's default).

    Raises ConfigError for more ranks than experts.
    """
    _check(num_experts, ranks)
    size, more = divmod(num_experts, ranks)
    starts = [rank * size + min(rank, more) for rank in range(ranks + 1)]
    return ExpertPlacement(num_experts, tuple(tuple(range(a, b)) for a, b in pairwise(starts)))


def round_robin(num_experts: int, ranks: int) -> ExpertPlacement:
    """Expert e on rank e modulo ranks. Raises ConfigError for more ranks than experts."""
    _check(num_experts, ranks)
    return ExpertPlacement(num_experts, tuple(tuple(range(rank, num_experts, ranks)) for rank in range(ranks)))


def eplb(load: Sequence[float], ranks: int, redundant: int = 0, *, groups: int = 1, nodes: int = 1) -> ExpertPlacement:
    """Redundant experts by load, after DeepSeek's published expert-parallel load balancer.

    Hierarchical where the expert groups divide over the nodes: groups are packed on nodes, experts are replicated
    within their node, and the replicas are packed on the node's ranks; so a group's tokens stay on one node. Global
    (nodes = 1, or groups that do not divide): the same over all ranks at once. Packing gives every bin equally many
    items, heaviest first to the lightest bin; replicas go one by one to the expert with most load per replica.

    load: per expert, finite and not negative. Raises ConfigError for loads, or counts that do not divide.
    """
    experts = len(load)
    _check(experts, ranks)
    for expert, value in enumerate(load):
        if not isfinite(value) or value < 0:
            raise ConfigError(f"load {expert} is {value!r}; loads must be finite and not negative")
    if redundant < 0:
        raise ConfigError(f"redundant is {redundant}; it must be at least 0")
    if (experts + redundant) % ranks:
        raise ConfigError(
            f"{experts} experts and {redundant} redundant ones do not divide over {ranks} ranks; "
            f"the next larger number of redundant ones is {redundant + -(experts + redundant) % ranks}"
        )
    if groups < 1 or experts % groups:
        raise ConfigError(f"{groups} groups do not divide {experts} experts")
    if nodes < 1 or ranks % nodes:
        raise ConfigError(f"{nodes} nodes do not divide {ranks} ranks")
    if groups % nodes:
        groups = nodes = 1
    size = experts // groups
    by_group = [sum(load[g * size : (g + 1) * size]) for g in range(groups)]
    slots: list[tuple[int, ...]] = []
    for packed in _pack(by_group, nodes):
        members = [expert for group in packed for expert in range(group * size, (group + 1) * size)]
        replicas = _replicate([load[e] for e in members], (experts + redundant) // nodes)
        counts = [replicas.count(i) for i in range(len(members))]
        shares = [load[members[i]] / counts[i] for i in replicas]
        slots += [tuple(members[replicas[item]] for item in items) for items in _pack(shares, ranks // nodes)]
    return ExpertPlacement(experts, tuple(slots))


def make_placement(
    strategy: str,
    num_experts: int,
    ranks: int,
    *,
    load: Sequence[float] | None = None,
    redundant: int = 0,
    groups: int = 1,
    nodes: int = 1,
) -> ExpertPlacement:
    """A placement by name. load: per expert, for the eplb strategies, even where it is None. Raises ConfigError."""
    if strategy not in STRATEGIES:
        raise unknown("expert placement", strategy, STRATEGIES)
    if not strategy.startswith("eplb"):
        if redundant:
            raise ConfigError(f"placement {strategy} has no redundant experts; use eplb or eplb_global")
        return linear(num_experts, ranks) if strategy == "linear" else round_robin(num_experts, ranks)
    given = [1.0] * num_experts if load is None else list(load)
    if len(given) != num_experts:
        raise ConfigError(f"{len(given)} loads for {num_experts} experts; one each is needed")
    if strategy == "eplb_global":
        groups = nodes = 1
    return eplb(given, ranks, redundant, groups=groups, nodes=nodes)


def _check(experts: int, ranks: int) -> None:
    if ranks < 1:
        raise ConfigError(f"ranks is {ranks}; it must be at least 1")
    if ranks > experts:
        raise ConfigError(f"{ranks} ranks for {experts} experts: every rank needs one, so ep is at most {experts}")


def _pack(weights: Sequence[float], bins: int) -> list[list[int]]:
    """Items of each bin, equally many in each; heaviest first to the lightest bin with room, ties to the first."""
    room = len(weights) // bins
    packed: list[list[int]] = [[] for _ in range(bins)]
    sums = [0.0] * bins
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        lightest = min((b for b in range(bins) if len(packed[b]) < room), key=sums.__getitem__)
        packed[lightest].append(item)
        sums[lightest] += weights[item]
    return packed


def _replicate(weights: Sequence[float], total: int) -> list[int]:
    """The item of each of `total` replicas: every item once, then always the one with most weight per replica."""
    replicas = list(range(len(weights)))
    counts = [1] * len(weights)
    while len(replicas) < total:
        heaviest = max(range(len(weights)), key=lambda i: weights[i] / counts[i])
        replicas.append(heaviest)
        counts[heaviest] += 1
    return replicas
