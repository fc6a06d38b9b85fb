"""Collectives among the GPUs of one node, from two numbers of its link: peak bandwidth and latency.

A library (NCCL) picks among three ways, by size; L is the latency of a smallest message, B the bytes of every rank (all
of them together in an all-gather), p = 2 for an all-reduce and 1 for an all-gather or a reduce-scatter,
m = p (n - 1) / n x B what passes a rank of a ring of n:

    low latency   L + s p (n - 1) L + m / w        short steps s, part of the bandwidth: small messages
    ring          a L + s p (n - 1) L + m / w      pipelined in chunks, nearly all of the bandwidth: large ones
    in the switch 17 L + B / w                     all-reduces of eight ranks and more, switched links, floating point

On NVLink it picks the fastest. Over PCIe it keeps the low-latency way up to 512 KiB although the ring would be faster
by then, and all GPUs share the host's fabric in it: its bytes count as p (n - 1) B over one such fabric.

An engine's own all-reduce kernels read the peers' memory directly where links allow that: one exchange of (n - 1) B,
or two of (n - 1) / n B each. The shares of the peak and the step lengths below are fitted to public tables of H200 and
RTX PRO 6000 with 2, 4 and 8 ranks (AIConfigurator: NCCL 2.29, vLLM 0.24's own all-reduce in a CUDA graph); every
all-reduce row from 64 KiB is met within 25 % (docs/validation.md).
"""

from dataclasses import dataclass

from profiler.core.units import KIB, MIB

# NVLink and its switches link every pair at full rate; links slower than this are taken for PCIe.
SWITCHED_GBPS = 150


@dataclass(frozen=True, slots=True)
class NodeLink:
    """peak_gbps: of one GPU in one direction (1e9 bytes per second). latency_us: of a smallest message."""

    peak_gbps: float
    latency_us: float

    @property
    def switched(self) -> bool:
        return self.peak_gbps >= SWITCHED_GBPS

    def us(self, moved_bytes: float, share: float) -> float:
        """Time of bytes at a share of the peak."""
        return moved_bytes / (self.peak_gbps * share * 1e3)

    def engine_all_reduce_us(self, total_bytes: float, ranks: int) -> float:
        """Microseconds of an all-reduce as an engine does it: its own kernels where they serve, else the library."""
        library = self.library_all_reduce_us(total_bytes, ranks)
        if self.switched:
            return min(library, self._direct_us(total_bytes, ranks)) if total_bytes <= 64 * MIB else library
        if ranks == 2 and total_bytes < 8 * MIB:
            return self.latency_us + self.us(total_bytes, 0.63)
        return library

    def _direct_us(self, total_bytes: float, ranks: int) -> float:
        share, peers = (0.57 if ranks == 2 else 0.68), ranks - 1
        once = self.latency_us + self.us(peers * total_bytes, share)
        twice = (1 + 0.114 * peers) * self.latency_us + self.us(2 * peers / ranks * total_bytes, share)
        return min(once, twice)

    def library_all_reduce_us(self, total_bytes: float, ranks: int, *, floating: bool = True) -> float:
        """Microseconds of an all-reduce by a library. floating: elements that a switch can add."""
        latency, steps = self.latency_us, 2 * (ranks - 1)
        moved = 2 * (ranks - 1) / ranks * total_bytes
        pair = ranks == 2
        if not self.switched:
            if total_bytes > 512 * KIB:
                return (2 + 0.88 * steps) * latency + self.us(moved, 0.6 if pair else 0.4)
            shared = 2 * (ranks - 1) * total_bytes
            return max((1 + 0.35 * steps) * latency, (1 + 0.16 * steps) * latency + self.us(shared, 0.7))
        ways = [
            (1 + 0.235 * steps) * latency + self.us(moved, min(0.56, 0.2 + 0.045 * ranks)),
            (3 + 0.52 * steps) * latency + self.us(moved, 0.67 if pair else 0.767),
        ]
        if ranks >= 8 and floating:
            ways.append(17 * latency + self.us(total_bytes, 0.607))
        return min(ways)

    def exchange_us(self, total_bytes: float, ranks: int) -> float:
        """Microseconds of an all-gather or reduce-scatter by a library; total_bytes of all ranks together."""
        latency, steps = self.latency_us, ranks - 1
        moved = steps / ranks * total_bytes
        pair = ranks == 2
        if not self.switched:
            if total_bytes > 512 * KIB:
                return (2 + 0.88 * steps) * latency + self.us(moved, 0.52 if pair else 0.37)
            shared = self.us(steps * total_bytes, 0.5 if pair else 0.7)
            return max((1 + 0.35 * steps) * latency, (1 + 0.16 * steps) * latency + shared)
        return min(
            (1 + 0.235 * steps) * latency + self.us(moved, min(0.5, 0.17 + 0.04 * ranks)),
            (4.2 + 0.52 * steps) * latency + self.us(moved, 0.58 if pair else 0.72),
        )

    def all_to_all_us(self, sent_bytes: float, ranks: int) -> float:
        """Microseconds until every rank has sent `sent_bytes`, an equal part to each rank and one to itself."""
        moved = (ranks - 1) / ranks * sent_bytes
        if self.switched:
            return 3 * self.latency_us + self.us(moved, 0.69)
        return 2 * self.latency_us + self.us(moved, 0.38 if ranks <= 4 else 0.29)
