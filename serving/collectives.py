"""Time of collective operations: a measured table where there is one, else a computation from link parameters.

Volumes per rank, for n ranks; B bytes are the result of an all-gather, the input of a reduce-scatter or all-reduce, and
what one rank sends in an all-to-all, its own part included:

    all-gather, reduce-scatter   (n - 1) / n x B, in n - 1 ring steps
    all-reduce                   2 (n - 1) / n x B, in 2 (n - 1) ring steps
    all-to-all                   (n - 1) / n x B, to all peers at once

Within a node of a hardware file the way is chosen by size (serving.links). A ring between nodes, or over a cluster
file's own link, of s steps that moves m bytes over links of bandwidth w takes

    first + (s - 1) further + m / w + 2 sqrt(chunk m / w)

where the last term is that of the best cut into chunks, each of which costs `chunk` once (the sum k chunk + m / (k w)
over k chunks has this least value).

Over several nodes the bytes that cross between them share each node's network ports, one per GPU: (nodes - 1) / nodes
x B leave a node in a ring or, from each of its ranks, in an all-to-all. The slower of both tiers counts. An all-reduce
takes the ring or a tree, whichever is faster: down and up the tree, 2 ceil(log2 nodes) hops, B bytes each way per node.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from profiler.core.collective_table import CollectiveRow, collective_curve
from profiler.core.errors import ConfigError
from profiler.core.grid import Curve
from profiler.core.hardware import Hardware, Link
from serving.links import SWITCHED_GBPS, NodeLink

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]

# Of rings over several nodes, taken from all-gathers within one (AIConfigurator, NCCL 2.29): a ring step after the
# first adds 0.3 of a smallest message's latency, a chunk costs one, and these shares of the links' peak are reached.
_FURTHER_STEP = 0.3
_SWITCHED, _PAIR, _BUS = 0.9, 0.55, 0.4


class LinkLike(Protocol):
    """bandwidth_gbps per direction and GPU, latency_us of a smallest message."""

    @property
    def bandwidth_gbps(self) -> float: ...

    @property
    def latency_us(self) -> float: ...


class Price(NamedTuple):
    """provenance: "measured" or "imported" from a table, "computed" from links."""

    us: float
    provenance: str


@dataclass(frozen=True, slots=True)
class Tier:
    """Links of one reach as rings use them: achieved bandwidths per GPU and direction.

    pair_gbps, ring_gbps: in a ring of two ranks, and of more. first_us, further_us: latency of the first and of each
    further step. chunk_us: cost of one chunk of a pipelined ring.
    """

    pair_gbps: float
    ring_gbps: float
    first_us: float
    further_us: float
    chunk_us: float

    def ring_us(self, steps: int, moved_bytes: float, ranks: int) -> float:
        return self.first_us + self.further_us * (steps - 1) + self.flow_us(moved_bytes, ranks)

    def flow_us(self, moved_bytes: float, ranks: int) -> float:
        """The part of a ring that grows with its bytes."""
        us = moved_bytes / ((self.pair_gbps if ranks == 2 else self.ring_gbps) * 1e3)
        return us + 2 * math.sqrt(self.chunk_us * us)


@dataclass(frozen=True, slots=True)
class Measured:
    """Curves of a collectives table by (operation, ranks), bytes to microseconds.

    imported: those that others measured.
    """

    curves: dict[tuple[str, int], Curve]
    imported: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives among ranks of one GPU each. inter is needed only for more ranks than gpus_per_node.

    node: link parameters of a node for what is chosen by size; None computes rings alone. measured: asked first.
    """

    intra: Tier
    inter: Tier | None = None
    gpus_per_node: int = 8
    node: NodeLink | None = None
    measured: Measured | None = None

    def price(self, operation: Operation, total_bytes: float, ranks: int) -> Price:
        """Microseconds of one call on `ranks` ranks, and where they are from.

        Within the sizes of a table its piecewise linear value; beyond its largest message the computed time, scaled by
        what the table and the computation differ there. Raises ConfigError for ranks that span nodes without a link.
        """
        if ranks == 1 or total_bytes <= 0:
            return Price(0.0, "computed")
        curve = self.measured.curves.get((operation, ranks)) if self.measured else None
        if curve is None:
            return Price(self._computed_us(operation, total_bytes, ranks), "computed")
        largest = curve.xs[-1]
        if total_bytes <= largest:
            assert self.measured is not None
            imported = (operation, ranks) in self.measured.imported
            return Price(curve.at(max(total_bytes, curve.xs[0])), "imported" if imported else "measured")
        factor = curve.ts[-1] / self._computed_us(operation, largest, ranks)
        return Price(factor * self._computed_us(operation, total_bytes, ranks), "computed")

    def all_gather_us(self, total_bytes: float, ranks: int) -> float:
        """Microseconds until every rank holds the `total_bytes` that the ranks contribute together."""
        return self.price("all_gather", total_bytes, ranks).us

    def reduce_scatter_us(self, total_bytes: float, ranks: int) -> float:
        """Microseconds to sum `total_bytes` of every rank and leave each with its share."""
        return self.price("reduce_scatter", total_bytes, ranks).us

    def all_reduce_us(self, total_bytes: float, ranks: int) -> float:
        """Microseconds to sum `total_bytes` of every rank on every rank."""
        return self.price("all_reduce", total_bytes, ranks).us

    def all_to_all_us(self, sent_bytes: float, ranks: int) -> float:
        """Microseconds until every rank has sent its `sent_bytes`, equal parts to all ranks."""
        return self.price("all_to_all", sent_bytes, ranks).us

    def send(self, sent_bytes: float, *, between_nodes: bool = False) -> Price:
        """Time until another rank has received `sent_bytes`; within a node of a measured table where there is one."""
        if between_nodes:
            return Price(self.send_us(sent_bytes, between_nodes=True), "computed")
        return self.price("send", sent_bytes, 2)

    def send_us(self, sent_bytes: float, *, between_nodes: bool = False) -> float:
        """Microseconds until another rank has received `sent_bytes`, computed."""
        return self._tier(between_nodes).ring_us(1, sent_bytes, 2)

    def _computed_us(self, operation: Operation, total_bytes: float, ranks: int) -> float:
        if operation == "send":
            return self.send_us(total_bytes, between_nodes=ranks > self.gpus_per_node)
        if operation == "all_to_all":
            return self._all_to_all(total_bytes, ranks)
        if operation != "all_reduce":
            if self.node is not None and ranks <= self.gpus_per_node:
                return self.node.exchange_us(total_bytes, ranks)
            return self._ring(ranks - 1, total_bytes, ranks)
        if ranks <= self.gpus_per_node:
            if self.node is not None:
                return self.node.engine_all_reduce_us(total_bytes, ranks)
            return self._ring(2 * (ranks - 1), 2 * total_bytes, ranks)
        return min(self._ring(2 * (ranks - 1), 2 * total_bytes, ranks), self._tree(total_bytes, ranks))

    def _tier(self, between_nodes: bool, ranks: int = 2) -> Tier:
        if not between_nodes:
            return self.intra
        if self.inter is None:
            raise ConfigError(f"{ranks} ranks span nodes of {self.gpus_per_node}, but no inter-node link is given")
        return self.inter

    def _ring(self, steps: int, total_bytes: float, ranks: int) -> float:
        """A ring in which (ranks - 1) / ranks of `total_bytes` pass each rank."""
        moved = total_bytes * (ranks - 1) / ranks
        if ranks <= self.gpus_per_node:
            return self.intra.ring_us(steps, moved, ranks)
        inter = self._tier(True, ranks)
        nodes = -(-ranks // self.gpus_per_node)
        between = inter.flow_us(total_bytes * (nodes - 1) / nodes / self.gpus_per_node, ranks)
        return inter.ring_us(steps, 0.0, ranks) + max(between, self.intra.flow_us(moved, ranks))

    def _tree(self, total_bytes: float, ranks: int) -> float:
        """Reduced within each node, up and down a tree of nodes, and spread within each node again."""
        inter = self._tier(True, ranks)
        nodes = -(-ranks // self.gpus_per_node)
        within = self._computed_us("all_reduce", total_bytes, self.gpus_per_node) if self.gpus_per_node > 1 else 0.0
        return (
            within
            + 2 * math.ceil(math.log2(nodes)) * inter.first_us
            + inter.flow_us(2 * total_bytes / self.gpus_per_node, ranks)
        )

    def _all_to_all(self, sent_bytes: float, ranks: int) -> float:
        local = min(ranks, self.gpus_per_node)
        inside = sent_bytes * local / ranks
        if self.node is not None:
            within = self.node.all_to_all_us(inside, local)
        else:
            within = self.intra.ring_us(1, inside * (local - 1) / local, local)
        if ranks <= self.gpus_per_node:
            return within
        return max(within, self._tier(True, ranks).ring_us(1, sent_bytes * (ranks - local) / ranks, ranks))


def from_hardware(hardware: Hardware, rows: Sequence[CollectiveRow] = ()) -> Collectives:
    """Collectives over the links of a hardware file, and of its measured rows first."""
    links = hardware.links
    inter, intra = links.get("inter_node"), links["intra_node"]
    found = Collectives(
        _tier(intra),
        _tier(inter) if inter else None,
        hardware.gpus_per_node,
        NodeLink(intra.bandwidth_gbps, intra.latency_us),
    )
    return with_table(found, rows) if rows else found


def with_table(collectives: Collectives, rows: Sequence[CollectiveRow]) -> Collectives:
    """The same collectives that ask a table first: its calls in CUDA graphs, the fastest back end by size.

    Imported rows count for operations and ranks alone of which the card's own table has none.
    """
    graphs = [row for row in rows if row.mode == "graph"]
    own = {(row.operation, row.gpus) for row in graphs if row.provenance == "measured"}
    imported = {(row.operation, row.gpus) for row in graphs} - own
    chosen = [row for row in graphs if ((row.operation, row.gpus) in imported) == (row.provenance == "imported")]
    curves = {one: collective_curve(chosen, *one, "graph") for one in sorted(own | imported)}
    return replace(collectives, measured=Measured(curves, frozenset(imported)))


def _tier(link: Link) -> Tier:
    peak, latency = link.bandwidth_gbps, link.latency_us
    switched = peak >= SWITCHED_GBPS
    return Tier(
        pair_gbps=peak * (_SWITCHED if switched else _PAIR),
        ring_gbps=peak * (_SWITCHED if switched else _BUS),
        first_us=latency,
        further_us=_FURTHER_STEP * latency,
        chunk_us=latency,
    )


def from_fitted_link(link: LinkLike) -> Collectives:
    """Collectives over a cluster file's own link numbers, taken as achieved: rings, every step at full latency."""
    gbps, latency = link.bandwidth_gbps, link.latency_us
    return Collectives(Tier(gbps, gbps, latency, latency, 0.0), None, gpus_per_node=1 << 30)
