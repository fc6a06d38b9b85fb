"""Sweeps over users who wait for their answers: files, points, keys, results from before there were any, reports."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from test_sweeps import EXAMPLE, MODEL, sweep_of

from profiler.core.errors import ConfigError
from profiler.core.paths import default_bundle_root
from profiler.core.types import Parallel
from serving.api import replay
from serving.report.content import report_of
from serving.report.figures import capacity, pareto, verdict
from serving.report.html import html_text
from serving.report.load import doubts
from serving.report.markdown import markdown_text
from serving.report.terminal import print_results
from serving.sweeps import run as run_module
from serving.sweeps.measure import measured, point_columns
from serving.sweeps.points import Candidate, Job, Layout, jobs, layouts
from serving.sweeps.results import HEADER, JOURNAL, read_results
from serving.sweeps.search import Search
from serving.sweeps.size import size
from serving.sweeps.slo import Slo
from serving.sweeps.spec import LimitSet, read_sweep
from serving.traces import read_trace

USERS = {"rates_per_s": None, "concurrencies": [16, 1, 4]}
SESSIONS = EXAMPLE.with_name("agentic_sessions.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrencies": [4]}, "rates_per_s and concurrencies are both given; remove one"),
        ({"rates_per_s": None}, "mode replay needs rates_per_s or concurrencies; mode screen needs none of them"),
        (USERS | {"seeds": None}, "mode replay needs seeds; mode screen"),
        (USERS | {"concurrencies": []}, "concurrencies: List should have at least 1 item"),
        (USERS | {"concurrencies": [4, 1, 4]}, r"concurrencies\[2\]: 4 is listed twice"),
        (USERS | {"concurrencies": [4, 0]}, r"concurrencies\[1\]: .*greater than or equal to 1, found 0"),
        (USERS | {"concurrencies": [-1]}, r"concurrencies\[0\]: .*greater than or equal to 1, found -1"),
        (USERS | {"concurrencies": [1.5]}, r"concurrencies\[0\]: .*valid integer, found 1.5"),
        (USERS | {"concurrencies": ["4"]}, r"concurrencies\[0\]: .*valid integer, found '4'"),
        (USERS | {"concurrencies": [True]}, r"concurrencies\[0\]: .*valid integer, found True"),
        (USERS | {"concurrencies": 4}, "concurrencies: .*valid list, found 4"),
        (USERS | {"concurrency": [4]}, "unknown key 'concurrency'; did you mean 'concurrencies'"),
        (
            {"mode": "screen", "rates_per_s": None, "workload": None, "requests": None, "seeds": None, "slo": None}
            | {"concurrencies": [4]},
            "mode screen replays nothing: remove concurrencies, or use mode replay",
        ),
    ],
)
def test_wrong_numbers_of_users_are_refused_with_file_and_key(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=rf"sweep\.yaml: {message}"):
        sweep_of(tmp_path, **changes)


def test_points_go_from_few_users_to_many_and_all_arrive_at_once(tmp_path):
    sweep = sweep_of(tmp_path, **USERS, seeds=[1, 2])
    made = jobs(sweep, [one for one in layouts(sweep) if isinstance(one, Candidate)][:1])
    assert [(job.concurrency, job.rate_per_s, job.seed) for job in made] == [
        (users, 0.0, seed) for users in (1, 4, 16) for seed in (1, 2)
    ]
    assert len({job.key for job in made}) == 6
    assert [job.steps for job in made] == [False] * 5 + [True]
    columns = list(point_columns(made[2]).items())
    assert columns[-3:] == [("rate_per_s", None), ("concurrency", 4), ("seed", 1)]
    by_rate = replace(made[2], rate_per_s=2.0, concurrency=None)
    assert list(point_columns(by_rate).items())[-3:] == [("rate_per_s", 2.0), ("concurrency", None), ("seed", 1)]


def job_of(**changes):
    layout = Layout(MODEL, "H200", Parallel(dp=8, ep=8), "auto", 0.9, LimitSet(65536, 4096, 64))
    slo = Slo(ttft_ms=5000, tpot_ms=40, percentile=90)
    return replace(Job(layout, 1, "least_loaded", Path("t"), "0" * 64, 60, 4.0, 2, slo, Path("b"), True), **changes)


def test_keys_of_rates_are_those_of_results_that_exist():
    assert job_of().key == "68248610e2d47f4f"
    assert Search(job_of(), 0.02).key == "search 845c9da2699df44f 0.02"
    others = {"replicas": 2, "router": "round_robin", "rate_per_s": 0.0, "seed": 0, "slo": None}
    flags = {"allow_extrapolation": False, "allow_projected": True, "steps": True}
    assert job_of(**others, **flags).key == "ff0ea54a4f3718cf"
    assert len({job_of(rate_per_s=0.0, concurrency=users).key for users in (None, 1, 2)}) == 3


def old_results(folder, sweep):
    """A folder as it was written before there were concurrencies, with one finished point per rate."""
    names = (
        "name", "mode", "models", "hardware", "gpus", "placements", "kv_dtypes", "utilizations", "limits", "replicas",
        "router", "workload", "requests", "rates_per_s", "seeds", "slo", "allow_extrapolation", "allow_projected",
        "pipelines",
    )  # fmt: skip
    header = run_module._header(sweep)
    assert tuple(header["sweep"]) == names
    folder.mkdir()
    (folder / HEADER).write_text(json.dumps(header))
    candidates = [one for one in layouts(sweep) if isinstance(one, Candidate)]
    lines = []
    for job in jobs(sweep, candidates):
        row = {name: value for name, value in point_columns(job).items() if name != "concurrency"}
        row |= {"output_tokens_per_s": 8.0, "output_tokens_per_s_per_gpu": 1.0, "user_tokens_per_s": 9.0}
        row |= dict.fromkeys(("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99"), 1.0)
        row |= {"slo_met": True, "slo_worst_ratio": 0.5, "slo_limiting": "ttft_ms", "weights_gib": 1.0}
        row |= {"variant": "v", "provenance": "measured", "table_engine": "e", "extrapolated_lookups": 0}
        row |= {"kv_tokens_total": 1}
        lines.append(json.dumps({"key": job.key, "row": row, "detail": {}}) + "\n")
    (folder / JOURNAL).write_text("".join(lines))
    return len(lines)


def test_results_from_before_go_on_and_are_reported(tmp_path, capsys):
    sweep = sweep_of(tmp_path, placements=[{"dp": 8, "ep": 8}, {"tp": 8}])
    points = old_results(tmp_path / "out", sweep)
    outcome = run_module.run_sweep(sweep, tmp_path / "out", workers=1)
    assert (outcome.ran, outcome.resumed) == (0, points)
    assert "concurrency" not in outcome.table.read_text().splitlines()[0].split(",")
    header, found = read_results(tmp_path / "out")
    text = markdown_text(report_of(header, found))
    assert "Highest rate per GPU within the SLO" in text and "2 requests/s" in text
    assert "user" not in text.replace("of a user", "").replace("speed of a user", "")


def test_the_header_has_the_axis_that_was_asked(tmp_path):
    asked = run_module._header(sweep_of(tmp_path, **USERS))["sweep"]
    assert asked["concurrencies"] == (16, 1, 4) and "rates_per_s" not in asked


def test_a_size_searches_rates(tmp_path):
    with pytest.raises(ConfigError, match="a size searches rates; concurrencies are for a sweep"):
        size(sweep_of(tmp_path, **USERS), tmp_path / "out")


def job_on(path, **changes):
    """On tp 8, which has no ranks that could hold each other up, with the shipped tables."""
    job = job_of(workload=path, rate_per_s=0.0, slo=None, seed=0, bundle_root=default_bundle_root(), **changes)
    return replace(job, layout=replace(job.layout, parallel=Parallel(tp=8)), allow_extrapolation=False)


def test_one_user_sees_each_request_alone(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [(1000, 20, 0), (50, 7, 10), (3000, 1, 20), (9000, 3, 30)]
    lines = [{"input_toks": p, "output_toks": n, "arrival_time_ns": at} for p, n, at in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = job_on(path, requests=4, concurrency=1)
    row = measured(job)["row"]
    trace = read_trace(path)
    alone = [
        replay(job.cluster, replace(trace, requests=(one,)), bundle_root=job.bundle_root).records[0]
        for one in trace.requests
    ]
    ttft = [(one.first_token_ns - one.arrival_ns) / 1e6 for one in alone]
    e2e = [(one.finish_ns - one.arrival_ns) / 1e6 for one in alone]
    # A later request comes while the engine's own thread hands out the last token of the one before: 0.06 ms.
    assert row["ttft_ms_mean"] == pytest.approx(sum(ttft) / 4, abs=0.1)
    assert row["ttft_ms_p99"] == pytest.approx(max(ttft), rel=0.05)
    assert row["makespan_s"] == pytest.approx(sum(e2e) / 1e3, abs=4e-4)
    assert row["in_flight_mean"] == pytest.approx(1.0)
    assert row["finished"] == 4 and row["concurrency"] == 1 and row["rate_per_s"] is None


def test_calls_of_sessions_take_places(tmp_path):
    job = job_on(SESSIONS, requests=12, concurrency=2)
    row = measured(job)["row"]
    assert row["status"] == "done" and row["finished"] == 12 and 0 < row["in_flight_mean"] <= 2


def test_sessions_with_other_seeds_are_refused_before_anything_runs(tmp_path):
    sweep = sweep_of(tmp_path, **USERS, workload=str(SESSIONS), seeds=[0, 1])
    with pytest.raises(ConfigError, match=r"seeds 0, 1: .*agentic_sessions\.jsonl: .*use seed 0 alone"):
        run_module.run_sweep(sweep, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def point(users, met=True, **more):
    layout = {
        "model": "m", "hardware": "H200", "gpus": 8, "gpus_total": 8, "replicas": 1, "tp": 1, "pp": 1, "dp": 8, "ep": 8,
        "kv_dtype": "auto", "utilization": 0.9, "max_model_len": 1000, "max_num_batched_tokens": 8192,
        "max_num_seqs": 256, "weights_gib": 96.7, "kv_tokens_total": 100000,
    }  # fmt: skip
    figures = {
        "key": f"{users} {more}", "status": "done", "kind": None, "reason": None, "rate_per_s": None,
        "concurrency": users, "seed": 1, "finished": 640, "rejected": 0, "unfinished": 0, "in_flight_mean": 0.9 * users,
        "output_tokens_per_s": 80.0 * users, "output_tokens_per_s_per_gpu": 10.0 * users,
        "user_tokens_per_s": 90 - users, "requests_per_s": 1.0, "slo_met": met, "slo_limiting": "ttft_ms",
        "slo_worst_ratio": 1.5, "variant": "v", "provenance": "measured", "table_engine": "e",
        "extrapolated_lookups": 0,
    }  # fmt: skip
    figures |= {f"{n}_ms_{p}": 10.0 * users for n in ("ttft", "tpot") for p in ("p50", "p99")}
    lines = [{"name": "dense", "us": 400.0, "provenance": "x"}]
    detail = {
        "cdf_percents": [0, 50, 100], "cdf_ms": {name: [1, 10, 100] for name in ("ttft", "tpot", "e2e")},
        "series": {"time_s": [0, 1, 2], "waiting": [0, 2, 1], "running": [1, 3, 2], "kv_share": [0.1, 0.4, 0.2]},
        "steps": {which: {"what": "w", "lines": lines, "joules_per_token": None} for which in ("decode", "prefill")},
    }  # fmt: skip
    return {"row": layout | figures | more, "detail": detail}


def header_of(slo=True, name="n"):
    bounds = {"ttft_ms": 5.0, "tpot_ms": None, "itl_ms": None, "e2e_ms": None, "percentile": 99.0}
    asked = {
        "name": name, "mode": "replay", "models": ["m"], "hardware": ["H200"], "workload": "w.jsonl", "requests": 640,
        "seeds": [1], "router": "r", "slo": bounds | {"goodput_share": None} if slo else None,
        "concurrencies": [64, 1, 16],
    }  # fmt: skip
    return {"made_by": "x", "command": "sweep", "sweep": asked, "workload_sha256": "0", "bundles": {}}


POINTS = [point(1), point(16), point(64, met=False), point(1, tp=8, dp=1, ep=1), point(64, tp=8, dp=1, ep=1)]


def test_verdicts_speak_of_users():
    rows = [one["row"] for one in POINTS]
    (first,) = verdict(header_of(), rows)
    assert first == (
        "Most users per GPU within the SLO: tp8 dp1 on 8 H200, 64 users. No larger number was run; the limit may lie "
        "above."
    )
    assert verdict(header_of(), rows[:3]) == ["Most users per GPU within the SLO: tp1 dp8 ep8 on 8 H200, 16 users."]
    assert verdict(header_of(slo=False), rows) == [
        "Most output per GPU: tp1 dp8 ep8 on 8 H200, 640.0 tokens/s per GPU at 64 users."
    ]
    assert verdict(header_of(), [point(1, met=False)["row"]]) == [
        "No point keeps the SLO. Nearest: tp1 dp8 ep8 at 1 user, limited by ttft_ms, 1.50 times what is allowed."
    ]


def test_the_most_users_lie_below_the_first_number_that_any_seed_breaks():
    rows = [point(*one)["row"] for one in ((1,), (4,), (16,))] + [point(4, met=False, seed=2)["row"]]
    (line,) = capacity(rows, True)
    assert (line["highest_load"], line["load"], line["bounded"]) == (1, 1, True)
    (line,) = capacity(rows[:3], True)
    assert (line["highest_load"], line["bounded"]) == (16, False)
    assert [row["concurrency"] for row in pareto(rows)] == [16, 4, 1]


def test_a_report_of_users_names_no_rate(capsys):
    found = report_of(header_of(), POINTS)
    text = markdown_text(found)
    page = html_text(found).split("<script>")[0]
    print_results([one["row"] for one in POINTS], sys.stdout)
    shown = capsys.readouterr().out
    for one in (text, page, shown):
        assert "requests/s" not in one and "req/s" not in one and "rate" not in one.lower().replace("separate", "")
    assert "SLO users" in shown and "| most users in SLO | shown at users |" in text
    assert "1, 16, 64 users over all replicas" in text
    assert "| tp1 dp8 ep8 | 16 | 640 | 14.4 | 160.0 | 74.0 | 160 | 160 | 160.0 | 160.0 | yes |" in text
    assert "64 users, seed 1" in page and "tp8 dp1 at 64 users" in page
    plots = {plot.name: plot for section in found.sections for plot in section.plots}
    best = plots["users_ttft_ms_p50"].traces[0]
    assert (best["x"], best["y"], best["text"]) == ([1, 64], [10.0, 640.0], ["1 user", "64 users"])
    assert [one["mode"] for one in plots["pareto"].traces] == ["markers"] * 2 + ["lines"] * 3


def test_short_replays_are_told_and_not_refused():
    short = point(64, finished=100, rejected=20, unfinished=7)["row"]
    assert doubts([short | {"finished": 101}, point(16)["row"]]) == []
    (told,) = doubts([short, point(128, finished=8)["row"], point(16)["row"], {"status": "refused"}])
    assert told.startswith("Too short: with 64 and 128 users there were fewer than 2 requests per user")
    assert "at least 10 per user, here 1,280 requests" in told
    (told,) = doubts([point(64, in_flight_mean=31.9)["row"]])
    assert told.startswith("With 64 users fewer than half of them had a request in flight")
    assert verdict(header_of(), [point(16)["row"], short])[1].startswith("Too short: with 64 users")
    page = html_text(report_of(header_of(), [point(16), {"row": short, "detail": {}}]))
    assert "Too short: with 64 users" in page.split("<h2>")[0]
    assert doubts([{"status": "done", "rate_per_s": 2.0}, point(16, in_flight_mean=None)["row"]]) == []


def test_text_of_others_stays_text():
    evil = '<img src=x onerror="alert(1)"><script>alert(1)<\\script>'
    made = [point(1, model=evil), point(4, model=evil), point(4, model="m", variant=evil)]
    found = report_of(header_of(name=evil), made)
    assert any("<img" in one["name"] for one in found.sections[5].plots[0].traces)
    page = html_text(found)
    assert "<img" not in page and "<script>alert" not in page
    assert r"\<img" in markdown_text(found)


def test_the_example_of_the_guide_is_read(tmp_path):
    page = (EXAMPLE.parents[1] / "docs" / "guide" / "sweep.md").read_text()
    examples = [yaml.safe_load(part.split("```")[0]) for part in page.split("```yaml\n")[1:]]
    (users,) = [one for one in examples if "concurrencies" in one]
    assert (EXAMPLE.parents[1] / users["workload"]).is_file()
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(users | {"workload": str(EXAMPLE)}))
    sweep = read_sweep(tmp_path / "sweep.yaml")
    assert sweep.requests >= 10 * max(sweep.concurrencies)
