"""Request traces: one module per file format, recognised by the first line of the file.

A format module offers what `Format` lists. FIELDS are the names that a row of it is recognised by, for messages;
OWN_IDS says that rows may name themselves; HASH_BLOCK_TOKENS is the length of its hash blocks where the file does not
say it, None where it has none. `read` takes (line number from 1, text) of the non-blank lines and gives each row with
its line; a session is one row, a tuple of its calls. A format that can also be written has `write`, KEEPS (which of
FEATURES it has a place for) and RESOLUTION_NS (of its times).
"""

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol, cast

from profiler.core.errors import ConfigError, unknown

OnBadRow = Literal["error", "skip"]
FEATURES: Final = ("request ids", "priorities", "session names", "sessions", "token ids", "prefix hashes")


@dataclass(frozen=True, slots=True)
class PrefixHashes:
    """What the first `tokens` tokens of prompt and output hold: one id per block of `block_tokens`, the last perhaps
    part-filled. Equal ids mean equal content behind an equal prefix."""

    ids: tuple[int, ...]
    block_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. arrival_ns counts from the start of the trace, lengths are tokens.

    request_id: the trace's own, else the row number from 0 as text.
    prompt_ids, output_ids: token ids where the trace has them; they let requests share cached prefixes.
    priority: lower is more urgent; read by the priority policy alone.
    prefix: hashes in place of token ids.
    session_id: the conversation it belongs to.
    call_index: None for a request that arrives at arrival_ns. From 0 for the calls of a session, which stand one after
    another: call 0 arrives at arrival_ns, every later one is released `tool_duration_ns` after the call before it has
    finished, and its arrival_ns is that of call 0.
    """

    request_id: str
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    priority: int = 0
    prefix: PrefixHashes | None = None
    session_id: str | None = None
    call_index: int | None = None
    tool_duration_ns: int = 0


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is not a legal request, and why. Without `skippable` it is refused even where bad rows are skipped."""

    reason: str
    skippable: bool = True


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. skipped: (line, reason) of the bad rows left out on demand."""

    format: str
    requests: tuple[TraceRequest, ...]
    skipped: tuple[tuple[int, str], ...] = ()


Row = TraceRequest | tuple[TraceRequest, ...] | BadRow


class Format(Protocol):
    NAME: str
    FIELDS: tuple[str, ...]
    OWN_IDS: bool
    HASH_BLOCK_TOKENS: int | None

    def claims(self, first_line: str) -> bool: ...

    def read(self, lines: Iterable[tuple[int, str]], hash_block_tokens: int) -> Iterator[tuple[int, Row]]: ...


class WritableFormat(Format, Protocol):
    KEEPS: frozenset[str]
    RESOLUTION_NS: int

    def write(self, requests: Iterable[TraceRequest], hash_block_tokens: int) -> Iterator[str]: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """A trace file being read: the requests come one by one, `skipped` fills up as they do."""

    format: str
    requests: Iterator[TraceRequest]
    skipped: list[tuple[int, str]] = field(default_factory=list)


def formats() -> tuple[Format, ...]:
    """The format modules, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return tuple(cast(Format, importlib.import_module(f"{__name__}.{name}")) for name in names)


def format_named(name: str) -> Format:
    """Raises ConfigError for a name that is not one of the formats."""
    known = {module.NAME: module for module in formats()}
    if name not in known:
        raise unknown("trace format", name, known)
    return known[name]


def read_trace(
    path: Path,
    *,
    limit: int = 0,
    on_bad_row: OnBadRow = "error",
    max_prompt_tokens: int | None = None,
    sessions: bool = False,
) -> Trace:
    """The requests of a trace file, all of them or the first `limit` rows. Raises as `open_trace` does, and for a
    file with agentic sessions unless `sessions`."""
    reading = open_trace(
        path, limit=limit, on_bad_row=on_bad_row, max_prompt_tokens=max_prompt_tokens, sessions=sessions
    )
    return Trace(reading.format, tuple(reading.requests), tuple(reading.skipped))


def open_trace(
    path: Path,
    *,
    format_name: str | None = None,
    limit: int = 0,
    on_bad_row: OnBadRow = "error",
    max_prompt_tokens: int | None = None,
    hash_block_tokens: int | None = None,
    sessions: bool = False,
    ordered: bool = True,
) -> Reading:
    """A trace file, read row by row.

    format_name: a format to read it as, None to recognise it. limit: rows to read (a session is one), 0 for all.
    hash_block_tokens: length of the hash blocks where it is not the format's own. sessions: give the calls of agentic
    sessions instead of refusing them. ordered: refuse a row that arrives before the row above it.

    A row is bad when its format says so, when it arrives before the row above it, when its request_id was used
    before, or when its prompt is longer than `max_prompt_tokens`. Raises ConfigError naming file and line for the
    first bad row unless `on_bad_row` is "skip", and for a file that is missing, empty, of no known format, claimed by
    two formats, or without a single good row.
    """
    first = next(numbered_lines(path), None)
    if first is None:
        raise ConfigError(f"{path}: the file is empty")
    chosen = format_named(format_name) if format_name else _recognise(path, *first)
    if hash_block_tokens is not None and chosen.HASH_BLOCK_TOKENS is None:
        raise ConfigError(f"{path}: rows of the format {chosen.NAME} have no hash blocks whose length could be given")
    rows = chosen.read(numbered_lines(path), hash_block_tokens or chosen.HASH_BLOCK_TOKENS or 0)
    skipped: list[tuple[int, str]] = []
    strict = on_bad_row == "error"
    good = _checked(rows, path, skipped, _Checks(limit, strict, max_prompt_tokens, sessions, ordered, chosen.OWN_IDS))
    return Reading(chosen.NAME, good, skipped)


@dataclass(frozen=True, slots=True)
class _Checks:
    limit: int
    strict: bool
    max_prompt_tokens: int | None
    sessions: bool
    ordered: bool
    own_ids: bool


def _checked(
    rows: Iterator[tuple[int, Row]], path: Path, skipped: list[tuple[int, str]], checks: _Checks
) -> Iterator[TraceRequest]:
    seen: set[str] = set()
    good = 0
    last_ns = 0
    for line, row in rows:
        if checks.limit and good + len(skipped) == checks.limit:
            break
        calls = row if isinstance(row, tuple) else (row,)
        if isinstance(row, tuple) and not checks.sessions:
            raise ConfigError(f"{path}:{line}: {_NO_SESSIONS}")
        reason = row.reason if isinstance(row, BadRow) else None
        for call in calls:
            if reason is None and isinstance(call, TraceRequest):
                reason = _misfit(call, last_ns, seen, checks)
        if reason is None:
            good += 1
            for call in calls:
                assert isinstance(call, TraceRequest)
                last_ns = call.arrival_ns
                if checks.own_ids:
                    seen.add(call.request_id)
                yield call
        elif checks.strict or (isinstance(row, BadRow) and not row.skippable):
            raise ConfigError(f"{path}:{line}: {reason}")
        else:
            skipped.append((line, reason))
    if not good:
        detail = f": all {len(skipped)} are bad, the first in line {skipped[0][0]}: {skipped[0][1]}" if skipped else ""
        raise ConfigError(f"{path}: no usable rows{detail}")


_NO_SESSIONS: Final = (
    "a line of an agentic session; sessions, whose calls wait for the calls before them, are replayed only by "
    "`replay`, give one line per request here"
)


def _misfit(row: TraceRequest, last_ns: int, seen: set[str], checks: _Checks) -> str | None:
    if checks.ordered and row.arrival_ns < last_ns:
        return (
            f"arrives at {row.arrival_ns} ns, before the row above it ({last_ns} ns); rows must be in order of arrival"
        )
    if row.request_id in seen:
        return f"request_id {row.request_id!r} appears twice"
    if checks.max_prompt_tokens is not None and row.prompt_tokens > checks.max_prompt_tokens:
        return f"a prompt of {row.prompt_tokens} tokens exceeds max_model_len {checks.max_prompt_tokens}"
    return None


def _recognise(path: Path, line: int, first_line: str) -> Format:
    claims = [module for module in formats() if module.claims(first_line)]
    if len(claims) > 1:
        raise ConfigError(f"{path}: more than one format claims it: {', '.join(module.NAME for module in claims)}")
    if not claims:
        known = "; ".join(f"{module.NAME} ({', '.join(module.FIELDS)})" for module in formats())
        shown = first_line.strip()[:80]
        raise ConfigError(f"{path}:{line}: no known trace format, the row starts with {shown!r}. Known: {known}.")
    return claims[0]


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The non-blank lines of a UTF-8 file with their numbers from 1. Raises ConfigError for one that cannot be read."""
    try:
        with path.open(encoding="utf-8-sig") as stream:
            yield from ((number, line) for number, line in enumerate(stream, 1) if line.strip())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, a trace file is needed") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.object[error.start]:#04x})") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
