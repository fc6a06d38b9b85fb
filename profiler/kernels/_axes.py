"""Axis values of the grids, and the limits that cut them."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from profiler.core.errors import unknown


@dataclass(frozen=True, slots=True)
class SkewAxes:
    """Batches of unequal requests.

    requests, mean_kv_tokens: decode batches for the fit, points of the decode axes so that the equal batch is a cell.
    held_out_*: batches to judge it on, off those points. chunk_tokens, context_tokens, decodes: one prefill beside
    (requests, keys) equal decode requests, points of the axes again. prefills: several prefills in one step, as groups
    of (count, chunk, context) tokens.
    """

    requests: tuple[int, ...]
    mean_kv_tokens: tuple[int, ...]
    held_out_requests: tuple[int, ...]
    held_out_mean_kv_tokens: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    context_tokens: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[tuple[tuple[int, int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class Axes:
    """Values along each axis, ascending. `to_the_limit` adds the limit itself as the last point of an axis,
    `at_the_cap` points on both sides of the cap on attended keys, where the selection begins to work.

    dense_chunk_tokens, dense_context_tokens: of the dense prefill that replaces sparse attention up to the cap."""

    tokens: tuple[int, ...]
    sequences: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    context_tokens: tuple[int, ...]
    dense_chunk_tokens: tuple[int, ...]
    dense_context_tokens: tuple[int, ...]
    decode_requests: tuple[int, ...]
    decode_kv_tokens: tuple[int, ...]
    moe_tokens: tuple[int, ...]
    moe_skews: tuple[float, ...]
    skew: SkewAxes
    to_the_limit: bool
    at_the_cap: bool


# Block-scaled fp8 products on SM90 take tiles of 64 and 128 tokens, and another kernel up to 32: time steps behind
# each.
_COARSE_TOKENS: Final = (
    *(1, 2, 4, 8, 16, 17, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, 768, 1024, 1536, 2048, 3072, 4096),
    *(6144, 8192, 12288, 16384),
)
_COARSE_CHUNKS: Final = (1, 16, 64, 128, 129, 256, 257, 512, 1024, 1536, 2048, 4096, 8192, 16384)
_COARSE_SEQUENCES: Final = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024)
_MOE_TOKENS: Final = tuple(1 << power for power in range(18))
# Untuned Triton experts change their tiles behind 8, 16 and 64 tokens of block-scaled fp8, behind 32, 64, 96, 128 and
# 512 of bf16 (vLLM's get_default_config); half-way points up to where tiles are full.
_FULL_MOE_TOKENS: Final = tuple(
    sorted({*_MOE_TOKENS, 5, 9, 17, 24, 33, 48, 65, 96, 97, 129, 192, 384, 513, 768, 1536, 3072, 6144, 12288})
)
# And every size that vLLM captures decode steps at, which is what they then run with, up to 512; and those of the
# experts, since a pass runs them too.
_FULL_TOKENS: Final = tuple(
    sorted(
        {*_COARSE_TOKENS, *range(8, 256, 8), *range(256, 513, 16), *range(576, 1025, 64), *range(1152, 2049, 128)}
        | {193, 385, 513, 641, 769, 1025, 1281, 1537, 2049, *range(2560, 4097, 512), *range(5120, 16385, 1024)}
        | {tokens for tokens in _FULL_MOE_TOKENS if tokens <= _COARSE_TOKENS[-1]}
    )
)

_SKEW: Final = SkewAxes(
    requests=(4, 16, 64, 128, 256),
    mean_kv_tokens=(1024, 4096, 16384, 65536),
    held_out_requests=(8, 32, 96, 192),
    held_out_mean_kv_tokens=(3000, 12000, 48000),
    chunk_tokens=(128, 512, 2048, 8192),
    context_tokens=(0, 8192, 65536),
    decodes=((8, 65536), (64, 4096), (128, 16384)),
    prefills=(
        # At or below a top-k of 2048 in every request: also measured on the dense path.
        ((2, 1024, 0),),
        ((4, 512, 512),),
        ((8, 1024, 1024),),
        ((4, 2048, 0),),
        ((1, 2048, 0), (3, 300, 700)),
        # Beyond it.
        ((2, 2048, 4096),),
        ((4, 512, 8192),),
        ((2, 4096, 16384),),
        ((16, 128, 4096),),
        ((1, 4096, 0), (3, 512, 32768)),
        ((1, 1024, 65536), (1, 1024, 0)),
        ((4, 2048, 8192),),
    ),
)
_TINY_SKEW: Final = SkewAxes(
    requests=(4,),
    mean_kv_tokens=(1024,),
    held_out_requests=(3,),
    held_out_mean_kv_tokens=(800,),
    chunk_tokens=(64,),
    context_tokens=(0, 1024),
    decodes=((4, 1024),),
    prefills=(((2, 64, 0),), ((1, 64, 0), (1, 16, 2048))),
)

GRIDS: Final[dict[str, Axes]] = {
    # A few points per axis, small enough for a CPU; contexts on both sides of a top-k of 2048.
    "tiny": Axes(
        tokens=(1, 16, 64, 128),
        sequences=(1, 4, 16),
        chunk_tokens=(16, 64),
        context_tokens=(0, 1024, 2048, 4096),
        dense_chunk_tokens=(16, 64),
        dense_context_tokens=(0, 1024, 2048),
        decode_requests=(1, 4),
        decode_kv_tokens=(64, 1024, 2048, 4096),
        moe_tokens=(1, 16, 64, 128),
        moe_skews=(0.0,),
        skew=_TINY_SKEW,
        to_the_limit=False,
        at_the_cap=False,
    ),
    # Dense enough for piecewise linear interpolation. Chunks have points on both sides of 128 and 256 tokens, where
    # sparse MLA back ends stop treating a chunk as decode, and tokens on both sides of the router's 16 and 32.
    "coarse": Axes(
        tokens=_COARSE_TOKENS,
        sequences=_COARSE_SEQUENCES,
        chunk_tokens=_COARSE_CHUNKS,
        context_tokens=(0, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288),
        dense_chunk_tokens=_COARSE_CHUNKS,
        dense_context_tokens=(0, 512, 1024, 2048),
        decode_requests=(1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 1024),
        decode_kv_tokens=(64, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288),
        moe_tokens=_MOE_TOKENS,
        moe_skews=(0.0, 1.5),
        skew=_SKEW,
        to_the_limit=True,
        at_the_cap=False,
    ),
    # The coarse grid and, between its points, those where kernels of 132 multiprocessors (H100, H200) bend or step.
    # Chunks: one token is a decode for the indexer and two are not; back ends stop treating a chunk as decode behind
    # 128 or 256, and FlashAttention 3 stops splitting keys of more than 992 rows. Requests: top-k changes its kernel
    # between 8 and 16 rows and behind 32; 33, 66, 132 and 198 requests fill whole waves of tiles, one more begins
    # another. Keys: the top-k kernels bend between 8k and 128k, where a row takes another path and the scores of a
    # batch outgrow the L2 cache.
    "full": Axes(
        tokens=_FULL_TOKENS,
        sequences=_COARSE_SEQUENCES,
        chunk_tokens=(
            *(1, 2, 16, 32, 64, 128, 129, 192, 256, 257, 384, 512, 768, 992, 993, 1024, 1536, 2048, 3072, 4096, 6144),
            *(8192, 12288, 16384),
        ),
        context_tokens=(
            *(0, 512, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768, 49152, 65536, 98304, 131072, 196608, 262144),
            *(393216, 524288),
        ),
        dense_chunk_tokens=(1, 16, 64, 128, 129, 256, 257, 384, 512, 768, 1024, 1280, 1536, 1792, 2048),
        dense_context_tokens=(0, 1, 256, 512, 1024, 1536, 2048),
        decode_requests=(
            *(1, 2, 4, 8, 9, 16, 24, 32, 33, 34, 48, 64, 66, 67, 96, 128, 132, 133, 192, 198, 199, 256, 384, 512, 768),
            1024,
        ),
        decode_kv_tokens=(
            *(64, 512, 1024, 2048, 2049, 4096, 8192, 12288, 16384, 24576, 32768, 49152, 65536, 131072, 196608, 262144),
            *(393216, 524288),
        ),
        moe_tokens=_FULL_MOE_TOKENS,
        moe_skews=(0.0, 1.5),
        skew=_SKEW,
        to_the_limit=True,
        at_the_cap=True,
    ),
}

# The grid that each other one contains, by its name: an acquisition runs the contained one first, so that one cut
# short still has whole tables.
CONTAINS: Final = {"full": "coarse"}

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
