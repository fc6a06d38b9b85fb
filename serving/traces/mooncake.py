"""Mooncake: JSON lines with prefix hashes.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

timestamp: integer milliseconds from the start of the trace. hash_ids: one id per block of 512 prompt tokens, the last
one perhaps part-filled; equal ids mean an equal block behind an equal prefix.
"""

import json
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any, Final

from profiler.core.units import NS_PER_MS
from serving.traces import BadRow, Row, TraceRequest
from serving.traces._hashes import whole_prompt
from serving.traces._rows import MAX_NS, check_keys, in_units, integer, keys_of, parsed, shown

NAME: Final = "mooncake"
FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
OWN_IDS: Final = False
HASH_BLOCK_TOKENS: Final = 512
KEEPS: Final = frozenset({"prefix hashes", "token ids"})
RESOLUTION_NS: Final = NS_PER_MS
_BAILIAN: Final = ("chat_id", "parent_chat_id")
_DYNAMO: Final = ("session_id", "delay", "delay_ms", "input_tokens", "output_tokens", "created_time", "type")


def claims(first_line: str) -> bool:
    """True for a JSON object with hashes and a length or a timestamp, and no key of Bailian's or Dynamo's alone."""
    keys = keys_of(first_line)
    return not keys.isdisjoint(FIELDS[:3]) and keys.isdisjoint((*_BAILIAN, *_DYNAMO)) and "hash_ids" in keys


def read(lines: Iterable[tuple[int, str]], hash_block_tokens: int = HASH_BLOCK_TOKENS) -> Iterator[tuple[int, Row]]:
    for number, (line, text) in enumerate(lines):
        try:
            yield line, _request(parsed(text), number, hash_block_tokens)
        except ValueError as error:
            yield line, BadRow(str(error))


def _request(row: dict[str, Any], number: int, block_tokens: int) -> TraceRequest:
    if not row.keys().isdisjoint(_DYNAMO):
        key = next(key for key in _DYNAMO if key in row)
        raise ValueError(f"{key!r} is no key of this format; Dynamo's rows have it (format dynamo)")
    check_keys(row, FIELDS)
    prompt_tokens = integer(row, "input_length", 1)
    return TraceRequest(
        request_id=str(number),
        arrival_ns=_milliseconds(row),
        prompt_tokens=prompt_tokens,
        output_tokens=integer(row, "output_length", 1),
        prefix=whole_prompt(row, prompt_tokens, block_tokens),
    )


def _milliseconds(row: dict[str, Any]) -> int:
    if "timestamp" in row and (type(row["timestamp"]) is not int or row["timestamp"] > MAX_NS // NS_PER_MS):
        raise ValueError(
            f"timestamp must be an integer of milliseconds of at least 0, found {shown(row['timestamp'])}"
            + ("; fractions are of the format dynamo" if isinstance(row["timestamp"], Decimal) else "")
        )
    return integer(row, "timestamp", 0, "milliseconds") * NS_PER_MS


def write(requests: Iterable[TraceRequest], hash_block_tokens: int = HASH_BLOCK_TOKENS) -> Iterator[str]:
    """One line per request; a block of which nothing is known gets an id of its own."""
    from serving.content import Keys

    keys = Keys(hash_block_tokens)
    for request in requests:
        row = {
            "timestamp": in_units(request.arrival_ns, NS_PER_MS),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": keys.of_prompt(request),
        }
        yield json.dumps(row) + "\n"
