"""One self-contained HTML page of a comparison: its figures, and per metric a scatter, distributions and errors.

Nothing is fetched when it is opened. Every name that comes from a file is escaped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from serving.comparison import METRICS, Comparison, Paired

_NAMES: Final = {"ttft": "Time to first token", "tpot": "Time per output token", "latency": "Latency"}
_MOST_SVG_POINTS: Final = 3_000
_COLOURS: Final = ("#3b6fb6", "#c8553d")
_STYLE: Final = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:0 auto;max-width:1500px;padding:1rem;color:#222}"
    "h1{font-size:1.3rem}h2{font-size:1.1rem;margin:1.6rem 0 .3rem}"
    "td,th{padding:.15rem .9rem;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}"
    ".plots{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:.5rem}"
    ".two{grid-template-columns:repeat(2,minmax(0,1fr))}"
    "@media(max-width:1000px){.plots{grid-template-columns:minmax(0,1fr)}}"
)
# A plot is drawn before its neighbours are there and is fitted to its place once all are.
_FIT: Final = (
    "addEventListener('load',()=>document.querySelectorAll('.js-plotly-plot').forEach(p=>Plotly.Plots.resize(p)))"
)


@dataclass(frozen=True, slots=True)
class Section:
    """What a page shows besides the requests, as plain text: heading, table (its header first) and a note on the plots,
    which are plotly figures."""

    heading: str
    rows: Sequence[Sequence[str]]
    note: str
    plots: Sequence[Any]


def page(
    comparison: Comparison,
    files: tuple[str, str],
    sides: tuple[str, str],
    title: str,
    sections: Sequence[Section] = (),
) -> str:
    """The whole page. files: where the two runs are from; sides: what they are called; title: what is compared;
    sections: shown behind the metrics of requests."""
    from plotly.offline import get_plotlyjs

    body = [f"<h1>{escape(title)}</h1>", "<p>" + "<br>".join(_sources(comparison, files, sides)) + "</p>"]
    body.append(_table(comparison, sides))
    for number, metric in enumerate(METRICS):
        pairs = [one for one in comparison.pairs if metric in one.simulated_ms]
        if pairs:
            plots = (
                _scatter(pairs, metric, sides),
                _distributions(pairs, metric, sides),
                _errors(pairs, metric, sides),
            )
            drawn = "".join(_html(plot, f"{metric}{place}") for place, plot in enumerate(plots))
            body.append(f"<h2>{_NAMES[metric]}</h2><div class='plots' id='m{number}'>{drawn}</div>")
    for number, section in enumerate(sections):
        drawn = "".join(_html(plot, f"section{number}{place}") for place, plot in enumerate(section.plots))
        body.append(f"<h2>{escape(section.heading)}</h2>{_cells(section.rows)}<p>{escape(section.note)}</p>")
        body.append(f"<div class='plots two'>{drawn}</div>")
    head = (
        f"<meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script>"
    )
    body.append(f"<script>{_FIT}</script>")
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _sources(comparison: Comparison, files: tuple[str, str], sides: tuple[str, str]) -> list[str]:
    lines = [f"{escape(side)}: {escape(file)}" for side, file in zip(sides, files, strict=True)]
    if comparison.left_out:
        lines.append(f"{comparison.left_out} requests that did not finish in both are left out")
    if comparison.load:
        load = comparison.load
        lines.append(
            f"mean absolute difference at the recorded ticks: {load['running']:.1f} running, {load['waiting']:.1f} "
            "waiting requests"
        )
    return lines


def _table(comparison: Comparison, sides: tuple[str, str]) -> str:
    rows: list[Sequence[str]] = [("ms", *sides, "difference", "mean |error| per request")]
    for one in comparison.figures:
        error = comparison.error_ms.get(one.metric) if one.statistic == "mean" else None
        rows.append(
            (
                f"{one.metric} {one.statistic}",
                f"{one.simulated_ms:,.2f}",
                f"{one.recorded_ms:,.2f}",
                f"{one.difference_percent:+.2f} %",
                "" if error is None else f"{error:,.2f}",
            )
        )
    return _cells(rows)


def _cells(rows: Sequence[Sequence[str]]) -> str:
    lines = [_row("th" if number == 0 else "td", cells) for number, cells in enumerate(rows)]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _scatter(pairs: Sequence[Paired], metric: str, sides: tuple[str, str]) -> Any:
    """Each request, the second run's time across and the first one's up; equal times lie on the line."""
    import plotly.graph_objects as go

    xs, ys = [one.recorded_ms[metric] for one in pairs], [one.simulated_ms[metric] for one in pairs]
    ends = [min((*xs, *ys)), max((*xs, *ys))]
    figure = go.Figure(
        [
            go.Scatter(x=ends, y=ends, mode="lines", line={"color": "#999", "width": 1}, hoverinfo="skip"),
            _points(xs, ys, pairs),
        ]
    )
    return styled(figure, "each request", f"{sides[1]}, ms", f"{sides[0]}, ms")


def _distributions(pairs: Sequence[Paired], metric: str, sides: tuple[str, str]) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    shares = [(place + 1) / len(pairs) for place in range(len(pairs))]
    for side, colour, run in zip(sides, _COLOURS, ("simulated_ms", "recorded_ms"), strict=True):
        figure.add_trace(
            go.Scatter(
                x=sorted(getattr(one, run)[metric] for one in pairs),
                y=shares,
                mode="lines",
                line={"color": colour, "shape": "hv"},
                name=escape(side),
            )
        )
    return styled(figure, "share of requests within", "ms", "share", legend=True)


def _errors(pairs: Sequence[Paired], metric: str, sides: tuple[str, str]) -> Any:
    xs = [one.start_s for one in pairs]
    ys = [one.simulated_ms[metric] - one.recorded_ms[metric] for one in pairs]
    import plotly.graph_objects as go

    figure = go.Figure(_points(xs, ys, pairs))
    figure.add_hline(y=0.0, line_width=1, line_color="#999")
    return styled(figure, "difference by arrival", "arrival, s", f"{sides[0]} - {sides[1]}, ms")


def _points(xs: Sequence[float], ys: Sequence[float], pairs: Sequence[Paired]) -> Any:
    import plotly.graph_objects as go

    text = [escape(f"{one.request_id}: {one.prompt_tokens} in, {one.output_tokens} out") for one in pairs]
    marker = {"size": 5, "color": _COLOURS[0], "opacity": 0.6}
    hover = "%{text}<br>%{x:,.4g}, %{y:,.4g}<extra></extra>"
    kind = go.Scatter if len(pairs) <= _MOST_SVG_POINTS else go.Scattergl  # the latter needs WebGL
    return kind(x=list(xs), y=list(ys), mode="markers", marker=marker, text=text, hovertemplate=hover)


def styled(figure: Any, title: str, x_axis: str, y_axis: str, legend: bool = False) -> Any:
    """The plotly figure, changed to look as all of the page do; its texts are escaped here."""
    figure.update_layout(
        title={"text": escape(title), "font": {"size": 14}},
        template="plotly_white",
        height=380,
        margin={"l": 60, "r": 15, "t": 45, "b": 50},
        showlegend=legend,
        legend={"x": 0.98, "y": 0.05, "xanchor": "right", "yanchor": "bottom"},
    )
    figure.update_xaxes(title=escape(x_axis))
    figure.update_yaxes(title=escape(y_axis))
    return figure


def _html(figure: Any, name: str) -> str:
    text: str = figure.to_html(
        full_html=False, include_plotlyjs=False, div_id=name, config={"displaylogo": False, "responsive": True}
    )
    return text
