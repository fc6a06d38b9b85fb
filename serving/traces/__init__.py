"""Request traces: one module per file format, recognised by the first line of the file.

A format module offers NAME, FIELDS (the names that a row of it is recognised by, for messages),
`claims(first_line: str) -> bool` and `read(lines) -> Iterator[tuple[int, TraceRequest | BadRow]]`, where `lines` are
(line number from 1, text) of the non-blank lines and each row is given with its line.
"""

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

from profiler.core.errors import ConfigError

OnBadRow = Literal["error", "skip"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. arrival_ns counts from the start of the trace, lengths are tokens.

    request_id: the trace's own, else the row number from 0 as text.
    prompt_ids, output_ids: token ids where the trace has them; they let requests share cached prefixes.
    priority: lower is more urgent; read by the priority policy alone.
    """

    request_id: str
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    priority: int = 0


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


class Format(Protocol):
    NAME: str
    FIELDS: tuple[str, ...]

    def claims(self, first_line: str) -> bool: ...

    def read(self, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, TraceRequest | BadRow]]: ...


def formats() -> tuple[Format, ...]:
    """The format modules, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return tuple(cast(Format, importlib.import_module(f"{__name__}.{name}")) for name in names)


def read_trace(
    path: Path, *, limit: int = 0, on_bad_row: OnBadRow = "error", max_prompt_tokens: int | None = None
) -> Trace:
    """The requests of a trace file, all of them or the first `limit` rows.

    A row is bad when its format says so, when it arrives before the row above it, when its request_id was used
    before, or when its prompt is longer than `max_prompt_tokens`. Raises ConfigError naming file and line for the
    first bad row unless `on_bad_row` is "skip", and for a file that is missing, empty, of no known format, claimed by
    two formats, or without a single good row.
    """
    chosen = _recognise(path)
    requests: list[TraceRequest] = []
    skipped: list[tuple[int, str]] = []
    seen: set[str] = set()
    for line, row in chosen.read(_lines(path)):
        if limit and len(requests) + len(skipped) == limit:
            break
        reason = row.reason if isinstance(row, BadRow) else _misfit(row, requests, seen, max_prompt_tokens)
        if isinstance(row, TraceRequest) and reason is None:
            seen.add(row.request_id)
            requests.append(row)
        elif on_bad_row == "error" or (isinstance(row, BadRow) and not row.skippable):
            raise ConfigError(f"{path}:{line}: {reason}")
        else:
            skipped.append((line, str(reason)))
    if not requests:
        detail = f": all {len(skipped)} are bad, the first in line {skipped[0][0]}: {skipped[0][1]}" if skipped else ""
        raise ConfigError(f"{path}: no usable rows{detail}")
    return Trace(chosen.NAME, tuple(requests), tuple(skipped))


def _misfit(row: TraceRequest, before: list[TraceRequest], seen: set[str], max_prompt_tokens: int | None) -> str | None:
    if before and row.arrival_ns < before[-1].arrival_ns:
        return (
            f"arrives at {row.arrival_ns} ns, before the row above it ({before[-1].arrival_ns} ns); "
            "rows must be in order of arrival"
        )
    if row.request_id in seen:
        return f"request_id {row.request_id!r} appears twice"
    if max_prompt_tokens is not None and row.prompt_tokens > max_prompt_tokens:
        return f"a prompt of {row.prompt_tokens} tokens exceeds max_model_len {max_prompt_tokens}"
    return None


def _recognise(path: Path) -> Format:
    first = next(_lines(path), None)
    if first is None:
        raise ConfigError(f"{path}: the file is empty")
    claims = [module for module in formats() if module.claims(first[1])]
    if len(claims) > 1:
        raise ConfigError(f"{path}: more than one format claims it: {', '.join(module.NAME for module in claims)}")
    if not claims:
        known = "; ".join(f"{module.NAME} ({', '.join(module.FIELDS)})" for module in formats())
        shown = first[1].strip()[:80]
        raise ConfigError(f"{path}:{first[0]}: no known trace format, the row starts with {shown!r}. Known: {known}.")
    return claims[0]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as stream:
            yield from ((number, line) for number, line in enumerate(stream, 1) if line.strip())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, a trace file is needed") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.object[error.start]:#04x})") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
