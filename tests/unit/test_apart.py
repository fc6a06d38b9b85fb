"""Work in a process of its own: errors, deaths, interruption, and several tensor-parallel degrees measured that way."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import apart_workers
import pytest
from profiling import SMALL, job, small_root

from profiler import acquire, apart
from profiler.apart import run_apart
from profiler.commands._options import measure_all
from profiler.core.bundle import read_bundle
from profiler.core.errors import AcquisitionError, ConfigError, SparsightError
from profiler.samples import Run, read_runs
from profiler.sweep import batch_of

REPOSITORY = Path(__file__).resolve().parents[2]
TWO: dict[str, Any] = {
    **{"tps": (1, 2), "categories": ("per_sequence", "dense"), "repeats": 2},
    **{"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8},
}


def test_work_is_done_in_another_process(tmp_path: Path) -> None:
    run_apart(apart_workers.write, (tmp_path / "a", "done"), "tp 2", "go on")
    assert (tmp_path / "a").read_text() == "done"


@pytest.mark.parametrize("kind", ["ConfigError", "CoverageError", "AcquisitionError"])
def test_an_error_comes_back_with_its_message_and_exit_code(kind: str) -> None:
    from profiler.core import errors

    wanted = getattr(errors, kind)
    with pytest.raises(SparsightError) as caught:
        run_apart(apart_workers.refuse, (kind, "no such card"), "tp 2", "go on")
    assert type(caught.value) is wanted and str(caught.value) == "no such card"
    assert caught.value.exit_code == wanted.exit_code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_process_says_which_signal_it_was(number: int) -> None:
    with pytest.raises(AcquisitionError) as caught:
        run_apart(apart_workers.kill_itself, (int(number),), "tp 2", "go on")
    what = f"signal {int(number)} ({signal.strsignal(number)})"
    assert str(caught.value) == f"tp 2: its process was ended by {what}; go on"


def test_a_killed_process_is_seen_while_one_that_it_forked_lives_on(tmp_path: Path) -> None:
    started = time.monotonic()
    try:
        with pytest.raises(AcquisitionError, match="signal 9"):
            run_apart(apart_workers.fork_and_die, (tmp_path / "orphan",), "tp 2", "go on")
        assert time.monotonic() - started < 30
    finally:
        os.kill(int((tmp_path / "orphan").read_text()), signal.SIGKILL)


def test_an_internal_error_shows_its_traceback_and_is_exit_code_1(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SparsightError, match="tp 2: its process ended with exit code 1 before") as caught:
        run_apart(apart_workers.crash, (), "tp 2", "go on")
    assert caught.value.exit_code == 1
    assert "ValueError: three is not liked" in capfd.readouterr().err


def test_an_end_without_a_word_is_not_success() -> None:
    with pytest.raises(SparsightError, match="exit code 0 before it was done"):
        run_apart(apart_workers.leave, (0,), "tp 2", "go on")


def test_a_process_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "CLOSING_S", 0.2)
    monkeypatch.setattr(apart, "_said", lambda process, pipe: [None])
    run_apart(apart_workers.linger, (tmp_path,), "tp 2", "go on")
    assert not multiprocessing.active_children()


def lingering(folder: Path) -> "tuple[subprocess.Popen[str], int]":
    """A process that waits for one of its own, and the number of that one."""
    code = "import sys, apart_workers; apart_workers.wait_for_lingering(sys.argv[1])"
    paths = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests")))
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    wait_until((folder / "pid").exists)
    return parent, int((folder / "pid").read_text())


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether a process ended; one that nobody collected counts as ended."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("both", [False, True])
def test_an_interrupted_parent_lets_the_work_close(tmp_path: Path, both: bool) -> None:
    """A signal to the parent alone, and Ctrl-C, which reaches the work twice."""
    parent, pid = lingering(tmp_path)
    if both:
        os.kill(pid, signal.SIGINT)
        wait_until((tmp_path / "closing").exists)
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=60)
    assert said.strip().endswith("KeyboardInterrupt") and "SpawnProcess" not in said
    assert (tmp_path / "closed").exists() and gone(pid)


def test_interrupted_work_interrupts_its_parent(tmp_path: Path) -> None:
    parent, pid = lingering(tmp_path)
    os.kill(pid, signal.SIGINT)
    _, said = parent.communicate(timeout=60)
    assert said.strip().endswith("KeyboardInterrupt") and (tmp_path / "closed").exists()


def test_work_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    parent, pid = lingering(tmp_path)
    parent.kill()
    parent.communicate(timeout=60)
    wait_until(lambda: gone(pid))


@pytest.fixture
def target(tmp_path: Path) -> acquire.Target:
    pytest.importorskip("torch")
    return acquire.prepare(job(**TWO), small_root(tmp_path / "models"))


def facts(run: Run) -> Any:
    """All of a run but when it was and how long each call took."""
    kv = {key: value for key, value in run.info.kv.items() if key != "tokens"}
    samples = {
        index: (result.failure, [(s.repeat, s.module, s.kernel, s.launches) for s in result.samples])
        for index, result in run.results.items()
    }
    return replace(run, started_at="", results={}, info=replace(run.info, gpu={}, kv=kv)), samples


def tables(runs: dict[int, list[Run]], target: acquire.Target, root: Path) -> dict[Any, Any]:
    for tp in runs:
        folder, acquired = acquire.publish(runs[tp], target, job(**TWO), root)
        acquire.refuse_incomplete([acquired])
    assert folder is not None
    return {
        at: {name: column for name, column in table.columns.items() if name not in ("time_us", "spread_rel")}
        for at, table in read_bundle(folder).tables.items()
    }


@pytest.mark.parametrize("saved", [False, True])
def test_degrees_measured_apart_give_what_one_process_gives(
    target: acquire.Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    paths = [tmp_path / name if saved else None for name in ("one.gz", "apart.gz")]
    one, separate = (
        measure_all(job(**TWO), target, path, False, None, apart=apart)
        for path, apart in zip(paths, (False, True), strict=True)
    )
    assert list(separate) == [1, 2]
    assert {tp: list(map(facts, runs)) for tp, runs in separate.items()} == {
        tp: list(map(facts, runs)) for tp, runs in one.items()
    }
    assert tables(separate, target, tmp_path / "a") == tables(one, target, tmp_path / "b") != {}
    assert not list((tmp_path / "temporary").iterdir())
    if paths[1] is not None:
        assert read_runs([paths[1]]) == [run for runs in separate.values() for run in runs]


def test_a_killed_degree_is_named_and_resumed(target: acquire.Target, tmp_path: Path) -> None:
    path = tmp_path / "s.gz"

    def kill_one() -> None:
        def shots() -> int:
            return sum(len(run.results) for run in read_runs([path])) if path.exists() else 0

        wait_until(lambda: shots() > 0)
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    # Enough repeats that the first degree is still at it.
    long = job(**TWO | {"repeats": 8})
    with pytest.raises(AcquisitionError) as caught:
        measure_all(long, target, path, False, None, apart=True)
    killer.join()
    assert str(caught.value) == (
        f"tp 1: its process was ended by signal 9 ({signal.strsignal(9)}); --save-samples {path} --resume continues"
    )
    with pytest.raises(ConfigError, match="exists; --resume continues it"):
        measure_all(long, target, path, False, None, apart=True)
    runs = measure_all(long, target, path, True, None, apart=True)
    assert [len(runs[tp]) for tp in (1, 2)] == [2, 1]
    first, second = runs[1]
    assert first.results and second.results
    done, again = ({batch_of(run.shots[i], False) for i in run.results} for run in (first, second))
    assert not done & again and done | again == {batch_of(shot, False) for shot in second.shots}


def test_without_a_file_a_killed_degree_says_what_would_keep_it(
    target: acquire.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(apart, "run_apart", lambda work, arguments, name, advice: seen.append((name, advice)))
    with pytest.raises(ConfigError):
        measure_all(job(**TWO), target, None, False, None, apart=True)
    advice = "its samples are lost, --save-samples FILE keeps them and --resume continues"
    assert seen == [("tp 1", advice), ("tp 2", advice)]


def test_tables_that_exist_are_refused_from_apart(target: acquire.Target, tmp_path: Path) -> None:
    tables(measure_all(job(**TWO), target, None, False, None), target, tmp_path / "out")
    messages = []
    for separate in (False, True):
        with pytest.raises(ConfigError, match="--force replaces them") as caught:
            measure_all(job(**TWO), target, None, False, tmp_path / "out", apart=separate)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"engine": "vllm", "tps": (1, 2)}, True),
        ({"engine": "auto", "tps": (1, 2)}, True),
        ({"engine": "vllm", "tps": (2,)}, False),
        ({"engine": "reference", "tps": (1, 2)}, False),
    ],
)
def test_several_degrees_of_vllm_are_measured_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], expected: bool
) -> None:
    monkeypatch.setattr("profiler.card.importlib.util.find_spec", lambda name: object())
    started: list[str] = []

    def here(*arguments: Any, **keywords: Any) -> None:
        started.append("here")

    def there(work: Any, arguments: tuple[Any, ...], name: str, advice: str) -> None:
        started.append(name)

    monkeypatch.setattr(acquire, "measure", here)
    monkeypatch.setattr(apart, "run_apart", there)
    monkeypatch.setattr(acquire, "load_samples", lambda paths, target: {1: [], 2: []})
    the_job = job(hardware="H200", **TWO | changes)
    measure_all(the_job, acquire.prepare(the_job, small_root(tmp_path)), None, False, None)
    assert started == (["tp 1", "tp 2"] if expected else ["here"] * len(the_job.tps))


def test_the_command_line_shows_one_message_whichever_process_it_came_from(tmp_path: Path) -> None:
    """A card that is not here, refused in this process for one degree and in another for two."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "profiler", "profile", SMALL, "--hardware", "H200", "--engine", "vllm"]
    where = ["--model-config-root", str(small_root(tmp_path / "models")), "--out-root", str(tmp_path / "out")]
    one, several = (
        subprocess.run(
            [*command, *where, "--grid", "tiny", "--tp", tp],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            timeout=120,
        )
        for tp in ("1", "1,2")
    )
    assert one.returncode == several.returncode == 6
    assert "no CUDA device is visible here" in one.stderr and one.stderr.count("\n") == 1
    assert several.stderr == one.stderr and several.stdout == one.stdout == ""
