"""`python -m serving trace`: convert, rescale, cut, filter, merge, generate, summarise and plot traces."""

import sys
from pathlib import Path
from typing import Any

import click

from serving.trace_tools.cli import AS_IT_IS, Input, check_output, exact, reading, seconds_ns, write, writing

_FILE = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)
_ANY_COUNT = click.IntRange(min=0)


@click.group()
def command() -> None:
    """Work on traces of any format; `trace COMMAND --help` lists the flags of one.

    The format of an input is recognised by its first line. Outputs are JSON lines unless --output-format says else,
    written whole or not at all. Agentic sessions stay whole.
    """


@command.command()
@click.argument("trace", type=_FILE)
@click.argument("output", type=_FILE)
@writing
@reading
def convert(trace: Path, output: Path, output_format: str, hash_block_tokens: int | None, **read_as: Any) -> None:
    """Write TRACE to OUTPUT in another format.

    What the format has no place for is named on stderr with the number of requests that lose it.
    """
    source = Input(trace, read_as)
    write([source], source.requests(), output, output_format, hash_block_tokens)


@command.command()
@click.argument("trace", type=_FILE)
@click.argument("output", type=_FILE)
@click.option("--time-factor", help="Multiply arrivals by this; 0.5 doubles the rate.")
@click.option("--rate", help="Bring arrivals to this many per second on average, from the first to the last.")
@writing
@reading
def rescale(
    trace: Path,
    output: Path,
    time_factor: str | None,
    rate: str | None,
    output_format: str,
    hash_block_tokens: int | None,
    **read_as: Any,
) -> None:
    """Stretch or compress the arrivals of TRACE; give --time-factor or --rate. Tool durations of sessions stay."""
    from profiler.core.errors import ConfigError
    from serving.trace_tools.edit import factor_for_rate, rescaled

    if (time_factor is None) == (rate is None):
        raise ConfigError("rescale needs one of --time-factor and --rate")
    source = Input(trace, read_as)
    factor = exact("--time-factor", time_factor)
    wanted = exact("--rate", rate)
    requests = source.requests()
    if wanted is not None:
        requests = list(requests)
        factor = factor_for_rate(requests, wanted)
    assert factor is not None
    write([source], rescaled(requests, factor), output, output_format, hash_block_tokens)


@command.command()
@click.argument("trace", type=_FILE)
@click.argument("output", type=_FILE)
@click.option("--from", "start", help="Seconds: leave out what arrives earlier.")
@click.option("--to", "stop", help="Seconds: leave out what arrives then or later.")
@click.option("--skip", type=_ANY_COUNT, default=0, show_default=True, help="Rows to leave out at the start.")
@click.option("--rows", type=_COUNT, help="Rows to keep after that; a session is one row.")
@click.option("--keep-times", is_flag=True, help="Do not count arrivals from the start of the cut.")
@writing
@reading
def cut(
    trace: Path,
    output: Path,
    start: str | None,
    stop: str | None,
    skip: int,
    rows: int | None,
    keep_times: bool,
    output_format: str,
    hash_block_tokens: int | None,
    **read_as: Any,
) -> None:
    """Cut TRACE by time, by rows, or by rows within a time."""
    from profiler.core.errors import ConfigError
    from serving.trace_tools.edit import Window
    from serving.trace_tools.edit import cut as cut_out

    window = Window(seconds_ns("--from", start), seconds_ns("--to", stop), skip, rows)
    if window == Window():
        raise ConfigError("cut needs --from, --to, --skip or --rows")
    if window.start_ns is not None and window.stop_ns is not None and window.stop_ns <= window.start_ns:
        raise ConfigError(f"--to {stop} must be later than --from {start}")
    source = Input(trace, read_as)
    write([source], cut_out(source.requests(), window, keep_times), output, output_format, hash_block_tokens)


@command.command("filter")
@click.argument("trace", type=_FILE)
@click.argument("output", type=_FILE)
@click.option("--min-prompt-tokens", type=_COUNT)
@click.option("--max-prompt-tokens", type=_COUNT)
@click.option("--min-output-tokens", type=_COUNT)
@click.option("--max-output-tokens", type=_COUNT)
@click.option("--max-total-tokens", type=_COUNT, help="Prompt and output together.")
@writing
@reading
def filter_(
    trace: Path,
    output: Path,
    min_prompt_tokens: int | None,
    max_prompt_tokens: int | None,
    min_output_tokens: int | None,
    max_output_tokens: int | None,
    max_total_tokens: int | None,
    output_format: str,
    hash_block_tokens: int | None,
    **read_as: Any,
) -> None:
    """Keep the rows of TRACE whose lengths lie in the given ranges; a session, if all its calls do."""
    from profiler.core.errors import ConfigError
    from serving.trace_tools.edit import Lengths, filtered

    lengths = Lengths(min_prompt_tokens, max_prompt_tokens, min_output_tokens, max_output_tokens, max_total_tokens)
    if lengths == Lengths():
        raise ConfigError("filter needs at least one limit")
    source = Input(trace, read_as)
    write([source], filtered(source.requests(), lengths), output, output_format, hash_block_tokens)


@command.command()
@click.argument("traces", type=_FILE, nargs=-1, required=True)
@click.argument("output", type=_FILE)
@click.option("--shared-content", is_flag=True, help="Equal hash ids of different inputs mean equal content.")
@writing
@reading
def merge(
    traces: tuple[Path, ...],
    output: Path,
    shared_content: bool,
    output_format: str,
    hash_block_tokens: int | None,
    **read_as: Any,
) -> None:
    """Merge TRACES into OUTPUT by arrival; ids get the position of their trace in front ("0:17")."""
    from profiler.core.errors import ConfigError
    from serving.trace_tools.edit import merged

    if len(traces) < 2:
        raise ConfigError("merge needs at least two traces and an output")
    sources = [Input(path, read_as) for path in traces]
    streams = [source.requests() for source in sources]
    write(sources, merged(streams, shared_content), output, output_format, hash_block_tokens)


@command.command()
@click.argument("output", type=_FILE)
@click.option("--requests", "rows", type=_COUNT, required=True, help="Requests, or sessions with --calls.")
@click.option("--seed", type=int, required=True, help="Equal seeds give equal traces.")
@click.option(
    "--arrivals",
    "process",
    type=click.Choice(["poisson", "gamma", "constant", "at-once"]),
    default="poisson",
    show_default=True,
    help="Arrival process.",
)
@click.option("--rate", type=float, help="Arrivals per second; not for at-once.")
@click.option("--burstiness", type=float, help="Shape of gamma gaps: 1 is Poisson, below 1 burstier.")
@click.option("--prompt", help="Prompt tokens: N, uniform:MIN:MAX, lognormal:MEAN:SIGMA[:MIN:MAX].")
@click.option("--output-tokens", help="Output tokens, likewise.")
@click.option("--lengths", type=_FILE, help="Draw both from a list of lengths or a trace of any format instead.")
@click.option("--in-order", is_flag=True, help="Take --lengths from the start instead of drawing.")
@click.option("--prefixes", type=_COUNT, help="Number of different shared prefixes.")
@click.option("--prefix-tokens", type=_COUNT, help="Length of each; comes on top of the prompt.")
@click.option("--prefix-share", type=float, default=1.0, show_default=True, help="Share of requests that have one.")
@click.option("--calls", help="Calls of an agentic session, a distribution as for --prompt.")
@click.option("--added-tokens", help="Prompt tokens that a call adds after the answer before it.")
@click.option("--tool-ms", help="Milliseconds from the end of a call to the release of the next.")
@click.option("--max-prompt-tokens", type=_COUNT, help="A session ends before a longer prompt.")
@click.option("--prefix-block-tokens", type=_COUNT, default=64, show_default=True, help="Hash blocks of the content.")
@writing
def generate(output: Path, output_format: str, hash_block_tokens: int | None, **plan: Any) -> None:
    """Write a seeded trace: drawn lengths and arrivals, shared prefixes, agentic sessions."""
    from serving.trace_tools.generate import generated
    from serving.trace_tools.plan_flags import plan_of

    made = plan_of(plan)
    lengths = [Input(plan["lengths"], AS_IT_IS)] if plan["lengths"] else []
    write(lengths, generated(made), output, output_format, hash_block_tokens)


@command.command()
@click.argument("trace", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
@click.option("--block-tokens", type=_COUNT, help="Blocks of the prefix cache.  [default: the trace's own, else 64]")
@reading
def summary(trace: Path, as_json: bool, block_tokens: int | None, **read_as: Any) -> None:
    """Totals, rates, percentiles and the most that a prefix cache could save."""
    import json

    from serving.trace_tools.summary import summarise
    from serving.trace_tools.table import print_figures

    source = Input(trace, read_as)
    figures = summarise(source.requests(), block_tokens)
    figures = {"format": source.format, "bad_rows_skipped": source.report_skipped()} | figures
    if as_json:
        click.echo(json.dumps(figures, indent=2, allow_nan=False))
    else:
        print_figures(figures, sys.stdout)


@command.command()
@click.argument("trace", type=_FILE)
@click.argument("output", type=_FILE)
@click.option("--title", help="Heading of the page.  [default: the file's name]")
@reading
def plot(trace: Path, output: Path, title: str | None, **read_as: Any) -> None:
    """Arrivals over time and distributions of lengths as one HTML page that needs no network."""
    from profiler.core.load import atomic_write
    from serving.trace_tools.plot import plot_html

    check_output(output, [trace])
    source = Input(trace, read_as)
    page = plot_html(source.requests(), title if title is not None else trace.name)
    source.report_skipped()
    with atomic_write(output) as stream:
        stream.write(page)
