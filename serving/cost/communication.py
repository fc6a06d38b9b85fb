"""Collectives of a step, in the order in which vLLM's default back ends issue them.

Tensor parallel (tp > 1): all-reduce of the embedding, after attention and after the MLP of every layer; all-gather of
the logits. Experts over data-parallel ranks (ep > 1, dp > 1): all-gather of the hidden states of the whole group
before the experts, reduce-scatter of their sum after them; with tp > 1 the ranks of a tensor-parallel group take a
slice of their tokens each into that exchange, and gather it again afterwards instead of the all-reduce. Experts over
tensor-parallel ranks alone (dp = 1) need no exchange: every rank holds all tokens, and the all-reduce sums them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from profiler.core.types import ModelSpec, Parallel
from serving.collectives import Collectives
from serving.cost.lines import Line, line

ACTIVATION_BYTES = 2
_PROVENANCE = "computed"


@dataclass(frozen=True, slots=True)
class Communication:
    """Volumes of one model under one split."""

    spec: ModelSpec
    parallel: Parallel
    collectives: Collectives

    @property
    def _moe_layers(self) -> int:
        return sum(kind.mlp == "moe" for kind in self.spec.layers)

    @property
    def _exchanges(self) -> bool:
        return self.parallel.ep > 1 and self.parallel.dp > 1 and self._moe_layers > 0

    def tensor_lines(self, tokens: int) -> list[Line]:
        """Collectives of a tensor-parallel group for the tokens of one rank."""
        tp, layers = self.parallel.tp, self.spec.num_layers
        if tp == 1:
            return []
        rows = tokens * self.spec.hidden * ACTIVATION_BYTES
        reduce_us = self.collectives.all_reduce_us(rows, tp)
        sliced = self._moe_layers if self._exchanges else 0
        lines = [
            line("all_reduce embedding", 1, reduce_us, _PROVENANCE),
            line("all_reduce attention", layers, reduce_us, _PROVENANCE),
        ]
        if layers > sliced:
            lines.append(line("all_reduce mlp", layers - sliced, reduce_us, _PROVENANCE))
        if sliced:
            gather_us = self.collectives.all_gather_us(rows, tp)
            lines.append(line("all_gather mlp slices", sliced, gather_us, _PROVENANCE))
        return lines

    def head_lines(self, sequences: int) -> list[Line]:
        """All-gather of the logits of the sampled rows."""
        tp = self.parallel.tp
        if tp == 1 or not sequences:
            return []
        logits = sequences * self.spec.vocab * ACTIVATION_BYTES
        return [line("all_gather logits", 1, self.collectives.all_gather_us(logits, tp), _PROVENANCE)]

    def expert_lines(self, group_tokens: int) -> list[Line]:
        """All-gather and reduce-scatter around the experts, for the tokens of all data-parallel ranks together."""
        if not self._exchanges:
            return []
        ranks = self.parallel.ep
        rows = group_tokens * self.spec.hidden * ACTIVATION_BYTES
        return [
            line("all_gather experts", self._moe_layers, self.collectives.all_gather_us(rows, ranks), _PROVENANCE),
            line(
                "reduce_scatter experts", self._moe_layers, self.collectives.reduce_scatter_us(rows, ranks), _PROVENANCE
            ),
        ]


def group_lines(*parts: Callable[[int], list[Line]]) -> Callable[[int], list[Line]]:
    """The lines of several parts that take the same count."""

    def lines(count: int) -> list[Line]:
        return [entry for part in parts for entry in part(count)]

    return lines
