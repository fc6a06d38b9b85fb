"""Time of collective operations from link parameters alone.

Volumes per rank, for n ranks and a result of B bytes (all-gather) or an input of B bytes (reduce-scatter, all-reduce):

    all-gather, reduce-scatter   (n - 1) / n x B, in n - 1 ring steps
    all-reduce                   2 (n - 1) / n x B, in 2 (n - 1) ring steps

A ring of s steps that moves m bytes over links of bandwidth w takes

    first + (s - 1) further + m / w + 2 sqrt(chunk m / w)

where the last term is that of the best cut into chunks, each of which costs `chunk` once (the sum k chunk + m / (k w)
over k chunks has this least value). All-reduces up to 8 MiB among directly linked ranks are single kernels that read
their peers' memory: one exchange of (n - 1) x B, or two of (n - 1) / n x B each, whichever is faster, without chunks.

Over several nodes the bytes that cross between them, (nodes - 1) / nodes x B for a node, share its network ports; the
slower of both tiers counts.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from profiler.core.errors import ConfigError
from profiler.core.hardware import Hardware, Link
from profiler.core.units import MIB

# From public tables of H200 and RTX PRO 6000 with 2, 4 and 8 ranks (AIConfigurator: NCCL 2.29, and the engine's own
# all-reduce in a CUDA graph). A ring step after the first adds 0.3 of a smallest message's latency, a chunk costs one,
# and these shares of the links' peak are reached.
_FURTHER_STEP = 0.3
_SWITCHED_RING, _SWITCHED_DIRECT = 0.9, 0.75
_PAIR = 0.55
_BUS_RING = 0.4
# NVLink and its switches link every pair at full rate; PCIe, which is slower than this, links only two ranks so.
_SWITCHED_GBPS = 150
# Largest message of the engine's own all-reduce kernels.
_DIRECT_MAX_BYTES = 8 * MIB


class LinkLike(Protocol):
    """bandwidth_gbps per direction and GPU, latency_us of a smallest message."""

    @property
    def bandwidth_gbps(self) -> float: ...

    @property
    def latency_us(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Tier:
    """Links of one reach, achieved bandwidths per GPU and direction.

    pair_gbps, ring_gbps: in a ring of two ranks, and of more. direct_gbps, direct_pair_gbps: single kernels over direct
    links among more than two ranks and between two, 0 where there are none. first_us, further_us: latency of the first
    and of each further step. chunk_us: cost of one chunk of a pipelined ring.
    """

    pair_gbps: float
    ring_gbps: float
    direct_pair_gbps: float
    direct_gbps: float
    first_us: float
    further_us: float
    chunk_us: float

    def ring_us(self, steps: int, moved_bytes: float, ranks: int) -> float:
        return self.first_us + self.further_us * (steps - 1) + self.flow_us(moved_bytes, ranks)

    def flow_us(self, moved_bytes: float, ranks: int) -> float:
        """The part of a ring that grows with its bytes."""
        us = moved_bytes / ((self.pair_gbps if ranks == 2 else self.ring_gbps) * 1e3)
        return us + 2 * math.sqrt(self.chunk_us * us)

    def direct_us(self, total_bytes: float, ranks: int) -> float | None:
        """The fastest single-kernel all-reduce, or None where there is none."""
        gbps = self.direct_pair_gbps if ranks == 2 else self.direct_gbps
        if not gbps or total_bytes > _DIRECT_MAX_BYTES:
            return None
        once = self.first_us + (ranks - 1) * total_bytes / (gbps * 1e3)
        twice = self.first_us + self.further_us + 2 * (ranks - 1) / ranks * total_bytes / (gbps * 1e3)
        return min(once, twice)


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives among ranks of one GPU each. inter is needed only for more ranks than gpus_per_node."""

    intra: Tier
    inter: Tier | None = None
    gpus_per_node: int = 8

    def all_gather_us(self, total_bytes: float, ranks: int) -> float:
        """Microseconds until every rank holds the `total_bytes` that the ranks contribute together."""
        return self._ring(ranks - 1, total_bytes, ranks)

    def reduce_scatter_us(self, total_bytes: float, ranks: int) -> float:
        """Microseconds to sum `total_bytes` of every rank and leave each with its share."""
        return self._ring(ranks - 1, total_bytes, ranks)

    def all_reduce_us(self, total_bytes: float, ranks: int) -> float:
        """Microseconds to sum `total_bytes` of every rank on every rank."""
        direct = self.intra.direct_us(total_bytes, ranks) if 1 < ranks <= self.gpus_per_node else None
        return direct if direct is not None else self._ring(2 * (ranks - 1), 2 * total_bytes, ranks)

    def _ring(self, steps: int, total_bytes: float, ranks: int) -> float:
        """A ring in which (ranks - 1) / ranks of `total_bytes` pass each rank."""
        if ranks == 1:
            return 0.0
        moved = total_bytes * (ranks - 1) / ranks
        if ranks <= self.gpus_per_node:
            return self.intra.ring_us(steps, moved, ranks)
        if self.inter is None:
            raise ConfigError(f"{ranks} ranks span nodes of {self.gpus_per_node}, but no inter-node link is given")
        nodes = -(-ranks // self.gpus_per_node)
        between = self.inter.flow_us(total_bytes * (nodes - 1) / nodes / self.gpus_per_node, ranks)
        return self.inter.ring_us(steps, 0.0, ranks) + max(between, self.intra.flow_us(moved, ranks))


def from_hardware(hardware: Hardware) -> Collectives:
    """Collectives over the links of a hardware file."""
    links = hardware.links
    inter = links.get("inter_node")
    return Collectives(_tier(links["intra_node"]), _tier(inter) if inter else None, hardware.gpus_per_node)


def _tier(link: Link) -> Tier:
    peak, latency = link.bandwidth_gbps, link.latency_us
    switched = peak >= _SWITCHED_GBPS
    return Tier(
        pair_gbps=peak * (_SWITCHED_RING if switched else _PAIR),
        ring_gbps=peak * (_SWITCHED_RING if switched else _BUS_RING),
        direct_pair_gbps=peak * (_SWITCHED_DIRECT if switched else _PAIR),
        direct_gbps=peak * _SWITCHED_DIRECT if switched else 0.0,
        first_us=latency,
        further_us=_FURTHER_STEP * latency,
        chunk_us=latency,
    )


def from_fitted_link(link: LinkLike) -> Collectives:
    """Collectives over a cluster file's own link numbers, taken as achieved: rings, every step at full latency."""
    gbps, latency = link.bandwidth_gbps, link.latency_us
    return Collectives(Tier(gbps, gbps, 0.0, 0.0, latency, latency, 0.0), None, gpus_per_node=1 << 30)
