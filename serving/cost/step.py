"""The StepCost of a data-parallel group, from folded tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from profiler.core.grid import Outside
from serving.core.shape import StepShape
from serving.cost.graphs import padded_tokens
from serving.cost.kernels import Kernel, Prefill
from serving.cost.lines import Line, line, nanoseconds
from serving.cost.tokens import Folded


@dataclass(frozen=True, slots=True)
class TableCost:
    """Prices lockstep steps; see serving/core/shape.py for the contract.

    A step takes as long as its slowest rank, plus the experts and collectives that all ranks run together, plus the
    stated host overhead. by_tokens and by_sequences price one rank, by_group_tokens the tokens of all ranks (padded as
    they are computed). dense_prefill_tokens: the length up to which a step whose prefills all end there attends every
    key and selects nothing (None: the engine has no such kernel, or the model no indexer).
    """

    by_tokens: Folded
    by_sequences: Folded
    by_group_tokens: Folded
    kernels: tuple[Kernel, ...]
    dense_prefill_tokens: int | None
    capture_sizes: tuple[int, ...]
    overhead_us: float
    outside: tuple[Outside, ...]

    @property
    def extrapolated(self) -> Counter[str]:
        """Lookups per kernel that went beyond its table, with permission."""
        return sum((one.extrapolated for one in self.outside), Counter())

    def step_ns(self, shapes: Sequence[StepShape | None]) -> int:
        """Nanoseconds of one step; None marks a rank that runs a dummy batch of one token."""
        tokens = padded_tokens([shape.tokens if shape else 1 for shape in shapes], self.capture_sizes)
        slowest = max(self._rank_ns(shape, count) for shape, count in zip(shapes, tokens, strict=True))
        return slowest + self.by_group_tokens.ns(sum(tokens)) + round(self.overhead_us * 1e3)

    def explain(self, shapes: Sequence[StepShape | None]) -> list[Line]:
        """The step's price list: the slowest rank, then what all ranks run together. Its sum is step_ns."""
        tokens = padded_tokens([shape.tokens if shape else 1 for shape in shapes], self.capture_sizes)
        ranks = list(zip(shapes, tokens, strict=True))
        shape, count = max(ranks, key=lambda rank: self._rank_ns(*rank))
        lines = list(self.by_tokens.lines(count))
        if shape is not None:
            lines += self.by_sequences.lines(shape.sampled_sequences)
            lines += [
                line(kernel.name, kernel.count, kernel.us(shape, rows), kernel.provenance)
                for kernel, rows in self._rows(shape)
            ]
        lines += self.by_group_tokens.lines(sum(tokens))
        if self.overhead_us:
            lines.append(line("host", 1, self.overhead_us, "stated"))
        return [entry for entry in lines if entry.us]

    def _rank_ns(self, shape: StepShape | None, tokens: int) -> int:
        total = self.by_tokens.ns(tokens)
        if shape is None:
            return total
        total += self.by_sequences.ns(shape.sampled_sequences)
        if not shape.prefills:
            for kernel in self.kernels:
                total += round(kernel.count * kernel.us(shape, ()) * 1e3)
            return total
        for kernel, rows in self._rows(shape):
            total += round(kernel.count * kernel.us(shape, rows) * 1e3)
        return total

    def _rows(self, shape: StepShape) -> list[tuple[Kernel, Sequence[Prefill]]]:
        """Which kernels run, and whose prefill rows each one takes."""
        limit = self.dense_prefill_tokens
        dense = limit is not None and all(chunk + context <= limit for chunk, context in shape.prefills)
        rows: list[tuple[Kernel, Sequence[Prefill]]] = []
        for kernel in self.kernels:
            runs = kernel.prefill_when
            if runs == "selection":
                # The selection of a step with decode rows is made for its prefill rows too, even if it goes unused.
                takes = not dense or shape.decode_requests > 0
            else:
                takes = runs == "always" or runs == ("dense" if dense else "sparse")
            if takes or shape.decode_requests:
                rows.append((kernel, shape.prefills if takes else ()))
        return rows


def step_us(lines: Sequence[Line]) -> float:
    """Sum of a price list in microseconds."""
    return sum(nanoseconds(entry) for entry in lines) / 1e3
