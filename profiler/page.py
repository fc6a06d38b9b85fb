"""One self-contained HTML page per bundle: provenance, tables, and every kernel's time along each of its axes.

Nothing is fetched when it is opened: plotly's script is inside. Every text that comes from the bundle is escaped.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from profiler.core.bundle import Bundle, Table
from profiler.core.tables import KEY_COLUMNS
from profiler.kernels._components import ATTENTION_LIKE
from profiler.summary import TableSummary, flat, percent, share, skew_of, summarise

_SECTIONS: Final = ("hardware", "gpu", "engine", "model", "model_config_sha256", "variant", "weights", "kv", "contract")
_MORE: Final = ("provenance", "attended_cap_tokens", "protocol", "layer_kinds", "measured_at", "command")
_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1500px; padding: 1rem 1.5rem; color: #1c1e21 }
h1 { font-size: 1.5rem; margin: .5rem 0 } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem } h3 { font-size: 1rem }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-size: .86rem }
th, td { text-align: left; padding: .2rem .7rem; border-bottom: 1px solid #dcdfe4; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums } td { overflow-wrap: anywhere }
td:first-child { white-space: nowrap }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(620px, 1fr)); gap: 1rem }
nav a { margin-right: 1rem }
.plots > div { min-width: 0; overflow: hidden; border: 1px solid #e6e8ec; border-radius: 6px }
"""

# Plots are drawn while the page still grows; once it stands, each takes the width of its cell.
_FIT: Final = (
    "window.addEventListener('load',()=>document.querySelectorAll('.plotly-graph-div')"
    ".forEach(plot=>Plotly.Plots.resize(plot)))"
)

# (x, microseconds, spread, text on hover) by the value of the other axis, ascending.
Series = Mapping[str, Sequence[tuple[float, float, float, str]]]


def page(bundle: Bundle) -> str:
    """The whole page as one string."""
    from plotly.offline import get_plotlyjs

    title = escape(f"{bundle.meta['model']} on {bundle.meta['hardware']}, {bundle.meta['variant']}")
    summaries = summarise(bundle)
    tps = sorted({one.tp for one in summaries})
    links = "".join(f'<a href="#tp{tp}">tp {tp}</a>' for tp in tps)
    body = [
        f"<h1>{title}</h1><nav>{links}</nav>",
        "<h2>Provenance</h2>",
        _provenance(bundle.meta),
        "<h2>Tables</h2>",
        _tables(summaries),
    ]
    for tp in tps:
        body.append(f'<h2 id="tp{tp}">tp {tp}</h2>')
        body += _skew(bundle, tp)
        body.append('<div class="plots">')
        for (table_tp, _), table in sorted(bundle.tables.items()):
            if table_tp == tp:
                body += [f"<div>{plot}</div>" for plot in _plots(bundle, tp, table)]
        body.append("</div>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>"
        + "\n".join(body)
        + f"<script>{_FIT}</script></body></html>\n"
    )


def _row(cells: Sequence[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _provenance(meta: Mapping[str, Any]) -> str:
    pairs = [pair for key in (*_SECTIONS, *_MORE) if key in meta for pair in flat(meta[key], key)]
    return "<table>" + "".join(_row(pair) for pair in pairs) + "</table>"


def _tables(summaries: Sequence[TableSummary]) -> str:
    head = ("tp", "table", "rows", "components", "microseconds", "spread from 20 us", "leave one out", "out of order")
    rows = [
        _row(
            (
                str(one.tp),
                one.category,
                str(one.rows),
                str(len(one.components)),
                f"{one.least_us:.2f} to {one.most_us:.1f}",
                percent(one.quality, "spread_from_20_us"),
                percent(one.quality, "leave_one_out"),
                share(one.quality),
            )
        )
        for one in summaries
    ]
    return "<table>" + _row(head, "th") + "".join(rows) + "</table>"


def _skew(bundle: Bundle, tp: int) -> Iterator[str]:
    report = skew_of(bundle, tp)
    if not report:
        return
    rows = [_row(("kernel", "batches", "form", "p50", "p90", "p99", "number"), "th")]
    for kernel, kinds in report.items():
        for kind, found in kinds.items():
            for form, errors in found.items():
                if isinstance(errors, Mapping):
                    cells = (f"{errors[q]:.1%}" for q in ("p50", "p90", "p99"))
                    rows.append(_row((kernel, kind, form, *cells, str(found["batches"]))))
    yield (
        "<h3>Batches of unequal requests: error on batches that were not fitted</h3><table>"
        + "".join(rows)
        + "</table>"
    )


def _plots(bundle: Bundle, tp: int, table: Table) -> Iterator[str]:
    if table.category in ATTENTION_LIKE:
        for name in table.names:
            yield from _plane_plots(table, name)
    elif table.category == "moe":
        yield from _expert_plots(table)
    elif table.category != "skew":
        axis = KEY_COLUMNS[table.category][1]
        yield _figure(f"{table.category}: time against {axis}", axis, "component", _curves(table, axis))
    else:
        series = {
            kernel: [(float(n), alpha, 0.0, f"chunk {chunk}") for chunk, n, alpha in points if not chunk]
            for (at, kernel), points in sorted(bundle.skew.items())
            if at == tp
        }
        if series:
            yield _figure(
                "alpha of unequal decode batches", "decode_requests", "kernel", series, y_axis="alpha", log_y=False
            )


def _curves(table: Table, axis: str) -> Series:
    columns = (KEY_COLUMNS[table.category][0], axis, "time_us", "spread_rel")
    names, xs, times, spreads = (table.columns[c] for c in columns)
    found: dict[str, list[tuple[float, float, float, str]]] = defaultdict(list)
    for name, x, time, spread in zip(names, xs, times, spreads, strict=True):
        found[str(name)].append((float(x), float(time), float(spread), str(name)))
    return found


def _plane_plots(table: Table, name: str) -> Iterator[str]:
    """Prefill against chunk and context, decode against requests and keys. A context is drawn where its chunk ends."""
    wanted = ("kernel", "prefill_chunk_tokens", "prefill_context_tokens", "decode_requests", "decode_kv_tokens")
    rows = [
        (int(chunk), int(context), int(requests), int(kv), float(time), float(spread))
        for kernel, chunk, context, requests, kv, time, spread in zip(
            *(table.columns[c] for c in (*wanted, "time_us", "spread_rel")), strict=True
        )
        if kernel == name
    ]
    prefill = [(c, k, t, s) for c, k, r, _, t, s in rows if c and not r]
    decode = [(r, v, t, s) for c, _, r, v, t, s in rows if r and not c]
    ends = _by([(c, c + k, t, s, f"chunk {c}, context {k}") for c, k, t, s in prefill])
    chunks = _by([(k, c, t, s, f"chunk {c}, context {k}") for c, k, t, s in prefill], least=3)
    keys = _by([(r, v, t, s, f"{r} requests of {v} keys") for r, v, t, s in decode])
    requests = _by([(v, r, t, s, f"{r} requests of {v} keys") for r, v, t, s in decode], least=3)
    for title, axis, legend, series in (
        ("prefill: time against the end of the chunk", "context + chunk, tokens", "chunk", ends),
        ("prefill: time against the chunk", "prefill_chunk_tokens", "context", chunks),
        ("decode: time against the keys", "decode_kv_tokens", "requests", keys),
        ("decode: time against the requests", "decode_requests", "keys", requests),
    ):
        if series:
            yield _figure(f"{name}, {title}", axis, legend, series)


def _by(rows: Sequence[tuple[int, int, float, float, str]], least: int = 1) -> Series:
    found: dict[int, list[tuple[float, float, float, str]]] = defaultdict(list)
    for other, x, time, spread, text in rows:
        found[other].append((float(x), time, spread, text))
    return {str(other): sorted(points) for other, points in sorted(found.items()) if len(points) >= least}


def _expert_plots(table: Table) -> Iterator[str]:
    wanted = ("ep", "tokens", "activated_experts", "local_pairs", "time_us", "spread_rel")
    rows = list(zip(*(table.columns[c] for c in wanted), strict=True))
    for axis, place in (("local_pairs", 3), ("activated_experts", 2)):
        found: dict[str, list[tuple[float, float, float, str]]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: (float(row[0]), float(row[place]))):
            text = f"{row[1]} tokens, {row[2]} experts, {row[3]} pairs"
            found[str(row[0])].append((float(row[place]), float(row[4]), float(row[5]), text))
        yield _figure(f"experts: time against {axis}", axis, "ep", found, mode="markers")


def _figure(
    title: str, x_axis: str, legend: str, series: Series, y_axis: str = "time, us", log_y: bool = True, mode: str = ""
) -> str:
    import plotly.graph_objects as go
    from plotly.colors import sample_colorscale

    figure = go.Figure()
    shades = sample_colorscale("Viridis", [0.92 * i / max(1, len(series) - 1) for i in range(len(series))])
    for (name, points), shade in zip(series.items(), shades, strict=True):
        figure.add_trace(
            go.Scatter(
                x=[x for x, *_ in points],
                y=[y for _, y, *_ in points],
                name=escape(name),
                mode=mode or "lines+markers",
                line={"color": shade, "width": 1.5},
                marker={"color": shade, "size": 5},
                text=[escape(f"{text}, spread {spread:.1%}") for _, _, spread, text in points],
                hovertemplate="%{text}<br>%{x:,.0f}: %{y:,.4g}<extra></extra>",
            )
        )
    figure.update_layout(
        title={"text": escape(title), "font": {"size": 15}},
        template="plotly_white",
        height=430,
        margin={"l": 70, "r": 20, "t": 50, "b": 55},
        legend={"title": {"text": escape(legend)}, "font": {"size": 11}},
        showlegend=True,
    )
    figure.update_xaxes(type="log", title=escape(x_axis), dtick="D2", exponentformat="SI")
    figure.update_yaxes(type="log" if log_y else "linear", title=escape(y_axis), dtick="D2" if log_y else None)
    text: str = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True}
    )
    return text
