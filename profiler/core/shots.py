"""What one measurement asks of an engine: the batch to run and the table cells that it fills."""

from dataclasses import dataclass
from typing import Literal

from profiler.core.tables import KEY_COLUMNS
from profiler.core.types import Category

# Which of two kernels that replace each other the shot must reach. "sparse": selection and sparse attention run even
# where every key fits into the top-k. "dense": every request is at or below the top-k and attends every key. "auto":
# whatever the engine does by itself, for shots whose cells do not depend on it.
Regime = Literal["auto", "sparse", "dense"]

# Key columns of one cell, without the component's name: numbers, and text in the table of unequal batches.
Key = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """Cells of one table: the rows (component, *key) for every name in `components`.

    key: the key columns of the category behind the component, in file order: `KEY_COLUMNS[category][1:]`.
    components: the component names that the shot must measure; a missing one makes the shot incomplete.
    """

    category: Category
    key: Key
    components: tuple[str, ...]

    def __post_init__(self) -> None:
        expected = len(KEY_COLUMNS[self.category]) - 1
        if len(self.key) != expected:
            raise ValueError(f"{self.category}: {expected} key columns are needed, got {self.key}")


@dataclass(frozen=True, slots=True)
class MoeBatch:
    """Input of the routed experts of one rank. `profiler.kernels.moe.topk_ids` draws its routing, the same everywhere.

    ep: expert-parallel degree; the rank holds num_experts / ep whole experts, ids 0 up to that number.
    tokens: rows given to the expert kernel (all tokens of the group under an all-gather back end).
    skew: standard deviation of the experts' log-popularity; 0 is uniform routing.
    """

    ep: int
    tokens: int
    skew: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Shot:
    """One forward pass to be timed.

    requests: (new_tokens, context_tokens) per request; context_tokens are cached before the pass. A decode request
    has one new token and at least one of context. Every request emits a token, so the head runs len(requests) rows.
    Empty for a pure expert shot, which sets `moe` instead and times the routed experts alone.
    """

    fills: tuple[Fill, ...]
    requests: tuple[tuple[int, int], ...] = ()
    regime: Regime = "auto"
    moe: MoeBatch | None = None

    @property
    def new_tokens(self) -> int:
        return sum(new for new, _ in self.requests)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache when the pass ends, each request on whole tokens of its own."""
        return sum(new + context for new, context in self.requests)

    @property
    def label(self) -> str:
        """A short name for messages: what runs, and for which tables."""
        tables = "+".join(dict.fromkeys(fill.category for fill in self.fills))
        if self.moe is not None:
            return f"{tables} ep={self.moe.ep} tokens={self.moe.tokens} skew={self.moe.skew:g}"
        shapes: dict[tuple[int, int], int] = {}
        for request in self.requests:
            shapes[request] = shapes.get(request, 0) + 1
        batch = ", ".join(f"{count} x (new {new}, context {ctx})" for (new, ctx), count in shapes.items())
        return f"{tables} {batch} {self.regime}"
