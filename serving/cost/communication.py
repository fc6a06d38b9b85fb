"""Collectives of a step, in the order in which the engine's back ends issue them.

Tensor parallel (tp > 1): all-reduce of the embedding, after attention and after the MLP of every layer; all-gather of
the logits. Experts over data-parallel ranks (ep > 1, dp > 1), default back end: all-gather of the hidden states of the
whole group before the experts, reduce-scatter of their sum after them; other back ends send copies to the ranks that
need them and back (serving.backends). With tp > 1 the ranks of a tensor-parallel group take a slice of their tokens
each into that exchange, and gather it again afterwards instead of the all-reduce. Experts over tensor-parallel ranks
alone (dp = 1) need no exchange: every rank holds all tokens, and the all-reduce sums them.

Nothing overlaps: vLLM runs these on the stream of the layer's kernels unless dual-batch overlap is switched on, which
is off by default.
"""

from collections.abc import Callable
from dataclasses import dataclass

from profiler.core.types import ModelSpec, Parallel
from serving.backends import ACTIVATION_BYTES, Sends, dispatch_bytes
from serving.collectives import Collectives, Operation
from serving.cost.lines import Line, line


@dataclass(frozen=True, slots=True)
class Communication:
    """Volumes of one model under one split.

    sends: what the back end of the experts sends. reach: probability that a token reaches a given rank, used where
    tokens are sent once per rank; times the busiest rank's excess where the routing says one.
    """

    spec: ModelSpec
    parallel: Parallel
    collectives: Collectives
    sends: Sends = "gather"
    reach: float = 1.0

    def _line(self, name: str, calls: int, operation: Operation, total_bytes: float, ranks: int) -> Line:
        price = self.collectives.price(operation, total_bytes, ranks)
        return line(name, calls, price.us, price.provenance)

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
        sliced = self._moe_layers if self._exchanges else 0
        lines = [
            self._line("all_reduce embedding", 1, "all_reduce", rows, tp),
            self._line("all_reduce attention", layers, "all_reduce", rows, tp),
        ]
        if layers > sliced:
            lines.append(self._line("all_reduce mlp", layers - sliced, "all_reduce", rows, tp))
        if sliced:
            lines.append(self._line("all_gather mlp slices", sliced, "all_gather", rows, tp))
        return lines

    def head_lines(self, sequences: int) -> list[Line]:
        """All-gather of the logits of the sampled rows."""
        tp = self.parallel.tp
        if tp == 1 or not sequences:
            return []
        logits = sequences * self.spec.vocab * ACTIVATION_BYTES
        return [self._line("all_gather logits", 1, "all_gather", logits, tp)]

    def expert_lines(self, group_tokens: int) -> list[Line]:
        """The exchange around the experts, for the tokens of all data-parallel ranks together."""
        if not self._exchanges:
            return []
        ranks, calls, moe = self.parallel.ep, self._moe_layers, self.spec.moe
        assert moe is not None
        rows = group_tokens * self.spec.hidden * ACTIVATION_BYTES
        if self.sends == "gather":
            return [
                self._line("all_gather experts", calls, "all_gather", rows, ranks),
                self._line("reduce_scatter experts", calls, "reduce_scatter", rows, ranks),
            ]
        # A rank holds 1 / ranks of the tokens and sends each to `copies` ranks.
        copies = self.reach * ranks if self.sends == "per_rank" else moe.topk
        sent = group_tokens / ranks * copies
        return [
            self._line("dispatch experts", calls, "all_to_all", sent * dispatch_bytes(self.spec), ranks),
            self._line("combine experts", calls, "all_to_all", sent * self.spec.hidden * ACTIVATION_BYTES, ranks),
        ]


def group_lines(*parts: Callable[[int], list[Line]]) -> Callable[[int], list[Line]]:
    """The lines of several parts that take the same count."""

    def lines(count: int) -> list[Line]:
        return [entry for part in parts for entry in part(count)]

    return lines
