"""The summary of a trace on the terminal."""

from collections.abc import Iterator, Mapping
from typing import IO, Any, Final

_COLUMNS: Final = ("sum", "mean", "min", "p50", "p90", "p95", "p99", "max")


def print_figures(figures: Mapping[str, Any], stream: IO[str]) -> None:
    """Write the figures of serving.trace_tools.summary to `stream` as two tables."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False, width=None if stream.isatty() else 120)
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for label, text in _facts(figures):
        facts.add_row(label, Text(text))
    lengths = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    lengths.add_column("tokens")
    for column in _COLUMNS:
        lengths.add_column(column, justify="right")
    for label, key in (("prompt", "prompt_tokens"), ("output", "output_tokens"), ("total", "total_tokens")):
        lengths.add_row(label, *(_number(figures[key][column]) for column in _COLUMNS))
    console.print(facts)
    console.print(lengths)


def _facts(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    arrivals = figures["arrivals"]
    yield "format", figures["format"]
    yield "requests", f"{figures['requests']:,}"
    if figures["bad_rows_skipped"]:
        yield "bad rows skipped", f"{figures['bad_rows_skipped']:,}"
    if figures["sessions"]:
        yield "sessions", f"{figures['sessions']:,}, with {figures['session_calls']:,} calls that wait for each other"
    yield "arrivals", f"{arrivals['first_ns'] / 1e9:,.3f} s to {arrivals['last_ns'] / 1e9:,.3f} s"
    for label, key, unit in (
        ("arrival rate", "arrivals_per_s", "per second"),
        ("prompt rate", "prompt_tokens_per_s", "tokens/s"),
        ("output rate", "output_tokens_per_s", "tokens/s"),
        ("gaps, coefficient of variation", "gap_coefficient_of_variation", "(Poisson: 1)"),
    ):
        if arrivals[key] is not None:
            yield label, f"{arrivals[key]:,.3f} {unit}"
    yield "most at one time", f"{arrivals['most_at_one_time']:,}"
    share = figures["share_within_topk"]
    yield (
        f"at most {share['topk_tokens']:,} tokens",
        f"{share['prompt']:.2%} of prompts, {share['prompt_and_output']:.2%} with their output",
    )
    hits = figures["prefix_hits"]
    if hits is None:
        yield "prefix hits", "the trace does not tell what prompts hold"
    else:
        yield (
            "prefix hits, at most",
            f"{hits['hit_tokens']:,} tokens, {hits['share_of_prompt_tokens']:.2%} of all prompts "
            f"({hits['hit_blocks']:,} of {hits['blocks']:,} blocks of {hits['block_tokens']})",
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
