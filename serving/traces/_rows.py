"""Reading and checking the rows of JSON-lines traces. Every check raises ValueError with what is legal."""

import json
import re
from decimal import Decimal
from typing import Any, Final

from profiler.core.errors import nearest
from profiler.core.units import NS_PER_S

MAX_NS: Final = 2**63 - 1
_KEY: Final = re.compile(r'"(\w+)"\s*:')


def keys_of(first_line: str) -> frozenset[str]:
    """The keys of a row, for recognising its format; of a row that does not parse, whatever looks like a key."""
    if not first_line.lstrip().startswith("{"):
        return frozenset()
    try:
        return frozenset(json.loads(first_line))
    except (ValueError, RecursionError):
        return frozenset(_KEY.findall(first_line))


def parsed(text: str) -> dict[str, Any]:
    """The JSON object of one line. Numbers with a fraction or an exponent become Decimal, so that none is rounded."""
    try:
        row = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=Decimal)
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


def shown(value: Any) -> str:
    """A value as it stood in the file, cut to 40 characters."""
    return json.dumps(value, default=str)[:40] if not isinstance(value, Decimal) else str(value)[:40]


def check_keys(row: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in row:
        if key not in known:
            hint = nearest(key, known)
            suggestion = f"; did you mean {hint!r}?" if hint else ""
            raise ValueError(f"unknown key {key!r}{suggestion} Known: {', '.join(known)}.")


def integer(row: dict[str, Any], key: str, least: int, unit: str = "") -> int:
    """row[key], an integer of at least `least` and below 2**63. `unit` is named in the message."""
    if key not in row:
        raise ValueError(f"{key} is missing")
    value = row[key]
    if type(value) is not int or not least <= value <= MAX_NS:
        of = f" of {unit}" if unit else ""
        raise ValueError(f"{key} must be an integer{of} of at least {least}, found {shown(value)}")
    return value


def nanoseconds(row: dict[str, Any], key: str, ns_per_unit: int, unit: str) -> int:
    """row[key], a number of `unit` of at least 0, in nanoseconds; beyond nine digits of a second to the nearest one."""
    if key not in row:
        raise ValueError(f"{key} is missing")
    value = row[key]
    if type(value) is int or isinstance(value, Decimal):
        ns = to_ns(Decimal(value), ns_per_unit)
        if ns is not None:
            return ns
    raise ValueError(f"{key} must be a number of {unit} of at least 0, found {shown(value)}")


def to_ns(value: Decimal, ns_per_unit: int = NS_PER_S) -> int | None:
    """A time in nanoseconds, None for one that is negative, not finite or beyond 2**63."""
    if not value.is_finite() or value < 0 or value.adjusted() > 19:
        return None
    ns = int((value * ns_per_unit).to_integral_value())
    return ns if ns <= MAX_NS else None


def decimal_text(ns: int, ns_per_unit: int) -> str:
    """Nanoseconds as an exact decimal number of a unit of 10**k ns, without trailing zeros."""
    whole, rest = divmod(ns, ns_per_unit)
    digits = len(str(ns_per_unit)) - 1
    fraction = f"{rest:0{digits}d}".rstrip("0")
    return f"{whole}.{fraction}" if fraction else str(whole)


def in_units(ns: int, ns_per_unit: int) -> int:
    """Nanoseconds in whole units, the nearest, a half upwards."""
    return (2 * ns + ns_per_unit) // (2 * ns_per_unit)


def token_ids(row: dict[str, Any], key: str, length: int) -> tuple[int, ...] | None:
    """row[key], one id of at least 0 for each of `length` tokens; None where the key is absent."""
    if key not in row:
        return None
    ids = id_list(row, key)
    if len(ids) != length:
        raise ValueError(f"{key} has {len(ids)} ids for {length} tokens")
    return ids


def id_list(row: dict[str, Any], key: str) -> tuple[int, ...]:
    if key not in row:
        raise ValueError(f"{key} is missing")
    ids = row[key]
    if not isinstance(ids, list) or any(type(one) is not int or one < 0 for one in ids):
        raise ValueError(f"{key} must be a list of integers of at least 0")
    return tuple(ids)


def name(row: dict[str, Any], key: str) -> str | None:
    """row[key], a non-empty text or an integer, as text; None where the key is absent."""
    if key not in row:
        return None
    value = row[key]
    if type(value) is int or (isinstance(value, str) and value.strip()):
        return str(value)
    raise ValueError(f"{key} must be a non-empty text or an integer, found {shown(value)}")
