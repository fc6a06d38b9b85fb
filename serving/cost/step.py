"""The StepCost of a data-parallel group, from folded tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from profiler.core.grid import Outside
from profiler.core.launch import Prefill
from serving.core.shape import StepShape
from serving.cost.graphs import padding
from serving.cost.kernels import Kernel, PrefillWhen
from serving.cost.lines import Line, line, nanoseconds
from serving.cost.padded import PaddedExperts
from serving.cost.ranks import RankKernels, StepKernels
from serving.cost.tokens import Folded


@dataclass(frozen=True, slots=True)
class DensePrefill:
    """When an engine attends every key instead of the selected ones.

    limit_tokens: a step runs its prefills dense when all of them end within it. longer_than_tokens: a chunk of at most
    this length runs as a decode does, on the sparse path, and does not count. selects: the engine scores and selects
    for dense prefills all the same.
    """

    limit_tokens: int
    longer_than_tokens: int = 0
    selects: bool = False

    def rows(self, prefills: Sequence[Prefill]) -> list[Prefill]:
        """The prefill requests of a step that run dense."""
        long = [prefill for prefill in prefills if prefill[0] > self.longer_than_tokens]
        return long if all(chunk + context <= self.limit_tokens for chunk, context in long) else []


@dataclass(frozen=True, slots=True)
class TableCost:
    """Prices lockstep steps; see serving/core/shape.py for the contract.

    A step takes as long as its slowest rank, plus the experts and collectives that all ranks run together, plus the
    device time outside them that the caller gives (step_us). The host's time (host_us) comes on top, or, where it
    overlaps with the device's as under asynchronous scheduling, only what it exceeds it by. by_tokens and by_sequences
    price one rank, by_group_tokens the tokens of all ranks (padded as they are computed), by_sparse_tokens the tokens
    of a rank that do not take dense prefill. dense_prefill: None where the engine has no such kernel, or the model no
    indexer. dummy_tokens: of the batch of a rank without work. prefills_in_graphs: CUDA graphs take steps with prefills
    too; else those run unpadded. is_part: of a model whose cost looks the kernels of a step up (`part_of`).
    padded_experts: the experts, where they are not priced as all else of by_group_tokens is.
    """

    by_tokens: Folded
    by_sparse_tokens: Folded
    by_sequences: Folded
    by_group_tokens: Folded
    kernels: tuple[Kernel, ...]
    dense_prefill: DensePrefill | None
    capture_sizes: tuple[int, ...]
    outside: tuple[Outside, ...]
    host_us: float = 0.0
    host_overlaps: bool = False
    step_us: float = 0.0
    step_source: str = "stated"
    dummy_tokens: int = 1
    prefills_in_graphs: bool = True
    padded: tuple[int, ...] = ()
    padded_experts: PaddedExperts | None = None
    is_part: bool = False
    step_kernels: StepKernels = field(default_factory=StepKernels, init=False, compare=False, repr=False)
    _lone: dict[tuple[int, int, int], int] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "padded", padding(self.capture_sizes))

    @property
    def extrapolated(self) -> Counter[str]:
        """Lookups per kernel that went beyond its table, with permission."""
        return sum((one.extrapolated for one in self.outside), Counter())

    def step_ns(self, shapes: Sequence[StepShape | None]) -> int:
        """Nanoseconds of one step; None marks a rank that runs a dummy batch."""
        if len(shapes) == 1 and (shape := shapes[0]) is not None:
            count = shape.tokens if shape.prefills else shape.decode_requests * shape.decode_query_tokens
            if count < len(self.padded) and (self.prefills_in_graphs or not shape.prefills):
                count = self.padded[count]
            device_ns = self._rank_ns(shape, count) + self._group_ns(shapes, count)
        else:
            computed = self._tokens(shapes)
            device_ns = self._slowest_ns(shapes, computed) + self._group_ns(shapes, sum(computed))
        if self.step_us:
            device_ns += round(self.step_us * 1e3)
        return device_ns + self._host_ns(device_ns) if self.host_us else device_ns

    def _tokens(self, shapes: Sequence[StepShape | None]) -> list[int]:
        """Tokens per rank that the step computes, padded to CUDA graphs; see serving.cost.graphs."""
        dummy = self.dummy_tokens
        tokens = [
            (shape.tokens if shape.prefills else shape.decode_requests * shape.decode_query_tokens) if shape else dummy
            for shape in shapes
        ]
        largest = max(tokens)
        if not self.prefills_in_graphs and any(shape and shape.prefills for shape in shapes):
            return tokens
        return [self.padded[largest]] * len(tokens) if largest < len(self.padded) else tokens

    def _host_ns(self, device_ns: int) -> int:
        """Time of the host that shows in the step."""
        host_ns = round(self.host_us * 1e3)
        return max(0, host_ns - device_ns) if self.host_overlaps else host_ns

    def computed_tokens(self, shapes: Sequence[StepShape | None]) -> list[int]:
        """Tokens that each rank computes, padding included."""
        return self._tokens(shapes)

    def ranks_ns(self, shapes: Sequence[StepShape | None]) -> list[int]:
        """Nanoseconds of each rank before what all ranks run together; the step waits for the slowest."""
        return list(map(self._rank_ns, shapes, self._tokens(shapes)))

    def launches(self, shape: StepShape) -> tuple[int, list[tuple[Kernel, Sequence[Prefill]]]]:
        """(tokens that take dense prefill, attention-like kernels with the prefill rows that each takes)."""
        dense = self._dense(shape)
        return sum(chunk for chunk, _ in dense), self._rows(shape, dense)

    def explain(self, shapes: Sequence[StepShape | None]) -> list[Line]:
        """The step's price list: the slowest rank, then what all ranks run together. Its sum is step_ns."""
        tokens = self._tokens(shapes)
        ranks = list(zip(shapes, tokens, strict=True))
        shape, count = max(ranks, key=lambda rank: self._rank_ns(*rank))
        lines = self.rank_lines(shape, count)
        lines += self.group_lines(shapes, tokens)
        if self.step_us:
            lines.append(line("step overhead", 1, self.step_us, self.step_source))
        host_ns = self._host_ns(sum(map(nanoseconds, lines)))
        if host_ns:
            lines.append(line("host", 1, host_ns / 1e3, "stated"))
        return [entry for entry in lines if entry.us]

    def group_lines(self, shapes: Sequence[StepShape | None], computed: Sequence[int]) -> list[Line]:
        """What all ranks run together. computed: as of computed_tokens."""
        total = sum(computed)
        lines = list(self.by_group_tokens.lines(total))
        if self.padded_experts is not None:
            lines += self.padded_experts.lines(self._routed(shapes, total), total)
        return lines

    def _group_ns(self, shapes: Sequence[StepShape | None], computed: int) -> int:
        """What all ranks run together, of `computed` tokens of all of them."""
        together = self.by_group_tokens.ns(computed)
        if self.padded_experts is not None:
            together += self.padded_experts.ns(self._routed(shapes, computed), computed)
        return together

    def _routed(self, shapes: Sequence[StepShape | None], computed: int) -> int:
        """Tokens of all ranks that pick experts of their own."""
        if any(shape and shape.prefills for shape in shapes):
            return computed
        return sum(shape.tokens if shape else self.dummy_tokens for shape in shapes)

    def rank_lines(self, shape: StepShape | None, tokens: int) -> list[Line]:
        """What one rank runs by itself, for `tokens` computed tokens."""
        lines = list(self.by_tokens.lines(tokens))
        if shape is None:
            return lines + list(self.by_sparse_tokens.lines(tokens))
        dense = self._dense(shape)
        lines += self.by_sparse_tokens.lines(tokens - sum(chunk for chunk, _ in dense))
        lines += self.by_sequences.lines(shape.sampled_sequences)
        return lines + [
            line(kernel.name, kernel.count, kernel.us(shape, rows), kernel.provenance)
            for kernel, rows in self._rows(shape, dense)
        ]

    def _rank_ns(self, shape: StepShape | None, tokens: int) -> int:
        total = self.by_tokens.ns(tokens)
        if shape is None:
            return total + self.by_sparse_tokens.ns(tokens)
        total += self.by_sequences.ns(shape.sampled_sequences)
        if not shape.prefills:
            for kernel in self.kernels:
                total += round(kernel.count * kernel.us(shape, ()) * 1e3)
            return total + self.by_sparse_tokens.ns(tokens)
        dense = self._dense(shape)
        total += self.by_sparse_tokens.ns(tokens - sum(chunk for chunk, _ in dense))
        for kernel, rows in self._rows(shape, dense):
            total += round(kernel.count * kernel.us(shape, rows) * 1e3)
        return total

    def _slowest_ns(self, shapes: Sequence[StepShape | None], tokens: Sequence[int]) -> int:
        """The largest of `ranks_ns`: kernels are looked up once in a step, those of a lone decode once in a run, and
        what depends on the tokens alone once for ranks of as many."""
        by_tokens, by_sparse, by_sequences = self.by_tokens, self.by_sparse_tokens, self.by_sequences
        known, lone = self.step_kernels.of(shapes, anew=not self.is_part), self._lone
        slowest = same_ns = 0
        same = -1
        for rank, shape in enumerate(shapes):
            count = tokens[rank]
            if shape is not None and shape.prefills:
                dense_tokens, kernels_ns = self._kernels_ns(known, rank, shape)
                total = by_tokens.ns(count) + by_sparse.ns(count - dense_tokens) + kernels_ns
                total += by_sequences.ns(shape.sampled_sequences)
            else:
                if count != same:
                    same_ns = by_tokens.ns(count) + by_sparse.ns(count)
                    # Beyond the tables every rank's lookups count.
                    same = count if by_tokens.keeps(count) and by_sparse.keeps(count) else -1
                total = same_ns
                if shape is not None:
                    if shape.decode_requests == 1:
                        kernels_ns = lone.get(shape[2:5]) or self._lone_ns(shape)
                    else:
                        _, kernels_ns = self._kernels_ns(known, rank, shape)
                    total += by_sequences.ns(shape.sampled_sequences) + kernels_ns
            if total > slowest:
                slowest = total
        return slowest

    def _kernels_ns(self, known: list[RankKernels | None], rank: int, shape: StepShape) -> tuple[int, int]:
        """(tokens that take dense prefill, nanoseconds of the kernels) of one rank."""
        found = known[rank]
        if found is None:
            found = known[rank] = self._rank_kernels(shape)
        total = 0
        for kernel, us in zip(self.kernels, found.us, strict=True):
            if us:
                total += round(kernel.count * us * 1e3)
        return found.dense_tokens, total

    def _lone_ns(self, shape: StepShape) -> int:
        """The kernels of one decode and nothing else, kept by its keys: with few requests they come again and again."""
        ns = sum(round(kernel.count * kernel.us(shape, ()) * 1e3) for kernel in self.kernels)
        if not any(one.allow_extrapolation for one in self.outside):
            self._lone[shape[2:5]] = ns
        return ns

    def _rank_kernels(self, shape: StepShape) -> RankKernels:
        if not shape.prefills:
            _, *batch = shape[:5]
            return RankKernels(0, [kernel.decodes_us(*batch) for kernel in self.kernels])
        dense = self._dense(shape)
        us = {kernel.name: kernel.us(shape, rows) for kernel, rows in self._rows(shape, dense)}
        return RankKernels(sum(chunk for chunk, _ in dense), [us.get(kernel.name, 0.0) for kernel in self.kernels])

    def _dense(self, shape: StepShape) -> list[Prefill]:
        return self.dense_prefill.rows(shape.prefills) if self.dense_prefill else []

    def _rows(self, shape: StepShape, dense: Sequence[Prefill]) -> list[tuple[Kernel, Sequence[Prefill]]]:
        """Which kernels run, and whose prefill rows each one takes."""
        sparse = [prefill for prefill in shape.prefills if prefill not in dense] if dense else shape.prefills
        # The selection of a step with other rows is made for its dense prefills too, even if it goes unused.
        selects = bool(sparse) or shape.decode_requests > 0 or self.dense_prefill is None or self.dense_prefill.selects
        takes: dict[PrefillWhen, Sequence[Prefill]] = {
            "always": shape.prefills,
            "dense": dense,
            "sparse": sparse,
            "selection": shape.prefills if selects else (),
            "never": (),
        }
        rows = [(kernel, takes[kernel.prefill_when]) for kernel in self.kernels]
        return [(kernel, prefills) for kernel, prefills in rows if prefills or shape.decode_requests]


def part_of(whole: TableCost, part: TableCost) -> TableCost:
    """`part`, the cost of some layers of the model of `whole` on the same tables, sharing the kernels of each step."""
    calls = {kernel.name: kernel.count for kernel in part.kernels}
    kernels = tuple(replace(one, count=calls.get(one.name, 0)) for one in whole.kernels)
    shared = replace(part, kernels=kernels, is_part=True)
    object.__setattr__(shared, "step_kernels", whole.step_kernels)
    return shared


def step_us(lines: Sequence[Line]) -> float:
    """Sum of a price list in microseconds."""
    return sum(nanoseconds(entry) for entry in lines) / 1e3
