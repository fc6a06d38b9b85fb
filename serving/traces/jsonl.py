"""JSON lines: one request, or one agentic session, per line.

    {"input_toks": 120, "output_toks": 30, "arrival_time_ns": 5000000,
     "input_tok_ids": [...], "output_tok_ids": [...], "request_id": "a", "priority": 0, "session_id": "s",
     "hash_ids": [...], "hash_block_tokens": 64, "hash_tokens": 120}
    {"session_id": "s", "arrival_time_ns": 5000000,
     "sub_requests": [{"input_toks": 120, "output_toks": 30, "tool_duration_ns": 2000000}, ...]}

Only the first three keys are needed. Of two priorities the lower is more urgent. The three hash keys come together, in
place of token ids: the first `hash_tokens` tokens of prompt and output in blocks of `hash_block_tokens`, the last one
perhaps part-filled, equal ids for equal content behind an equal prefix. Call k + 1 of a session is released
`tool_duration_ns` after call k has finished; the calls take token ids and hashes as well.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from serving.traces import BadRow, PrefixHashes, Row, TraceRequest
from serving.traces._rows import MAX_NS, check_keys, id_list, integer, keys_of, name, parsed, token_ids

NAME: Final = "jsonl"
FIELDS: Final = ("input_toks", "output_toks", "arrival_time_ns")
OWN_IDS: Final = True
HASH_BLOCK_TOKENS: Final = None
KEEPS: Final = frozenset(
    {"request ids", "priorities", "session names", "sessions", "token ids", "prefix hashes"},
)
RESOLUTION_NS: Final = 1
_CONTENT: Final = ("input_tok_ids", "output_tok_ids", "hash_ids", "hash_block_tokens", "hash_tokens")
_FLAT: Final = (*FIELDS, "request_id", "priority", "session_id", *_CONTENT)
_SESSION: Final = ("session_id", "arrival_time_ns", "priority", "sub_requests")
_CALL: Final = ("input_toks", "output_toks", "tool_duration_ns", "request_id", *_CONTENT)


def claims(first_line: str) -> bool:
    """True for a JSON object with one of the fields, and for a line that looks like an object but does not parse."""
    return not keys_of(first_line).isdisjoint((*FIELDS, "sub_requests"))


def read(lines: Iterable[tuple[int, str]], hash_block_tokens: int = 0) -> Iterator[tuple[int, Row]]:
    sessions: set[str] = set()
    for number, (line, text) in enumerate(lines):
        try:
            row = parsed(text)
            yield line, _session(row, number, sessions) if "sub_requests" in row else _flat(row, number)
        except ValueError as error:
            yield line, BadRow(str(error))


def _flat(row: dict[str, Any], number: int) -> TraceRequest:
    check_keys(row, _FLAT)
    return _request(
        row,
        name(row, "request_id") or str(number),
        integer(row, "arrival_time_ns", 0),
        priority=_priority(row),
        session_id=name(row, "session_id"),
    )


def _session(row: dict[str, Any], number: int, sessions: set[str]) -> tuple[TraceRequest, ...]:
    check_keys(row, _SESSION)
    session_id = name(row, "session_id") or f"session_{number}"
    if session_id in sessions:
        raise ValueError(f"session_id {session_id!r} appears twice")
    arrival_ns, priority, calls = integer(row, "arrival_time_ns", 0), _priority(row), row["sub_requests"]
    if not isinstance(calls, list) or not calls or not all(isinstance(call, dict) for call in calls):
        raise ValueError("sub_requests must be a list of at least one JSON object")
    result = []
    tool_duration_ns = 0
    for index, call in enumerate(calls):
        try:
            check_keys(call, _CALL)
            result.append(
                _request(
                    call,
                    name(call, "request_id") or f"{session_id}/{index}",
                    arrival_ns,
                    priority=priority,
                    session_id=session_id,
                    call_index=index,
                    tool_duration_ns=tool_duration_ns,
                )
            )
            tool_duration_ns = integer(call, "tool_duration_ns", 0) if "tool_duration_ns" in call else 0
        except ValueError as error:
            raise ValueError(f"sub_requests[{index}]: {error}") from None
    if len({call.request_id for call in result}) < len(result):
        raise ValueError("two calls of the session have the same request_id")
    sessions.add(session_id)
    return tuple(result)


def _request(row: dict[str, Any], request_id: str, arrival_ns: int, **placed: Any) -> TraceRequest:
    prompt_tokens = integer(row, "input_toks", 1)
    output_tokens = integer(row, "output_toks", 1)
    return TraceRequest(
        request_id=request_id,
        arrival_ns=arrival_ns,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_ids=token_ids(row, "input_tok_ids", prompt_tokens),
        output_ids=token_ids(row, "output_tok_ids", output_tokens),
        prefix=_prefix(row, prompt_tokens + output_tokens),
        **placed,
    )


def _priority(row: dict[str, Any]) -> int:
    return integer(row, "priority", -MAX_NS) if "priority" in row else 0


def _prefix(row: dict[str, Any], most_tokens: int) -> PrefixHashes | None:
    if row.keys().isdisjoint(("hash_ids", "hash_block_tokens", "hash_tokens")):
        return None
    if "input_tok_ids" in row or "output_tok_ids" in row:
        raise ValueError("hash_ids and token ids exclude each other")
    ids = id_list(row, "hash_ids")
    block_tokens = integer(row, "hash_block_tokens", 1)
    tokens = integer(row, "hash_tokens", 0)
    if tokens > most_tokens:
        raise ValueError(f"hash_tokens is {tokens}, prompt and output have {most_tokens} tokens")
    if len(ids) != -(-tokens // block_tokens):
        need = -(-tokens // block_tokens)
        raise ValueError(f"hash_ids has {len(ids)} ids, {tokens} tokens need {need} (one per block of {block_tokens})")
    return PrefixHashes(ids, block_tokens, tokens)


def write(requests: Iterable[TraceRequest], hash_block_tokens: int = 0) -> Iterator[str]:
    """One line per request or session. A request_id is left out where the reader would give the same."""
    number = 0
    session: list[TraceRequest] = []
    for request in requests:
        if session and not request.call_index:
            yield _session_line(session, number)
            number += 1
            session = []
        if request.call_index is None:
            yield _line(_flat_row(request, number))
            number += 1
        else:
            session.append(request)
    if session:
        yield _session_line(session, number)


def _flat_row(request: TraceRequest, number: int) -> dict[str, Any]:
    row: dict[str, Any] = {"arrival_time_ns": request.arrival_ns}
    if request.request_id != str(number):
        row["request_id"] = request.request_id
    if request.session_id is not None:
        row["session_id"] = request.session_id
    if request.priority:
        row["priority"] = request.priority
    return row | _tokens(request)


def _session_line(calls: list[TraceRequest], number: int) -> str:
    first = calls[0]
    row: dict[str, Any] = {"session_id": first.session_id, "arrival_time_ns": first.arrival_ns}
    if first.priority:
        row["priority"] = first.priority
    subs = []
    for index, call in enumerate(calls):
        sub = _tokens(call)
        if index + 1 < len(calls):
            sub["tool_duration_ns"] = calls[index + 1].tool_duration_ns
        if call.request_id != f"{first.session_id}/{index}":
            sub["request_id"] = call.request_id
        subs.append(sub)
    return _line(row | {"sub_requests": subs})


def _tokens(request: TraceRequest) -> dict[str, Any]:
    row: dict[str, Any] = {"input_toks": request.prompt_tokens, "output_toks": request.output_tokens}
    if request.prompt_ids is not None:
        row["input_tok_ids"] = request.prompt_ids
    if request.output_ids is not None:
        row["output_tok_ids"] = request.output_ids
    if request.prefix is not None:
        row["hash_ids"] = request.prefix.ids
        row["hash_block_tokens"] = request.prefix.block_tokens
        row["hash_tokens"] = request.prefix.tokens
    return row


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"
