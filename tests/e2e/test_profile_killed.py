"""kill -9 at any moment: at most the shot in flight is lost, and never a published table."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from profiling import SMALL, small_root

from profiler.core.bundle import read_bundle
from profiler.core.errors import ConfigError
from profiler.samples import read_runs

ROOT = Path(__file__).resolve().parents[2]

# Writes a bundle over an old one and dies at the step whose number it is given: before every flush to disk, rename and
# removal. Exits 0 when there were fewer steps.
WRITER = """
import os, shutil, signal, sys
from pathlib import Path

step, root = int(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, "tests/unit")
from test_bundle import dense, meta
from profiler.core.bundle import make_table, write_bundle
from profiler.core.skew_fit import SkewFit

count = 0

def dying(call):
    def wrapped(*args, **kwargs):
        global count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapped

os.fsync, shutil.rmtree = dying(os.fsync), dying(shutil.rmtree)
Path.rename, Path.mkdir = dying(Path.rename), dying(Path.mkdir)
skew = make_table("skew", [("k", "none", "1x8 1x2", "fit", 1.5, 0.01)])
write_bundle(root, meta(), {(1, "dense"): dense(7, 8), (1, "skew"): skew}, force=True,
             skew_fits={1: [SkewFit("k", 0, 2, 0.5, 1)]})
"""


def run(log: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        return _started(stream, *arguments)
    finally:
        os.close(stream)


def _started(stream: int, *arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=stream,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )


def test_a_writer_killed_at_any_step_leaves_the_old_bundle_or_the_new_one(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    from test_bundle import dense, meta

    from profiler.core.bundle import write_bundle

    seen: set[tuple[float, ...]] = set()
    for step in range(1, 40):
        root = tmp_path / str(step)
        path = write_bundle(root, meta(), {(1, "dense"): dense(1, 2)})
        old = {(1, "dense")}
        process = run(tmp_path / "log", "-c", WRITER, str(step), str(root))
        process.wait(timeout=60)
        bundle = read_bundle(path)
        tokens = tuple(float(t) for t in bundle.tables[1, "dense"].columns["tokens"])
        assert (tokens, set(bundle.tables)) in (((1.0, 2.0), old), ((7.0, 8.0), old | {(1, "skew")}))
        assert bool(bundle.skew) == (tokens == (7.0, 8.0))
        seen.add(tokens)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, (tmp_path / "log").read_text()
        # The next writer is not in the way of what was left behind.
        write_bundle(root, meta(), {(2, "dense"): dense(3)})
        assert (2, "dense") in read_bundle(path).tables
    assert process.returncode == 0 and step > 8 and len(seen) == 2


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[list[str]]:
    root = small_root(tmp_path / "models")
    yield [
        *("-m", "profiler", "profile", SMALL, "--hardware", "CPU", "--grid", "tiny", "--repeats", "2", "--warmup", "0"),
        *("--model-config-root", str(root), "--out-root", str(tmp_path / "perf")),
    ]


def shots_in(samples: Path) -> int:
    try:
        return sum(len(one.results) for one in read_runs([samples]))
    except ConfigError:
        return 0


def test_a_killed_acquisition_goes_on_where_it_was(arguments: list[str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    samples = tmp_path / "s.csv.gz"
    log = tmp_path / "log"
    done = run(log, *arguments, "--categories", "per_sequence")
    assert done.wait(timeout=120) == 0, log.read_text()
    bundle = tmp_path / "perf" / "CPU" / SMALL / "bf16"
    published = (bundle / "tp1/per_sequence.csv").read_bytes()

    wanted = ["--categories", "indexer,dense", "--save-samples", str(samples), "--resume"]
    kept = 0
    for _ in range(2):
        process = run(log, *arguments, *wanted)
        deadline = time.monotonic() + 120
        while shots_in(samples) < kept + 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        before = shots_in(samples)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(timeout=60) in (-signal.SIGKILL, 0)
        # What was on disk when the signal was sent is there, and reads.
        kept = shots_in(samples)
        assert kept >= before >= 3
        assert (bundle / "tp1/per_sequence.csv").read_bytes() == published
        assert (1, "per_sequence") in read_bundle(bundle).tables

    finished = run(log, *arguments, *wanted)
    assert finished.wait(timeout=120) == 0, log.read_text()
    assert set(read_bundle(bundle).tables) == {(1, "per_sequence"), (1, "indexer"), (1, "dense")}
    runs = read_runs([samples])
    measured_last = len(runs[-1].results)
    assert len(runs) >= 2 and measured_last <= len(runs[-1].shots) - kept
