"""A list of lengths with the arrivals that it is to have.

    # arrivals=gamma rate_per_s=8 burstiness=0.5 seed=1
    prompt_tokens,output_tokens
    120,30

arrivals: poisson, gamma, constant (these need rate_per_s) or at-once; burstiness belongs to gamma alone; seed is needed
where something is drawn. The same line gives the same arrivals. A row without output tokens, a negative or a fractional
number is bad; it takes its arrival with it.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

from serving.traces import BadRow, Row, TraceRequest
from serving.traces._arrivals import PROCESSES, Arrivals, problem, times_ns
from serving.traces._table import Cells, columns_of, read_table, whole

NAME: Final = "lengths"
FIELDS: Final = ("prompt_tokens", "output_tokens")
OWN_IDS: Final = False
HASH_BLOCK_TOKENS: Final = None
_NEEDED: Final = {
    "poisson": {"rate_per_s", "seed"},
    "gamma": {"rate_per_s", "burstiness", "seed"},
    "constant": {"rate_per_s"},
    "at-once": set[str](),
}
_EXAMPLE: Final = "'# arrivals=poisson rate_per_s=8 seed=0'"


def claims(first_line: str) -> bool:
    """True for the line of the arrivals, and for the header of a list that lacks it."""
    return _declares(first_line) or not columns_of(first_line).isdisjoint(FIELDS)


def _declares(line: str) -> bool:
    return line.lstrip().startswith("#") and "arrivals" in line


def read(lines: Iterable[tuple[int, str]], hash_block_tokens: int = 0) -> Iterator[tuple[int, Row]]:
    rows = iter(lines)
    line, first = next(rows)
    try:
        if not _declares(first):
            raise ValueError(
                f"a list of lengths has no arrivals; give them in a line like {_EXAMPLE} above the header, "
                "or make a trace with `trace generate --lengths FILE`"
            )
        times = times_ns(_arrivals(first))
    except ValueError as error:
        yield line, BadRow(str(error), skippable=False)
        return
    header = next(rows, None)
    if header is None:
        yield line, BadRow(f"the header {','.join(FIELDS)} is missing below", skippable=False)
        return
    for line, row in read_table(chain((header,), rows), FIELDS, (), _lengths):
        arrival_ns = next(times)
        if isinstance(row, TraceRequest):
            row = TraceRequest(row.request_id, arrival_ns, row.prompt_tokens, row.output_tokens)
        yield line, row


def _lengths(cells: Cells, number: int) -> TraceRequest:
    return TraceRequest(str(number), 0, whole(cells, "prompt_tokens", 1), whole(cells, "output_tokens", 1))


def _arrivals(line: str) -> Arrivals:
    words = line.strip().lstrip("#").split()
    pairs = [word.partition("=") for word in words]
    given = {key: value for key, _, value in pairs}
    process = given.pop("arrivals", "")
    if process not in PROCESSES or len(given) + 1 < len(pairs):
        raise ValueError(f"the arrivals must be a line like {_EXAMPLE} with one of {', '.join(PROCESSES)}")
    if given.keys() != _NEEDED[process]:
        needed = ", ".join(sorted(_NEEDED[process])) or "nothing else"
        raise ValueError(f"arrivals={process} needs {needed}; found {', '.join(sorted(given)) or 'nothing'}")
    try:
        arrivals = Arrivals(
            process,
            float(given.get("rate_per_s", 1)),
            int(given.get("seed", 0)),
            float(given.get("burstiness", 1)),
        )
    except ValueError:
        raise ValueError(f"rate_per_s and burstiness must be numbers and seed an integer: {line.strip()!r}") from None
    if wrong := problem(arrivals):
        raise ValueError(wrong)
    return arrivals
