"""The vLLM benchmark JSON, the time series and the step trace of small replays, against values worked out by hand."""

import csv
import io
import json

import numpy as np
import pytest
from simulated import LinearCost, engine, group, request
from test_metrics import DEPLOYMENT

from profiler.core.errors import ConfigError
from serving import timeseries
from serving.bench_result import bench_result, parse_goals
from serving.core.loop import run
from serving.core.runlog import RunLog
from serving.core.scheduler import Limits
from serving.metrics import summary
from serving.result import Result
from serving.routers import create_router
from serving.step_trace import StepTrace, parse_window, write_trace
from serving.timeseries import Sampler, write_series
from serving.traces import Trace, TraceRequest

MS = 1_000_000
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len_tokens=1024)
# Fields of vLLM's result file without --save-detailed, as vllm/benchmarks/serve.py writes them (0.31).
SAVED = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "rtfx", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms",
    "mean_e2el_ms", "median_e2el_ms", "std_e2el_ms", "p99_e2el_ms",
}  # fmt: skip
DETAILED = {"input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors"}


def replayed(rows, step_ms=1, horizon_ns=None, watches=(), wrap=None, engines=1):
    """Rows are (arrival_ns, prompt, output); every step takes `step_ms`; 5 usable blocks of 16 tokens per engine."""
    log = RunLog(keep_itl=True)
    cost = LinearCost(base_ns=step_ms * MS, token_ns=0, key_ns=0)
    members = [engine(i, num_blocks=6, limits=LIMITS) for i in range(engines)]
    groups = [group(*members, cost=wrap(cost) if wrap else cost)]
    for watch in watches:
        watch.open(groups)

    def advance(now_ns):
        for watch in watches:
            watch.advance(now_ns)

    requests = [request(i, prompt, output, at) for i, (at, prompt, output) in enumerate(rows)]
    run(groups, requests, create_router("round_robin"), log, horizon_ns=horizon_ns, advance=advance)
    for watch in watches:
        watch.close()
    trace = Trace("jsonl", tuple(TraceRequest(f"r{i}", at, p, o) for i, (at, p, o) in enumerate(rows)))
    records = tuple(log.records[i] for i in range(len(rows)))
    return Result(
        "test", "round_robin", trace, records, log.gaps(), (DEPLOYMENT,), groups[0].steps, 0, 0, horizon_ns, log.itl_ns
    )


def test_the_keys_are_vllms():
    result = replayed([(0, 10, 3)])
    assert set(bench_result(result)) == SAVED
    assert set(bench_result(result, detailed=True)) == SAVED | DETAILED


def test_benchmark_figures_by_hand():
    """Steps of 400 ms. The first request runs from 0 to 1.2 s; the second arrives at 0.1 s, is queued at 0.4 s and has
    its only token at 0.8 s; the third never fits."""
    content = bench_result(replayed([(0, 10, 3), (100 * MS, 20, 1), (100 * MS, 500, 9)], step_ms=400), detailed=True)
    assert (content["completed"], content["failed"], content["num_prompts"]) == (2, 1, 3)
    assert (content["total_input_tokens"], content["total_output_tokens"]) == (30, 4)
    assert content["duration"] == pytest.approx(1.2)
    assert content["request_throughput"] == pytest.approx(2 / 1.2)
    assert content["total_token_throughput"] == pytest.approx(34 / 1.2)
    assert (content["mean_ttft_ms"], content["std_ttft_ms"]) == pytest.approx((550, 150))
    assert content["p99_ttft_ms"] == pytest.approx(400 + 0.99 * 300)
    assert (content["mean_tpot_ms"], content["mean_itl_ms"], content["std_itl_ms"]) == pytest.approx((400, 400, 0))
    assert content["mean_e2el_ms"] == pytest.approx(950)
    assert content["max_output_tokens_per_s"] == 3, "0.4, 0.8 and 0.8 s"
    assert content["max_concurrent_requests"] == 2
    assert content["request_goodput"] is None
    assert content["ttfts"] == pytest.approx([0.4, 0.7, 0])
    assert content["itls"] == [pytest.approx([0.4, 0.4]), [], []]
    assert (content["output_lens"], content["errors"]) == ([3, 1, 0], ["", "", "rejected"])
    json.dumps(content, allow_nan=False)


def test_goodput_counts_requests_within_every_goal():
    result = replayed([(0, 10, 3), (100 * MS, 20, 1)], step_ms=400)
    for goals, good in (({"ttft": 500}, 1), ({"ttft": 700}, 2), ({"ttft": 700, "tpot": 399}, 1), ({"e2el": 1}, 0)):
        assert bench_result(result, goals=goals)["request_goodput"] == pytest.approx(good / 1.2)


def test_requests_that_only_touch_do_not_overlap():
    assert bench_result(replayed([(0, 10, 1), (MS, 10, 1)]))["max_concurrent_requests"] == 1


def test_a_run_without_any_completed_request_has_zeros_as_vllms():
    content = bench_result(replayed([(0, 500, 9)]))
    assert (content["completed"], content["failed"], content["duration"], content["p99_itl_ms"]) == (0, 1, 0, 0)


def test_benchmark_figures_agree_with_the_summary_and_with_numpy():
    rng = np.random.default_rng(4)
    rows = sorted((int(at), int(p), int(o)) for at, p, o in rng.integers((0, 1, 1), (60 * MS, 40, 25), (40, 3)))
    result = replayed(rows)
    content, figures = bench_result(result), summary(result)
    assert figures["preemptions"] > 0
    gaps = np.concatenate([np.asarray(values) for values in result.itl_ns.values()]) / MS
    assert (
        content["p99_itl_ms"] == pytest.approx(np.percentile(gaps, 99)) == pytest.approx(figures["itl_ns"]["p99"] / MS)
    )
    assert content["std_itl_ms"] == pytest.approx(gaps.std())
    for ours, theirs in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el")):
        assert content[f"median_{theirs}_ms"] == pytest.approx(figures[f"{ours}_ns"]["p50"] / MS, abs=1e-6)
        assert content[f"mean_{theirs}_ms"] == pytest.approx(figures[f"{ours}_ns"]["mean"] / MS, abs=1e-6)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["tftt:5"], "did you mean 'ttft'"),
        (["ttft"], "METRIC:MILLISECONDS"),
        (["ttft:nan"], "METRIC:MILLISECONDS"),
        (["ttft:-1"], "METRIC:MILLISECONDS"),
        (["ttft:1", "ttft:2"], "given twice"),
    ],
)
def test_goals_are_checked(texts, message):
    with pytest.raises(ConfigError, match=message):
        parse_goals(texts)


def series(rows, tick_ms, **options):
    sampler = Sampler(tick_ms * MS)
    result = replayed(rows, watches=[sampler], **options)
    stream = io.StringIO()
    write_series(sampler, result, stream)
    return list(csv.DictReader(io.StringIO(stream.getvalue()))), result


def test_ticks_by_hand():
    """Steps of 10 ms from 5 ms on: tokens at 15, 25 and 35 ms. The second arrives at 12 ms, is queued at 15 and has its
    token at 25. Ticks of 8 ms from the first arrival: 13, 21, 29, 37 ms."""
    rows, _ = series([(5 * MS, 10, 3), (12 * MS, 20, 1)], 8, step_ms=10)
    assert [row["time_s"] for row in rows] == ["0.013", "0.021", "0.029", "0.037"]
    assert [row["instance_id"] for row in rows] == ["all"] * 4
    assert [(row["running"], row["waiting"]) for row in rows] == [("1", "0"), ("2", "0"), ("1", "0"), ("0", "0")]
    assert [float(row["kv_usage"]) for row in rows] == pytest.approx([0.2, 0.6, 0.2, 0], abs=1e-6)
    assert [float(row["output_tokens_per_s"]) for row in rows] == [0, 125, 250, 125]
    assert [float(row["prompt_tokens_per_s"]) for row in rows] == [0, 1250, 2500, 0]


def test_a_token_at_a_tick_belongs_to_what_the_tick_ends():
    rows, _ = series([(0, 10, 3)], 10, step_ms=10)
    assert [(row["time_s"], row["output_tokens_per_s"]) for row in rows] == [
        ("0.01", "100.00"), ("0.02", "100.00"), ("0.03", "100.00"),
    ]  # fmt: skip


def test_every_token_is_in_one_tick_and_engines_add_up():
    rng = np.random.default_rng(3)
    arrivals = sorted((int(at), int(p), int(o)) for at, p, o in rng.integers((0, 1, 1), (60 * MS, 40, 25), (30, 3)))
    rows, result = series(arrivals, 7, engines=3, horizon_ns=90 * MS)
    assert any(record.outcome == "unfinished" for record in result.records)
    total = [row for row in rows if row["instance_id"] == "all"]
    assert len(rows) == 4 * len(total)
    tokens = sum(float(row["output_tokens_per_s"]) for row in total) * 0.007
    assert tokens == pytest.approx(sum(record.emitted_tokens for record in result.records), abs=0.01)
    for name in ("running", "waiting", "output_tokens_per_s", "prompt_tokens_per_s"):
        parts = sum(float(row[name]) for row in rows if row["instance_id"] != "all")
        assert parts == pytest.approx(sum(float(row[name]) for row in total), abs=0.01 * len(rows))


def test_a_quiet_gap_has_its_ticks_and_too_many_are_refused(monkeypatch):
    rows, _ = series([(0, 10, 1), (50 * MS, 10, 1)], 10)
    assert [row["running"] for row in rows] == ["0", "0", "0", "0", "1", "0"], "at 50 ms the second has arrived"
    monkeypatch.setattr(timeseries, "MAX_TICKS", 4)
    with pytest.raises(ConfigError, match="longer --tick"):
        series([(0, 10, 1), (50 * MS, 10, 1)], 10)


def steps(rows, trace, **options):
    result = replayed(rows, watches=[trace], wrap=trace.wrap, **options)
    stream = io.StringIO()
    write_trace(trace, result, stream)
    return json.loads(stream.getvalue()), result


def test_steps_by_hand():
    content, result = steps([(2_500, 10, 3), (MS, 20, 1)], StepTrace())
    slices = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert [(one["ts"], one["dur"], one["name"]) for one in slices] == [
        (2.5, 1000.0, "prefill"), (1002.5, 1000.0, "mixed"), (2002.5, 1000.0, "decode"),
    ]  # fmt: skip
    assert slices[1]["args"] == {
        "prefill_requests": 1, "prefill_tokens": 20, "prefill_context_tokens": 0, "decode_requests": 1,
        "decode_kv_tokens": 11, "decode_kv_max_tokens": 11, "sampled_sequences": 2,
    }  # fmt: skip
    assert len(slices) == result.steps
    counts = [event["args"] for event in content["traceEvents"] if event["name"] == "requests 0"]
    assert counts == [{"running": n, "waiting": 0} for n in (1, 2, 1)]
    assert content["traceEvents"][0]["args"]["name"] == "group 0: acme/tiny on CPU"


def test_the_step_trace_is_bounded_by_window_and_events():
    content, _ = steps([(0, 10, 9)], StepTrace(window_ns=(2 * MS, 4 * MS)))
    assert [event["ts"] for event in content["traceEvents"] if event["ph"] == "X"] == [2000.0, 3000.0, 4000.0]
    trace = StepTrace(max_events=7)
    content, _ = steps([(0, 10, 9)], trace)
    assert sum(event["ph"] == "X" for event in content["traceEvents"]) == 2
    assert (trace.left_out, content["otherData"]["events_left_out"]) == (21, 21)


@pytest.mark.parametrize("text", ["5", "a:b", "-1:5", "5:4", "nan:5", ":inf"])
def test_windows_are_checked(text):
    with pytest.raises(ConfigError, match="START:END"):
        parse_window(text)


def test_windows():
    assert [parse_window(text) for text in ("1.5:2", ":2", "3:", ":")] == [
        (1_500_000_000, 2_000_000_000), (0, 2_000_000_000), (3_000_000_000, None), (0, None),
    ]  # fmt: skip
