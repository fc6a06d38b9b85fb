"""`python -m serving compare`: a simulated run against a recorded one."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from serving.comparison import Comparison
    from serving.recorded import Recorded

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("run", metavar="RUN.csv", type=_FILE)
@click.argument("recorded", metavar="RECORDED_DIR", type=_FILE)
@click.option("--format", "form", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@click.option(
    "--since",
    type=click.Choice(["queued", "arrival"]),
    default="queued",
    show_default=True,
    help="Simulated time from which TTFT and latency count; arrival suits a trace made by `retime`.",
)
def command(run: Path, recorded: Path, form: str, since: str) -> None:
    """Compare RUN.csv, written by a replay, with the run of a real engine recorded in RECORDED_DIR.

    Requests are paired by row. Recorded times count from queueing. Prints TTFT, TPOT and latency (mean, p50, p90, p99),
    the makespan, the difference in per cent, and the mean absolute difference per request.
    """
    from serving.comparison import compare
    from serving.recorded import read_recorded

    run_recorded = read_recorded(recorded)
    comparison = compare(run, run_recorded, since)
    if form == "json":
        json.dump(_mapping(comparison, run_recorded, since), sys.stdout, indent=2, allow_nan=False)
        click.echo()
    elif form == "csv":
        click.echo("metric,statistic,simulated_ms,recorded_ms,difference_percent")
        for one in comparison.figures:
            numbers = one.simulated_ms, one.recorded_ms, one.difference_percent
            click.echo(",".join((one.metric, one.statistic, *(f"{value:.6f}" for value in numbers))))
    else:
        _print_table(comparison, run_recorded, since)


def _mapping(comparison: "Comparison", recorded: "Recorded", since: str) -> dict[str, object]:
    figures: dict[str, dict[str, object]] = {}
    for one in comparison.figures:
        figures.setdefault(one.metric, {})[one.statistic] = {
            "simulated_ms": one.simulated_ms,
            "recorded_ms": one.recorded_ms,
            "difference_percent": one.difference_percent,
        }
    return {
        "requests": comparison.requests,
        "since": since,
        "engine": {key: recorded.meta.get(key) for key in ("model", "vllm_version", "engine_kwargs")},
        "figures": figures,
        "mean_absolute_error_ms": comparison.error_ms,
        "mean_absolute_difference_in_requests": comparison.load,
    }


def _print_table(comparison: "Comparison", recorded: "Recorded", since: str) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False)
    version = recorded.meta.get("vllm_version", "unknown")
    title = f"{comparison.requests} requests, {recorded.meta.get('model')}, vLLM {version}, simulated since {since}"
    console.print(title, soft_wrap=True)
    table = Table(box=SIMPLE)
    table.add_column("ms")
    for name in ("simulated", "recorded", "difference", "mean |error|"):
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
