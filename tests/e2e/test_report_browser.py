"""The HTML report in a real browser: it draws, fits a phone, and runs nothing that a trace or a config brings in."""

import json
import os
import re
import shutil
import subprocess
import time

import pytest

from serving.report.content import report_of
from serving.report.html import html_text

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<img src=x onerror=\"document.title='hacked'\"></script><script>document.title='hacked'</script>"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


def browse(tmp_path, page, *flags):
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={tmp_path}/profile",
        "--allow-file-access-from-files", "--window-size=1280,1000", *flags, page.as_uri(),
    ]  # fmt: skip
    environment = {**os.environ, "HOME": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment).stdout


def point(number, rate, met):
    layout = {
        "model": EVIL, "hardware": "H200", "gpus": 8, "gpus_total": 8, "replicas": 1, "tp": 1, "pp": 1, "dp": 8,
        "ep": 8, "kv_dtype": "auto", "utilization": 0.9, "max_model_len": 1000 + number % 3,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256, "weights_gib": 96.7, "kv_tokens_total": 100000,
    }  # fmt: skip
    figures = {
        "key": str(number), "status": "done", "kind": None, "reason": None, "rate_per_s": rate, "seed": 1,
        "output_tokens_per_s": 100.0 * rate, "output_tokens_per_s_per_gpu": 12.5 * rate, "user_tokens_per_s": 40 - rate,
        "requests_per_s": rate, "slo_met": met, "slo_limiting": "ttft_ms", "slo_worst_ratio": 0.5, "variant": EVIL,
        "provenance": "projected", "table_engine": EVIL, "extrapolated_lookups": 3,
    }  # fmt: skip
    figures |= {f"{n}_ms_{p}": 10.0 * rate for n in ("ttft", "tpot") for p in ("p50", "p99")}
    lines = [{"name": EVIL, "us": 900.0, "provenance": "projected"}, {"name": "dense", "us": 400.0, "provenance": "x"}]
    detail = {
        "cdf_percents": [0, 50, 100], "cdf_ms": {name: [1, 10, 100] for name in ("ttft", "tpot", "e2e")},
        "series": {"time_s": [0, 1, 2], "waiting": [0, 2, 1], "running": [1, 3, 2], "kv_share": [0.1, 0.4, 0.2]},
        "steps": {which: {"what": EVIL, "lines": lines, "joules_per_token": None} for which in ("decode", "prefill")},
    }  # fmt: skip
    return {"row": layout | figures, "detail": detail}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return written(tmp_path_factory.mktemp("page"), [point(n, 1.0 + n // 3, n < 6) for n in range(9)])


def written(folder, points, **more):
    asked = {
        "name": EVIL, "mode": "replay", "models": [EVIL], "hardware": ["H200"], "workload": EVIL + ".jsonl",
        "requests": 10, "seeds": [1], "router": EVIL, "slo": {"ttft_ms": 5.0, "tpot_ms": None, "itl_ms": None,
        "e2e_ms": None, "percentile": 99.0, "goodput_share": None},
    }  # fmt: skip
    header = {"made_by": "x", "command": "sweep", "sweep": asked | more, "workload_sha256": "0", "bundles": {EVIL: "0"}}
    refused = {"status": "refused", "kind": "coverage", "reason": EVIL * 3}
    points = [*points, {"row": points[0]["row"] | refused, "detail": {}}]
    path = folder / "report.html"
    path.write_text(html_text(report_of(header, points)))
    return path


def test_it_draws_every_figure_and_runs_nothing_else(page, tmp_path):
    start = time.monotonic()
    dom = browse(tmp_path, page, "--dump-dom")
    spent_s = time.monotonic() - start
    names = [one["name"] for one in json.loads(re.search(r'id="figures">(.*?)</script>', page.read_text())[1])]
    assert f'data-drawn="{len(names)}"' in dom and len(names) == 9
    for name in names:
        drawn = dom.split(f'id="{name}"')[1][:20000]
        assert "js-plotly-plot" in dom and "main-svg" in drawn, name
    assert "<title>hacked</title>" not in dom
    assert not re.search(r"<img[^>]*onerror", dom)
    assert page.stat().st_size < 6e6
    assert spent_s < 60  # the page itself takes far less; a loaded machine starts a browser slowly


def test_a_page_of_users_draws_its_curves_too(tmp_path):
    points = [point(n, float(4 ** (n // 3)), n < 6) for n in range(9)]
    for one in points:
        users = {"rate_per_s": None, "concurrency": int(one["row"]["rate_per_s"]), "in_flight_mean": 0.5}
        one["row"] |= users | {"finished": 10, "rejected": 0, "unfinished": 0}
    page = written(tmp_path, points, concurrencies=[1, 4, 16])
    dom = browse(tmp_path, page, "--dump-dom")
    names = [one["name"] for one in json.loads(re.search(r'id="figures">(.*?)</script>', page.read_text())[1])]
    assert f'data-drawn="{len(names)}"' in dom and len(names) == 12
    assert [name for name in names if name.startswith("users_")] == [
        "users_output_tokens_per_s_per_gpu", "users_ttft_ms_p50", "users_tpot_ms_p50",
    ]  # fmt: skip
    assert "Too short: with 16 users" in dom and "requests/s" not in page.read_text().split("<script>")[0]
    assert "<title>hacked</title>" not in dom and not re.search(r"<img[^>]*onerror", dom)


def test_it_needs_nothing_from_elsewhere(page):
    own = re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', own)
    assert "@import" not in own and "url(" not in own


def test_the_verdict_comes_first_and_says_projected(page):
    body = page.read_text().split("<body>")[1]
    assert body.index('class="verdict"') < body.index("<h2>")
    assert body.index('<span class="mark">projected</span>') < body.index('class="verdict"')


def test_a_phone_scrolls_tables_and_not_the_page(page, tmp_path):
    frame = page.parent / "phone.html"
    frame.write_text(
        f'<iframe id="f" src="{page.name}" style="width:390px;height:800px;border:0"></iframe><p id="out"></p>'
        "<script>window.onload = () => { const d = document.getElementById('f').contentDocument;"
        " const wide = [...d.querySelectorAll('.plot .main-svg')].map(e => e.getBoundingClientRect().right);"
        " document.getElementById('out').textContent ="
        " JSON.stringify([d.documentElement.scrollWidth, Math.max(...wide), d.querySelectorAll('.plot').length]); };"
        "</script>"
    )
    dom = browse(tmp_path, frame, "--dump-dom")
    width, rightmost, plots = json.loads(re.search(r'<p id="out">(.*?)</p>', dom)[1])
    assert width <= 390 and rightmost <= 390 and plots == 9


def test_it_prints(page, tmp_path):
    target = tmp_path / "r.pdf"
    browse(tmp_path, page, f"--print-to-pdf={target}")
    assert target.read_bytes().startswith(b"%PDF") and target.stat().st_size > 20_000
