"""`python -m serving sweep`: run every legal point of a sweep file."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

if TYPE_CHECKING:
    from serving.sweeps.run import Progress

_FILE = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("spec", type=_FILE)
@click.option("--output", "folder", type=_FILE, required=True, help="Folder of results; an unfinished one is resumed.")
@click.option("--workers", type=_COUNT, help="Points at a time.  [default: the CPUs]")
@click.option("--executor", type=click.Choice(["process", "ray"]), default="process", show_default=True)
@click.option("--ray-address", help="Ray cluster to use.  [default: one on this machine]")
@click.option("--format", "style", type=click.Choice(["csv", "parquet"]), default="csv", show_default=True)
@click.option("--prices", type=_FILE, help="Price file; adds cost columns.")
def command(
    spec: Path,
    folder: Path,
    workers: int | None,
    executor: Literal["process", "ray"],
    ray_address: str | None,
    style: str,
    prices: Path | None,
) -> None:
    """Run the points of SPEC (see docs/guide/sweep.md) and write one table.

    Layouts that break a rule or do not fit become rows with the reason. Finished points are kept in the folder as they
    finish, so that the same command goes on after a crash.

    When no point is done (in a screen: nothing fits) the table is written all the same, and the exit code is that of
    the refusals: 5 where nothing fits, 3 where tables lack, 4 where they are refused, 2 otherwise or where points
    differ, 1 when workers failed.
    """
    from profiler.core.errors import ConfigError
    from serving.pricing import read_prices
    from serving.report.load import doubts
    from serving.report.terminal import print_results
    from serving.sweeps.refusal import nothing_ran
    from serving.sweeps.run import run_sweep
    from serving.sweeps.spec import read_sweep

    if ray_address and executor != "ray":
        raise ConfigError("--ray-address goes with --executor ray")
    paid = read_prices(prices) if prices else None
    with progress_bar("points") as progress:
        outcome = run_sweep(
            read_sweep(spec), folder, workers=workers, executor=executor, ray_address=ray_address, style=style,
            prices=paid, progress=progress,
        )  # fmt: skip
    click.echo(f"{outcome.ran} points run, {outcome.resumed} found finished; table in {outcome.table}", err=True)
    print_results(outcome.rows, sys.stdout, doubts(outcome.rows))
    if error := nothing_ran(outcome.rows):
        raise error


@contextmanager
def progress_bar(what: str) -> "Iterator[Progress | None]":
    """A bar with the time left on stderr while it is a terminal, a line every tenth of the points otherwise."""
    if not sys.stderr.isatty():
        yield _plain_progress(what)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update


def _plain_progress(what: str) -> "Progress":
    import time

    start_s = time.monotonic()
    first: int | None = None
    shown = -1

    def update(done: int, total: int) -> None:
        nonlocal first, shown
        first = done if first is None else first
        tenth = 10 * done // total if total else 10
        if tenth == shown or total == 0:
            return
        shown = tenth
        spent_s = time.monotonic() - start_s
        left = f", about {spent_s / (done - first) * (total - done):.0f} s left" if done > first else ""
        click.echo(f"{done} of {total} {what}{left}", err=True)

    return update
