"""Picture of recordings against the simulator: distributions of TTFT and TPOT over the requests of each recording.

    python tests/perf/plot_recordings.py docs/images/recordings-h200-v32.png
    python tests/perf/plot_recordings.py docs/images/recordings-h200-glm-5.png tests/recorded/H200/GLM-5-FP8-6L

Replays the six recordings of RECORDINGS, of DeepSeek-V3.2 or in the folder named, as `python -m serving validate` does
and draws both distributions of each, with the difference of the means above them. The picture is taken with headless
Chromium, which must be on the PATH.
"""

import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from serving.recording.validate import Validation

FOLDER = ROOT / "tests" / "recorded" / "H200" / "DeepSeek-V3.2-Exp-6L"
RECORDINGS = (
    "graphs-chat",
    "graphs-mixed",
    "graphs-saturated",
    "graphs-prefixes",
    "graphs-long",
    "eager-mixed",
)
INSTEAD = {"eager-mixed": "engine-mixed"}  # where the first was not made
METRICS = {"ttft": "TTFT", "tpot": "TPOT"}
COLUMNS = 3
SIDES = {"recorded": "#c8553d", "simulated": "#3b6fb6"}
SIZE = 1200, 1140  # pixels
MANTISSAS = (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)  # of ticks, for axes of more than a decade and of less
BROWSERS = "chromium", "chromium-browser", "google-chrome"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--virtual-time-budget=10000",
)  # fmt: skip


def main(output: Path, folder: Path = FOLDER) -> None:
    """Writes the picture, PNG; exits with a message where there is no browser or it draws nothing."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is on the PATH")
    from serving.recording.validate import validate

    names = [name if (folder / name).is_dir() else INSTEAD.get(name, name) for name in RECORDINGS]
    html = picture([validate(folder / name) for name in names])
    output.parent.mkdir(parents=True, exist_ok=True)
    shoot(browser, html, output.resolve())
    print(f"{output}: {output.stat().st_size / 1e3:.0f} kB")


def picture(found: "Sequence[Validation]") -> str:
    """The page of SIZE: rows of COLUMNS recordings, each with one plot per metric under the other."""
    from plotly.subplots import make_subplots

    places = [(index // COLUMNS * len(METRICS), index % COLUMNS + 1) for index in range(len(found))]
    rows = max(row for row, _ in places) + len(METRICS)
    titles = {}
    for one, (row, column) in zip(found, places, strict=True):
        for below, metric in enumerate(METRICS, start=1):
            titles[row + below, column] = plot_title(one, metric)
    figure = make_subplots(
        rows,
        COLUMNS,
        subplot_titles=[titles.get((row + 1, column + 1), "") for row in range(rows) for column in range(COLUMNS)],
        vertical_spacing=0.085,
        horizontal_spacing=0.05,
    )
    for one, (row, column) in zip(found, places, strict=True):
        for below, metric in enumerate(METRICS, start=1):
            draw(figure, one, metric, row + below, column)
    style(figure, page_title(found[0]))
    body: str = figure.to_html(include_plotlyjs=True, config={"staticPlot": True})
    return body.replace("<body>", "<body style='margin:0'>")


def page_title(one: "Validation") -> str:
    meta = one.meta
    return (
        f"{meta['model']}, {meta['layers']} layers, one {FOLDER.parent.name}, vLLM {meta['vllm_version']}: requests "
        "recorded and simulated; in per cent, the simulated mean against the recorded one"
    )


def plot_title(one: "Validation", metric: str) -> str:
    by = {figure.statistic: figure for figure in one.comparison.figures if figure.metric == metric}
    count = sum(metric in pair.recorded_ms for pair in one.comparison.pairs)
    return f"<b>{one.path.name}</b>, {count} requests: {METRICS[metric]} {by['mean'].difference_percent:+.1f} %"


def draw(figure: Any, one: "Validation", metric: str, row: int, column: int) -> None:
    """Both distributions: share of the requests with at most that time, milliseconds on a logarithmic axis."""
    import plotly.graph_objects as go

    pairs = [pair for pair in one.comparison.pairs if metric in pair.recorded_ms]
    shares = [place / len(pairs) for place in range(len(pairs) + 1)]
    ends = []
    for side, colour in SIDES.items():
        times = sorted(getattr(pair, f"{side}_ms")[metric] for pair in pairs)
        ends += [times[0], times[-1]]
        trace = go.Scatter(
            x=[times[0], *times],
            y=shares,
            mode="lines",
            line={"color": colour, "shape": "hv", "width": 2},
            name=side,
            showlegend=(row, column) == (1, 1),
        )
        figure.add_trace(trace, row=row, col=column)
    at = ticks(min(ends), max(ends))
    texts = [f"{one:,g}" for one in at]
    figure.update_xaxes(title_text=f"{METRICS[metric]}, ms", tickvals=at, ticktext=texts, row=row, col=column)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high; plotly's own have a logarithmic axis of less than a decade without labels."""
    mantissas = MANTISSAS[high < 10 * low]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [mantissa * 10**decade for decade in decades for mantissa in mantissas]
    return [value for value in values if low <= value <= high]


def style(figure: Any, title: str) -> None:
    figure.update_layout(
        template="plotly_white",
        width=SIZE[0],
        height=SIZE[1],
        title={"text": title, "x": 0.5, "y": 0.985, "yanchor": "top", "font_size": 15},
        margin={"l": 60, "r": 15, "t": 95, "b": 50},
        font={"size": 13, "color": "#222"},
        legend={"orientation": "h", "x": 0.5, "xanchor": "center", "y": 1.03, "yanchor": "bottom", "font_size": 15},
    )
    figure.update_annotations(font_size=13.5)
    figure.update_xaxes(type="log", title_standoff=4, title_font_size=12, showline=True, linecolor="#999")
    figure.update_yaxes(range=[0, 1.02], dtick=0.25, showline=True, linecolor="#999")
    figure.update_yaxes(title_text="share of requests", title_font_size=12, title_standoff=6, col=1)


def shoot(browser: str, html: str, output: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page, profile = Path(folder) / "page.html", Path(folder) / "profile"
        page.write_text(html, encoding="utf-8")
        taken = Path(folder) / "page.png"
        command = [browser, *FLAGS, f"--user-data-dir={profile}", f"--screenshot={taken}"]
        command += [f"--window-size={SIZE[0]},{SIZE[1]}", page.as_uri()]
        done = subprocess.run(command, env=os.environ | {"HOME": folder}, capture_output=True, text=True, timeout=120)
        if done.returncode or not taken.is_file():
            sys.exit(f"{browser} took no picture:\n{done.stderr[-2000:]}")
        shutil.copyfile(taken, output)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
