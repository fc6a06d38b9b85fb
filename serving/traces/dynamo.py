"""Dynamo's and AIPerf's extension of Mooncake rows: hashes optional, fractional milliseconds, sessions.

    {"timestamp": 0, "input_length": 4096, "output_length": 120, "hash_ids": [...], "session_id": "a"}
    {"session_id": "a", "delay": 850.5, "input_length": 5120, "output_length": 80}

A row with a timestamp (milliseconds) arrives then. A row with a delay instead is the next turn of its session, released
so many milliseconds after the turn before it has finished; the session's first row has the timestamp. input_length is
the whole prompt of a turn. Rows that carry text (text_input, messages) have no token counts and are refused.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from profiler.core.units import NS_PER_MS
from serving.traces import BadRow, Row, TraceRequest
from serving.traces._hashes import whole_prompt
from serving.traces._rows import MAX_NS, check_keys, decimal_text, integer, keys_of, name, nanoseconds, parsed, shown

NAME: Final = "dynamo"
FIELDS: Final = ("timestamp", "input_length", "output_length")
OWN_IDS: Final = True
HASH_BLOCK_TOKENS: Final = 512
KEEPS: Final = frozenset({"request ids", "priorities", "session names", "sessions", "token ids", "prefix hashes"})
RESOLUTION_NS: Final = 1
_ALIASES: Final = {
    "input_tokens": "input_length",
    "output_tokens": "output_length",
    "created_time": "timestamp",
    "delay_ms": "delay",
}
_KEYS: Final = (*FIELDS, "hash_ids", "session_id", "delay", "request_id", "priority", "type")
_TEXT: Final = ("text_input", "messages", "tools", "payload")
_DISTINCT: Final = ("session_id", "delay", "delay_ms", "input_tokens", "output_tokens", "created_time", "type")
_TYPE: Final = "mooncake_trace"


def claims(first_line: str) -> bool:
    """True for a JSON object with a length or a timestamp that is not of the plainer Mooncake format or Bailian's."""
    keys = keys_of(first_line)
    plain = "hash_ids" in keys and keys.isdisjoint(_DISTINCT)
    lengths = ("input_length", "input_tokens", "output_length", "timestamp", "created_time")
    return not keys.isdisjoint(lengths) and not plain and keys.isdisjoint(("chat_id", "parent_chat_id"))


def read(lines: Iterable[tuple[int, str]], hash_block_tokens: int = HASH_BLOCK_TOKENS) -> Iterator[tuple[int, Row]]:
    """The rows in file order, the turns of a session that wait for each other together where the first one stands.

    The file is read to its end first, since a session may go on in any row.
    """
    entries: list[tuple[int, list[TraceRequest] | BadRow]] = []
    open_sessions: dict[str, list[TraceRequest]] = {}
    for number, (line, text) in enumerate(lines):
        try:
            _place(_renamed(parsed(text)), number, line, hash_block_tokens, entries, open_sessions)
        except ValueError as error:
            entries.append((line, BadRow(str(error))))
    for line, entry in entries:
        yield line, entry if isinstance(entry, BadRow) else _together(entry)


def _place(
    row: dict[str, Any],
    number: int,
    line: int,
    block_tokens: int,
    entries: list[tuple[int, list[TraceRequest] | BadRow]],
    open_sessions: dict[str, list[TraceRequest]],
) -> None:
    session_id = name(row, "session_id")
    turns = open_sessions.get(session_id) if session_id is not None else None
    if "delay" not in row:
        if turns is not None and len(turns) > 1:
            raise ValueError(f"a timestamp in session {session_id!r}, whose rows above have delays")
        request = _request(row, number, nanoseconds(row, "timestamp", NS_PER_MS, "milliseconds"), block_tokens)
        entries.append((line, [request]))
        if session_id is not None:
            open_sessions[session_id] = entries[-1][1]  # type: ignore[assignment]
        return
    if "timestamp" in row:
        raise ValueError("timestamp and delay exclude each other: a row arrives then, or so long after the turn before")
    if turns is None:
        raise ValueError("delay needs a row with a timestamp and the same session_id above it")
    wait_ns = nanoseconds(row, "delay", NS_PER_MS, "milliseconds")
    turns.append(_request(row, number, turns[0].arrival_ns, block_tokens, wait_ns))


def _together(turns: list[TraceRequest]) -> Row:
    if len(turns) == 1:
        return turns[0]
    return tuple(replace(turn, call_index=index) for index, turn in enumerate(turns))


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    for alias, key in _ALIASES.items():
        if alias in row and key in row:
            raise ValueError(f"{alias} and {key} are the same field, both are given")
    return {_ALIASES.get(key, key): value for key, value in row.items()}


def _request(
    row: dict[str, Any], number: int, arrival_ns: int, block_tokens: int, tool_duration_ns: int = 0
) -> TraceRequest:
    for key in _TEXT:
        if key in row:
            raise ValueError(f"the row carries {key} and no token counts; input_length is needed")
    check_keys(row, _KEYS)
    if row.get("type", _TYPE) != _TYPE:
        raise ValueError(f"type must be {_TYPE!r}, found {shown(row['type'])}")
    prompt_tokens = integer(row, "input_length", 1)
    return TraceRequest(
        request_id=name(row, "request_id") or str(number),
        arrival_ns=arrival_ns,
        prompt_tokens=prompt_tokens,
        output_tokens=integer(row, "output_length", 1),
        priority=integer(row, "priority", -MAX_NS) if "priority" in row else 0,
        prefix=whole_prompt(row, prompt_tokens, block_tokens) if "hash_ids" in row else None,
        session_id=name(row, "session_id"),
        tool_duration_ns=tool_duration_ns,
    )


def write(requests: Iterable[TraceRequest], hash_block_tokens: int = HASH_BLOCK_TOKENS) -> Iterator[str]:
    """One line per request or turn; hash_ids only where the content is told."""
    from serving.content import Keys

    keys = Keys(hash_block_tokens)
    for number, request in enumerate(requests):
        row: dict[str, Any] = {}
        if request.request_id != str(number):
            row["request_id"] = request.request_id
        if request.session_id is not None:
            row["session_id"] = request.session_id
        if request.call_index:
            time = f'"delay": {decimal_text(request.tool_duration_ns, NS_PER_MS)}'
        else:
            time = f'"timestamp": {decimal_text(request.arrival_ns, NS_PER_MS)}'
        row |= {"input_length": request.prompt_tokens, "output_length": request.output_tokens}
        if request.prompt_ids is not None or request.prefix is not None:
            row["hash_ids"] = keys.of_prompt(request)
        if request.priority:
            row["priority"] = request.priority
        yield f"{{{time}, {json.dumps(row)[1:]}\n"
