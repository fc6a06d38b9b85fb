"""Curves of a replay against a recount, and the split estimate against the price of a step."""

from dataclasses import replace
from pathlib import Path

import priced
import pytest

from profiler.core.registry import load_model
from profiler.core.types import Parallel
from serving.api import replay
from serving.core.shape import StepShape
from serving.deployment import deploy
from serving.sweeps.measure import measured, series
from serving.sweeps.points import Job, Layout
from serving.sweeps.slo import Slo
from serving.sweeps.spec import LimitSet
from serving.sweeps.split import split_ratio
from serving.sweeps.traffic import open_traffic

EXAMPLE = Path(__file__).resolve().parents[2] / "workloads" / "example_trace.jsonl"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    root = tmp_path_factory.mktemp("bundles")
    priced.bundle(root)
    layout = Layout(priced.MODEL, "H200", Parallel(dp=8, ep=8), "auto", 0.9, LimitSet(65536, 4096, 64))
    return Job(
        layout,
        1,
        "least_loaded",
        EXAMPLE,
        "0" * 64,
        60,
        4.0,
        2,
        Slo(ttft_ms=5000, tpot_ms=40, percentile=90),
        root,
        True,
    )


@pytest.fixture(scope="module")
def result(job):
    trace = open_traffic(EXAMPLE).at(job.rate_per_s, job.seed, job.requests)
    return replay(job.cluster, trace, bundle_root=job.bundle_root, allow_extrapolation=True)


def test_equal_jobs_give_equal_points(job):
    assert measured(job) == measured(job)


def test_every_request_in_the_system_waits_or_runs(result):
    found = series(result)
    start_ns = result.trace.requests[0].arrival_ns
    pairs = list(zip(result.trace.requests, result.records, strict=True))
    end_ns = max(got.finish_ns for _, got in pairs)
    for place in (0, 7, 30, 60, 99, 119):
        at = start_ns + (end_ns - start_ns) * place // 120
        inside = [(asked, got) for asked, got in pairs if asked.arrival_ns <= at < got.finish_ns]
        assert found["waiting"][place] + found["running"][place] == len(inside)
        assert found["waiting"][place] == sum(at < got.scheduled_ns for _, got in inside)
        most = sum(asked.prompt_tokens + asked.output_tokens for asked, _ in inside)
        least = sum(asked.prompt_tokens for asked, got in inside if got.first_token_ns <= at)
        held = found["kv_share"][place] * sum(one.kv_tokens * len(one.engines) for one in result.deployments)
        assert least * 0.999 - 20 <= held <= most * 1.001 + 20
    assert found["running"][-1] == 0


def test_the_parts_of_a_step_add_up_to_its_price(job):
    steps = measured(replace(job, steps=True))["detail"]["steps"]
    deployed = deploy(job.cluster.instances[0], 0, job.bundle_root, True)
    longest = max(row.prompt_tokens for row in open_traffic(EXAMPLE).at(4.0, 2, 60).requests)
    chunk = StepShape(((min(longest, 4096), 0),), 0, 0, 0, 0, 1)
    price_us = deployed.cost.step_ns([chunk] * 8) / 1e3
    assert sum(line["us"] for line in steps["prefill"]["lines"]) == pytest.approx(price_us, rel=1e-4)
    assert steps["decode"]["joules_per_token"] is None  # this bundle has no power samples


def test_the_decode_batch_is_the_largest_that_keeps_the_bound(job):
    traffic = open_traffic(EXAMPLE)
    found = split_ratio(job, traffic, job.bundle_root)
    deployed = deploy(job.cluster.instances[0], 0, job.bundle_root, True)
    rows = traffic.at(None, job.seed, job.requests).requests
    keys = round(sum(row.prompt_tokens for row in rows) / 60 + sum(row.output_tokens for row in rows) / 60 / 2)
    cap = min(keys, load_model(priced.MODEL).indexer.attended_cap_tokens)

    def step_ms(batch):
        return deployed.cost.step_ns([StepShape((), batch, batch * keys, keys, batch * cap, batch)] * 8) / 1e6

    assert step_ms(found.decode_batch) <= 40 < step_ms(found.decode_batch + 1)
    assert found.prefill_per_decode == pytest.approx(found.decode_per_s / found.prefill_per_s)
