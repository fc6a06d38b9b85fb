"""Vidur's processed traces: CSV of arrivals in seconds and lengths.

arrived_at,num_prefill_tokens,num_decode_tokens
4.314579,396,109
"""

from collections.abc import Iterable, Iterator
from typing import Final

from profiler.core.units import NS_PER_S
from serving.traces import Row, TraceRequest
from serving.traces._rows import decimal_text
from serving.traces._table import Cells, columns_of, read_table, seconds, whole

NAME: Final = "vidur"
FIELDS: Final = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
OWN_IDS: Final = False
HASH_BLOCK_TOKENS: Final = None
KEEPS: Final[frozenset[str]] = frozenset()
RESOLUTION_NS: Final = 1
_NO_ARRIVALS: Final = ". A list of lengths gets arrivals from `trace generate --lengths FILE`."


def claims(first_line: str) -> bool:
    """True for a header with one of the columns."""
    return not columns_of(first_line).isdisjoint(FIELDS)


def read(lines: Iterable[tuple[int, str]], hash_block_tokens: int = 0) -> Iterator[tuple[int, Row]]:
    return read_table(lines, FIELDS, ("num_total_tokens", "pd_ratio"), _request, _NO_ARRIVALS)


def _request(cells: Cells, number: int) -> TraceRequest:
    request = TraceRequest(
        request_id=str(number),
        arrival_ns=seconds(cells, "arrived_at"),
        prompt_tokens=whole(cells, "num_prefill_tokens", 1),
        output_tokens=whole(cells, "num_decode_tokens", 1),
    )
    if "num_total_tokens" in cells:
        total = request.prompt_tokens + request.output_tokens
        if whole(cells, "num_total_tokens", 1) != total:
            raise ValueError(f"num_total_tokens is {cells['num_total_tokens']}, prefill and decode sum to {total}")
    return request


def write(requests: Iterable[TraceRequest], hash_block_tokens: int = 0) -> Iterator[str]:
    yield ",".join(FIELDS) + "\n"
    for request in requests:
        time = decimal_text(request.arrival_ns, NS_PER_S)
        yield f"{time},{request.prompt_tokens},{request.output_tokens}\n"
