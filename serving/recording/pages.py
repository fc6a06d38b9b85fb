"""One page per validated recording: its requests as `compare` shows them, and the device's time of its steps.

Nothing is fetched when a page is opened, and every name that comes from a recording is escaped.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from profiler.core.errors import ConfigError
from profiler.core.load import atomic_write
from serving.comparison_page import Section, page, styled
from serving.recording.step_errors import KINDS, PricedStep, p90_absolute
from serving.recording.validate import Validation

MOST_POINTS: Final = 600  # of one kind in a plot; of all kinds few enough for SVG, since WebGL is not everywhere
BAND: Final = 0.1
_LEAST_RANGE_PERCENT: Final = 12.0
_COLOURS: Final = dict(zip(KINDS, ("#3b6fb6", "#4fb3bf", "#7a5195", "#c8553d", "#222222"), strict=True))

_T = TypeVar("_T")


def page_paths(recordings: Sequence[Path], folder: Path) -> list[Path]:
    """Where the page of each recording is written: NAME.html in `folder`.

    Raises ConfigError when the folder cannot be one, a page's name is taken by a folder, or two recordings have the
    same name.
    """
    blocked = next((one for one in (folder, *folder.absolute().parents) if one.exists() and not one.is_dir()), None)
    if blocked is not None:
        raise ConfigError(f"--html: {blocked} is a file, not a folder")
    paths: dict[Path, Path] = {}
    for recording in recordings:
        path = folder / f"{recording.resolve().name}.html"
        if path in paths:
            raise ConfigError(f"--html: {paths[path]} and {recording} have the same name, and would share {path}")
        if path.is_dir():
            raise ConfigError(f"--html: {path} is a folder")
        paths[path] = recording
    return list(paths)


def write_page(one: Validation, path: Path) -> None:
    """Writes the page as a whole or not at all; the folder is made, and a page that is there is replaced."""
    with atomic_write(path) as stream:
        stream.write(recording_page(one))


def title(one: Validation) -> str:
    meta = one.meta
    return (
        f"{one.path.resolve().name}: {one.comparison.requests} requests, {meta['model']}, {meta['layers']} layers, "
        f"{meta['mode']}, vLLM {meta['vllm_version']}"
    )


def recording_page(one: Validation) -> str:
    """The whole page, about 5 MB, nearly all of it plotly. Steps whose log has no time of the device are not in it."""
    files = f"replay of {one.meta['dataset_path']}", one.path.resolve().name
    steps = _by_kind(one.steps)
    sections = []
    if steps:
        sections.append(Section("Steps on the device", _rows(one), _note(steps), [_scatter(steps), _errors(steps)]))
    return page(one.comparison, files, ("simulated", "recorded"), title(one), sections)


def _by_kind(steps: Sequence[PricedStep]) -> dict[str, list[PricedStep]]:
    found: dict[str, list[PricedStep]] = {kind: [] for kind in KINDS}
    for one in steps:
        if one.device_us is not None and one.device_us[0] > 0:
            found[one.kind].append(one)
    return {kind: ones for kind, ones in found.items() if ones}


def _rows(one: Validation) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("kind", "steps", "mean recorded, ms", "difference of summed times", "median |error|", "p90 |error|")
    ]
    for kind, errors in one.device.items():
        mean = f"{errors.recorded_ms / errors.steps:.2f}"
        shares = f"{errors.total:+.1f} %", f"{errors.median:.1f} %", f"{errors.p90:.1f} %"
        rows.append((kind, f"{errors.steps:,}", mean, *shares))
    return rows


def _note(steps: dict[str, list[PricedStep]]) -> str:
    thinned = any(len(ones) > MOST_POINTS for ones in steps.values())
    points = f"at most {MOST_POINTS} steps of each kind, evenly chosen" if thinned else "every step"
    return (
        f"Left: {points}; the dotted lines are {100 * BAND:.0f} % above and below. Right: of all steps of a kind, the "
        "share whose error is at most so large; errors beyond the axis show after a double click."
    )


def _pair(one: PricedStep) -> tuple[float, float]:
    assert one.device_us is not None, "_by_kind leaves the others out"
    return one.device_us


def _error_percent(one: PricedStep) -> float:
    recorded_us, priced_us = _pair(one)
    return 100.0 * (priced_us / recorded_us - 1.0)


def _scatter(steps: dict[str, list[PricedStep]]) -> Any:
    """Recorded time across, priced one up, milliseconds, both logarithmic, with lines BAND to either side."""
    import plotly.graph_objects as go

    times = [us / 1e3 for ones in steps.values() for one in ones for us in _pair(one) if us > 0]
    ends = [min(times) / 1.1, max(times) * 1.1]
    grey = {"color": "#999", "width": 1}
    figure = go.Figure()
    for factor, more in ((1 + BAND, {}), (1 - BAND, {"fill": "tonexty", "fillcolor": "rgba(0,0,0,0.07)"}), (1.0, {})):
        line = grey if factor == 1.0 else grey | {"dash": "dot"}
        ys = [factor * end for end in ends]
        figure.add_trace(go.Scatter(x=ends, y=ys, mode="lines", line=line, hoverinfo="skip", showlegend=False, **more))
    for kind, ones in steps.items():
        figure.add_trace(_points(kind, ones))
    figure.update_layout(legend_traceorder="normal")  # a filled trace would turn it around
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return styled(figure, "priced against recorded", "recorded, ms", "priced, ms", legend=True)


def _points(kind: str, ones: Sequence[PricedStep]) -> Any:
    import plotly.graph_objects as go

    shown = _evenly(ones, MOST_POINTS)
    name = f"{kind}: {len(shown):,} of {len(ones):,}" if len(shown) < len(ones) else f"{kind}: {len(ones):,}"
    return go.Scatter(
        x=[_pair(one)[0] / 1e3 for one in shown],
        y=[_pair(one)[1] / 1e3 for one in shown],
        mode="markers",
        marker={"size": 4, "color": _COLOURS[kind], "opacity": 0.6},
        text=[f"step {one.index}, {one.tokens:,} tokens, {_error_percent(one):+.1f} %" for one in shown],
        hovertemplate="%{text}<br>%{x:,.4g}, %{y:,.4g}<extra></extra>",
        name=name,
    )


def _errors(steps: dict[str, list[PricedStep]]) -> Any:
    """Share of the steps of each kind with at most that error, of all its steps."""
    import plotly.graph_objects as go

    figure = go.Figure()
    widest = _LEAST_RANGE_PERCENT
    for kind, ones in steps.items():
        errors = sorted(map(_error_percent, ones))
        widest = max(widest, p90_absolute(errors))
        shares = [(place + 1) / len(errors) for place in range(len(errors))]
        xs, ys = zip(*_evenly(list(zip(errors, shares, strict=True)), MOST_POINTS), strict=True)
        line = {"color": _COLOURS[kind], "shape": "hv"}
        # From a share of nothing, so that a kind with one step is a line too.
        figure.add_trace(go.Scatter(x=[xs[0], *xs], y=[0.0, *ys], mode="lines", line=line, name=kind))
    for at in (-100 * BAND, 0.0, 100 * BAND):
        figure.add_vline(x=at, line_width=1, line_color="#999", line_dash="dot" if at else "solid")
    # A few steps may be several times off, which would hide the others.
    figure.update_xaxes(range=[-1.3 * widest, 1.3 * widest])
    return styled(figure, "share of steps within", "priced - recorded, % of recorded", "share", legend=True)


def _evenly(items: Sequence[_T], most: int) -> list[_T]:
    """At most that many of the items, first and last among them, at even distances."""
    if len(items) <= most:
        return list(items)
    return [items[place * (len(items) - 1) // (most - 1)] for place in range(most)]
