"""What more users do to each layout: throughput and latencies over their number."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from serving.report.figures import by_layout, label, layout_of
from serving.report.load import Row, by_load, load_text, mean_of, of_users, requests_of
from serving.report.parts import Plot, Section, Table, axes, colour, rounded, short

_PLOTS: Final = (
    ("output_tokens_per_s_per_gpu", "output tokens/s per GPU"),
    ("ttft_ms_p50", "TTFT p50, ms"),
    ("tpot_ms_p50", "TPOT p50, ms"),
)


def layout_lines(groups: Sequence[Sequence[Row]]) -> list[dict[str, Any]]:
    """Of every layout with users, the line from few to many in the plot of throughput against the speed of a user."""
    made = []
    for number, group in enumerate(groups):
        means = [
            (mean_of(rows, "user_tokens_per_s"), mean_of(rows, "output_tokens_per_s_per_gpu"))
            for rows in by_load(group).values()
        ]
        known = [(user, gpu) for user, gpu in means if user is not None and gpu is not None]
        if not of_users(group) or len(known) < 2:
            continue
        made.append(
            {
                "type": "scatter", "mode": "lines", "line": {"color": colour(number), "width": 1}, "showlegend": False,
                "x": [short(user) for user, _ in known], "y": [short(gpu) for _, gpu in known], "hoverinfo": "skip",
            }
        )  # fmt: skip
    return made


def curves_section(lines: Sequence[Mapping[str, Any]], done: Sequence[Row], with_slo: bool) -> Section | None:
    """The layouts of `lines` at every number of users; None for a sweep of rates, or of one number."""
    if not of_users(done) or len(by_load(done)) < 2:
        return None
    groups = by_layout(done)
    layouts = [(label(line["row"], done), by_load(groups[layout_of(line["row"])])) for line in lines]
    figures: list[tuple[str, Callable[[Sequence[Row]], str]]] = [
        ("requests", lambda rows: f"{min(map(requests_of, rows)):,}"),
        ("in flight", lambda rows: rounded(mean_of(rows, "in_flight_mean"), 1)),
        ("out tok/s per GPU", lambda rows: rounded(mean_of(rows, "output_tokens_per_s_per_gpu"), 1)),
        ("tok/s of a user", lambda rows: rounded(mean_of(rows, "user_tokens_per_s"), 1)),
        ("TTFT p50", lambda rows: rounded(mean_of(rows, "ttft_ms_p50"), 0)),
        ("TTFT p99", lambda rows: rounded(mean_of(rows, "ttft_ms_p99"), 0)),
        ("TPOT p50", lambda rows: rounded(mean_of(rows, "tpot_ms_p50"), 1)),
        ("TPOT p99", lambda rows: rounded(mean_of(rows, "tpot_ms_p99"), 1)),
    ]
    if with_slo:
        figures.append(("in SLO", lambda rows: "yes" if all(row["slo_met"] for row in rows) else "no"))
    columns = ("layout", "users", *(name for name, _ in figures))
    cells = tuple(
        (name, f"{users:,}", *(text(rows) for _, text in figures))
        for name, loads in layouts
        for users, rows in loads.items()
    )
    text = (
        "The best layouts; results.csv has all. Means over seeds, latencies in milliseconds. In flight: requests in "
        "the system, averaged over the replay, its start and its end included."
    )
    table = Table(columns, cells, frozenset(range(1, len(columns))))
    return Section("From few users to many", (text,), (table,), tuple(_plots(layouts)))


def _plots(layouts: Sequence[tuple[str, Mapping[float, Sequence[Row]]]]) -> list[Plot]:
    made = []
    for place, (column, text) in enumerate(_PLOTS):
        traces = []
        for number, (name, loads) in enumerate(layouts):
            known = [(rows[0], value) for rows in loads.values() if (value := mean_of(rows, column)) is not None]
            traces.append(
                {
                    "type": "scatter", "mode": "lines+markers", "name": name, "showlegend": place == 0,
                    "x": [row["concurrency"] for row, _ in known], "y": [short(value) for _, value in known],
                    "text": [load_text(row) for row, _ in known],
                    "line": {"color": colour(number)}, "marker": {"size": 7, "symbol": number % 8},
                }
            )  # fmt: skip
        layout = axes("users", text)
        layout["xaxis"] |= {"type": "log", "tickvals": sorted({users for _, loads in layouts for users in loads})}
        layout["yaxis"]["rangemode"] = "tozero"
        layout["legendRows"] = 0 if place else len(layouts)
        made.append(Plot(f"users_{column}", tuple(traces), layout))
    return made
