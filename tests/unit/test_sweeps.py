"""Sweep files, points, journals, searches: what is legal, what is kept, and what a crash leaves."""

import errno
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from profiler.core.errors import CapacityError, ConfigError, ContractError, CoverageError, SparsightError
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from serving.placement import splits
from serving.report.figures import capacity, pareto, refusals
from serving.sweeps import run as run_module
from serving.sweeps import search as search_module
from serving.sweeps.points import Candidate, Refused, jobs, layouts
from serving.sweeps.refusal import nothing_ran
from serving.sweeps.results import Journal, csv_text, read_results
from serving.sweeps.search import Search, searched
from serving.sweeps.size import Limit, _need_sentences, needs, size
from serving.sweeps.spec import read_sweep
from serving.sweeps.traffic import open_traffic

MODEL = "deepseek-ai/DeepSeek-V3.2-Exp"
EXAMPLE = Path(__file__).resolve().parents[2] / "workloads" / "example_trace.jsonl"
BASE = {
    "name": "test",
    "models": [MODEL],
    "hardware": ["H200"],
    "gpus": [8],
    "limits": [{"max_model_len": 81920}],
    "workload": str(EXAMPLE),
    "requests": 20,
    "rates_per_s": [2.0, 1.0],
    "seeds": [1],
    "slo": {"ttft_ms": 1000, "percentile": 90},
}


def sweep_of(folder, **changes):
    path = folder / "sweep.yaml"
    content = {key: value for key, value in (BASE | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(content))
    return read_sweep(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rates": [1]}, "unknown key 'rates'; did you mean 'rates_per_s'"),
        ({"models": []}, "models"),
        ({"gpus": [8, 8]}, r"gpus\[1\]: 8 is listed twice"),
        ({"limits": [{}, {}]}, r"limits\[1\].*listed twice"),
        ({"rates_per_s": [0]}, "rates_per_s"),
        ({"seeds": None}, "needs seeds|seeds"),
        ({"workload": None}, "mode replay needs workload"),
        ({"mode": "screen"}, "mode screen replays nothing: remove workload, requests, rates_per_s, seeds, slo"),
        ({"placements": []}, "leaves nothing to run"),
        ({"placements": [{"tp": 8, "xp": 4}]}, r"placements\[0\]: unknown key 'xp'"),
        ({"placements": [{"tp": 0}]}, r"placements\[0\].tp: Input should be greater than or equal to 1, found 0"),
        ({"placements": "some"}, "placements: Input should be 'launchable' or 'all', found 'some'"),
        ({"placements": [{"tp": 4}]}, r"placements\[0\] takes tp x pp x dp = 4 GPUs, gpus lists 8"),
        ({"router": "leastloaded"}, "did you mean 'least_loaded'"),
        ({"slo": {"ttft_ms": 1}}, "slo: needs one of percentile"),
        ({"utilizations": [1.2]}, "utilizations"),
    ],
)
def test_contradicting_specs_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        sweep_of(tmp_path, **changes)


def test_every_split_is_a_candidate_or_a_refusal_with_a_reason(tmp_path):
    judged = list(layouts(sweep_of(tmp_path)))
    assert [one.layout.parallel for one in judged] == list(splits(load_model(MODEL), 8))
    kinds = {one.layout.parallel: one.kind for one in judged if isinstance(one, Refused)}
    assert kinds[Parallel(tp=1, pp=8)] == "left out"
    assert kinds[Parallel(tp=2, pp=1, dp=4, ep=4)] == "not launchable"
    assert all(one.reason for one in judged if isinstance(one, Refused))
    assert Parallel(tp=1, dp=8, ep=8) in [one.layout.parallel for one in judged if isinstance(one, Candidate)]


def test_what_does_not_fit_says_what_would(tmp_path):
    judged = list(layouts(sweep_of(tmp_path, hardware=["H100"], placements=[{"dp": 8, "ep": 8}])))
    assert len(judged) == 1 and isinstance(judged[0], Refused)
    assert judged[0].kind == "capacity" and "GPUs" in str(judged[0].suggestion)


def test_keys_name_the_point_and_not_the_place(tmp_path):
    sweep = sweep_of(tmp_path)
    candidates = [one for one in layouts(sweep) if isinstance(one, Candidate)]
    made = jobs(sweep, candidates)
    assert len({job.key for job in made}) == len(made)
    assert [job.rate_per_s for job in made[:2]] == [1.0, 2.0]
    assert jobs(replace(sweep, seeds=()), candidates) == []  # the seeds behind the first, where there is one
    moved = replace(made[0], workload=tmp_path / "elsewhere", bundle_root=tmp_path)
    assert moved.key == made[0].key
    assert replace(made[0], workload_sha256="0" * 64).key != made[0].key


def test_a_torn_line_is_dropped_and_the_journal_goes_on(tmp_path):
    with Journal(tmp_path / "out", {"sweep": 1}) as journal:
        journal.add("a", {"row": {"x": 1}, "detail": {}})
        journal.add("b", {"row": {"x": 2}, "detail": {}})
    path = tmp_path / "out" / "points.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    with Journal(tmp_path / "out", {"sweep": 1}) as journal:
        assert list(journal.done) == ["a"]
        journal.add("c", {"row": {"x": 3}, "detail": {}})
    header, points = read_results(tmp_path / "out")
    assert header == {"sweep": 1}
    assert [point["row"]["x"] for point in points] == [1, 3]


def test_results_of_other_inputs_are_not_mixed(tmp_path):
    with Journal(tmp_path / "out", {"sweep": 1, "workload_sha256": "a"}):
        pass
    with pytest.raises(ConfigError, match=r"other inputs \(workload_sha256 differ\)"):
        Journal(tmp_path / "out", {"sweep": 1, "workload_sha256": "b"})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="holds no results"):
        Journal(tmp_path / "mine", {"sweep": 1})
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        Journal(tmp_path / "file", {"sweep": 1})


def test_damaged_results_are_one_message(tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"sweep.json: the key 'sweep' is missing"):
        read_results(tmp_path)
    (tmp_path / "sweep.json").write_text('{"sweep": 1}')
    for line in ("[]", "1", "{}", "x"):
        (tmp_path / "points.jsonl").write_text(f"{line}\n")
        with pytest.raises(ConfigError, match=r"points.jsonl:1: not a line of results"):
            read_results(tmp_path)


def test_a_full_disk_is_one_message_and_keeps_what_is_there(tmp_path, monkeypatch):
    with Journal(tmp_path / "out", {"sweep": 1}) as journal:
        journal.add("a", {"row": {"x": 1}, "detail": {}})

        def full(_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(SparsightError, match="the disk is full; 1 finished points are kept"):
            journal.add("b", {"row": {"x": 2}, "detail": {}})
        monkeypatch.undo()
    assert read_results(tmp_path / "out")[1][0]["row"] == {"x": 1}


def test_a_damaged_line_names_itself(tmp_path):
    with Journal(tmp_path, {"sweep": 1}) as journal:
        journal.add("a", {"row": {}, "detail": {}})
    path = tmp_path / "points.jsonl"
    path.write_text("not json\n" + path.read_text())
    with pytest.raises(ConfigError, match=r"points\.jsonl:1"):
        read_results(tmp_path)


def test_rows_of_different_columns_make_one_table():
    assert csv_text([{"a": 1}, {"a": 2, "b": None}]) == "a,b\n1,\n2,\n"


def test_seed_zero_is_the_trace_and_others_draw_runs_of_it():
    traffic = open_traffic(EXAMPLE)
    own = traffic.trace.requests
    assert traffic.at(None, 0, 50).requests == own[:50]
    drawn = traffic.at(None, 7, 500).requests
    assert len(drawn) == 500 and drawn == traffic.at(None, 7, 500).requests != traffic.at(None, 8, 500).requests
    lengths = [(one.prompt_tokens, one.output_tokens) for one in own]
    places = [lengths.index((one.prompt_tokens, one.output_tokens)) for one in drawn[:50]]
    assert [(place + 1) % len(own) for place in places[:-1]] == places[1:]
    assert all(a.arrival_ns <= b.arrival_ns for a, b in itertools.pairwise(drawn))
    with pytest.raises(ConfigError, match="has 200 requests, 201 are asked for"):
        traffic.at(None, 0, 201)


def test_rates_are_met_and_zero_means_at_once():
    requests = open_traffic(EXAMPLE).at(4.0, 3, 100).requests
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9
    assert 99 / span_s == pytest.approx(4.0, rel=1e-6)
    assert {one.arrival_ns for one in open_traffic(EXAMPLE).at(0, 3, 100).requests} == {0}


@pytest.fixture
def job(tmp_path):
    sweep = sweep_of(tmp_path)
    return jobs(sweep, [one for one in layouts(sweep) if isinstance(one, Candidate)][:1])[0]


def engine_with_limit(limit_per_s, ceiling_per_s, rates):
    """A stand-in for the replay whose limit is known."""

    def measured(job):
        rates.append(job.rate_per_s)
        row = {"key": str(job.rate_per_s), "status": "done", "rate_per_s": job.rate_per_s}
        row |= {"requests_per_s": ceiling_per_s, "slo_limiting": "ttft_ms", "slo_worst_ratio": 1.0}
        if job.slo is not None:
            row["slo_met"] = job.rate_per_s <= limit_per_s
        return {"row": row, "detail": {}}

    return measured


@pytest.mark.parametrize("around", [None, 0.9, 3.7, 8.0])
def test_bisection_finds_a_known_limit(job, monkeypatch, around):
    rates = []
    monkeypatch.setattr(search_module, "measured", engine_with_limit(3.7, 10.0, rates))
    row = searched(Search(job, 0.02, around))["row"]
    assert row["highest_rate_per_s"] <= 3.7 < row["failed_rate_per_s"] <= row["highest_rate_per_s"] * 1.0201
    assert not row["saturated"] and len(rates) < 16


def test_a_search_stops_at_the_ceiling_and_at_the_bottom(job, monkeypatch):
    monkeypatch.setattr(search_module, "measured", engine_with_limit(99.0, 10.0, []))
    row = searched(Search(job, 0.02))["row"]
    assert row["saturated"] and row["highest_rate_per_s"] == 10.0 and row["slo_limiting"] == "throughput"
    monkeypatch.setattr(search_module, "measured", engine_with_limit(0.0, 10.0, []))
    row = searched(Search(job, 0.02))["row"]
    assert row["highest_rate_per_s"] is None and row["slo_limiting"] == "ttft_ms"


def test_needs_round_up_and_count_the_load(tmp_path):
    sweep = sweep_of(tmp_path)
    candidate = next(one for one in layouts(sweep) if isinstance(one, Candidate))
    (need,) = needs([Limit(candidate, 4.4, 0.4, 4.0, {}, False)], 10.0)
    assert (need.instances, need.gpus) == (3, 24) and need.load == pytest.approx(10 / 12)
    (exact,) = needs([Limit(candidate, 5.0, None, 5.0, {}, False)], 10.0)
    assert (exact.instances, exact.load) == (2, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("halfwidth", "planned", "words"),
    [(0.9, 1.1, "the lower end of the 95 % interval;"), (2.0, 0.75, "half the rate of the lowest seed, since")],
)
def test_the_answer_says_what_it_was_sized_for(tmp_path, halfwidth, planned, words):
    """Two seeds, 1.5 and 2.5 requests/s: an interval that ends below half of the lowest is not counted on."""
    candidate = next(one for one in layouts(sweep_of(tmp_path)) if isinstance(one, Candidate))
    found = {"slo_met": True, "slo_limiting": "ttft_ms", "slo_worst_ratio": 0.5}
    (need,) = needs([Limit(candidate, 2.0, halfwidth, planned, {}, False)], 4.0)
    (sentence,) = [one for one in _need_sentences((need, found), 4.0, "") if one.startswith("Sized for ")]
    assert sentence.startswith(f"Sized for {words}") and "by the mean 2 x would do" in sentence


def row(rate, user, gpu, met=True, **more):
    names = {"model": "m", "hardware": "h", "gpus": 1, "gpus_total": 1, "tp": 1, "pp": 1, "dp": 1, "ep": 1}
    values = {"rate_per_s": rate, "user_tokens_per_s": user, "output_tokens_per_s_per_gpu": gpu, "slo_met": met}
    return names | {"status": "done", "replicas": 1, "seed": 1} | values | more


def test_pareto_keeps_what_no_point_beats():
    rows = [row(1, 10, 5), row(2, 8, 6), row(3, 9, 5), row(4, 2, 9), row(5, 2, 8), row(0, 99, 99)]
    assert [(one["user_tokens_per_s"], one["output_tokens_per_s_per_gpu"]) for one in pareto(rows)] == [
        (2, 9),
        (8, 6),
        (10, 5),
    ]


def test_the_highest_rate_lies_below_the_first_that_any_seed_breaks():
    rows = [row(1, 1, 1), row(2, 1, 1), row(2, 1, 1, met=False, seed=2), row(3, 1, 1)]
    (line,) = capacity(rows, True)
    assert line["highest_load"] == 1 and line["bounded"]
    (line,) = capacity(rows[:2], True)
    assert line["highest_load"] == 2 and not line["bounded"]


def test_refusals_are_grouped_by_reason():
    rows = [{"status": "refused", "kind": "k", "reason": r} for r in ("a", "b", "b")] + [row(1, 1, 1)]
    assert [(reason, len(found)) for _, reason, found in refusals(rows)] == [("b", 2), ("a", 1)]


def test_points_outside_the_same_table_are_one_group():
    def row(kernel, point, tp):
        reason = (
            f"{kernel}: tokens {point} is outside its table (tokens 1 to 9). Measure it with: x --tp {tp} --n {point}"
        )
        return {"status": "refused", "kind": "coverage", "reason": reason}

    rows = [row("experts", 12, 8), row("experts", 10, 8), row("experts", 12, 4), row("o_proj", 12, 8)]
    found = refusals(rows)
    assert [(one[1], len(one[2])) for one in found] == [(rows[n]["reason"], 2 if n == 0 else 1) for n in (0, 2, 3)]


def test_header_tells_what_results_depend_on(tmp_path):
    header = run_module._header(sweep_of(tmp_path))
    assert json.loads(json.dumps(header))["sweep"]["slo"]["ttft_ms"] == 1000
    assert f"H200/{MODEL}/fp8" in header["bundles"]


def refused_as(*kinds):
    """Rows of layouts (kind) and of points ("point: kind"), with more KV from row to row."""
    rows = []
    for place, named in enumerate(kinds):
        kind = named.removeprefix("point: ")
        split = {"tp": 1, "pp": 1, "dp": place + 1, "ep": 1}
        status = {"worker": "failed", "done": "done", "fits": "fits"}.get(kind, "refused")
        key = "k" if kind != named else None
        rows.append({"key": key, "status": status, "kind": kind, "reason": f"since {kind}", "kv_available_gib": place})
        rows[-1] |= split
    return rows


@pytest.mark.parametrize(
    ("kinds", "error", "nearest"),
    [
        (["capacity", "capacity"], CapacityError, "tp1 dp2: since capacity"),
        (["capacity", "illegal", "not launchable", "left out"], CapacityError, "tp1 dp1: since capacity"),
        (["illegal", "left out"], ConfigError, "tp1 dp2: since left out"),
        (["point: coverage", "capacity", "input"], CoverageError, "tp1 dp1: since coverage"),
        (["point: coverage", "point: contract"], ConfigError, "tp1 dp2: since contract"),
        (["point: contract"], ContractError, "tp1 dp1: since contract"),
        (["point: input", "capacity"], ConfigError, "tp1 dp1: since input"),
        (["point: worker", "point: coverage"], SparsightError, "tp1 dp1: since worker"),
    ],
)
def test_where_nothing_ran_the_points_that_came_furthest_give_the_error(kinds, error, nearest):
    found = nothing_ran(refused_as(*kinds))
    assert type(found) is error
    failed = sum("worker" in kind for kind in kinds)
    tally = f"{failed} failed, " * bool(failed) + f"{len(kinds) - failed} refused"
    assert str(found) == f"no point ran ({tally}); nearest: {nearest}"


def test_one_result_is_enough_and_room_that_is_not_known_is_never_nearest():
    assert nothing_ran([]) is None
    assert nothing_ran(refused_as("capacity", "point: done")) is None
    assert nothing_ran(refused_as("capacity", "fits")) is None
    unknown, known = refused_as("input", "input")
    assert "tp1 dp2" in str(nothing_ran([unknown | {"kv_available_gib": None}, known | {"kv_available_gib": -9.0}]))


def test_a_search_without_a_layout_that_fits_is_one_of_capacity(tmp_path):
    sweep = sweep_of(tmp_path, gpus=[1], placements=[{"tp": 1}])
    with pytest.raises(CapacityError, match=r"no point ran \(1 refused\); nearest: tp1 dp1: the weights need .* try "):
        size(sweep, tmp_path / "out")
    assert not (tmp_path / "out").exists()
