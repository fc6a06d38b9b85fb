"""The one exception tree. Every error that a user can cause carries its exit code (docs/reference/exit-codes.md)."""

from collections.abc import Iterable
from difflib import get_close_matches


class SparsightError(Exception):
    """Base of all errors that the command line prints as one message."""

    exit_code = 1


class ConfigError(SparsightError):
    """Bad input: a flag, a configuration file, a model, a GPU name or a trace row."""

    exit_code = 2


class CoverageError(SparsightError):
    """A shape or a kernel that the tables do not cover."""

    exit_code = 3


class ContractError(SparsightError):
    """A bundle whose contract, KV layout or checksum disagrees with what is asked of it."""

    exit_code = 4


class CapacityError(SparsightError):
    """The model, its KV cache or a request does not fit."""

    exit_code = 5


class AcquisitionError(SparsightError):
    """Measuring failed: wrong card, missing engine, failed kernels."""

    exit_code = 6


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name` (case-insensitive), or None when none is close."""
    by_folded = {k.casefold(): k for k in known}
    match = get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.4)
    return by_folded[match[0]] if match else None


def unknown(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """A ConfigError that lists what is known and proposes the nearest name.

    `kind` is the noun of the message, such as "model", "GPU" or "key".
    """
    names = sorted(known)
    hint = nearest(name, names)
    suggestion = f"; did you mean {hint!r}?" if hint else "."
    return ConfigError(f"unknown {kind} {name!r}{suggestion} Known: {', '.join(names) or 'none'}.")
