"""Collectives of a step, in the order in which the engine's back ends issue them.

Tensor parallel (tp > 1): all-reduce of the embedding, after attention and after the MLP of every layer; all-gather of
the logits. Experts over data-parallel ranks (dp > 1), default back end: all-gather of the hidden states of the whole
group before the experts, reduce-scatter of their sum after them, whether whole experts are spread over the ranks or all
are divided; other back ends send copies to the ranks that need them and back (serving.backends), and need whole ones.
With tp > 1 and whole experts the ranks of a tensor-parallel group take a slice of their tokens each into that exchange,
and gather it again afterwards instead of the all-reduce. With tp > 1 and divided experts (ep 1) a rank exchanges all
its tokens with its like in the other engines, and the all-reduce sums the parts of its own engine. Experts over
tensor-parallel ranks alone (dp = 1) need no exchange: every rank holds all tokens, and the all-reduce sums them.

Nothing overlaps: vLLM runs these on the stream of the layer's kernels unless dual-batch overlap is switched on, which
is off by default.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from profiler.core.types import ModelSpec, Parallel
from serving.backends import ACTIVATION_BYTES, Sends, dispatch_bytes
from serving.collectives import Collectives, Operation
from serving.cost.lines import Line, line


class Call(NamedTuple):
    """`times` equal collectives of `total_bytes` among `ranks` ranks; total_bytes as in serving.collectives.

    across: one rank of each engine, instead of those of one engine or all.
    """

    name: str
    times: int
    operation: Operation
    total_bytes: float
    ranks: int
    across: bool = False


@dataclass(frozen=True, slots=True)
class Communication:
    """Volumes of one model under one split.

    sends: what the back end of the experts sends. reach: probability that a token reaches a given rank, used where
    tokens are sent once per rank; times the busiest rank's excess where the routing says one.
    first, last: whether the embedding and the head are here, for a pipeline stage. between_experts: links of the
    exchange around the experts, where its ranks do not fill the nodes one after the other; None for `collectives`.
    """

    spec: ModelSpec
    parallel: Parallel
    collectives: Collectives
    sends: Sends = "gather"
    reach: float = 1.0
    first: bool = True
    last: bool = True
    between_experts: Collectives | None = None

    @property
    def _moe_layers(self) -> int:
        return sum(kind.mlp == "moe" for kind in self.spec.layers)

    @property
    def _exchanges(self) -> bool:
        return self.parallel.dp > 1 and self._moe_layers > 0

    @property
    def _slices(self) -> bool:
        """The ranks of a tensor-parallel group enter the exchange with a slice of their tokens each."""
        return self._exchanges and self.parallel.ep > 1

    def _lines(self, calls: list[Call], over: Collectives | None = None) -> list[Line]:
        prices = [(over or self.collectives).price(one.operation, one.total_bytes, one.ranks) for one in calls]
        return [line(one.name, one.times, *price) for one, price in zip(calls, prices, strict=True)]

    def tensor_lines(self, tokens: int) -> list[Line]:
        return self._lines(self.tensor_calls(tokens))

    def head_lines(self, sequences: int) -> list[Line]:
        return self._lines(self.head_calls(sequences))

    def expert_lines(self, group_tokens: int) -> list[Line]:
        return self._lines(self.expert_calls(group_tokens), self.between_experts)

    def tensor_calls(self, tokens: int) -> list[Call]:
        """Collectives of a tensor-parallel group for the tokens of one rank."""
        tp, layers = self.parallel.tp, self.spec.num_layers
        if tp == 1:
            return []
        rows = tokens * self.spec.hidden * ACTIVATION_BYTES
        sliced = self._moe_layers if self._slices else 0
        calls = [
            *([Call("all_reduce embedding", 1, "all_reduce", rows, tp)] if self.first else []),
            Call("all_reduce attention", layers, "all_reduce", rows, tp),
        ]
        if layers > sliced:
            calls.append(Call("all_reduce mlp", layers - sliced, "all_reduce", rows, tp))
        if sliced:
            calls.append(Call("all_gather mlp slices", sliced, "all_gather", rows, tp))
        return calls

    def head_calls(self, sequences: int) -> list[Call]:
        """All-gather of the logits of the sampled rows."""
        tp = self.parallel.tp
        if tp == 1 or not sequences or not self.last:
            return []
        return [Call("all_gather logits", 1, "all_gather", sequences * self.spec.vocab * ACTIVATION_BYTES, tp)]

    def expert_calls(self, group_tokens: int) -> list[Call]:
        """The exchange around the experts, for the tokens of all data-parallel ranks together."""
        if not self._exchanges:
            return []
        ranks, count, moe = self.parallel.dp, self._moe_layers, self.spec.moe
        assert moe is not None
        across = self.parallel.tp > 1 and not self._slices
        if not across:
            ranks *= self.parallel.tp
        if self.sends == "gather":
            out, back = dispatch_bytes(self.spec), self.spec.hidden * ACTIVATION_BYTES
            return [
                Call("all_gather experts", count, "all_gather", group_tokens * out, ranks, across),
                Call("reduce_scatter experts", count, "reduce_scatter", group_tokens * back, ranks, across),
            ]
        # A rank holds 1 / ranks of the tokens and sends each to `copies` ranks.
        copies = self.reach * ranks if self.sends == "per_rank" else moe.topk
        sent = group_tokens / ranks * copies
        return [
            Call("dispatch experts", count, "all_to_all", sent * dispatch_bytes(self.spec), ranks),
            Call("combine experts", count, "all_to_all", sent * self.spec.hidden * ACTIVATION_BYTES, ranks),
        ]


def group_lines(*parts: Callable[[int], list[Line]]) -> Callable[[int], list[Line]]:
    """The lines of several parts that take the same count."""

    def lines(count: int) -> list[Line]:
        return [entry for part in parts for entry in part(count)]

    return lines
