"""`python -m serving validate`: recordings of a real engine against the simulator."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from serving.recording.validate import Validation

_FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("recordings", nargs=-1, required=True, type=_FOLDER)
@click.option("--traces", type=_FOLDER, help="Folder of the traces.  [default: `traces` beside or above a recording]")
@click.option("--bundle-root", type=_FOLDER, help="Folder of bundles.  [default: profiler/perf-native]")
@click.option("--json", "json_path", type=_FOLDER, help="Also write all figures to this file.")
@click.option("--steps", "steps_path", type=_FOLDER, help="Also write a CSV of every step with its price.")
@click.option("--html", "html_folder", type=_FOLDER, help="Also write a page with plots per recording to this folder.")
@click.option("--own-host", is_flag=True, help="Take the host's times from each recording, not from the GPU's file.")
@click.option("--allow-extrapolation", is_flag=True, help="Price shapes outside the tables too, and count them.")
def command(
    recordings: tuple[Path, ...],
    traces: Path | None,
    bundle_root: Path | None,
    json_path: Path | None,
    steps_path: Path | None,
    html_folder: Path | None,
    own_host: bool,
    allow_extrapolation: bool,
) -> None:
    """Replay the trace of every recording (folders written by `record`), price its steps, and count its KV blocks.

    Prints the differences in per cent of the recording: of requests (mean and p99 of TTFT, TPOT, time between tokens
    and latency; the makespan), of steps by kind (summed times, and the median of the absolute errors), and of blocks.
    """
    from profiler.core.load import atomic_write
    from serving.recording.pages import page_paths, write_page
    from serving.recording.validate import validate

    pages = [] if html_folder is None else page_paths(recordings, html_folder)
    found = []
    for path in recordings:
        one = validate(path, traces, bundle_root, allow_extrapolation=allow_extrapolation, with_own_host=own_host)
        _print(one)
        found.append(one)
    if json_path is not None:
        with atomic_write(json_path) as stream:
            json.dump([one.mapping() for one in found], stream, indent=2, allow_nan=False)
            stream.write("\n")
    if steps_path is not None:
        with atomic_write(steps_path) as stream:
            stream.write(_steps_csv(found))
    for one, path in zip(found, pages, strict=False):
        write_page(one, path)


def _steps_csv(found: "list[Validation]") -> str:
    lines = ["recording,step,kind,tokens,kernels_us,device_us,device_priced_us,step_us,step_priced_us"]
    for validation in found:
        for one in validation.steps:
            times = [*(one.device_us or ("", "")), *(one.step_us or ("", ""))]
            cells = [one.kernels_us, *times]
            texts = [f"{cell:.1f}" if isinstance(cell, float) else cell for cell in cells]
            lines.append(",".join([validation.path.name, str(one.index), one.kind, str(one.tokens), *texts]))
    return "\n".join(lines) + "\n"


def _print(one: "Validation") -> None:
    from rich.console import Console
    from rich.table import Table

    from serving.comparison import STATISTICS
    from serving.recording.pages import title

    console = Console(file=sys.stdout, highlight=False)
    console.print(title(one), soft_wrap=True, markup=False)
    tight: dict[str, Any] = {"box": None, "padding": (0, 1, 0, 0), "pad_edge": False}  # so that 80 columns hold a row
    table = Table(**tight)
    table.add_column("requests, ms")
    for name in STATISTICS:
        table.add_column(name, justify="right")
    by = {(figure.metric, figure.statistic): figure for figure in one.comparison.figures}
    for metric in dict.fromkeys(figure.metric for figure in one.comparison.figures if figure.metric != "makespan"):
        figures = [by[metric, name] for name in STATISTICS]
        cells = [f"{figure.recorded_ms:,.2f} {figure.difference_percent:+.1f} %" for figure in figures]
        table.add_row(metric, *cells)
    span = by["makespan", "total"]
    table.add_row("makespan", f"{span.recorded_ms:,.0f} {span.difference_percent:+.1f} %")
    console.print(table)
    console.print()
    table = Table(**tight)
    table.add_column("steps, ms")
    for name in ("count", "device", "sum", "median", "p90", "step", "sum", "median", "p90"):
        table.add_column(name, justify="right")
    for kind in one.step:
        cells = [str(one.step[kind].steps)]
        for errors in (one.device.get(kind), one.step[kind]):
            if errors is None:
                cells += [""] * 4
                continue
            cells.append(f"{errors.recorded_ms / errors.steps:.2f}")
            cells += [f"{errors.total:+.1f} %", f"{errors.median:.1f} %", f"{errors.p90:.1f} %"]
        table.add_row(kind, *cells)
    console.print(table)
    if one.preemptions != (0, 0):
        console.print(f"preemptions: {one.preemptions[0]} simulated, {one.preemptions[1]} recorded")
    if one.extrapolated_lookups:
        console.print(f"{one.extrapolated_lookups} lookups beyond the tables")
    if one.blocks is not None:
        blocks = one.blocks
        console.print(
            f"KV blocks: {blocks.recorded:,} recorded, {blocks.given:,} of the engine's KV memory, "
            f"{blocks.predicted:,} predicted ({blocks.predicted_percent:+.2f} %)"
        )
        for name, (theirs, ours) in blocks.terms_gib.items():
            numbers = ["-" if value is None else f"{value:.2f}" for value in (theirs, ours)]
            console.print(f"  {name}: {numbers[0]} GiB recorded, {numbers[1]} predicted")
    console.print()
