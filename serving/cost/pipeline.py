"""Prices steps of engines that are cut into pipeline stages: every stage by its own layers, and what it sends on.

Between two stages go the hidden states and the residual, both in bf16, cut into one slice per tensor-parallel rank,
which the receiving ranks gather again (vLLM's send_tensor_dict with an all-gather group). Ranks are numbered by
data-parallel engine, then stage, then tensor-parallel rank, and nodes are filled in that order; what crosses a node
boundary takes the inter-node link.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from profiler.core.types import ModelSpec, Parallel
from serving.backends import ACTIVATION_BYTES
from serving.collectives import Collectives
from serving.core.shape import StepShape
from serving.cost.lines import Line, line
from serving.cost.step import TableCost
from serving.cost.tokens import Folded

TENSORS = 2  # the hidden states and the residual


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """stages: the cost of each. sends: between one and the next, by tokens of the busiest rank.

    Each stage has the step overhead of its own, since each of its workers prepares the batch.
    """

    stages: tuple[TableCost, ...]
    sends: tuple[Folded, ...]

    @property
    def extrapolated(self) -> Counter[str]:
        """Lookups per kernel that went beyond its table, with permission."""
        return sum((one.extrapolated for one in self.stages), Counter())

    def stages_ns(self, shapes: Sequence[StepShape | None]) -> list[tuple[int, int]]:
        """Nanoseconds of a step in each stage, and of the transfer behind it."""
        tokens = max(self.stages[0].computed_tokens(shapes))
        sends = [*(one.ns(tokens) for one in self.sends), 0]
        return [(stage.step_ns(shapes), send) for stage, send in zip(self.stages, sends, strict=True)]

    def step_ns(self, shapes: Sequence[StepShape | None]) -> int:
        """Nanoseconds of a step that is alone in the pipeline."""
        return sum(compute + send for compute, send in self.stages_ns(shapes))

    def explain(self, shapes: Sequence[StepShape | None]) -> list[Line]:
        """The price list of a step that is alone in the pipeline, by stage. Its sum is step_ns."""
        tokens = max(self.stages[0].computed_tokens(shapes))
        lines: list[Line] = []
        for number, stage in enumerate(self.stages):
            sent = self.sends[number].lines(tokens) if number < len(self.sends) else ()
            lines += [
                entry._replace(component=f"stage {number}: {entry.component}")
                for entry in (*stage.explain(shapes), *sent)
            ]
        return lines


def stage_sends(spec: ModelSpec, parallel: Parallel, collectives: Collectives) -> tuple[Folded, ...]:
    """The transfer behind every stage but the last, by tokens of one rank."""
    return tuple(
        Folded(_send_lines(spec, parallel.tp, collectives, _crosses(parallel, stage, collectives.gpus_per_node)), ())
        for stage in range(parallel.pp - 1)
    )


def _crosses(parallel: Parallel, stage: int, gpus_per_node: int) -> bool:
    """Whether the ranks of some engine's stage and its next lie in different nodes."""
    firsts = [(engine * parallel.pp + stage) * parallel.tp for engine in range(parallel.dp)]
    ranks = [first + rank for first in firsts for rank in range(parallel.tp)]
    return any(rank // gpus_per_node != (rank + parallel.tp) // gpus_per_node for rank in ranks)


def _send_lines(spec: ModelSpec, tp: int, collectives: Collectives, between_nodes: bool) -> Callable[[int], list[Line]]:
    def lines(tokens: int) -> list[Line]:
        tensor_bytes = tokens * spec.hidden * ACTIVATION_BYTES
        price = collectives.send(tensor_bytes / tp, between_nodes=between_nodes)
        sent = line("send to next stage", TENSORS, *price)
        if tp == 1:
            return [sent]
        return [sent, line("all_gather next stage", TENSORS, *collectives.price("all_gather", tensor_bytes, tp))]

    return lines
