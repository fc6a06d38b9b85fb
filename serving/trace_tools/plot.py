"""A trace as one HTML page that needs nothing from elsewhere."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final

from profiler.core.units import NS_PER_S
from serving.trace_tools.summary import SELECTION_TOKENS
from serving.traces import TraceRequest

_BINS: Final = 200
_POINTS: Final = 400


def plot_html(requests: Iterable[TraceRequest], title: str) -> str:
    """Arrivals and tokens over time, and the distributions of prompt and output lengths, as a page of about 5 MB.

    At most 200 bins and 400 points a curve, whatever the number of requests. The title is shown as plain text.
    """
    arrivals, sizes = array("q"), array("q")
    prompts, outputs = Counter[int](), Counter[int]()
    for request in requests:
        arrivals.append(request.arrival_ns)
        sizes.append(request.prompt_tokens + request.output_tokens)
        prompts[request.prompt_tokens] += 1
        outputs[request.output_tokens] += 1
    figure = _figure(arrivals, sizes, prompts, outputs)
    shown = escape(title)
    figure.update_layout(title_text=shown, height=820, showlegend=True, template="plotly_white")
    body = figure.to_html(full_html=False, include_plotlyjs=True, div_id="trace")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{shown}</title></head>\n'
        f"<body>{body}</body></html>\n"
    )


def _figure(arrivals: Sequence[int], sizes: Sequence[int], prompts: Counter[int], outputs: Counter[int]) -> Any:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=2,
        cols=2,
        subplot_titles=("arrivals per second", "tokens per second", "prompt tokens", "output tokens"),
    )
    middles, per_s, tokens_per_s = _binned(arrivals, sizes)
    figure.add_trace(go.Scatter(x=middles, y=per_s, name="requests", line_shape="hvh"), row=1, col=1)
    figure.add_trace(go.Scatter(x=middles, y=tokens_per_s, name="tokens", line_shape="hvh"), row=1, col=2)
    for column, (name, counts) in enumerate((("prompt", prompts), ("output", outputs)), start=1):
        x, y = _cumulative(counts)
        figure.add_trace(go.Scatter(x=x, y=y, name=name, line_shape="hv"), row=2, col=column)
        figure.update_xaxes(type="log", title_text="tokens", row=2, col=column)
        figure.update_yaxes(title_text="share of requests at or below", range=[0, 1], row=2, col=column)
        figure.update_xaxes(title_text="seconds", row=1, col=column)
    figure.add_vline(x=SELECTION_TOKENS, line_dash="dot", annotation_text="top-k 2,048", row=2, col=1)
    return figure


def _binned(arrivals: Sequence[int], sizes: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
    """Middle of each bin in seconds, requests per second and tokens per second in it."""
    first_ns, last_ns = min(arrivals), max(arrivals)
    width_ns = max(-(-(last_ns - first_ns + 1) // _BINS), 1)
    bins = (last_ns - first_ns) // width_ns + 1
    counts, tokens = [0] * bins, [0] * bins
    for arrival_ns, size in zip(arrivals, sizes, strict=True):
        place = (arrival_ns - first_ns) // width_ns
        counts[place] += 1
        tokens[place] += size
    width_s = width_ns / NS_PER_S
    middles = [(first_ns + (place + 0.5) * width_ns) / NS_PER_S for place in range(bins)]
    return middles, [count / width_s for count in counts], [count / width_s for count in tokens]


def _cumulative(counts: Counter[int]) -> tuple[list[int], list[float]]:
    """Lengths and the share of requests at or below each, thinned to steps of 1 / 400."""
    total = counts.total()
    x, y = [], []
    below = 0
    shown = -1.0
    for value in sorted(counts):
        below += counts[value]
        if below / total - shown >= 1 / _POINTS or below == total:
            shown = below / total
            x.append(value)
            y.append(shown)
    return x, y
