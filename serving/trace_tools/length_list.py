"""Lists of lengths: CSV with two columns of tokens, from any source, without arrivals."""

from pathlib import Path

from profiler.core.errors import ConfigError
from serving.traces import BadRow, TraceRequest, numbered_lines
from serving.traces._table import Cells, columns_of, read_table, whole

_PAIRS = (("prompt_tokens", "output_tokens"), ("num_prefill_tokens", "num_decode_tokens"))
_EXTRA = ("num_total_tokens", "pd_ratio")


def read_length_list(path: Path) -> list[tuple[int, int]] | None:
    """The (prompt, output) tokens of a list without arrivals; None where the file is something else.

    The columns are prompt_tokens and output_tokens, or those of Vidur's lists. Raises ConfigError with file and line
    for a bad row.
    """
    first = next(numbered_lines(path), None)
    header = columns_of(first[1]) if first else frozenset[str]()
    pair = next((pair for pair in _PAIRS if header.issuperset(pair)), None)
    if pair is None or "arrived_at" in header:
        return None
    found: list[tuple[int, int]] = []

    def request(cells: Cells, number: int) -> TraceRequest:
        return TraceRequest(str(number), 0, whole(cells, pair[0], 1), whole(cells, pair[1], 1))

    for line, row in read_table(numbered_lines(path), pair, _EXTRA if pair == _PAIRS[1] else (), request):
        if isinstance(row, BadRow):
            raise ConfigError(f"{path}:{line}: {row.reason}")
        assert isinstance(row, TraceRequest)
        found.append((row.prompt_tokens, row.output_tokens))
    if not found:
        raise ConfigError(f"{path}: no lengths below the header")
    return found
