"""Rows and figures of a replay, against values worked out by hand."""

import csv
import io
import json

import pytest
from simulated import LinearCost, engine, group, request

from profiler.core.types import Parallel
from serving.core.loop import run
from serving.core.runlog import RunLog
from serving.core.scheduler import Limits
from serving.metrics import COLUMNS, csv_text, peer_csv_text, summary
from serving.result import Deployment, Result, Tables
from serving.routers import create_router
from serving.terminal import run_lines
from serving.traces import Trace, TraceRequest

FLAT = LinearCost(base_ns=1_000_000, token_ns=0, key_ns=0)
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len_tokens=1024)
DEPLOYMENT = Deployment(
    model="acme/tiny", hardware="CPU", parallel=Parallel(), engines=(0,), lockstep=False, kv_layout="bf16",
    block_tokens=16, num_gpu_blocks=6, blocks_source="num_gpu_blocks", limits=LIMITS,
    prefix_caching=True, policy="fcfs", eager=True, host_overhead_us=0.0,
    async_scheduling=False, step_overhead_us=0.0, step_overhead_source="not known",
    tables=Tables("CPU", "acme/tiny", "bf16", "measured", "reference 1"),
)  # fmt: skip


def replayed(rows, horizon_ns=None, keep_itl=False):
    """Rows are (arrival_ns, prompt, output); every step takes 1 ms; 5 usable blocks of 16 tokens."""
    log = RunLog(keep_itl=keep_itl)
    groups = [group(engine(num_blocks=6, limits=LIMITS), cost=FLAT)]
    requests = [request(i, prompt, output, at) for i, (at, prompt, output) in enumerate(rows)]
    run(groups, requests, create_router("least_loaded"), log, horizon_ns=horizon_ns)
    trace = Trace("jsonl", tuple(TraceRequest(f"r{i}", at, p, o) for i, (at, p, o) in enumerate(rows)))
    records = tuple(log.records[i] for i in range(len(rows)))
    return Result(
        "test", "least_loaded", trace, records, log.gaps(), (DEPLOYMENT,), groups[0].steps, 0, 0, horizon_ns, log.itl_ns
    )


def rows_of(result):
    return list(csv.DictReader(io.StringIO(csv_text(result))))


def test_columns_are_those_promised():
    assert ",".join(COLUMNS) == (
        "request_id,instance_id,prompt_tokens,output_tokens,arrival_ns,queued_ns,scheduled_ns,first_token_ns,finish_ns,"
        "ttft_ns,tpot_ns,itl_p50_ns,itl_p99_ns,preemptions,prefix_hit_tokens,outcome"
    )


def test_rows_by_hand():
    result = replayed([(500_000, 10, 3), (600_000, 20, 1), (700_000, 500, 9)])
    first, second, third = rows_of(result)
    assert first == dict(
        zip(COLUMNS, ["r0", "0", "10", "3", "500000", "500000", "500000", "1500000", "3500000", "1000000", "1000000",
                      "1000000", "1000000", "0", "0", "finished"], strict=True)
    )  # fmt: skip
    assert (second["queued_ns"], second["ttft_ns"], second["tpot_ns"], second["itl_p50_ns"]) == (
        "1500000",
        "1900000",
        "",
        "",
    )
    assert (third["outcome"], third["queued_ns"], third["scheduled_ns"], third["finish_ns"]) == (
        "rejected",
        "1500000",
        "",
        "",
    )


def test_figures_by_hand():
    figures = summary(replayed([(0, 10, 3), (0, 20, 1), (4_000_000, 500, 9), (5_000_000, 10, 2)]))
    assert figures["requests"] == {"total": 4, "finished": 3, "rejected": 1, "unfinished": 0, "bad_rows_skipped": 0}
    assert figures["makespan_ns"] == 7_000_000
    assert figures["output_tokens_per_s"] == pytest.approx(6 / 0.007)
    assert figures["total_tokens_per_s"] == pytest.approx(46 / 0.007)
    assert figures["requests_per_s"] == pytest.approx(3 / 0.007)
    assert figures["ttft_ns"] == {"mean": 1e6, "p50": 1e6, "p90": 1e6, "p99": 1e6}
    assert figures["e2e_ns"]["p50"] == 2e6
    assert figures["e2e_ns"]["mean"] == pytest.approx((3e6 + 1e6 + 2e6) / 3)
    assert figures["instances"][0]["kv_tokens_per_rank"] == 80
    json.dumps(figures, allow_nan=False)


def test_figures_without_samples_are_empty_not_zero():
    figures = summary(replayed([(0, 500, 9)]))
    assert figures["makespan_ns"] == 0
    assert figures["output_tokens_per_s"] is None
    assert figures["ttft_ns"]["mean"] is None and figures["tpot_ns"]["p99"] is None
    assert dict(run_lines(figures))["output throughput"] == "-"


def test_unfinished_requests_are_counted_and_keep_what_they_reached():
    result = replayed([(0, 10, 5), (9_000_000, 10, 5)], horizon_ns=2_500_000)
    started, never = rows_of(result)
    assert (started["outcome"], started["ttft_ns"], started["finish_ns"]) == ("unfinished", "1000000", "")
    assert (never["outcome"], never["instance_id"], never["queued_ns"]) == ("unfinished", "", "")
    assert summary(result)["requests"]["unfinished"] == 2


def test_preemptions_show_in_row_and_figures():
    result = replayed([(0, 32, 20), (0, 32, 20)])
    assert [row["preemptions"] for row in rows_of(result)] == ["0", "1"]
    assert summary(result)["preemptions"] == 1


def test_the_peers_columns_by_hand():
    """The second request is preempted after its first token, waits for the first, and is computed again with the last.

    5 blocks of 16 tokens: the first holds three from its 33rd token on, so the second finds none for its own.
    """
    result = replayed([(500_000, 32, 18), (600_000, 32, 20), (700_000, 500, 9), (700_000, 8, 1)], keep_itl=True)
    assert list(csv.reader(io.StringIO(peer_csv_text(result)))) == [
        ["instance id", "request id", "model", "input", "output", "arrival", "end_time", "latency", "queuing_delay",
         "TTFT", "TPOT", "ITL"],
        ["0", "r0", "acme/tiny", "32", "18", "500000", "18500000", "18000000", "0", "1000000", "1000000",
         str([1_000_000] * 17)],
        ["0", "r3", "acme/tiny", "8", "1", "700000", "19500000", "18800000", "17800000", "18800000", "0", "[]"],
        ["0", "r1", "acme/tiny", "32", "20", "600000", "37500000", "36900000", "900000", "1900000", "1842105",
         str([17_000_000] + [1_000_000] * 18)],
    ]  # fmt: skip
