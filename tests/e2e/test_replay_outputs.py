"""The further files of the replay command, and its progress on a terminal."""

import contextlib
import csv
import itertools
import json
import os
import pty
import subprocess
import sys

import priced
import pytest

from profiler.core.paths import data_root

ROOT = data_root()
CLUSTER = ROOT / "configs" / "cluster" / "h200-8x-deepseek-v32-dp8-ep8.yaml"
EXAMPLE = ROOT / "workloads" / "example_trace.jsonl"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    root = tmp_path_factory.mktemp("bundles")
    priced.bundle(root)
    return root


def command(bundles, output, *flags):
    return [sys.executable, "-m", "serving", "--cluster-config", CLUSTER, "--dataset", EXAMPLE, "--output", output,
            "--bundle-root", bundles, "--max-num-batched-tokens", "4096", *flags]  # fmt: skip


def run(arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "TERM": "xterm-256color"}
    return subprocess.run(
        list(map(str, arguments)), text=True, cwd=ROOT, env=environment, timeout=120, check=False, **options
    )


def test_every_file_is_written_and_leaves_the_rows_as_they_are(bundles, tmp_path):
    plain = run(command(bundles, tmp_path / "plain.csv"), capture_output=True)
    flags = ["--bench-json", tmp_path / "bench.json", "--goodput", "ttft:2000", "--goodput", "tpot:60",
             "--timeseries", tmp_path / "series.csv", "--tick", "0.5",
             "--trace-steps", tmp_path / "steps.json", "--trace-window", "10:12"]  # fmt: skip
    done = run(command(bundles, tmp_path / "run.csv", *flags), capture_output=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", plain.stdout)
    assert (tmp_path / "run.csv").read_bytes() == (tmp_path / "plain.csv").read_bytes()
    figures = json.loads((tmp_path / "run.csv.summary.json").read_text())
    bench = json.loads((tmp_path / "bench.json").read_text())
    assert bench["completed"] == 200
    assert bench["output_throughput"] == pytest.approx(figures["output_tokens_per_s"])
    assert bench["p99_ttft_ms"] == pytest.approx(figures["ttft_ns"]["p99"] / 1e6)
    assert 0 < bench["request_goodput"] <= bench["request_throughput"]
    assert bench["max_output_tokens_per_s"] >= bench["output_throughput"]
    with (tmp_path / "series.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["instance_id"] == "all"]
    assert sum(float(row["output_tokens_per_s"]) for row in rows) * 0.5 == pytest.approx(figures["output_tokens"], 1e-6)
    assert sum(float(row["prompt_tokens_per_s"]) for row in rows) * 0.5 == pytest.approx(figures["prompt_tokens"], 1e-6)
    assert max(int(row["running"]) for row in rows) <= bench["max_concurrent_requests"]
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    starts = [event["ts"] for event in events if event["ph"] == "X"]
    assert starts and 10e6 <= min(starts) <= max(starts) <= 12e6
    first = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    for before, after in itertools.pairwise(first):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3, "an engine runs one step at a time"
    again = run(command(bundles, tmp_path / "run.csv", *flags), capture_output=True)
    assert again.returncode == 0
    assert json.loads((tmp_path / "bench.json").read_text()) == bench


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--goodput", "ttft:5"], "need --bench-json"),
        (["--trace-window", "1:2"], "need --trace-steps"),
        (["--bench-json", "run.csv"], "is written by --output already"),
        (["--timeseries", EXAMPLE], "would overwrite an input"),
        (["--trace-steps", "steps.json", "--trace-window", "9"], "START:END"),
        (["--bench-json", "b.json", "--goodput", "ttl:9"], "did you mean 'ttft'"),
    ],
)
def test_flags_that_make_no_sense_are_refused_before_anything_runs(bundles, tmp_path, flags, text):
    own = [tmp_path / flag if str(flag).endswith((".csv", ".json")) else flag for flag in flags]
    done = run(command(bundles, tmp_path / "run.csv", *own), capture_output=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert not list(tmp_path.iterdir())


def test_progress_is_drawn_on_a_terminal_and_never_on_a_pipe(bundles, tmp_path):
    reader, writer = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    arguments = list(map(str, command(bundles, tmp_path / "run.csv")))
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=writer, text=True, cwd=ROOT, env=environment
    ) as done:
        os.close(writer)
        shown = b""
        with contextlib.suppress(OSError):  # raised when the other side is closed
            while part := os.read(reader, 65536):
                shown += part
        assert done.stdout is not None
        printed = done.stdout.read()
    os.close(reader)
    text = shown.decode()
    assert done.returncode == 0
    assert "s simulated" in text and "/200" in text
    assert any(f"{minutes}:" in text for minutes in ("0:00", "-:--")), "time left"
    assert "simulated" not in printed
