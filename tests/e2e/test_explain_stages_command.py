"""`python -m serving explain` for an instance with pipeline stages, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from profiler.core.paths import data_root

ROOT = data_root()
CLUSTER = ROOT / "configs" / "cluster" / "h200-8x-deepseek-v32-dp8-ep8.yaml"


def explained(cluster: Path, *arguments: str) -> str:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "serving",
            "explain",
            "--cluster-config",
            str(cluster),
            "--batch",
            "33x4096",
            *arguments,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pipeline_as_tree_json_and_page(tmp_path: Path) -> None:
    cluster = tmp_path / "pp2.yaml"
    cluster.write_text(CLUSTER.read_text().replace("pp: 1", "pp: 2"))
    assert "2 such steps in flight: one ends every" in explained(cluster)
    found = json.loads(explained(cluster, "--format", "json"))
    assert [stage["stage"] for stage in found["stages"]] == [0, 1]
    assert [child["name"] for child in found["tree"]["children"]] == ["stage 0", "send to stage 1", "stage 1"]
    target = tmp_path / "step.html"
    assert explained(cluster, "--format", "html", "--output", str(target)) == ""
    assert target.read_text().count('class="flame"') == 3
