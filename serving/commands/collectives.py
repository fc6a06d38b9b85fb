"""`python -m serving collectives`: measured collectives beside the times that the link model computes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from serving.collective_errors import Compared


@click.command("collectives")
@click.argument("hardware")
@click.option("--mode", default="graph", show_default=True, help="graph, or eager: launched by the host.")
@click.option(
    "--from-bytes", type=click.IntRange(min=1), default=65536, show_default=True, help="Where the summary parts."
)
@click.option(
    "--bundle-root", type=click.Path(file_okay=False, path_type=Path), help="[default: the package's perf-native]"
)
@click.option("--rows", type=click.Path(dir_okay=False, path_type=Path), help="Write every cell as CSV here.")
def command(hardware: str, mode: str, from_bytes: int, bundle_root: Path | None, rows: Path | None) -> None:
    """Compare the measured collectives of HARDWARE with those computed from the links of its hardware file.

    Error = (computed - measured) / measured. A library's all-reduce is compared with the library's; where an engine's
    own kernels were measured too, the fastest of each size is compared with the engine's all-reduce.
    """
    from profiler.core.collective_table import MODES, collectives_path, read_collectives
    from profiler.core.errors import unknown
    from profiler.core.hardware import load_hardware
    from profiler.core.load import atomic_write
    from profiler.core.paths import default_bundle_root
    from serving.collective_errors import compare

    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    card = load_hardware(hardware)
    path = collectives_path(bundle_root or default_bundle_root(), card.name)
    found = compare(card, read_collectives(path), mode)
    _print(found, from_bytes)
    if rows is not None:
        with atomic_write(rows) as stream:
            stream.write("operation,gpus,way,bytes,measured_us,computed_us,error\n")
            for one in found:
                figures = f"{one.measured_us:.6g},{one.computed_us:.6g},{one.error:.4f}"
                stream.write(f"{one.operation},{one.gpus},{one.way},{one.bytes},{figures}\n")
        click.echo(f"rows: {rows}", err=True)


def _print(found: "Sequence[Compared]", from_bytes: int) -> None:
    from statistics import median

    form = "{:<14} {:>4} {:<8} {:<9} {:>6} {:>8} {:>8} {:>8}  {}"
    click.echo(form.format("operation", "gpus", "way", "messages", "cells", "median", "least", "most", "worst cell"))
    groups: dict[tuple[str, int, str, bool], list[Compared]] = {}
    for one in found:
        groups.setdefault((one.operation, one.gpus, one.way, one.bytes >= from_bytes), []).append(one)
    for (operation, gpus, way, large), cells in sorted(groups.items()):
        errors = [one.error for one in cells]
        worst = max(cells, key=lambda one: abs(one.error))
        cell = f"{worst.bytes} bytes: {worst.measured_us:.2f} us measured, {worst.computed_us:.2f} computed"
        messages = f"{'from' if large else 'below'} {_short(from_bytes)}"
        figures = (f"{value:+.1%}" for value in (median(errors), min(errors), max(errors)))
        click.echo(form.format(operation, gpus, way, messages, len(cells), *figures, cell))


def _short(count: int) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count % size == 0:
            return f"{count // size}{unit}"
    return str(count)
