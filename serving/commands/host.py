"""`python -m serving host`: what a step costs the host, from recordings."""

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from serving.recording.host_table import Row


@click.command()
@click.argument("recordings", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["table", "csv", "yaml"]), default="table", show_default=True)
def command(recordings: tuple[Path, ...], form: str) -> None:
    """What a step costs the host's thread, from the step logs of RECORDINGS (folders written by `record`).

    Medians in microseconds by kind of step, graph mode and number of requests: scheduling, preparing the inputs,
    launching the layers, sampling, taking the tokens, updating the scheduler, making outputs; and the device's time
    before, in and behind the layers. yaml: the `host` block of a hardware file, fitted to the same steps.
    """
    from serving.recording.host_table import host_block, read_log, rows

    logs = [read_log(path) for path in recordings]
    if form == "yaml":
        import yaml

        click.echo(yaml.safe_dump({"host": host_block(logs)}, sort_keys=False, default_flow_style=None), nl=False)
    elif form == "csv":
        _write_csv(rows(logs))
    else:
        _print_table(rows(logs))


def _write_csv(found: "list[Row]") -> None:
    from serving.recording.host_table import PARTS

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["kind", "graph", "async", "layers", "least_requests", "steps", *(f"{name}_us" for name in PARTS)])
    for one in found:
        times = ["" if (us := one.median_us[name]) is None else f"{us:.1f}" for name in PARTS]
        writer.writerow([one.kind, one.graph, int(one.asynchronous), one.layers, one.least_requests, one.steps, *times])


def _print_table(found: "list[Row]") -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from serving.recording.host_table import PARTS

    table = Table(box=SIMPLE, title="medians, us")
    for name in ("kind", "graph", "async"):
        table.add_column(name)
    for name in ("layers", "requests", "steps", *PARTS):
        table.add_column(name, justify="right")
    for one in found:
        times = ["" if (us := one.median_us[name]) is None else f"{us:,.0f}" for name in PARTS]
        most = 2 * one.least_requests - 1
        requests = str(one.least_requests) if most == one.least_requests else f"{one.least_requests}-{most}"
        table.add_row(
            one.kind, one.graph, "yes" if one.asynchronous else "no", str(one.layers), requests, str(one.steps), *times
        )
    wide = Console(file=sys.stdout, highlight=False, width=1_000)  # a narrow terminal would leave nothing of the cells
    wide.width = wide.measure(table).maximum
    wide.print(table)
