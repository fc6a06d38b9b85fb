"""What the subcommands of `trace` share: their common flags, reading inputs, writing outputs."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from fractions import Fraction

    from serving.traces import Reading, TraceRequest

_COUNT = click.IntRange(min=1)
_MOST_DIGITS = 18
_F = TypeVar("_F", bound=Callable[..., Any])
AS_IT_IS: Final = {"input_format": None, "on_bad_row": "error", "input_hash_block_tokens": None, "sort": False}


def reading(function: _F) -> _F:
    """Adds the flags of a command that reads traces."""
    for option in (
        click.option("--input-format", help="Read the input as this format instead of recognising it."),
        click.option(
            "--on-bad-row", type=click.Choice(["error", "skip"]), default="error", show_default=True, help="Bad rows."
        ),
        click.option(
            "--input-hash-block-tokens", type=_COUNT, help="Hash blocks of the input.  [default: the format's]"
        ),
        click.option("--sort", is_flag=True, help="Accept rows out of order and sort them by arrival, in memory."),
    ):
        function = option(function)
    return function


def writing(function: _F) -> _F:
    """Adds the flags of a command that writes a trace."""
    for option in (
        click.option("--output-format", default="jsonl", show_default=True, help="Format to write."),
        click.option("--hash-block-tokens", type=_COUNT, help="Hash blocks of the output.  [default: the format's]"),
    ):
        function = option(function)
    return function


class Input:
    """A trace file to read and how, and afterwards which rows were skipped."""

    def __init__(self, path: Path, reading: dict[str, Any]) -> None:
        self.path = path
        self._options = {
            "format_name": reading["input_format"],
            "on_bad_row": reading["on_bad_row"],
            "hash_block_tokens": reading["input_hash_block_tokens"],
            "ordered": not reading["sort"],
        }
        self._reading: Reading | None = None

    def requests(self) -> "Iterable[TraceRequest]":
        from serving.trace_tools.edit import by_arrival
        from serving.traces import open_trace

        self._reading = open_trace(self.path, sessions=True, **self._options)
        return self._reading.requests if self._options["ordered"] else by_arrival(self._reading.requests)

    @property
    def format(self) -> str:
        assert self._reading is not None
        return self._reading.format

    def report_skipped(self) -> int:
        """Says on stderr which rows were left out, and returns how many."""
        skipped = self._reading.skipped if self._reading else []
        for line, reason in skipped[:20]:
            click.echo(f"skipped {self.path}:{line}: {reason}", err=True)
        if len(skipped) > 20:
            click.echo(f"skipped {self.path}: {len(skipped) - 20} more bad rows", err=True)
        return len(skipped)


def write(
    inputs: list[Input], requests: "Iterable[TraceRequest]", output: Path, format_name: str, block_tokens: int | None
) -> None:
    """Writes the output and says on stderr what was written, skipped, lost and rounded."""
    from serving.trace_tools.write import write_trace

    check_output(output, [one.path for one in inputs])
    written = write_trace(output, requests, format_name, block_tokens)
    for one in inputs:
        one.report_skipped()
    for feature, times in sorted(written.lost.items()):
        click.echo(f"note: {format_name} rows have no place for {feature}: {times} requests lose theirs", err=True)
    if written.rounded:
        click.echo(f"note: {written.rounded} arrivals are rounded to what {format_name} rows can say", err=True)
    click.echo(f"{written.requests} requests written to {output}", err=True)


def check_output(output: Path, inputs: list[Path]) -> None:
    """Refuse a path that could not be written or would overwrite an input, before anything is read."""
    from profiler.core.errors import ConfigError

    if output.is_dir():
        raise ConfigError(f"{output} is a folder, a file name is needed")
    if output.resolve() in [one.resolve() for one in inputs]:
        raise ConfigError(f"{output} would overwrite an input")
    blocked = next((one for one in output.absolute().parents if one.exists() and not one.is_dir()), None)
    if blocked is not None:
        raise ConfigError(f"{output}: {blocked} is a file, not a folder")


def exact(flag: str, text: str | None) -> "Fraction | None":
    """A number above 0 as it stands in the text, None for None. Raises ConfigError naming the flag."""
    value = _number(flag, text)
    if value is not None and value <= 0:
        raise _not_a_number(flag, "above 0", text)
    return value


def seconds_ns(flag: str, text: str | None) -> int | None:
    """A number of seconds of at least 0 in nanoseconds, None for None. Raises ConfigError naming the flag."""
    from profiler.core.units import NS_PER_S

    value = _number(flag, text)
    if value is not None and value < 0:
        raise _not_a_number(flag, "of at least 0", text)
    return None if value is None else round(value * NS_PER_S)


def _number(flag: str, text: str | None) -> "Fraction | None":
    from decimal import Decimal, InvalidOperation
    from fractions import Fraction

    if text is None:
        return None
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise _not_a_number(flag, "", text) from None
    if not value.is_finite() or abs(value.adjusted()) > _MOST_DIGITS:
        raise _not_a_number(flag, "of a size that makes sense", text)
    return Fraction(value)


def _not_a_number(flag: str, which: str, text: str | None) -> Exception:
    from profiler.core.errors import ConfigError

    return ConfigError(f"{flag} must be a number{' ' if which else ''}{which}, found {text!r}")
