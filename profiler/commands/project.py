"""`python -m profiler project`: tables of a GPU that nobody measured, with an error band."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from profiler.commands._options import out_root_option

if TYPE_CHECKING:
    from profiler.projection import Check


@click.command("project")
@click.argument("model")
@click.option("--from", "source", required=True, help="GPU with a measured or imported bundle of MODEL.")
@click.option("--to", "target", required=True, help="GPU to project to: a file of configs/hardware.")
@click.option("--variant", help="Of the source bundle; needed where it has several.")
@click.option("--no-error-band", is_flag=True, help="Project although no model has tables of both GPUs.")
@click.option(
    "--bundle-root",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the bundles to project from and to judge by.  [default: the package's perf-native]",
)
@out_root_option
@click.option("--force", is_flag=True, help="Replace a bundle that exists.")
def command(
    model: str,
    source: str,
    target: str,
    variant: str | None,
    no_error_band: bool,
    bundle_root: Path | None,
    out_root: Path | None,
    force: bool,
) -> None:
    """Scale the bundle of MODEL on one GPU to another by the roofline of each row.

    Prints how far the same projection is off for every model whose tables exist for both GPUs, and writes a bundle with
    provenance `projected`, which the simulator takes only with --allow-projected.
    """
    from profiler import projection
    from profiler.core.bundle import write_bundle
    from profiler.core.errors import CoverageError
    from profiler.core.hardware import load_hardware
    from profiler.core.paths import default_bundle_root
    from profiler.core.registry import load_model

    out, root = out_root or default_bundle_root(), bundle_root or default_bundle_root()
    here, there = load_hardware(source), load_hardware(target)
    bundle = projection.source_bundle(root, here, there, model, variant)
    found = projection.checks(root, here, there)
    if not found and not no_error_band:
        raise CoverageError(
            f"no model has tables of both {here.name} and {there.name} under {root}, so the error of a projection is "
            "not known. Import such a pair with: python -m profiler import aiconfigurator --system SYSTEM --model "
            "MiniMaxAI/MiniMax-M3, once for each GPU; or pass --no-error-band"
        )
    projected = projection.project_tables(bundle, load_model(model), here, there)
    meta = projection.projected_meta(bundle, here, there, projected.unscaled, found)
    folder = write_bundle(out, meta, projected.tables, force=force)
    click.echo(f"{folder}")
    for (tp, category), table in sorted(projected.tables.items()):
        click.echo(f"  tp{tp}/{category}.csv: {len(table)} rows, projected")
    for name, count in sorted(projected.unscaled.items()):
        click.echo(f"  {name}: {count} rows without a known amount of work carried over unchanged")
    for check in found:
        _print(check)
    if not found:
        click.echo("error band: unknown")


def _print(check: "Check") -> None:
    click.echo(f"error band, projected / measured: {check.model} {check.variant}, {check.source} to {check.target}")
    form = "  {:<24} {:<8} {:>6} {:>7} {:>7} {:>7}"
    click.echo(form.format("kernel", "phase", "rows", "p10", "p50", "p90"))
    for band in (*check.bands, check.whole):
        figures = (f"{value:.3f}" for value in (band.p10, band.p50, band.p90))
        click.echo(form.format(band.kernel, band.phase, band.rows, *figures))
