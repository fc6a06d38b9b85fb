"""Results on the terminal: the verdict, a table of layouts and a Pareto plot in characters."""

from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

from serving.report.figures import (
    capacity,
    counts,
    finished,
    fitting,
    label,
    layouts_of,
    pareto,
    refusals,
    with_throughput,
)
from serving.report.load import amount, of_users

_WIDTH: Final = 110
_PLOT_COLUMNS: Final = 68
_PLOT_LINES: Final = 16
_MOST_ROWS: Final = 20


def print_results(rows: Sequence[Mapping[str, Any]], stream: IO[str], verdict: Sequence[str] = ()) -> None:
    """Rows of results.csv on `stream`, at the same width everywhere but on a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream, highlight=False, markup=False, width=None if stream.isatty() else _WIDTH)
    for sentence in verdict:
        console.print(sentence)
    tally = counts(rows)
    console.print(", ".join(f"{times} {status}" for status, times in sorted(tally.items())))
    done = finished(rows)
    if done:
        with_slo = any(row.get("slo_met") is not None for row in done)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("layout", overflow="fold")
        loads = ("users", "SLO users") if of_users(done) else ("req/s", "SLO rate")
        for name in ("GPUs", *loads, "tok/s/GPU", "tok/s/user", "TTFT p99", "TPOT p50"):
            table.add_column(name, justify="right", no_wrap=True)
        for line in capacity(rows, with_slo)[:_MOST_ROWS]:
            table.add_row(
                label(line["row"], done),
                str(line["row"]["gpus_total"]),
                amount(line["row"]),
                "-" if line["highest_load"] is None else amount(line["row"]),
                _number(line["output_tokens_per_s_per_gpu"], 1),
                _number(line["user_tokens_per_s"], 1),
                _number(line["ttft_ms_p99"], 0),
                _number(line["tpot_ms_p50"], 1),
            )
        console.print(table)
        console.print(pareto_text(done))
    if fits := fitting(rows):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("layout", overflow="fold")
        for name in ("GPUs", "weights GiB", "KV GiB", "KV tokens", "sequences per rank"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("verdict", overflow="fold")
        for row in fits[:_MOST_ROWS]:
            sizes = (_number(row["weights_gib"], 1), _number(row["kv_available_gib"], 1), f"{row['kv_tokens_total']:,}")
            held = _number(row["max_concurrency"], 1)
            table.add_row(label(row, rows), str(row["gpus"]), *sizes, held, row["risk"] or "fits")
        console.print(table)
        if len(fits) > _MOST_ROWS:
            console.print(f"{len(fits) - _MOST_ROWS} more fit; results.csv has all")
    for kind, reason, found in refusals(rows)[:_MOST_ROWS]:
        console.print(f"{len(found)} x {kind}, {layouts_of(found, rows)}: {reason}", soft_wrap=True)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def pareto_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Throughput per GPU over the speed of a user, in characters: `o` on the front, `.` behind it."""
    known = with_throughput(rows)
    if not known:
        return "no point has a throughput"
    front = {id(row) for row in pareto(known)}
    right = max(row["user_tokens_per_s"] for row in known)
    top = max(row["output_tokens_per_s_per_gpu"] for row in known)
    cells = [[" "] * (_PLOT_COLUMNS + 1) for _ in range(_PLOT_LINES + 1)]
    for row in sorted(known, key=lambda row: id(row) in front):
        column = round(row["user_tokens_per_s"] / right * _PLOT_COLUMNS)
        height = _PLOT_LINES - round(row["output_tokens_per_s_per_gpu"] / top * _PLOT_LINES)
        cells[height][column] = "o" if id(row) in front else "."
    lines = ["output tokens/s per GPU"]
    for number, line_cells in enumerate(cells):
        mark = f"{top * (_PLOT_LINES - number) / _PLOT_LINES:8.0f}" if number % 4 == 0 else " " * 8
        lines.append(f"{mark} |{''.join(line_cells)}".rstrip())
    lines.append(f"{'':8} +{'-' * _PLOT_COLUMNS}")
    lines.append(f"{'0':>10}{'tokens/s of a user (1 / TPOT p50)':^{_PLOT_COLUMNS - 8}}{right:8.1f}")
    return "\n".join(lines)


def print_tables(
    verdict: Sequence[str], text: Sequence[str], tables: Sequence[Mapping[str, Any]], stream: IO[str]
) -> None:
    """The answer of a search: sentences, then tables of texts (columns, rows, numeric columns)."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream, highlight=False, markup=False, width=None if stream.isatty() else _WIDTH)
    for sentence in (*verdict, *text):
        console.print(sentence)
    for found in tables:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for place, name in enumerate(found["columns"]):
            table.add_column(name, justify="right" if place in found["numeric"] else "left", overflow="fold")
        for row in found["rows"]:
            table.add_row(*map(str, row))
        console.print(table)
