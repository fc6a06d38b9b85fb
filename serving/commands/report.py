"""`python -m serving report`: results that people read."""

import sys
from pathlib import Path

import click

_FILE = click.Path(path_type=Path)
_SUFFIXES = {".html": "html", ".htm": "html", ".md": "md", ".csv": "csv"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("results", type=_FILE)
@click.option("--output", type=_FILE, help="File to write: .html, .md or .csv.  [default: a summary on the terminal]")
@click.option("--prices", type=_FILE, help="Price file; adds cost.")
def command(results: Path, output: Path | None, prices: Path | None) -> None:
    """Turn RESULTS, the --output folder of sweep or size, into one file, or print a summary.

    The HTML file is self-contained: verdict, capacity, Pareto plot, latencies, queues, refusals and provenance.
    """
    from profiler.core.errors import ConfigError, unknown
    from profiler.core.load import atomic_write
    from serving.pricing import cost_columns, read_prices
    from serving.report.content import report_of
    from serving.report.figures import verdict
    from serving.report.html import html_text
    from serving.report.markdown import markdown_text
    from serving.report.terminal import print_results
    from serving.sweeps.results import csv_text, read_results

    style = None
    if output is not None:
        if output.suffix.lower() not in _SUFFIXES:
            raise unknown("suffix of --output", output.suffix, _SUFFIXES)
        if output.is_dir():
            raise ConfigError(f"--output: {output} is a folder, a file name is needed")
        style = _SUFFIXES[output.suffix.lower()]
    header, points = read_results(results)
    if not points:
        raise ConfigError(f"{results}: has no finished point yet")
    if prices is not None:
        paid = read_prices(prices)
        header["prices"] = {"source": paid.source, "pue": paid.pue}
        points = [point | {"row": point["row"] | cost_columns(point["row"], paid)} for point in points]
    rows = [point["row"] for point in points]
    if output is None:
        print_results([row for row in rows if row["status"] != "limit"], sys.stdout, verdict(header, rows))
        return
    if style == "csv":
        text = csv_text(rows)
    else:
        found = report_of(header, points)
        text = html_text(found) if style == "html" else markdown_text(found)
    try:
        with atomic_write(output) as stream:
            stream.write(text)
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written: {error.strerror}") from None
    size = len(text.encode())
    click.echo(f"{output}: {size / 1e6:.1f} MB" if size >= 1e6 else f"{output}: {size / 1e3:.0f} kB", err=True)
