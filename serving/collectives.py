"""Time of collective operations from link parameters alone: latency of the steps plus bytes over bandwidth.

Volumes per rank, for n ranks and a result of B bytes (all-gather) or an input of B bytes (reduce-scatter, all-reduce):

    all-gather, reduce-scatter   (n - 1) / n x B, n - 1 ring steps
    all-reduce                   2 (n - 1) / n x B, 2 (n - 1) ring steps; where every pair of ranks is linked directly,
                                 also one exchange of (n - 1) x B, or two exchanges of (n - 1) / n x B each

The fastest legal way is taken. Over several nodes the bytes that cross between nodes, (nodes - 1) / nodes x B for a
node, share its network ports; the slower of both tiers counts.
"""

from dataclasses import dataclass
from typing import Protocol

from profiler.core.errors import ConfigError
from profiler.core.hardware import Hardware, Link

# From public all-reduce, all-gather and reduce-scatter tables of H200 and RTX PRO 6000 with 2, 4 and 8 ranks
# (AIConfigurator, NCCL 2.29 and vLLM's own kernel in a CUDA graph): a ring step after the first adds 0.3 of the
# smallest message's latency, and large messages reach these shares of the link's peak.
_FURTHER_STEP = 0.3
_SHARE_SWITCHED = 0.75
_SHARE_PAIR = 0.6
_SHARE_RING = 0.45
# NVLink and its switches link every pair at full rate; PCIe, which is slower than this, does not.
_SWITCHED_GBPS = 150


class LinkLike(Protocol):
    """bandwidth_gbps per direction and GPU, latency_us of a smallest message."""

    @property
    def bandwidth_gbps(self) -> float: ...

    @property
    def latency_us(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Tier:
    """Links of one reach. pair_gbps and ring_gbps: achieved per direction between two ranks, and by more than two.

    first_us and further_us: latency of the first and of each further step. direct: every pair has a full link.
    """

    pair_gbps: float
    ring_gbps: float
    first_us: float
    further_us: float
    direct: bool

    def _gbps(self, ranks: int) -> float:
        return self.pair_gbps if ranks == 2 else self.ring_gbps

    def us(self, steps: int, moved_bytes: float, ranks: int) -> float:
        return self.first_us + self.further_us * (steps - 1) + moved_bytes / (self._gbps(ranks) * 1e3)


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives among ranks of one GPU each. inter is needed only for more ranks than gpus_per_node."""

    intra: Tier
    inter: Tier | None = None
    gpus_per_node: int = 8

    def all_gather_us(self, total_bytes: float, ranks: int) -> float:
        """Microseconds until every rank holds the `total_bytes` that the ranks contribute together."""
        if ranks == 1:
            return 0.0
        if ranks > self.gpus_per_node:
            return self._across(ranks - 1, total_bytes, ranks)
        return self.intra.us(ranks - 1, total_bytes * (ranks - 1) / ranks, ranks)

    def reduce_scatter_us(self, total_bytes: float, ranks: int) -> float:
        """Microseconds to sum `total_bytes` of every rank and leave each with its share."""
        return self.all_gather_us(total_bytes, ranks)

    def all_reduce_us(self, total_bytes: float, ranks: int) -> float:
        """Microseconds to sum `total_bytes` of every rank on every rank."""
        if ranks == 1:
            return 0.0
        if ranks > self.gpus_per_node:
            return self._across(2 * (ranks - 1), 2 * total_bytes, ranks)
        share = (ranks - 1) / ranks
        ways = [self.intra.us(2 * (ranks - 1), 2 * share * total_bytes, ranks)]
        if self.intra.direct:
            ways.append(self.intra.us(1, (ranks - 1) * total_bytes, ranks))
            ways.append(self.intra.us(2, 2 * share * total_bytes, ranks))
        return min(ways)

    def _across(self, steps: int, total_bytes: float, ranks: int) -> float:
        """Several nodes: latency of the slower tier, volume of the slower one."""
        if self.inter is None:
            raise ConfigError(f"{ranks} ranks span nodes of {self.gpus_per_node}, but no inter-node link is given")
        nodes = -(-ranks // self.gpus_per_node)
        inside = self.intra.us(1, total_bytes * (ranks - 1) / ranks, ranks) - self.intra.first_us
        between = self.inter.us(steps, total_bytes * (nodes - 1) / nodes / self.gpus_per_node, ranks)
        return between + max(0.0, inside - (between - self.inter.us(steps, 0.0, ranks)))


def from_hardware(hardware: Hardware) -> Collectives:
    """Collectives over the links of a hardware file."""
    links = hardware.links
    inter = links.get("inter_node")
    return Collectives(_tier(links["intra_node"]), _tier(inter) if inter else None, hardware.gpus_per_node)


def _tier(link: Link) -> Tier:
    switched = link.bandwidth_gbps >= _SWITCHED_GBPS
    pair, ring = (_SHARE_SWITCHED, _SHARE_SWITCHED) if switched else (_SHARE_PAIR, _SHARE_RING)
    return Tier(
        pair_gbps=pair * link.bandwidth_gbps,
        ring_gbps=ring * link.bandwidth_gbps,
        first_us=link.latency_us,
        further_us=_FURTHER_STEP * link.latency_us,
        direct=switched,
    )


def from_fitted_link(link: LinkLike) -> Collectives:
    """Collectives over a cluster file's own link numbers, taken as achieved: rings, every step at full latency."""
    tier = Tier(link.bandwidth_gbps, link.bandwidth_gbps, link.latency_us, link.latency_us, direct=False)
    return Collectives(tier, None, gpus_per_node=1 << 30)
