"""How FlashAttention 3 on SM90 divides its work, and what of it runs one after the other.

From its public source (hopper/heuristics.h, flash_prepare_scheduler.cu, tile_size.h), for requests of unequal lengths,
as vLLM calls it. A tile is a block of rows of Q against all blocks of keys. Tiles beyond one for each multiprocessor
wait for the first that is free; where there are fewer, the keys of each are split, every part is a tile of its own, and
another kernel merges the parts. Times against the number of queries therefore step, and fall again: 34 queries of 64
heads make 136 tiles for 132 multiprocessors, 33 make 132 of them, and 128 queries as many that are split no more.

Work is counted in blocks: one block of keys against one block of rows, which takes about 1.8 us on an H200 in both
kernels here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from profiler.core.grid_work import Work, first_free, in_waves
from profiler.core.launch import Decodes, Launched, Prefill

# Tiles of the absorbed form (rows of 576, values of 512): rows x keys. Of the expanded one rows, and keys by the width
# of a key: 128 of DeepSeek's 192, 80 of GLM-5's 256, whose values are 256 wide, so that a block is as much arithmetic.
_SPARSE_ROWS: Final = 64
_SPARSE_KEYS: Final = 64
_SPARSE_VALUES: Final = 512
_DENSE_ROWS: Final = 128
_DENSE_KEYS: Final = 128
_DENSE_KEYS_OF_WIDE: Final = 80
_WIDE_KEY: Final = 192
_DENSE_VALUES: Final = 128
# Of grouped-query attention the tiles of one head width are known: 128 rows x 128 keys, as in the expanded form.
GROUPED_WIDTH: Final = 128
# num_splits_heuristic: no split from this share of the multiprocessors on, nor of so few blocks; else the fewest parts
# that fill them within 85 % of the best; at most 128 parts.
_FULL: Final = 0.8
_FEW_BLOCKS: Final = 4
_GOOD: Final = 0.85
_MOST_SPLITS: Final = 128
# prepare_varlen_num_blocks: a multiprocessor's share of all blocks, with 10 % to spare, is what a part may have. Beyond
# 992 requests, which are single queries of sparse attention, nothing is split.
_MARGIN: Final = 1.1
_MOST_REQUESTS: Final = 992
# Fitted on eight tables of an H200 (sparse and dense at tp 1, 2, 4 and 8), in blocks, one value for all: what a tile
# costs beyond its blocks; a megabyte of parts in fp32 to be merged, of which the result is as large as half a part; and
# how many queries the merge looks through in the time of one part, since each of its blocks searches for its request.
_TILE: Final = 2.0
_MERGED_MB: Final = 0.6
_SEARCHED: Final = 1000.0
# Of the expanded form, on fifteen tables (DeepSeek-V3.2-Exp, GLM-5-FP8, GLM-5, GLM-5.2): what its tiles cost beyond
# their blocks, and an element of a head that is projected from a token's latent, then copied and read.
_DENSE_TILE: Final = 0.5
# A megabyte of the parts of many requests, which are merged side by side at the rate of the memory (4.3 TB/s).
_MERGED_BESIDE_MB: Final = 0.13
_PROJECTED: Final = 4e-4 / 256
# A wave of a decode's parts against the share of the multiprocessors that it takes; all of them are bounded by the
# memory. Fitted on four tables of an H200 (grouped-query attention at tp 1, 2, 4 and 8).
_DECODE_WAVE: Final = ((0.0, 0.49), (0.27, 0.49), (1.0, 1.0))


@lru_cache(maxsize=4096)
def most_splits(tiles: int, blocks: int, sm_count: int) -> int:
    """num_splits_heuristic: the most parts into which keys are split when a request has so many tiles and blocks."""
    if tiles >= _FULL * sm_count or blocks <= _FEW_BLOCKS:
        return 1
    parts = range(1, min(_MOST_SPLITS, sm_count, blocks) + 1)
    filled = [tiles * n / sm_count / math.ceil(tiles * n / sm_count) for n in parts]
    return next(n for n, share in zip(parts, filled, strict=True) if share >= _GOOD * max(filled))


def splits(blocks: int, all_blocks: float, most: int, sm_count: int) -> int:
    """prepare_varlen_num_blocks: parts of a request of so many blocks when all tiles of the batch have `all_blocks`."""
    share = math.ceil(all_blocks * _MARGIN / sm_count)
    return max(1, min(math.ceil(blocks / share), most)) if share else 1


def _merge(rows: float, parts: float, values: int) -> float:
    """Blocks that merging so many rows takes, each of `parts` parts."""
    return _MERGED_MB * rows * (parts + 0.5) * values * 4 / 1e6


@dataclass(frozen=True, slots=True)
class SparseWork:
    """Absorbed attention over picked keys: every query is a request of its own, whose heads are the rows of its tiles.

    heads: of one rank. cap_keys: most keys that a query reads.
    """

    sm_count: int
    heads: int
    cap_keys: int

    def decode(self, requests: float, keys: float) -> float:
        """Blocks of equal requests of one query each."""
        blocks = max(1, math.ceil(min(keys, self.cap_keys) / _SPARSE_KEYS))
        return self._alike(requests, blocks)

    def prefill(self, chunk: float, context: float) -> float:
        """Blocks of a chunk behind a context: query i, from 1, sees context + i keys."""
        if context >= self.cap_keys:
            return self._alike(chunk, math.ceil(self.cap_keys / _SPARSE_KEYS))
        if chunk > _MOST_REQUESTS:
            whole = Work(self.sm_count // self._tiles(), self.cap_keys).prefill(chunk, context) / _SPARSE_KEYS
            return whole + _TILE * math.ceil(chunk * self._tiles() / self.sm_count)
        groups = list(self._groups(chunk, context))
        all_blocks = self._tiles() * sum(blocks * queries for blocks, queries in groups)
        tiles, parts = [], 0.0
        for blocks, queries in groups:
            of_one, n = self._parts(blocks, all_blocks)
            tiles.append((math.ceil(queries) * self._tiles() * n, of_one + _TILE))
            parts += queries * n
        return first_free(tiles, self.sm_count) + self._merged(chunk, parts / chunk)

    def _tiles(self) -> int:
        return math.ceil(self.heads / _SPARSE_ROWS)

    def _alike(self, queries: float, blocks: int) -> float:
        """Queries of as many blocks each."""
        of_one, n = (blocks, 1) if queries > _MOST_REQUESTS else self._parts(blocks, queries * self._tiles() * blocks)
        waves = math.ceil(queries * self._tiles() * n / self.sm_count)
        return waves * (of_one + _TILE) + (self._merged(queries, n) if queries <= _MOST_REQUESTS else 0.0)

    def _parts(self, blocks: int, all_blocks: float) -> tuple[int, int]:
        """(blocks of the longest part, parts that have any)."""
        most = most_splits(self._tiles(), math.ceil(self.cap_keys / _SPARSE_KEYS), self.sm_count)
        of_one = math.ceil(blocks / splits(blocks, all_blocks, most, self.sm_count))
        return of_one, math.ceil(blocks / of_one)

    def _merged(self, queries: float, parts: float) -> float:
        """The merge runs for whatever was prepared to be split, single parts included."""
        return _merge(queries * self.heads, parts + queries / _SEARCHED, _SPARSE_VALUES)

    def _groups(self, chunk: float, context: float) -> Iterator[tuple[int, float]]:
        """(blocks, queries that have so many), in the order of the queries."""
        last_blocks = math.ceil(self.cap_keys / _SPARSE_KEYS)
        done = 0.0
        while done < chunk:
            blocks = min(last_blocks, int(context + done) // _SPARSE_KEYS + 1)
            here = chunk - done
            if blocks < last_blocks:
                here = min(here, blocks * _SPARSE_KEYS - context - done)
            yield blocks, here
            done += here

    def bends(self, chunk: int, last_context: float) -> Iterator[float]:
        """Contexts between which time is taken to run straight: two blocks apart, up to where all are at the cap."""
        yield from range(0, self.cap_keys + 1, 2 * _SPARSE_KEYS)
        if chunk < self.cap_keys:
            yield self.cap_keys - chunk

    def straight_until(self, chunk: int) -> float:
        return math.inf

    def decode_bends(self, requests: int, last_keys: float) -> Iterator[float]:
        """The last number of keys of each block, and the first of the next."""
        for end in range(_SPARSE_KEYS, self.cap_keys, _SPARSE_KEYS):
            yield from (end, end + 1)
        yield self.cap_keys


@dataclass(frozen=True, slots=True)
class DenseWork:
    """Expanded attention of a chunk: to itself, causally, and in a second launch to its context.

    heads: of one rank, each of which has tiles of its own. keys: of a block. values: width of one head's values.
    projected: elements of a token and head that come from its latent, keys without their rotary part and values.
    """

    sm_count: int
    heads: int
    keys: int = _DENSE_KEYS
    values: int = _DENSE_VALUES
    projected: int = 2 * _DENSE_VALUES

    def prefill(self, chunk: float, context: float) -> float:
        return self.together([(chunk, context)])

    def together(self, prefills: Sequence[tuple[float, float]]) -> float:
        """Blocks of several chunks, request by request in each of the two launches."""
        own = tuple(_causal(chunk, self.keys) for chunk, _ in prefills)
        total = self._launch(prefills, own)
        if any(context for _, context in prefills):
            blocks = (math.ceil(context / self.keys) for _, context in prefills)
            total += self._launch(prefills, tuple((n,) * len(rows) for n, rows in zip(blocks, own, strict=True)))
        tokens = sum(chunk + context for chunk, context in prefills)
        return total + _PROJECTED * self.projected * self.heads * tokens

    def _launch(self, prefills: Sequence[tuple[float, float]], blocks: tuple[tuple[int, ...], ...]) -> float:
        """The parts of all requests are merged at the same time, as long as the largest takes, or the memory."""
        end, parts = _tiles_end(blocks, self.heads, self.sm_count)
        merged = [
            _merge(chunk * self.heads, n, self.values) for (chunk, _), n in zip(prefills, parts, strict=True) if n
        ]
        return end + max([*merged, sum(merged) * _MERGED_BESIDE_MB / _MERGED_MB], default=0.0)

    def bends(self, chunk: int, last_context: float) -> Iterator[float]:
        """The last context of each block, and the first of the next."""
        for end in range(0, int(last_context) + 1, self.keys):
            yield from (end, end + 1)

    def straight_until(self, chunk: int) -> float:
        return math.inf


def dense_keys(width: int) -> int:
    """Keys of a block of the expanded form, by the width of one (tile_size_fwd_sm90)."""
    return _DENSE_KEYS if width <= _WIDE_KEY else _DENSE_KEYS_OF_WIDE


def _causal(chunk: float, keys: int) -> tuple[int, ...]:
    """Blocks of each row of tiles of a chunk that sees itself, the longest first."""
    rows = math.ceil(chunk / _DENSE_ROWS)
    return tuple(math.ceil(min(chunk, row * _DENSE_ROWS) / keys) for row in range(rows, 0, -1))


@lru_cache(maxsize=4096)
def _tiles_end(requests: tuple[tuple[int, ...], ...], heads: int, sm_count: int) -> tuple[float, tuple[int, ...]]:
    """(blocks one after the other of a launch, parts of each request that are to be merged, 0 for none).

    requests: the blocks of each row of tiles, the longest first; a row without any is still run.
    """
    most = most_splits(heads * max(map(len, requests)), max(rows[0] for rows in requests), sm_count)
    every = heads * sum(len(rows) * rows[0] for rows in requests)
    parts = tuple(splits(rows[0], every, most, sm_count) for rows in requests)
    tiles = [
        (heads * n, math.ceil(blocks / n) + _DENSE_TILE)
        for rows, n in zip(requests, parts, strict=True)
        for blocks in rows
    ]
    return first_free(tiles, sm_count), parts if most > 1 else (0,) * len(parts)


# (how many, new tokens of each, keys of each).
_Request = tuple[int, float, float]


def _requests(decodes: Decodes, prefills: Sequence[Prefill]) -> list[_Request]:
    """In the order of a step of vLLM, which the kernel keeps: decodes first."""
    return [
        *((count, 1.0, keys) for count, keys in decodes),
        *((1, float(chunk), float(context + chunk)) for chunk, context in prefills),
    ]


@dataclass(frozen=True, slots=True)
class GroupedWork:
    """Grouped-query attention of chunks and decodes over a paged cache.

    The heads of a group are packed into the rows of a tile, so that with 16 of them a tile has eight tokens. heads: of
    one rank; kv_heads: its groups. Measured on an H200 (64 heads, 4 groups, behind 524,288 keys): 128 tokens
    are 64 tiles in two parts each and take 3.1 ms, 129 are 68 tiles whose 136 parts no longer fit at once, 6.1 ms, and
    256 are 128 whole tiles, 5.8 ms.

    One launch runs a whole step, its tiles in the order of the requests (vLLM has prepare_varlen_num_blocks not sort
    them), and one bound on the parts holds for all: num_splits_heuristic takes the longest chunk for that of a request
    of the longest keys. From 209 tokens on (64 heads, 4 groups) no decode of the step is split.
    """

    sm_count: int
    heads: int
    kv_heads: int

    def prefill(self, chunk: float, context: float) -> float:
        return self._run([(1, chunk, context + chunk)], 1.0)

    def decode(self, requests: float, keys: float) -> float:
        """Blocks of equal requests of one query each, counted as in a full wave of parts, which the memory bounds."""
        one, blocks = [(1, 1.0, keys)], math.ceil(keys / _DENSE_KEYS)
        n = splits(blocks, requests * self.kv_heads * blocks, self._most(one), self.sm_count)
        waves = in_waves(requests * self.kv_heads * n, self.sm_count, _DECODE_WAVE, _DECODE_WAVE)
        return waves * (keys / _DENSE_KEYS / n + _TILE) + self._merged(one, [n]) * requests

    def decode_bends(self, requests: int, last_keys: float) -> Iterator[float]:
        yield from ()

    def launched(self, prefills: Sequence[Prefill]) -> Launched:
        requests = _requests((), prefills)
        parts = self._parts(requests)
        tiles = list(self._tiles(requests, parts, 1.0))
        work = first_free(tiles, self.sm_count)
        running = sum(count * length for count, length in tiles) / work
        return Launched(work + self._merged(requests, parts), running / self.kv_heads * self._tile_tokens)

    def filled(self, decodes: Decodes, prefills: Sequence[Prefill]) -> float:
        requests = _requests(decodes, prefills)
        parts = self._parts(requests)
        tiles = self.kv_heads * sum(count * n for (count, _), n in zip(decodes, parts, strict=False))
        return min(1.0, tiles / self.sm_count)

    def joint(self, decodes: Decodes, prefills: Sequence[Prefill], slower: float) -> float:
        return self._run(_requests(decodes, prefills), slower)

    def _run(self, requests: Sequence[_Request], slower: float) -> float:
        """Blocks one after the other of a launch. slower: how many a block of a single query counts as."""
        parts = self._parts(requests)
        return first_free(self._tiles(requests, parts, slower), self.sm_count) + self._merged(requests, parts)

    @property
    def _tile_tokens(self) -> float:
        return _DENSE_ROWS * self.kv_heads / self.heads

    def _rows(self, new: float) -> int:
        return math.ceil(new / self._tile_tokens)

    def _most(self, requests: Sequence[_Request]) -> int:
        """The most parts of any request: as if the longest chunk and the longest keys of the launch were of one."""
        tiles = self.kv_heads * self._rows(max(new for _, new, _ in requests))
        return most_splits(tiles, math.ceil(max(keys for _, _, keys in requests) / _DENSE_KEYS), self.sm_count)

    def _parts(self, requests: Sequence[_Request]) -> list[int]:
        """Into how many parts the keys of each request are split."""
        most, blocks = self._most(requests), [math.ceil(keys / _DENSE_KEYS) for _, _, keys in requests]
        every = (count * self._rows(new) * own for (count, new, _), own in zip(requests, blocks, strict=True))
        total = self.kv_heads * sum(every)
        return [splits(own, total, most, self.sm_count) for own in blocks]

    def _tiles(self, requests: Sequence[_Request], parts: Sequence[int], slower: float) -> Iterator[tuple[int, float]]:
        """(tiles of as many keys within one block, their blocks), request by request, of each the longest first."""
        alike = max(1, int(_DENSE_KEYS / self._tile_tokens))
        for (count, new, keys), n in zip(requests, parts, strict=True):
            a_block = slower if new == 1 else 1.0
            for last in range(self._rows(new), 0, -alike):
                seen = keys - new + min(new, last * self._tile_tokens)
                yield count * self.kv_heads * n * min(alike, last), a_block * seen / _DENSE_KEYS / n + _TILE

    def _merged(self, requests: Sequence[_Request], parts: Sequence[int]) -> float:
        if self._most(requests) == 1:
            return 0.0
        own = zip(requests, parts, strict=True)
        return sum(_merge(count * new * self.heads, n, _DENSE_VALUES) for (count, new, _), n in own)

    def bends(self, chunk: int, last_context: float) -> Iterator[float]:
        yield from ()

    def straight_until(self, chunk: int) -> float:
        return math.inf
