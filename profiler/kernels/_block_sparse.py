"""How vLLM's Triton kernels for block-sparse attention divide their work, from models/minimax_m3/common/ops.

A tile of scores is 64 queries of one index head against all blocks of keys in their sight, one after the other; keys
are not split. A tile of attention is one query of one key-value head against its picks. Tiles beyond two for each
multiprocessor wait for the first that is free (measured on an H200: 128 and 256 tiles of scores behind 524,288 keys
take 6.7 and 6.3 ms, 512 tiles 13.1 ms). So short chunks behind long contexts cost as much as long ones.

The top-k of decodes splits a row of blocks into as many parts as fill the card, a power of two that falls as requests
come; each part is sorted 64 blocks at a time. Sparse attention of decodes splits the picks of a query likewise.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from profiler.core.grid_work import Work, first_free, in_waves
from profiler.core.launch import Launched, Prefill

# _index_block_score_kernel: BLOCK_SIZE_Q queries, pages of BLOCK_SIZE_K keys.
SCORE_QUERIES: Final = 64
# Tiles that one multiprocessor runs at a time, and what a tile costs beyond its blocks, in blocks: measured on an H200.
RESIDENT: Final = 2
_TILE: Final = 2.0
# minimax_m3_index_decode: TOPK_TARGET_GRID and MAX_NUM_TOPK_CHUNKS.
_TOPK_GRID: Final = 64
_MOST_PARTS: Final = 16
# minimax_m3_sparse_attn_decode: TARGET_GRID.
_PICKS_GRID: Final = 256
# A wave of tiles over picks against the share of the slots that it takes: up to half of them each tile has a
# multiprocessor of its own. Fitted on four tables of an H200 (tp 1, 2, 4 and 8), of a chunk and of decodes; and what a
# wave of the decodes' grid costs whatever it reads, in keys.
_CHUNK_FIRST: Final = ((0.0, 0.5), (0.5, 0.7), (0.5, 0.8), (1.0, 1.0))
_CHUNK_LATER: Final = ((0.0, 0.7), (1.0, 1.0))
_DECODE_FIRST: Final = ((0.0, 0.3), (0.5, 0.58), (0.5, 0.68), (1.0, 1.0))
_DECODE_LATER: Final = ((0.0, 0.4), (1.0, 1.0))
_GRID_KEYS: Final = 50.0
# What a part sorts at a time: of those that the kernel tunes itself over, the one it chose at 32,768 tokens (H200).
_SORTED_BLOCKS: Final = 64
# A block of the launch beyond its request's last token, which ends at once, in sorts: fitted on four tables of an H200.
_EMPTY: Final = 0.3
# Behind so many sorts one more is taken to come gradually.
_NEAR: Final = 4


@dataclass(frozen=True, slots=True)
class ScoreWork:
    """Scores of a chunk, in blocks of keys one after the other. heads: index heads of one rank."""

    sm_count: int
    heads: int
    block_tokens: int

    def prefill(self, chunk: float, context: float) -> float:
        tiles = math.ceil(chunk / SCORE_QUERIES)
        if tiles * self.heads <= RESIDENT * self.sm_count:
            return (context + chunk) / self.block_tokens + _TILE
        return _in_order(tiles, self.heads, chunk, context, self.block_tokens, RESIDENT * self.sm_count)

    def launched(self, prefills: Sequence[Prefill]) -> Launched:
        """Request by request, each head by head, as the grid of the launch numbers them."""
        groups = []
        for chunk, context in prefills:
            groups += _tiles(math.ceil(chunk / SCORE_QUERIES), chunk, context, self.block_tokens) * self.heads
        work = first_free(groups, RESIDENT * self.sm_count)
        running = sum(count * length for count, length in groups) / work
        return Launched(work, running / self.heads * SCORE_QUERIES)

    def bends(self, chunk: int, last_context: float) -> Iterator[float]:
        yield from ()

    def straight_until(self, chunk: int) -> float:
        return math.inf


@lru_cache(maxsize=4096)
def _in_order(tiles: int, heads: int, chunk: float, context: float, block: int, slots: int) -> float:
    """When the last tile ends: head by head, from the first queries, which see least, to the last."""
    return first_free(_tiles(tiles, chunk, context, block) * heads, slots)


def _tiles(tiles: int, chunk: float, context: float, block: int) -> list[tuple[int, float]]:
    """(tiles of one head, their blocks), in the order of the queries. Two tiles of one block of queries are taken as
    equally long."""
    pair = max(1, block // SCORE_QUERIES)
    groups = []
    for first in range(0, tiles, pair):
        last = min(tiles, first + pair)
        groups.append((last - first, (context + min(chunk, last * SCORE_QUERIES)) / block + _TILE))
    return groups


@dataclass(frozen=True, slots=True)
class TopkWork:
    """Selection, in sorts: of a chunk those of all its queries, which fill the card; of decodes those of one part of a
    row, which run one after the other. heads: index heads of one rank."""

    heads: int
    block_tokens: int

    def prefill(self, chunk: float, context: float) -> float:
        return _sorts_up_to(context + chunk, self._sorted) - _sorts_up_to(context, self._sorted)

    def launched(self, prefills: Sequence[Prefill]) -> Launched:
        """The sorts of all queries, which fill the card together; each request has a block of the launch for every
        token of the longest chunk."""
        most = max(chunk for chunk, _ in prefills)
        sorts = sum(self.prefill(*prefill) + _EMPTY * (most - prefill[0]) for prefill in prefills)
        return Launched(sorts, float(sum(chunk for chunk, _ in prefills)))

    def decode(self, requests: float, keys: float) -> float:
        blocks = math.ceil(math.ceil(keys / self.block_tokens) / self._parts(requests))
        return math.ceil(blocks / _SORTED_BLOCKS)

    def captured_keys(self, requests: float, keys: float, longest: float) -> float:
        """Keys whose parts are as long as those of a row of so many in a graph that was captured for `longest`: there
        a part is a share of these, and a shorter row lies in the first parts (chunk_blocks of
        minimax_m3_index_decode, whose max_seq_len is the engine's max_model_len while it captures)."""
        return max(keys, min(longest, keys * self._parts(requests)))

    @property
    def _sorted(self) -> int:
        return _SORTED_BLOCKS * self.block_tokens

    def _parts(self, requests: float) -> int:
        most = max(1, min(_MOST_PARTS, int(_TOPK_GRID // max(1.0, requests * self.heads))))
        return 1 << (most.bit_length() - 1)

    def bends(self, chunk: int, last_context: float) -> Iterator[float]:
        """From the context with which a chunk's last query needs another sort to that with which all do."""
        for end in range(self._sorted, _NEAR * self._sorted + 1, self._sorted):
            yield from (max(0, end - chunk), end)

    def straight_until(self, chunk: int) -> float:
        return math.inf

    def decode_bends(self, requests: int, last_keys: float) -> Iterator[float]:
        """The last number of keys of each sort, and the first of the next."""
        step = self._sorted * self._parts(requests)
        for end in range(step, _NEAR * step + 1, step):
            yield from (end, end + 1)


@dataclass(frozen=True, slots=True)
class PicksWork:
    """Sparse attention over selected blocks, in keys. heads: key-value heads of one rank.

    A chunk has a tile for each query and head, which reads its picks one after the other. Decodes divide the picks of
    each into parts, as many as fit a fixed grid: 64 requests of one head are 256 tiles of four picks, 66 are 132 of
    eight.
    """

    sm_count: int
    heads: int
    block_tokens: int
    cap_keys: int

    def prefill(self, chunk: float, context: float) -> float:
        slots = RESIDENT * self.sm_count
        keys = Work(cap_keys=self.cap_keys).prefill(chunk, context) / chunk
        return keys * in_waves(chunk * self.heads, slots, _CHUNK_FIRST, _CHUNK_LATER)

    def decode(self, requests: float, keys: float) -> float:
        slots, of_part = RESIDENT * self.sm_count, self._part_keys(requests)
        keys = min(keys, self.cap_keys)
        tiles = requests * self.heads * math.ceil(keys / of_part)
        grid = requests * self.heads * math.ceil(self.cap_keys / of_part)
        return min(keys, of_part) * in_waves(tiles, slots, _DECODE_FIRST, _DECODE_LATER) + _GRID_KEYS * grid / slots

    def _part_keys(self, requests: float) -> int:
        picks = self.cap_keys // self.block_tokens
        most = max(1, min(picks, int(_PICKS_GRID // max(1.0, requests * self.heads))))
        return math.ceil(picks / (1 << (most.bit_length() - 1))) * self.block_tokens

    def bends(self, chunk: int, last_context: float) -> Iterator[float]:
        yield from Work(cap_keys=self.cap_keys).bends(chunk, last_context)

    def straight_until(self, chunk: int) -> float:
        return math.inf

    def decode_bends(self, requests: int, last_keys: float) -> Iterator[float]:
        """The last number of keys of each part, and the first of the next."""
        step = self._part_keys(requests)
        for end in range(step, self.cap_keys, step):
            yield from (end, end + 1)
        yield self.cap_keys


def _sorts_up_to(keys: float, step: int) -> float:
    """Sorts of queries that see 1, 2, ... keys, added."""
    whole = keys // step
    return step * whole * (whole + 1) / 2 + (keys - whole * step) * (whole + 1)
