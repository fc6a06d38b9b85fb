"""Bailian (Qwen usage traces): JSON lines of chats with salted prefix hashes.

    {"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 521, "output_length": 132, "type": "text",
     "turn": 1, "hash_ids": [...]}

timestamp: seconds, with a fraction. parent_chat_id: the chat that this one goes on from, -1 for none. hash_ids: one id
per block of 16 prompt tokens. A request belongs to the session of its first chat, and arrives at its own timestamp.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from profiler.core.units import NS_PER_S
from serving.traces import BadRow, Row, TraceRequest
from serving.traces._hashes import whole_prompt
from serving.traces._rows import check_keys, decimal_text, integer, keys_of, nanoseconds, parsed, shown

NAME: Final = "bailian"
FIELDS: Final = (
    "chat_id",
    "parent_chat_id",
    "timestamp",
    "input_length",
    "output_length",
    "type",
    "turn",
    "hash_ids",
)
OWN_IDS: Final = False
HASH_BLOCK_TOKENS: Final = 16
KEEPS: Final = frozenset({"prefix hashes", "token ids"})
RESOLUTION_NS: Final = 1
_NO_PARENT: Final = -1


def claims(first_line: str) -> bool:
    """True for a JSON object with a chat_id or a parent_chat_id."""
    return not keys_of(first_line).isdisjoint(("chat_id", "parent_chat_id"))


def read(lines: Iterable[tuple[int, str]], hash_block_tokens: int = HASH_BLOCK_TOKENS) -> Iterator[tuple[int, Row]]:
    first_chats: dict[int, int] = {}
    for number, (line, text) in enumerate(lines):
        try:
            yield line, _request(parsed(text), number, hash_block_tokens, first_chats)
        except ValueError as error:
            yield line, BadRow(str(error))


def _request(row: dict[str, Any], number: int, block_tokens: int, first_chats: dict[int, int]) -> TraceRequest:
    check_keys(row, FIELDS)
    chat = integer(row, "chat_id", 0)
    parent = integer(row, "parent_chat_id", _NO_PARENT)
    integer(row, "turn", 1)
    if not isinstance(row.get("type"), str):
        raise ValueError(f"type must be a text, found {shown(row.get('type'))}" if "type" in row else "type is missing")
    prompt_tokens = integer(row, "input_length", 1)
    first = chat if parent == _NO_PARENT else first_chats.get(parent, parent)
    request = TraceRequest(
        request_id=str(number),
        arrival_ns=nanoseconds(row, "timestamp", NS_PER_S, "seconds"),
        prompt_tokens=prompt_tokens,
        output_tokens=integer(row, "output_length", 1),
        prefix=whole_prompt(row, prompt_tokens, block_tokens),
        session_id=str(first),
    )
    first_chats[chat] = first
    return request


def write(requests: Iterable[TraceRequest], hash_block_tokens: int = HASH_BLOCK_TOKENS) -> Iterator[str]:
    """One line per request, each its own chat unless it goes on a session; a block that is not told gets its own id."""
    from serving.content import Keys

    keys = Keys(hash_block_tokens)
    last: dict[str, tuple[int, int]] = {}
    for chat, request in enumerate(requests):
        parent, turn = last.get(request.session_id or "", (_NO_PARENT, 0))
        if request.session_id is not None:
            last[request.session_id] = chat, turn + 1
        row = {
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "type": "text",
            "turn": turn + 1,
            "hash_ids": keys.of_prompt(request),
        }
        time = decimal_text(request.arrival_ns, NS_PER_S)
        yield f'{{"chat_id": {chat}, "parent_chat_id": {parent}, "timestamp": {time}, {json.dumps(row)[1:]}\n'
