"""`python -m profiler compare`: two bundles of one model, kernel by kernel and shape by shape."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiler.commands._options import integers, out_root_option

if TYPE_CHECKING:
    from profiler.comparison import Ratio

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("compare")
@click.argument("first")
@click.argument("second")
@click.option("--tp", callback=integers, help="Tensor-parallel degrees to compare.  [default: all in common]")
@out_root_option
@click.option("--rows", type=_FILE, help="Write every shape as CSV here.")
@click.option("--html", type=_FILE, help="Write a page with a plot per kernel here.")
def command(
    first: str, second: str, tp: tuple[int, ...] | None, out_root: Path | None, rows: Path | None, html: Path | None
) -> None:
    """Compare bundle SECOND with bundle FIRST: ratio = second / first at the shapes that both answer for.

    A bundle is a folder, or HARDWARE/ORG/MODEL/VARIANT below the folder of bundles. A bundle of modules is compared
    with one of kernels through the sum of each module's kernels.
    """
    from profiler.comparison import compare, summarise
    from profiler.core.bundle import bundle_named, read_bundle
    from profiler.core.load import atomic_write
    from profiler.core.paths import default_bundle_root
    from profiler.core.registry import load_model

    root = out_root or default_bundle_root()
    a, b = (read_bundle(bundle_named(root, one)) for one in (first, second))
    ratios = compare(a, b, load_model(str(a.meta["model"])), tp)
    click.echo(f"first   {_title(a.meta)}")
    click.echo(f"second  {_title(b.meta)}")
    head = ("tp", "table", "kernel", "phase", "shapes", "p10", "p50", "p90", "of sums")
    form = "{:>2} {:<17} {:<22} {:<8} {:>6} {:>7} {:>7} {:>7} {:>7}"
    click.echo(form.format(*head))
    for one in summarise(ratios):
        figures = (f"{value:.3f}" for value in (one.p10, one.p50, one.p90, one.of_sums))
        click.echo(form.format(one.tp, one.category, one.kernel, one.phase, one.shapes, *figures))
    if rows is not None:
        with atomic_write(rows) as stream:
            stream.write(_csv(ratios))
        click.echo(f"rows: {rows}", err=True)
    if html is not None:
        from profiler.comparison_page import page

        with atomic_write(html) as stream:
            stream.write(page(a, b, ratios))
        click.echo(f"page: {html}", err=True)


def _title(meta: Mapping[str, Any]) -> str:
    return f"{meta['hardware']} {meta['model']} {meta['variant']} ({meta['provenance']})"


def _csv(ratios: "list[Ratio]") -> str:
    import csv
    import io

    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("tp", "table", "kernel", "phase", "key", "first_us", "second_us", "ratio"))
    for one in ratios:
        key = " ".join(f"{part:g}" for part in one.key)
        figures = (f"{one.first_us:.6g}", f"{one.second_us:.6g}", f"{one.ratio:.6g}")
        writer.writerow((one.tp, one.category, one.kernel, one.phase, key, *figures))
    return stream.getvalue()
