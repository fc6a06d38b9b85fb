"""`python -m serving explain` and `routing` as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from profiler.core.paths import data_root

ROOT = data_root()
CLUSTER = "configs/cluster/h200-8x-deepseek-v32-dp8-ep8.yaml"


def run(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "serving", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == expect, done.stderr
    return done


def test_tree_json_and_page_of_one_step(tmp_path: Path) -> None:
    shown = run("explain", "--cluster-config", CLUSTER, "--batch", "32x4096").stdout
    assert "58 x mla-full-moe" in shown and "measured, H200/fp8, vllm 0.26.0" in shown
    found = json.loads(run("explain", "--cluster-config", CLUSTER, "--batch", "32x4096", "--format", "json").stdout)
    assert found["tree"]["name"] == "step"
    assert sum(child["us"] for child in found["tree"]["children"]) > 0.999 * found["step_us"]
    target = tmp_path / "step.html"
    done = run(
        "explain", "--cluster-config", CLUSTER, "--batch", "32x4096", "--format", "html", "--output", str(target)
    )
    assert done.stdout == "" and target.read_text().startswith("<!doctype html>")


def test_bad_batches_end_with_one_message() -> None:
    done = run("explain", "--cluster-config", CLUSTER, "--batch", "32*4096", expect=2)
    assert done.stdout == "" and "'32*4096' is not a batch" in done.stderr and "Traceback" not in done.stderr
    done = run("explain", "--cluster-config", CLUSTER, "--batch", "1x200000", expect=3)
    assert "outside its table" in done.stderr
    done = run("explain", "--cluster-config", CLUSTER, "--instance", "1", "--batch", "1x10", expect=2)
    assert "has instances 0 to 0" in done.stderr
