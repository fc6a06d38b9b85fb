"""What one scheduler iteration asks of the hardware, and its cost: the contract of scheduler and cost model."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class StepShape(NamedTuple):
    """One rank's batch of one step.

    prefills: (chunk_tokens, context_tokens) per request that has more than one token scheduled or whose prompt is
    not finished: new tokens, and tokens already in its KV cache before them.
    decode_requests: requests with one scheduled token behind a finished prompt.
    decode_kv_sum_tokens, decode_kv_max_tokens: keys visible to those tokens, the token itself included.
    decode_kv_capped_sum_tokens: sum over decode requests of min(keys, attended cap of the model); equal to
    decode_kv_sum_tokens where attention has no cap.
    sampled_sequences: requests that emit a token in this step (rows of the head and the sampler), and with drafts one
    more row for each of them.
    decode_query_tokens: query tokens of each decode request; more than one only where drafts are verified as such.
    drafted: under speculative decoding what a draft pass behind the first runs, one token per request of the batch.
    loaded_blocks: KV blocks that the step waits for, from host memory.
    """

    prefills: tuple[tuple[int, int], ...]
    decode_requests: int
    decode_kv_sum_tokens: int
    decode_kv_max_tokens: int
    decode_kv_capped_sum_tokens: int
    sampled_sequences: int
    decode_query_tokens: int = 1
    drafted: "StepShape | None" = None
    loaded_blocks: int = 0

    @property
    def tokens(self) -> int:
        tokens = self.decode_requests * self.decode_query_tokens
        for chunk, _ in self.prefills:
            tokens += chunk
        return tokens


class StepCost(Protocol):
    """Prices steps. Implementations are pure: equal shapes cost equal time."""

    def step_ns(self, shapes: Sequence[StepShape | None]) -> int:
        """Nanoseconds of one lockstep step of a data-parallel group, one shape per rank.

        None marks a rank without work, which runs a dummy batch of one token. A group of one engine passes one
        shape. Raises CoverageError when a shape lies outside the tables and extrapolation was not asked for.
        """
        ...
