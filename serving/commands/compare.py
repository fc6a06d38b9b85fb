"""`python -m serving compare`: a simulated run against a recorded one, or against another simulated one."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from serving.comparison import Comparison
    from serving.recorded import Recorded

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("run", metavar="RUN.csv", type=_FILE)
@click.argument("other", metavar="RECORDED_DIR|OTHER.csv", type=_FILE)
@click.option("--format", "form", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@click.option(
    "--since",
    type=click.Choice(["queued", "arrival"]),
    help="Simulated time from which TTFT and latency count; arrival suits a trace made by `retime`.  "
    "[default: queued against a recording, arrival between two runs]",
)
@click.option("--html", "html_path", type=_FILE, help="Also write a page with plots, which needs nothing else.")
def command(run: Path, other: Path, form: str, since: str | None, html_path: Path | None) -> None:
    """Compare RUN.csv, written by a replay, with the run of a real engine recorded in a folder or with another replay.

    Requests are paired one by one; recorded times count from queueing. Prints TTFT, TPOT and latency (mean, p50, p90,
    p99), the makespan, the difference in per cent of the second run, and the mean absolute difference per request.
    """
    from profiler.core.load import atomic_write
    from serving.comparison import compare, compare_runs
    from serving.comparison_page import page
    from serving.recorded import read_recorded

    recorded = read_recorded(other) if other.is_dir() else None
    if recorded is not None:
        sides = _Sides("simulated", "recorded", since or "queued", _engine(recorded), other)
        comparison = compare(run, recorded, sides.since)
    else:
        sides = _Sides("first", "second", since or "arrival", None, other)
        comparison = compare_runs(run, other, sides.since)
    if html_path is not None:
        _check_html(html_path, (run, other))
        with atomic_write(html_path) as stream:
            stream.write(page(comparison, (run.name, other.name), (sides.first, sides.second), sides.title(comparison)))
    if form == "json":
        json.dump(_mapping(comparison, sides), sys.stdout, indent=2, allow_nan=False)
        click.echo()
    elif form == "csv":
        click.echo(f"metric,statistic,{sides.first}_ms,{sides.second}_ms,difference_percent")
        for one in comparison.figures:
            numbers = one.simulated_ms, one.recorded_ms, one.difference_percent
            click.echo(",".join((one.metric, one.statistic, *(f"{value:.6f}" for value in numbers))))
    else:
        _print_table(comparison, sides)


class _Sides(NamedTuple):
    """What the two runs are called, from when their times count, and the engine of a recorded one."""

    first: str
    second: str
    since: str
    engine: "dict[str, Any] | None"
    other: Path

    def title(self, comparison: "Comparison") -> str:
        if self.engine is None:
            return f"{comparison.requests} requests of two replays, since {self.since}"
        version = self.engine["vllm_version"] or "unknown"
        model = self.engine["model"]
        return f"{comparison.requests} requests, {model}, vLLM {version}, simulated since {self.since}"


def _engine(recorded: "Recorded") -> dict[str, Any]:
    return {key: recorded.meta.get(key) for key in ("model", "vllm_version", "engine_kwargs")}


def _check_html(path: Path, inputs: tuple[Path, ...]) -> None:
    from profiler.core.errors import ConfigError

    if path.is_dir():
        raise ConfigError(f"--html: {path} is a folder, a file name is needed")
    if path.resolve() in [one.resolve() for one in inputs]:
        raise ConfigError(f"--html: {path} would overwrite an input")
    blocked = next((one for one in path.absolute().parents if one.exists() and not one.is_dir()), None)
    if blocked is not None:
        raise ConfigError(f"--html: {blocked} is a file, not a folder")


def _mapping(comparison: "Comparison", sides: _Sides) -> dict[str, object]:
    figures: dict[str, dict[str, object]] = {}
    for one in comparison.figures:
        figures.setdefault(one.metric, {})[one.statistic] = {
            f"{sides.first}_ms": one.simulated_ms,
            f"{sides.second}_ms": one.recorded_ms,
            "difference_percent": one.difference_percent,
        }
    content: dict[str, object] = {"requests": comparison.requests, "since": sides.since, "figures": figures}
    content["mean_absolute_error_ms"] = comparison.error_ms
    if sides.engine is None:
        return content | {"requests_left_out": comparison.left_out}
    return content | {"engine": sides.engine, "mean_absolute_difference_in_requests": comparison.load}


def _print_table(comparison: "Comparison", sides: _Sides) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False)
    console.print(sides.title(comparison), soft_wrap=True, markup=False)
    if comparison.left_out:
        console.print(f"left out, since they did not finish in both: {comparison.left_out}")
    table = Table(box=SIMPLE)
    table.add_column("ms")
    for name in (sides.first, sides.second, "difference", "mean |error|"):
        table.add_column(name, justify="right")
    for one in comparison.figures:
        error = comparison.error_ms.get(one.metric) if one.statistic == "mean" else None
        table.add_row(
            f"{one.metric} {one.statistic}",
            f"{one.simulated_ms:,.2f}",
            f"{one.recorded_ms:,.2f}",
            f"{one.difference_percent:+.2f} %",
            "" if error is None else f"{error:,.2f}",
        )
    console.print(table)
    if comparison.load:
        running, waiting = comparison.load["running"], comparison.load["waiting"]
        console.print(f"mean |difference| at the recorded ticks: {running:.1f} running, {waiting:.1f} waiting requests")
