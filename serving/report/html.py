"""A report as one HTML file that needs nothing from elsewhere. All text is escaped."""

import json
from html import escape
from typing import Any

from serving.report.parts import Plot, Report, Section, Table

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2430; margin: 0 auto; padding: 1rem; max-width: 70rem; }
h1, h2, p { overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; margin: 0 0 .6rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
.verdict { border-left: 5px solid #1f5fa8; background: #eef3f9; padding: .7rem 1rem; }
.verdict p { margin: .3rem 0; }
.verdict p:first-child { font-size: 1.15rem; font-weight: 600; }
.mark { background: #b4400f; color: #fff; border-radius: 3px; padding: .1rem .5rem; font-size: .85rem; }
.wide { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #d8dee6; text-align: left; vertical-align: top; }
th { white-space: normal; background: #f4f6f9; }
td { overflow-wrap: anywhere; min-width: 3.2rem; }
.right { text-align: right; white-space: nowrap; }
td.long { min-width: 14rem; }
td.medium { min-width: 9rem; }
td.short { white-space: nowrap; }
.plot { width: 100%; min-height: 340px; overflow: hidden; }
@media (max-width: 40rem) { body { padding: .7rem; font-size: 15px; } table { font-size: .8rem; } }
@media print {
  body { max-width: none; font-size: 11px; padding: 0; }
  .wide { overflow: visible; }
  section { break-inside: auto; }
  .plot, tr { break-inside: avoid; }
}
"""

_SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const narrow = () => window.innerWidth < 640;
function laidOut(own) {
  const bars = own.barmode === "stack";
  const height = (own.height || 0) + (bars ? (narrow() ? 330 : 200) : (narrow() ? 400 : 430));
  const base = {
    margin: {l: 50, r: 12, t: 10, b: 45}, font: {family: "system-ui, sans-serif", size: 12}, hovermode: "closest",
    legend: {orientation: "h", yref: "container", y: 0, yanchor: "bottom", traceorder: "normal"},
    paper_bgcolor: "#fff", plot_bgcolor: "#fff"
  };
  const layout = Object.assign(base, own, {height});
  if (bars) layout.margin.b = narrow() ? 250 : 120;
  else if (own.legendRows) layout.margin.b = 60 + own.legendRows * (narrow() ? 20 : 12);
  for (const axis of ["xaxis", "yaxis"])
    layout[axis] = Object.assign({gridcolor: "#e4e8ee", zerolinecolor: "#c8d0da"}, own[axis]);
  return layout;
}
const config = {responsive: true, displaylogo: false, displayModeBar: false};
for (const figure of figures) Plotly.newPlot(figure.name, figure.traces, laidOut(figure.layout), config);
const resize = size => figures.forEach(figure => Plotly.relayout(figure.name, size));
window.addEventListener("beforeprint", () => resize({width: 680}));
window.addEventListener("afterprint", () => resize({width: null, autosize: true}));
document.documentElement.dataset.drawn = String(figures.length);
"""


def html_text(report: Report) -> str:
    """The page, about 5 MB, nearly all of it plotly."""
    from plotly.offline import get_plotlyjs

    plots = [plot for section in report.sections for plot in section.plots]
    body = [f"<h1>{escape(report.title)}</h1>"]
    if report.projected:
        body.append(
            '<p><span class="mark">projected</span> Some tables are scaled from another card, not measured.</p>'
        )
    body.append('<div class="verdict">' + "".join(f"<p>{escape(line)}</p>" for line in report.verdict) + "</div>")
    body += map(_section, report.sections)
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head><body>",
            *body,
            f'<script type="application/json" id="figures">{_json([_figure(plot) for plot in plots])}</script>',
            f"<script>{get_plotlyjs()}</script><script>{_SCRIPT}</script>" if plots else "",
            "</body></html>\n",
        )
    )


def _section(section: Section) -> str:
    parts = [f"<section><h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.text]
    parts += [f'<div class="plot" id="{plot.name}"></div>' for plot in section.plots]
    parts += map(_table, section.tables)
    return "".join(parts) + "</section>"


def _table(table: Table) -> str:
    head = "".join(f"<th{_right(table, place)}>{escape(name)}</th>" for place, name in enumerate(table.columns))
    rows = "".join(
        "<tr>"
        + "".join(f"<td{_right(table, place, cell)}>{escape(cell)}</td>" for place, cell in enumerate(row))
        + "</tr>"
        for row in table.rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _right(table: Table, place: int, cell: str = "") -> str:
    if place in table.numeric:
        return ' class="right"' if cell else ' style="text-align:right"'
    if len(cell) > 60:
        return ' class="long"'
    return f' class="{"short" if len(cell) <= 24 else "medium"}"' if cell else ""


def _figure(plot: Plot) -> dict[str, Any]:
    return {"name": plot.name, "traces": [_escaped(trace) for trace in plot.traces], "layout": plot.layout}


def _escaped(value: Any) -> Any:
    """plotly reads a subset of HTML in its texts, so they are escaped as well."""
    if isinstance(value, str):
        return escape(value, quote=False)
    if isinstance(value, dict):
        return {key: _escaped(one) for key, one in value.items()}
    return [_escaped(one) for one in value] if isinstance(value, list) else value


def _json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
