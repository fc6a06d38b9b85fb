"""One request as the scheduler sees it: what it asks for, and its progress."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["finished", "rejected", "unfinished"]


@dataclass(slots=True, eq=False)
class Request:
    """`index` is the position in the trace. Times are nanoseconds of the simulated clock, lengths are tokens.

    block_keys: one key per leading full KV block whose content the trace tells (token ids given); equal keys mean
    equal content behind an equal prefix. Blocks past them hold content that only this request has.
    computed_tokens: tokens whose KV is in the cache once the steps scheduled so far have run.
    prefix_hit_tokens: tokens found in the prefix cache when the request was first scheduled; -1 before that.
    """

    index: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    block_keys: Sequence[int] = ()

    outcome: Outcome = "unfinished"
    engine_index: int = -1
    computed_tokens: int = 0
    emitted_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    keyed_blocks: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = -1
    queued_ns: int | None = None
    scheduled_ns: int | None = None
    token_ns: list[int] = field(default_factory=list)

    @property
    def total_tokens(self) -> int:
        """Tokens known so far: the prompt and what has been emitted."""
        return self.prompt_tokens + self.emitted_tokens

    @property
    def peak_tokens(self) -> int:
        """Most tokens that it ever caches: the last emitted token is never fed back."""
        return self.prompt_tokens + self.output_tokens - 1
