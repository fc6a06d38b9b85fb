"""The shipped example trace is what its generator and its README say."""

import runpy
import subprocess
import sys

from profiler.core.paths import data_root
from serving.traces import read_trace

WORKLOADS = data_root() / "workloads"


def test_the_generator_reproduces_the_file():
    written = subprocess.run(
        [sys.executable, str(WORKLOADS / "generate_example.py")], capture_output=True, check=True
    ).stdout
    assert written == (WORKLOADS / "example_trace.jsonl").read_bytes()


def test_the_readme_counts_are_those_of_the_file():
    requests = read_trace(WORKLOADS / "example_trace.jsonl").requests
    text = (WORKLOADS / "README.md").read_text()
    assert f"{sum(request.prompt_tokens for request in requests):,} prompt" in text
    assert f"{sum(request.output_tokens for request in requests):,} output tokens" in text
    kinds = runpy.run_path(str(WORKLOADS / "generate_example.py"))["KINDS"]
    assert len(requests) == sum(kinds.values()) == 200
    assert sum(request.prompt_ids is not None for request in requests) == kinds["assistant"]
    assert (WORKLOADS / "example_trace.jsonl").stat().st_size < 200_000
