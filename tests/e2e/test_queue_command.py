"""`python -m profiler queue` end to end: acquisitions of this CPU, one standing by for the other, through a kill -9."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from profiling import SMALL, small_root

from profiler.core.errors import ConfigError
from profiler.samples import read_runs

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "profiler", "queue", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def a_plan(tmp_path: Path) -> Path:
    root = small_root(tmp_path / "models")
    shared = f"profile {SMALL} --hardware CPU --grid tiny --warmup 0 --model-config-root {root} --samples-only --resume"
    jobs: list[dict[str, Any]] = [
        {"name": name, "argv": [shared, f"--categories {categories}", f"--save-samples {tmp_path}/{name}.gz"]}
        for name, categories in (("one", "indexer,dense --repeats 12"), ("two", "per_sequence --repeats 2"))
    ]
    # Nothing is there to be measured anew: exit code 3.
    jobs.append(
        {"name": "three", "argv": f"slice {SMALL} --hardware CPU --tp 1 --category dense --out-root {tmp_path}"}
    )
    jobs[2]["argv"] += f" --model-config-root {root}"
    path = tmp_path / "plan.yaml"
    jobs = [job | {"max_seconds": 200} for job in jobs]
    path.write_text(yaml.safe_dump({"name": "p", "stand_by_after_s": 0, "jobs": jobs}))
    return path


def shots_in(samples: Path) -> int:
    try:
        return sum(len(one.results) for one in read_runs([samples]))
    except ConfigError:
        return 0


def processes(text: str) -> list[int]:
    """Numbers of the processes whose command line has this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_bytes().replace(b"\0", b" ").decode():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_killed_queue_ends_its_jobs_and_goes_on_where_it_was(tmp_path: Path) -> None:
    plan, out = a_plan(tmp_path), tmp_path / "out"
    # Job names alone would be found in other tests' processes.
    mark = f"{tmp_path}/one.gz"
    queue = start(str(plan), "--output", str(out))
    deadline = time.monotonic() + 120
    while shots_in(tmp_path / "one.gz") < 3 and queue.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes(mark)
    os.kill(queue.pid, signal.SIGKILL)
    queue.communicate()
    while processes(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not processes(str(tmp_path))
    kept = shots_in(tmp_path / "one.gz")
    assert kept >= 3
    state = yaml.safe_load((out / "state.yaml").read_text())["jobs"]
    assert set(state) == {"one"} and "end" not in state["one"]

    queue = start(str(plan), "--output", str(out))
    said, told = queue.communicate(timeout=200)
    assert queue.returncode == 6, told
    assert f"{out}: 3 jobs in " in said
    last = [line for line in told.splitlines() if not line[:1].isspace() or line.startswith("  three")]
    assert last[0] == "error: jobs that failed: 1" and last[1].startswith("  three: exit code 3 after ")
    assert len(last) == 2 and "no bundle" in last[1]
    state = yaml.safe_load((out / "state.yaml").read_text())["jobs"]
    assert [state[name]["exit_code"] for name in ("one", "two", "three")] == [0, 0, 3]
    runs = read_runs([tmp_path / "one.gz"])
    assert len(runs) == 2 and len(runs[0].results) == kept and runs[1].results
    assert (out / "two.out").read_text().startswith(f"{tmp_path}/two.gz: ")
    # The second one had everything imported when the first one ended.
    assert state["two"]["stood_by"] and "stands by after " in (out / "two.err").read_text()

    queue = start(str(plan), "--output", str(out))
    said, told = queue.communicate(timeout=200)
    assert queue.returncode == 6 and "one: done before" in told and "2 done before" in said


def test_a_listing_of_commands_imports_no_engine() -> None:
    code = (
        "import sys\n"
        "from profiler.__main__ import main\n"
        "for arguments in (['--help'], ['queue', '--help']):\n"
        "    try:\n        main(arguments)\n"
        "    except SystemExit:\n        pass\n"
        "assert not {'torch', 'vllm', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "queue " in done.stdout and "PLAN.yaml" in done.stdout
