"""Replays against recorded runs of a real engine. The recordings are the golden values; the bands are today's errors.

The causes of what is left are in docs/validation.md. A change that leaves a band has made the simulator worse.
"""

from pathlib import Path

import pytest

from serving.api import replay
from serving.comparison import compare
from serving.metrics import csv_text
from serving.recorded import read_recorded

RECORDED = Path(__file__).resolve().parents[2].parent / "shared" / "recorded"


@pytest.mark.parametrize(
    ("model", "trace", "ttft", "tpot", "latency"),
    [
        ("Llama-3.1-8B", "sharegpt-llama-3.1-8b-300-sps10", 5.0, 1.5, 2.5),
        ("Qwen3-30B-A3B-Instruct-2507", "sharegpt-qwen3-30b-a3b-300-sps10", 14.0, 1.5, 2.0),
    ],
)
def test_mean_errors_against_a_recorded_run(
    tmp_path: Path, model: str, trace: str, ttft: float, tpot: float, latency: float
) -> None:
    run = RECORDED / "RTXPRO6000" / model
    if not run.is_dir():
        pytest.skip(f"{run} is not here")
    result = replay(run / "config.json", RECORDED / "workloads" / f"{trace}.jsonl", bundle_root=RECORDED / "perf")
    (tmp_path / "run.csv").write_text(csv_text(result))
    found = compare(tmp_path / "run.csv", read_recorded(run))
    off = {(one.metric, one.statistic): abs(one.difference_percent) for one in found.figures}
    assert off["ttft", "mean"] < ttft
    assert off["tpot", "mean"] < tpot and off["tpot", "p99"] < tpot
    assert off["latency", "mean"] < latency and off["makespan", "total"] < 2.5
    assert found.error_ms["ttft"] < 330
    assert found.load is not None and found.load["running"] < 3
