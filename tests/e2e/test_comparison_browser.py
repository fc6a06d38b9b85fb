"""The page of `compare` in a real browser: every plot is drawn inside its column and nothing of a file is run."""

import os
import re
import shutil
import subprocess

import pytest

from serving.comparison import Comparison, Figure, Paired
from serving.comparison_page import page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<img src=x onerror=\"document.title='hacked'\"></script><script>document.title='hacked'</script>"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


def browse(folder, path, *flags):
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile",
        "--virtual-time-budget=5000", *flags, path.as_uri(),
    ]  # fmt: skip
    environment = {**os.environ, "HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True).stdout


@pytest.mark.parametrize("width", [1400, 500])
def test_plots_are_drawn_and_nothing_of_a_file_runs(tmp_path, width):
    pairs = tuple(
        Paired(f"{EVIL}{n}", n, 10, 3, *({"ttft": k * n + 1, "tpot": n + 2.0, "latency": 9.0 * n} for k in (2.0, 3.0)))
        for n in range(1, 40)
    )
    figures = (Figure("ttft", "mean", 41.0, 61.0), Figure("makespan", "total", 100.0, 120.0))
    path = tmp_path / "page.html"
    path.write_text(page(Comparison(39, figures, {"ttft": 20.0}, None, pairs, 1), (EVIL, "b.csv"), ("a", "b"), EVIL))
    # Widths of the drawn plots and of their columns, read by the page itself once it has settled.
    script = (
        "<script>addEventListener('load',()=>setTimeout(()=>{document.body.dataset.sizes="
        "[...document.querySelectorAll('.js-plotly-plot')].map(p=>"
        "Math.round(p.querySelector('.main-svg').getBoundingClientRect().width)+'/'+"
        "Math.round(p.parentElement.getBoundingClientRect().width)+'/'+p.querySelectorAll('.point').length).join(' ')"
        "},500))</script>"
    )
    path.write_text(path.read_text().replace("</body>", f"{script}</body>"))
    shown = browse(tmp_path, path, f"--window-size={width},900", "--dump-dom")
    found = re.search(r'data-sizes="([^"]*)"', shown)
    assert found is not None
    sizes = [tuple(map(int, one.split("/"))) for one in found[1].split()]
    assert len(sizes) == 9
    assert all(0 < drawn <= column for drawn, column, _ in sizes), sizes
    assert [points for *_, points in sizes] == [39, 0, 39] * 3, "every request is a point"
    assert "<title>hacked" not in shown and "<img" not in shown.replace("&lt;img", "")
