"""Experts of the rows that pad a step to a CUDA graph."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from profiler.core.types import ModelSpec, Parallel
from serving.cost.lines import Line
from serving.cost.tokens import Folded

# vLLM's SPARSITY_FACTOR: up to a quarter of the experts in pairs, the Triton kernel runs a block for each pair.
_PAIRS_SHARE: Final = 4


@dataclass(frozen=True, slots=True)
class PaddedExperts:
    """Routed experts of a model whose padded rows of decode steps all pick the same ones, as one more token does.

    by_tokens: the experts' price, by tokens. own_rows: up to so many computed tokens every row reads its own experts
    all the same.
    """

    by_tokens: Folded
    own_rows: int

    def ns(self, tokens: int, computed: int) -> int:
        """Of `tokens` tokens of all ranks in steps of `computed` rows."""
        return self.by_tokens.ns(self._routed(tokens, computed))

    def lines(self, tokens: int, computed: int) -> Sequence[Line]:
        return self.by_tokens.lines(self._routed(tokens, computed))

    def _routed(self, tokens: int, computed: int) -> int:
        return computed if computed <= max(tokens, self.own_rows) else tokens + 1


def own_rows(spec: ModelSpec, parallel: Parallel, engine: str) -> int | None:
    """PaddedExperts.own_rows of a model that has such rows in `engine`, None for one whose padding picks as tokens do.

    In vLLM 0.26 the block-sparse decode kernel of MiniMax-M3 divides by nothing where a request has no keys, as one
    that pads a step has not (common/ops/sparse_attn.py says so), and scores that are no numbers pick the same experts.
    Other models' padding keeps what earlier steps left in the inputs.
    """
    if engine != "vllm" or spec.moe is None or not spec.block_sparse:
        return None
    return spec.moe.num_experts // (_PAIRS_SHARE * spec.moe.topk) if parallel.ep == 1 else 0
