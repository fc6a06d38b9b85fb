"""BurstGPT: CSV of calls to two GPT services.

    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
    5,ChatGPT,472,18,490,Conversation log

Newer files add `Session ID` and `Elapsed time`. Timestamp is seconds. A call that failed has 0 response tokens and is a
bad row.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from profiler.core.units import NS_PER_S
from serving.traces import Row, TraceRequest
from serving.traces._rows import decimal_text
from serving.traces._table import Cells, columns_of, read_table, seconds, whole

NAME: Final = "burstgpt"
FIELDS: Final = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
OWN_IDS: Final = False
HASH_BLOCK_TOKENS: Final = None
KEEPS: Final = frozenset({"session names"})
RESOLUTION_NS: Final = 1
_OPTIONAL: Final = ("Session ID", "Elapsed time")


def claims(first_line: str) -> bool:
    """True for a header with one of the columns; `Model` alone could be any table's."""
    return not columns_of(first_line).isdisjoint(set(FIELDS) - {"Model"})


def read(lines: Iterable[tuple[int, str]], hash_block_tokens: int = 0) -> Iterator[tuple[int, Row]]:
    return read_table(lines, FIELDS, _OPTIONAL, _request)


def _request(cells: Cells, number: int) -> TraceRequest:
    arrival_ns = seconds(cells, "Timestamp")
    prompt_tokens = whole(cells, "Request tokens", 1)
    output_tokens = whole(cells, "Response tokens", 0)
    if not output_tokens:
        raise ValueError("Response tokens is 0: a call that failed")
    if whole(cells, "Total tokens", 1) != prompt_tokens + output_tokens:
        raise ValueError(
            f"Total tokens is {cells['Total tokens']}, request and response sum to {prompt_tokens + output_tokens}"
        )
    return TraceRequest(
        str(number), arrival_ns, prompt_tokens, output_tokens, session_id=cells.get("Session ID", "").strip() or None
    )


def write(requests: Iterable[TraceRequest], hash_block_tokens: int = 0) -> Iterator[str]:
    """The rows with `Session ID`, empty for a request without a session; the model is not known and stands as `-`."""
    yield "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    for request in requests:
        session = request.session_id or ""
        if any(one in session for one in ',"\r\n'):
            session = '"' + session.replace('"', '""').replace("\r", " ").replace("\n", " ") + '"'
        time = decimal_text(request.arrival_ns, NS_PER_S)
        total = request.prompt_tokens + request.output_tokens
        yield f"{time},{session},-,{request.prompt_tokens},{request.output_tokens},{total},API log\n"
