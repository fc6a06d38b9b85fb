"""One request as the scheduler keeps it. Progress that follows from the step number is not stored but derived."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from serving.core.blocks import Cached

Outcome = Literal["finished", "rejected", "unfinished"]

NEVER = -1


class Request:
    """`index` is the position in the trace. Times are nanoseconds of the simulated clock, lengths are tokens.

    block_keys: one key per leading full KV block whose content the trace tells (token ids given); equal keys mean
    equal content behind an equal prefix. Blocks past them hold content that only this request has.
    priority: lower is more urgent, for policies that read it.
    session: the conversation it belongs to, for routers that keep it on one engine; None for none.
    following: the call of an agentic session that is released `following.tool_duration_ns` after this request has
    finished; its arrival_ns is NEVER until then.

    rank: place in the waiting queue, from the policy. order: number of its admission, which orders running requests.
    computed_tokens: tokens scheduled so far, up to date only while it is not in the decode set; there they are
    base + step. emitted_tokens: tokens of closed runs. runs: (first, last) steps of each uninterrupted series of its
    tokens, one per step; run_start: first step of the open one. last_step: the step that yields its last token.
    decode_from: first step of its decoding that reads the token of the step before. entry: changes whenever it leaves
    the decode set.
    received: the cache of its prompt came from another engine and it has not been preempted since.
    chain: its blocks whose content the trace tells, of which the first `keyed` are findable. tail: its own blocks that
    stay findable after a preemption.
    token_ns, in_flight, held_blocks, known_tokens, drafts: only in engines that schedule request by request
    (serving.core.walk): when each token was emitted, None elsewhere; whether a token is in flight; blocks that it
    holds; tokens whose full blocks are findable; draft tokens that its next step may verify.
    """

    __slots__ = (
        "arrival_ns",
        "base",
        "block_keys",
        "chain",
        "computed_tokens",
        "decode_from",
        "decoding",
        "drafts",
        "emitted_tokens",
        "engine_index",
        "entry",
        "following",
        "held_blocks",
        "in_flight",
        "index",
        "keyed",
        "known_tokens",
        "last_step",
        "order",
        "outcome",
        "output_tokens",
        "preemptions",
        "prefix_hit_tokens",
        "priority",
        "prompt_tokens",
        "queued_ns",
        "rank",
        "received",
        "run_start",
        "runs",
        "scheduled_ns",
        "session",
        "short",
        "tail",
        "token_ns",
        "tool_duration_ns",
    )

    def __init__(
        self,
        index: int,
        arrival_ns: int,
        prompt_tokens: int,
        output_tokens: int,
        block_keys: Sequence[int] = (),
        priority: int = 0,
        session: str | None = None,
        tool_duration_ns: int = 0,
    ) -> None:
        self.index = index
        self.arrival_ns = arrival_ns
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.block_keys = block_keys
        self.priority = priority
        self.session = session
        self.tool_duration_ns = tool_duration_ns
        self.following: Request | None = None
        self.outcome: Outcome = "unfinished"
        self.engine_index = -1
        self.queued_ns: int | None = None
        self.scheduled_ns: int | None = None
        self.preemptions = 0
        self.prefix_hit_tokens = NEVER
        self.rank: tuple[int, ...] = ()
        self.order = 0
        self.computed_tokens = 0
        self.emitted_tokens = 0
        self.runs: list[tuple[int, int]] = []
        self.run_start = NEVER
        self.last_step = NEVER
        self.decoding = False
        self.decode_from = NEVER
        self.base = 0
        self.entry = 0
        self.short = False
        self.chain: list[Cached] = []
        self.keyed = 0
        self.tail: Cached | None = None
        self.token_ns: list[int] | None = None
        self.in_flight = False
        self.held_blocks = 0
        self.known_tokens = 0
        self.drafts = 0
        self.received = False

    @property
    def peak_tokens(self) -> int:
        """Most tokens that it ever caches: the last emitted token is never fed back."""
        return self.prompt_tokens + self.output_tokens - 1

    def close_run(self, last_step: int) -> None:
        """The open run of tokens ended with `last_step`; it may be empty, or there may be none."""
        if self.run_start == NEVER:
            return
        if self.run_start <= last_step:
            self.runs.append((self.run_start, last_step))
            self.emitted_tokens += last_step - self.run_start + 1
        self.run_start = NEVER
