"""Writing a trace in any format, saying what the format has no place for."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from profiler.core.errors import ConfigError, unknown
from profiler.core.load import atomic_write
from serving.traces import FEATURES, TraceRequest, WritableFormat, formats


@dataclass(frozen=True, slots=True)
class Written:
    """lost: what the format has no place for, and in how many requests. rounded: arrivals that are not exact."""

    requests: int
    lost: Counter[str] = field(default_factory=Counter)
    rounded: int = 0


def writable(name: str) -> WritableFormat:
    """Raises ConfigError for a name that is not one of the formats that can be written."""
    known = {module.NAME: cast(WritableFormat, module) for module in formats() if hasattr(module, "write")}
    if name not in known:
        raise unknown("output format", name, known)
    return known[name]


def write_trace(
    path: Path, requests: Iterable[TraceRequest], format_name: str, hash_block_tokens: int | None = None
) -> Written:
    """Writes the file whole or not at all.

    Raises ConfigError for an unknown format, for hash blocks in a format that has none, for agentic sessions in a
    format that has no place for them, and when there is no request to write.
    """
    chosen = writable(format_name)
    if hash_block_tokens is not None and chosen.HASH_BLOCK_TOKENS is None:
        raise ConfigError(f"{path}: rows of the format {format_name} are written without hash blocks of a given length")
    lost: Counter[str] = Counter()
    counts = {"requests": 0, "rounded": 0}
    watched = _watched(requests, chosen, lost, counts)
    with atomic_write(path) as stream:
        stream.writelines(chosen.write(watched, hash_block_tokens or chosen.HASH_BLOCK_TOKENS or 0))
        if not counts["requests"]:
            raise ConfigError(f"{path}: not written, no request is left")
    return Written(counts["requests"], lost, counts["rounded"])


def _watched(
    requests: Iterable[TraceRequest], chosen: WritableFormat, lost: Counter[str], counts: dict[str, int]
) -> Iterator[TraceRequest]:
    missing = [feature for feature in FEATURES if feature not in chosen.KEEPS]
    for number, request in enumerate(requests):
        if request.call_index is not None and "sessions" in missing:
            keep = ", ".join(module.NAME for module in formats() if "sessions" in getattr(module, "KEEPS", ()))
            raise ConfigError(
                f"request {request.request_id!r} is a call of an agentic session, for which rows of the format "
                f"{chosen.NAME} have no place; formats that do: {keep}"
            )
        for feature in missing:
            if _has(request, feature, number):
                lost[feature] += 1
        counts["requests"] += 1
        counts["rounded"] += request.arrival_ns % chosen.RESOLUTION_NS != 0
        yield request


def _has(request: TraceRequest, feature: str, number: int) -> bool:
    if feature == "request ids":
        return request.request_id != str(number)
    if feature == "priorities":
        return request.priority != 0
    if feature == "session names":
        return request.session_id is not None
    if feature == "token ids":
        return request.prompt_ids is not None
    return feature == "prefix hashes" and request.prefix is not None
