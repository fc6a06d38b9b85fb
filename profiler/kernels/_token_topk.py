"""How vLLM's selection of a query's top keys on SM90 divides its work.

A query is a block of threads that reads its scores, and three of them run on a multiprocessor at a time: 384 queries
of 131,072 keys take 129 us on an H200, 512 take 214. Fewer than fill the card are each faster. vLLM cuts a chunk where
its fp32 scores would exceed VLLM_SPARSE_INDEXER_MAX_LOGITS_MB, and selects part by part, so that one query too many
costs a launch: 512 queries of 196,608 keys take 300 us, of 262,144, which are 511 and one, 483.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from profiler.core.grid_work import Curve, Work, in_parts, in_waves

_ON_A_MULTIPROCESSOR: Final = 3
# Fitted on four tables of an H200 (DeepSeek-V3.2-Exp, GLM-5-FP8, GLM-5, GLM-5.2), one value for all: what a query costs
# beyond its keys, and one without a selection, in keys; a wave's time against the share of the card that it takes, the
# first one and later ones.
_QUERY_KEYS: Final = 8000.0
_IDLE_KEYS: Final = 1500.0
_FIRST: Final[Curve] = ((0.0, 0.44), (1 / 3, 0.72), (2 / 3, 0.8), (1.0, 1.0))
_LATER: Final[Curve] = ((0.0, 0.15), (1 / 3, 0.62), (2 / 3, 0.83), (1.0, 1.0))


@dataclass(frozen=True, slots=True)
class TokenTopkWork:
    """Selection of a chunk's queries, in keys that are read one after the other.

    cap_keys: how many are selected; a query of no more keys has nothing to select. most_scores: queries x keys (those
    of the chunk's last query) of one launch.
    """

    sm_count: int
    cap_keys: int
    most_scores: int

    def prefill(self, chunk: float, context: float) -> float:
        return sum(self._launch(*part) for part in in_parts(chunk, context, self.most_scores))

    def _launch(self, queries: float, context: float) -> float:
        idle = max(0.0, min(queries, self.cap_keys - context))
        busy = queries - idle
        read = context + idle + (busy + 1) / 2 + _QUERY_KEYS
        return idle * _IDLE_KEYS / self._at_a_time + (self._waves(busy) * read if busy else 0.0)

    def _waves(self, queries: float) -> float:
        return in_waves(queries, self._at_a_time, _FIRST, _LATER)

    @property
    def _at_a_time(self) -> int:
        return _ON_A_MULTIPROCESSOR * self.sm_count

    def bends(self, chunk: int, last_context: float) -> Iterator[float]:
        """Contexts between which queries begin to select."""
        yield from Work(select_beyond=self.cap_keys).bends(chunk, last_context)

    def straight_until(self, chunk: int) -> float:
        """The longest context at which the chunk is one launch."""
        return self.most_scores // chunk - chunk
