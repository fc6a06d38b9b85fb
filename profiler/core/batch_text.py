"""A batch of unequal requests as two short texts, for the key columns of `skew.csv`.

Prefills are written `<count>x<chunk>@<context>`, decode requests `<count>x<keys>` (the new token included), groups of
equal requests once, the longest first, separated by blanks: `1x4096@0 3x512@32768` and `1x65536 15x4096`. A side
without requests is `none`.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from profiler.core.errors import ConfigError

NONE: Final = "none"
_PREFILL: Final = re.compile(r"([1-9]\d*)x([1-9]\d*)@(\d+)")
_DECODE: Final = re.compile(r"([1-9]\d*)x([1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Batch:
    """prefills: (chunk, context) tokens of each request; decode_keys: keys visible to each decode request."""

    prefills: tuple[tuple[int, int], ...]
    decode_keys: tuple[int, ...]


def batch_text(requests: Sequence[tuple[int, int]]) -> tuple[str, str]:
    """(prefills, decodes) of a shot's (new_tokens, context_tokens) requests; one new token behind a context decodes."""
    prefills = Counter((new, context) for new, context in requests if new > 1 or not context)
    decodes = Counter(context + 1 for new, context in requests if new == 1 and context)
    return (
        " ".join(f"{prefills[p]}x{p[0]}@{p[1]}" for p in sorted(prefills, reverse=True)) or NONE,
        " ".join(f"{decodes[keys]}x{keys}" for keys in sorted(decodes, reverse=True)) or NONE,
    )


def parse_batch(prefills: str, decodes: str, where: str = "batch") -> Batch:
    """The requests behind the two texts. Raises ConfigError naming `where` for a text of another form."""
    return Batch(
        tuple(
            (int(found[2]), int(found[3])) for found in _groups(_PREFILL, prefills, where) for _ in range(int(found[1]))
        ),
        tuple(int(found[2]) for found in _groups(_DECODE, decodes, where) for _ in range(int(found[1]))),
    )


def _groups(form: re.Pattern[str], text: str, where: str) -> list[re.Match[str]]:
    parts = [] if text == NONE else text.split(" ")
    found = [form.fullmatch(part) for part in parts]
    if text == "" or None in found:
        raise ConfigError(f"{where}: {text!r} is not a batch; groups are written 2x512@4096 (prefills) or 31x1024")
    return [match for match in found if match is not None]
