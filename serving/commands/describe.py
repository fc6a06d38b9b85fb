"""`python -m serving describe`: a workload as a description that can be shared."""

from pathlib import Path
from typing import Literal

import click

_FILE = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)


@click.group()
def command() -> None:
    """Fit a workload description to a trace, or make a trace of a description."""


@command.command()
@click.argument("trace", type=_FILE)
@click.argument("output", type=_FILE)
@click.option(
    "--lengths", "form", type=click.Choice(["empirical", "lognormal"]), default="empirical", show_default=True
)
@click.option("--profile-parts", "parts", type=_COUNT, help="Fit a rate that varies over this many parts of the span.")
@click.option("--on-bad-row", type=click.Choice(["error", "skip"]), default="error", show_default=True)
def fit(
    trace: Path,
    output: Path,
    form: Literal["empirical", "lognormal"],
    parts: int | None,
    on_bad_row: Literal["error", "skip"],
) -> None:
    """Write the description of TRACE to OUTPUT (.yaml): arrivals, lengths, shared prefixes, sessions.

    It holds quantiles rounded to two digits, no rows, ids or contents of the trace.
    """
    import yaml

    from profiler.core.errors import ConfigError
    from profiler.core.load import atomic_write
    from serving.trace_tools.cli import check_output
    from serving.traces import open_trace
    from serving.workload_description import fit as fitted
    from serving.workload_description import is_description

    if not is_description(output):
        raise ConfigError(f"{output}: a description is YAML, its name must end in .yaml")
    check_output(output, [trace])
    reading = open_trace(trace, sessions=True, on_bad_row=on_bad_row)
    described = fitted(reading.requests, form=form, parts=parts or 0)
    for line, reason in reading.skipped[:20]:
        click.echo(f"skipped {trace}:{line}: {reason}", err=True)
    with atomic_write(output) as stream:
        yaml.safe_dump(described, stream, sort_keys=False, default_flow_style=None, width=110)


@command.command()
@click.argument("description", type=_FILE)
@click.argument("output", type=_FILE)
@click.option("--requests", "rows", type=_COUNT, required=True, help="Requests, or sessions.")
@click.option("--seed", type=click.IntRange(min=0), required=True, help="Equal seeds give equal traces.")
@click.option("--rate", "rate_per_s", type=float, help="Mean rate.  [default: the description's]")
@click.option("--output-format", default="jsonl", show_default=True, help="Format to write.")
def make(description: Path, output: Path, rows: int, seed: int, rate_per_s: float | None, output_format: str) -> None:
    """Write a trace of DESCRIPTION to OUTPUT."""
    from profiler.core.errors import ConfigError
    from serving.trace_tools.cli import check_output
    from serving.trace_tools.write import write_trace
    from serving.workload_description import read_description, requests_of

    if rate_per_s is not None and not 0 < rate_per_s <= 1e9:
        raise ConfigError(f"--rate is {rate_per_s}; it must be above 0")
    check_output(output, [description])
    written = write_trace(output, requests_of(read_description(description), rows, seed, rate_per_s), output_format)
    click.echo(f"{written.requests} requests written to {output}", err=True)
