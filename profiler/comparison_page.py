"""One self-contained HTML page of a comparison: for every kernel, the ratio of two bundles over its shapes."""

from collections.abc import Sequence
from html import escape
from typing import Final

from profiler.comparison import Ratio, summarise
from profiler.core.bundle import Bundle
from profiler.core.tables import KEY_COLUMNS

_STYLE: Final = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:0 auto;max-width:1400px;padding:1rem}"
    "td,th{padding:.15rem .7rem;text-align:right;border-bottom:1px solid #ddd}td.t,th.t{text-align:left}"
)


def page(first: Bundle, second: Bundle, ratios: Sequence[Ratio]) -> str:
    """The whole page as one string; nothing is fetched when it is opened. x: time of the first, y: second / first."""
    import plotly.graph_objects as go
    from plotly.offline import get_plotlyjs

    names = [
        f"{one.meta['hardware']} {one.meta['model']} {one.meta['variant']} ({one.meta['provenance']})"
        for one in (first, second)
    ]
    title = f"{names[1]} / {names[0]}"
    body = [f"<h1>{escape(title)}</h1>", _table(ratios)]
    groups: dict[tuple[int, str, str], list[Ratio]] = {}
    for one in ratios:
        groups.setdefault((one.tp, one.category, one.kernel), []).append(one)
    for number, ((tp, category, kernel), found) in enumerate(groups.items()):
        figure = go.Figure()
        for phase in dict.fromkeys(one.phase for one in found):
            own = [one for one in found if one.phase == phase]
            figure.add_trace(
                go.Scatter(
                    x=[one.first_us for one in own],
                    y=[one.ratio for one in own],
                    mode="markers",
                    name=phase,
                    text=[_shape(one) for one in own],
                )
            )
        figure.add_hline(y=1.0, line_width=1)
        figure.update_layout(
            title=f"tp {tp}, {category}, {kernel}", height=420, xaxis_title="first, microseconds", yaxis_title="ratio"
        )
        figure.update_xaxes(type="log")
        body.append(figure.to_html(full_html=False, include_plotlyjs=False, div_id=f"plot{number}"))
    script = f"<script>{get_plotlyjs()}</script>"
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>{script}"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _shape(one: Ratio) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in zip(KEY_COLUMNS[one.category][1:], one.key, strict=True))


def _table(ratios: Sequence[Ratio]) -> str:
    rows = [
        "<tr><th>tp</th><th class=t>table</th><th class=t>kernel</th><th class=t>phase</th><th>shapes</th><th>p10</th>"
        "<th>p50</th><th>p90</th><th>of sums</th></tr>"
    ]
    for one in summarise(ratios):
        figures = "".join(f"<td>{value:.3f}</td>" for value in (one.p10, one.p50, one.p90, one.of_sums))
        texts = "".join(f"<td class=t>{escape(text)}</td>" for text in (one.category, one.kernel, one.phase))
        rows.append(f"<tr><td>{one.tp}</td>{texts}<td>{one.shapes}</td>{figures}</tr>")
    return f"<table>{''.join(rows)}</table>"
