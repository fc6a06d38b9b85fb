"""One request of the specification."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Request:
    """Progress of a request. computed_tokens counts what the steps scheduled so far will have computed.

    in_flight: tokens that scheduled steps will yield and that are not known yet (0 or 1 without, up to 2 with
    asynchronous scheduling). following: the call released `following.tool_duration_ns` after this one has finished,
    which arrives at -1, never, until then. drafts: proposed tokens that the next step may verify. keyed_blocks: leading
    blocks that are findable by content.
    """

    index: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    block_keys: Sequence[int] = ()
    priority: int = 0
    session: str | None = None
    tool_duration_ns: int = 0
    following: "Request | None" = None

    outcome: str = "unfinished"
    engine_index: int = -1
    position: int = -1
    computed_tokens: int = 0
    emitted_tokens: int = 0
    in_flight: int = 0
    drafts: int = 0
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

    @property
    def draining(self) -> bool:
        """True when a scheduled step already yields its last token."""
        return self.in_flight > 0 and self.emitted_tokens + self.in_flight >= self.output_tokens
