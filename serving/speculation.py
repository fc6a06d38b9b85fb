"""Speculative decoding as a cluster file asks for it.

    speculative:
      tokens: 3                          drafts per request and step
      acceptance: [0.84, 0.66, 0.49]     share of verifications that accept the first, the first two, ... drafts
      acceptance_lengths: [1.84, 2.50, 2.99]      or: mean tokens per verification with 1, 2, ... drafts
      acceptance_file: acceptance.csv    or: rates by context, columns up_to_context_tokens,p1,p2,...
      verify_as: table                   or prefill, rows: see docs/guide/speculative.md
      seed: 0

Lengths are turned into rates as differences: with rates that do not depend on the number of drafts, the mean length
with i drafts is 1 + p1 + ... + pi.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import Field

from profiler.core.errors import ConfigError
from profiler.core.load import read_text
from profiler.core.types import ModelSpec
from serving.core.acceptance import Acceptance
from serving.core.walk import Speculation, VerifyAs
from serving.strict import Strict

MAX_TOKENS = 32
_EVERY_CONTEXT = 2**31 - 1
_NATIVE_QUERIES = (1, 2, 4)
_COLUMN = "up_to_context_tokens"


class SpeculativeFile(Strict):
    tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    acceptance: list[float] | None = None
    acceptance_lengths: list[float] | None = None
    acceptance_file: str | None = None
    verify_as: VerifyAs = "table"
    seed: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, slots=True)
class Verified:
    """What a run did: verifications[i] is the number of those that accepted i drafts."""

    speculation: Speculation
    verifications: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def mean_length(self) -> float | None:
        """Mean tokens per verification, the one that is no draft included; None without any."""
        count = sum(self.verifications)
        return 1 + sum(i * n for i, n in enumerate(self.verifications)) / count if count else None


def speculation_of(file: SpeculativeFile, folder: Path) -> Speculation:
    """Raises ConfigError naming key, file or line for rates that are none, rise, or are too few for the drafts."""
    given = [file.acceptance, file.acceptance_lengths, file.acceptance_file]
    if sum(one is not None for one in given) != 1:
        raise ConfigError("speculative: give one of acceptance, acceptance_lengths and acceptance_file")
    if file.acceptance_file is not None:
        ends, rows = _read_rates(folder / file.acceptance_file, file.tokens)
    elif file.acceptance_lengths is not None:
        lengths = [1.0, *file.acceptance_lengths]
        rows = [_rates([b - a for a, b in pairwise(lengths)], file.tokens, "speculative.acceptance_lengths")]
        ends = [_EVERY_CONTEXT]
    else:
        ends, rows = [_EVERY_CONTEXT], [_rates(file.acceptance or [], file.tokens, "speculative.acceptance")]
    return Speculation(file.tokens, Acceptance(tuple(ends), tuple(rows), file.seed), file.verify_as)


def check_speculation(one: Speculation, spec: ModelSpec, max_model_len: int) -> None:
    """Raises ConfigError where the model has no draft layer, or contexts get longer than the rates were given for."""
    if not spec.mtp_layers:
        raise ConfigError(f"speculative: {spec.name} has no multi-token prediction layers to draft with")
    last = one.acceptance.up_to_tokens[-1]
    if last < max_model_len:
        raise ConfigError(
            f"speculative.acceptance_file: rates end at contexts of {last} tokens, max_model_len is {max_model_len}; "
            "acceptance falls with the context, so give a row that reaches it"
        )


def kernel_notes(one: Speculation, spec: ModelSpec, architecture: str | None) -> tuple[str, ...]:
    """What the engine's kernels make of a verification, and how this run prices it."""
    queries = 1 + one.tokens
    notes = []
    if architecture == "sm90" and spec.mla is not None and spec.indexer is not None and queries not in _NATIVE_QUERIES:
        notes.append(
            f"the sm90 indexer takes 1, 2 or 4 query tokens per decode request natively; {queries} are split into rows"
        )
    if one.verify_as == "prefill":
        notes.append(f"verifications are priced as prefills of {queries} tokens, not from rows of their own")
    if one.verify_as == "rows":
        notes.append(f"verifications are priced as {queries} decode rows per request, not from rows of their own")
    if one.tokens > spec.mtp_layers:
        notes.append(f"{one.tokens} drafts come from {spec.mtp_layers} draft layer(s), run again for each further one")
    return tuple(notes)


def _rates(values: Sequence[float], tokens: int, where: str) -> tuple[float, ...]:
    """The first `tokens` values as rates. Later ones may not be needed, and are not judged."""
    if len(values) < tokens:
        raise ConfigError(f"{where} has {len(values)} values, {tokens} draft tokens need {tokens}")
    rates = [round(value, 12) for value in values[:tokens]]
    for position, (before, rate) in enumerate(pairwise([1.0, *rates]), start=1):
        if not math.isfinite(rate) or not 0 <= rate <= before:
            raise ConfigError(
                f"{where}: the rate of draft {position} is {rate:g}; it must lie between 0 and {before:g}, since a "
                "draft is accepted only behind the one before"
            )
    return tuple(rates)


def _read_rates(path: Path, tokens: int) -> tuple[list[int], list[tuple[float, ...]]]:
    lines = list(csv.reader(read_text(path).splitlines()))
    header = [name.strip() for name in lines[0]] if lines else []
    expected = [_COLUMN, *(f"p{i}" for i in range(1, len(header)))]
    if header != expected or len(header) < 2:
        raise ConfigError(f"{path}:1: the columns must be {_COLUMN},p1,p2,..., found {','.join(header)!r}")
    ends: list[int] = []
    rows: list[tuple[float, ...]] = []
    for number, fields in enumerate(lines[1:], start=2):
        where = f"{path}:{number}"
        if len(fields) != len(header):
            raise ConfigError(f"{where}: {len(fields)} fields, {len(header)} expected")
        try:
            end, values = int(fields[0]), [float(field) for field in fields[1:]]
        except ValueError:
            raise ConfigError(f"{where}: {','.join(fields)!r} is not a whole number followed by rates") from None
        if end <= (ends[-1] if ends else 0):
            raise ConfigError(f"{where}: {_COLUMN} must rise from row to row and be above 0, found {end}")
        ends.append(end)
        rows.append(_rates(values, tokens, where))
    if not rows:
        raise ConfigError(f"{path}: no rates")
    return ends, rows
