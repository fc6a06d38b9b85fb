"""Axis values of the grids, and the limits that cut them."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from profiler.core.errors import unknown


@dataclass(frozen=True, slots=True)
class Axes:
    """Values along each axis, ascending. `to_the_limit` adds the limit itself as the last point of an axis."""

    tokens: tuple[int, ...]
    sequences: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    context_tokens: tuple[int, ...]
    decode_requests: tuple[int, ...]
    decode_kv_tokens: tuple[int, ...]
    moe_tokens: tuple[int, ...]
    moe_skews: tuple[float, ...]
    to_the_limit: bool


_COARSE_TOKENS: Final = (
    *(1, 2, 4, 8, 16, 17, 32, 33, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    *(12288, 16384),
)

GRIDS: Final[dict[str, Axes]] = {
    # A few points per axis, small enough for a CPU; contexts on both sides of a top-k of 2048.
    "tiny": Axes(
        tokens=(1, 16, 64, 128),
        sequences=(1, 4, 16),
        chunk_tokens=(16, 64),
        context_tokens=(0, 1024, 2048, 4096),
        decode_requests=(1, 4),
        decode_kv_tokens=(64, 1024, 2048, 4096),
        moe_tokens=(1, 16, 64, 128),
        moe_skews=(0.0,),
        to_the_limit=False,
    ),
    # Dense enough for piecewise linear interpolation. Chunks have points on both sides of 128 and 256 tokens, where
    # sparse MLA back ends stop treating a chunk as decode, and tokens on both sides of the router's 16 and 32.
    "coarse": Axes(
        tokens=_COARSE_TOKENS,
        sequences=(1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024),
        chunk_tokens=(1, 16, 64, 128, 129, 256, 257, 512, 1024, 1536, 2048, 4096, 8192, 16384),
        context_tokens=(0, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288),
        decode_requests=(1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 1024),
        decode_kv_tokens=(64, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288),
        moe_tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
        moe_skews=(0.0, 1.5),
        to_the_limit=True,
    ),
}

# Rows of one expert call above which activations of the gathered batch alone take tens of GiB.
MAX_MOE_TOKENS: Final = 131_072


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine is started with, and which grid to lay over it."""

    grid: str
    tp: int
    ep_degrees: tuple[int, ...]
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int

    @property
    def longest(self) -> int:
        """Most tokens that a request holds in a step: the last of max_model_len is sampled and never computed."""
        return self.max_model_len - 1

    @property
    def axes(self) -> Axes:
        if self.grid not in GRIDS:
            raise unknown("grid", self.grid, GRIDS)
        return GRIDS[self.grid]

    def up_to(self, values: Iterable[int], limit: int) -> list[int]:
        """The axis values not above `limit`, and `limit` itself where the grid runs to its limits."""
        ordered = sorted(values)
        kept = ordered[: bisect_right(ordered, limit)]
        if self.axes.to_the_limit and limit >= 1 and limit not in kept:
            kept.append(limit)
        return kept
