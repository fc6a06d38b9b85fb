"""JSON lines: one request per line.

    {"input_toks": 120, "output_toks": 30, "arrival_time_ns": 5000000,
     "input_tok_ids": [...], "output_tok_ids": [...], "request_id": "a", "priority": 0}

The second line is optional; of two priorities the lower is more urgent.

Lines of agentic sessions (`sub_requests`) are recognised and refused: they are not replayed.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from profiler.core.errors import nearest
from serving.traces import BadRow, TraceRequest

NAME: Final = "jsonl"
FIELDS: Final = ("input_toks", "output_toks", "arrival_time_ns")
_OPTIONAL: Final = ("input_tok_ids", "output_tok_ids", "request_id", "priority")
_SESSION: Final = ("sub_requests", "session_id")
_NO_SESSIONS: Final = (
    "a line of an agentic session (sub_requests); sessions are not supported, "
    f"give one line per request with {', '.join(FIELDS)}"
)
_MAX_NS: Final = 2**63 - 1


def claims(first_line: str) -> bool:
    """True for a JSON object with one of the fields, and for a line that looks like an object but does not parse."""
    if not first_line.lstrip().startswith("{"):
        return False
    try:
        row = json.loads(first_line)
    except (ValueError, RecursionError):
        return any(f'"{field}"' in first_line for field in FIELDS + _SESSION)
    return not row.keys().isdisjoint(FIELDS + _SESSION)


def read(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, TraceRequest | BadRow]]:
    for number, (line, text) in enumerate(lines):
        try:
            row = _object(text)
            yield line, BadRow(_NO_SESSIONS, skippable=False) if _is_session(row) else _request(row, number)
        except ValueError as error:
            yield line, BadRow(str(error))


def _is_session(row: dict[str, Any]) -> bool:
    return not row.keys().isdisjoint(_SESSION)


def _object(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, found {type(row).__name__}")
    return row


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return row


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number of JSON")


def _request(row: dict[str, Any], number: int) -> TraceRequest:
    for key in row:
        if key not in FIELDS + _OPTIONAL:
            hint = nearest(key, FIELDS + _OPTIONAL)
            raise ValueError(
                f"unknown key {key!r}"
                + (f"; did you mean {hint!r}?" if hint else "")
                + f" Known: {', '.join(FIELDS + _OPTIONAL)}."
            )
    prompt_tokens = _integer(row, "input_toks", 1)
    output_tokens = _integer(row, "output_toks", 1)
    return TraceRequest(
        request_id=_request_id(row, number),
        arrival_ns=_integer(row, "arrival_time_ns", 0),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_ids=_ids(row, "input_tok_ids", prompt_tokens),
        output_ids=_ids(row, "output_tok_ids", output_tokens),
        priority=_integer(row, "priority", -_MAX_NS) if "priority" in row else 0,
    )


def _integer(row: dict[str, Any], key: str, least: int) -> int:
    if key not in row:
        raise ValueError(f"{key} is missing")
    value = row[key]
    if type(value) is not int or not least <= value <= _MAX_NS:
        raise ValueError(f"{key} must be an integer of at least {least}, found {json.dumps(value)[:40]}")
    return value


def _ids(row: dict[str, Any], key: str, length: int) -> tuple[int, ...] | None:
    if key not in row:
        return None
    ids = row[key]
    if not isinstance(ids, list) or any(type(one) is not int or one < 0 for one in ids):
        raise ValueError(f"{key} must be a list of integers of at least 0")
    if len(ids) != length:
        raise ValueError(f"{key} has {len(ids)} ids for {length} tokens")
    return tuple(ids)


def _request_id(row: dict[str, Any], number: int) -> str:
    value = row.get("request_id", number)
    if type(value) is int or (isinstance(value, str) and value.strip()):
        return str(value)
    raise ValueError(f"request_id must be a non-empty text or an integer, found {json.dumps(value)[:40]}")
