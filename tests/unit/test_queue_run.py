"""The queue itself, with jobs that measure nothing: order, overlap, failures, time limits, going on after a kill."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from profiler import queue_run
from profiler.core.errors import ConfigError
from profiler.queue_plan import COMPILE, Compile, Plan, QueueJob
from profiler.queue_run import TIMED_OUT, Outcome, run_queue
from profiler.queue_standby import JIT, uses_vllm

FAKE = str(Path(__file__).resolve().parents[1] / "queue_fake.py")


def a_job(name: str, run_s: float = 0.1, code: int = 0, *rest: str, import_s: float = 0.0, **changes: Any) -> QueueJob:
    argv = (str(import_s), str(run_s), str(code), *rest)
    fields: dict[str, Any] = {"module": "profiler", "max_seconds": 60.0, "after": None, "env": ()} | changes
    return QueueJob(name, argv=argv, **fields)


def a_plan(tmp_path: Path, *jobs: QueueJob, stand_by_after_s: float = 0.0, step: Compile | None = None) -> Plan:
    return Plan(tmp_path / "plan.yaml", "p", stand_by_after_s, step, jobs)


class Ran:
    """What a queue did in a folder: its outcome, its lines, the times of its jobs and its state."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.lines = folder, list[str]()

        def command(job: QueueJob) -> list[str]:
            return [sys.executable, FAKE, job.name, str(folder), *(part for part in job.argv if part[0] != "-")]

        self.outcome: Outcome = run_queue(plan, folder, self.lines.append, command)
        self.jobs: dict[str, Any] = yaml.safe_load((folder / "state.yaml").read_text())["jobs"]

    def at(self, name: str, what: str) -> float:
        return self.times(name, what)[-1]

    def times(self, name: str, what: str) -> list[float]:
        path = self.folder / f"{name}.{what}"
        return [float(line) for line in path.read_text().split()] if path.exists() else []


def gone(pid: int) -> bool:
    """The process has ended; one that nobody waited for yet counts as ended."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_the_next_job_imports_while_one_measures_and_goes_when_it_ends(tmp_path: Path) -> None:
    jobs = [a_job(name, 2.0, import_s=1.0) for name in ("a", "b", "c")]
    ran = Ran(a_plan(tmp_path, *jobs), tmp_path / "out")
    for one, following in (("a", "b"), ("b", "c")):
        assert ran.at(following, "stands") < ran.at(one, "ends") <= ran.at(following, "goes")
        assert ran.at(following, "goes") - ran.at(one, "ends") < 0.8
    # One stands by at a time.
    assert ran.at("b", "goes") <= ran.at("c", "started")
    assert ran.outcome.failures == () and (ran.outcome.ran, ran.outcome.earlier) == (3, 0)
    assert ran.outcome.between_s < 1.6 < 6.0 < ran.outcome.seconds
    assert [ran.jobs[name]["stood_by"] for name in "abc"] == [False, True, True]
    assert all(ran.jobs[name]["exit_code"] == 0 and ran.jobs[name]["seconds"] >= 2.0 for name in "abc")
    assert ran.jobs["a"]["begin"] < ran.jobs["a"]["end"] <= ran.jobs["b"]["begin"]
    assert (tmp_path / "out" / "b.out").read_text() == "measured\n"


def test_a_job_stands_by_only_after_a_while(tmp_path: Path) -> None:
    plan = a_plan(tmp_path, a_job("a", 1.0), a_job("b"), stand_by_after_s=0.7)
    ran = Ran(plan, tmp_path / "out")
    assert ran.at("b", "started") - ran.at("a", "goes") >= 0.6 and ran.jobs["b"]["stood_by"]
    late = Ran(a_plan(tmp_path, a_job("a"), a_job("b"), stand_by_after_s=9), tmp_path / "late")
    assert late.at("a", "ends") <= late.at("b", "started") and not late.jobs["b"]["stood_by"]


def test_a_failed_job_stops_only_those_that_need_it(tmp_path: Path) -> None:
    jobs = [
        a_job("a", 0.1, 3),
        a_job("b", after="a"),
        a_job("c", after="b"),
        a_job("d", env=(("MARK", "own"),)),
        a_job("e", after="d"),
    ]
    ran = Ran(a_plan(tmp_path, *jobs), tmp_path / "out")
    assert ran.outcome.failures == (
        "a: exit code 3 after 0 s; error: it went wrong",
        "b: not run, since a failed",
        "c: not run, since b failed",
    )
    assert ran.times("b", "goes") == ran.times("c", "goes") == []
    assert ran.at("d", "goes") < ran.at("e", "goes")
    assert [ran.jobs[name]["exit_code"] for name in "abcde"] == [3, None, None, 0, 0]
    assert (tmp_path / "out" / "d.env").read_text() == "own" and (tmp_path / "out" / "e.env").read_text() == ""


def test_a_job_beyond_its_time_is_killed_with_its_children(tmp_path: Path) -> None:
    jobs = [a_job("a", 60, 0, "child", max_seconds=1.0), a_job("b")]
    started = time.monotonic()
    ran = Ran(a_plan(tmp_path, *jobs), tmp_path / "out")
    assert time.monotonic() - started < 20
    assert ran.jobs["a"]["exit_code"] == TIMED_OUT and ran.jobs["b"]["exit_code"] == 0
    assert ran.outcome.failures == ("a: killed after its 1 s",)
    assert gone(int((tmp_path / "out" / "a.child").read_text()))


def test_what_a_job_leaves_behind_is_ended_before_the_next(tmp_path: Path) -> None:
    ran = Ran(a_plan(tmp_path, a_job("a", 0.2, 0, "child"), a_job("b")), tmp_path / "out")
    assert ran.outcome.failures == ()
    assert gone(int((tmp_path / "out" / "a.child").read_text()))


def test_a_process_that_died_while_it_stood_by_is_started_anew(tmp_path: Path) -> None:
    ran = Ran(a_plan(tmp_path, a_job("a", 1.0), a_job("b", 0.1, 0, "dies")), tmp_path / "out")
    assert ran.outcome.failures == () and len(ran.times("b", "started")) == 2
    assert not ran.jobs["b"]["stood_by"]


def test_what_ended_well_is_not_run_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    Ran(a_plan(tmp_path, a_job("a"), a_job("b", 0.1, 3), a_job("c")), out)
    # b is put right, c is asked for otherwise; a is as it was, and d needs it.
    again = Ran(a_plan(tmp_path, a_job("a"), a_job("b"), a_job("c", env=(("X", "1"),)), a_job("d", after="a")), out)
    assert [len(again.times(name, "goes")) for name in "abcd"] == [1, 2, 2, 1]
    assert (again.outcome.ran, again.outcome.earlier, again.outcome.failures) == (3, 1, ())
    assert "a: done before" in again.lines
    third = Ran(a_plan(tmp_path, a_job("a")), out)
    assert (third.outcome.ran, third.outcome.seconds) == (0, 0.0)


def test_an_interrupted_queue_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    out, jobs = tmp_path / "out", [a_job("a"), a_job("b", 60, 0, "child"), a_job("c", 0.1)]

    def interrupt() -> None:
        while not (out / "b.child").exists() or not (out / "c.stands").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        Ran(a_plan(tmp_path, *jobs), out)
    assert gone(int((out / "b.child").read_text()))
    state = yaml.safe_load((out / "state.yaml").read_text())["jobs"]
    assert state["a"]["exit_code"] == 0 and "exit_code" not in state["b"] and "c" not in state
    jobs[1] = a_job("b", 0.1)
    again = Ran(a_plan(tmp_path, *jobs), out)
    assert again.outcome.failures == () and again.outcome.earlier == 1
    assert not (out / "c.goes").read_text().count("\n") > 1


def test_a_file_is_waited_for_while_others_run(tmp_path: Path) -> None:
    awaited = tmp_path / "file.txt"
    jobs = [a_job("a", after=str(awaited)), a_job("b", 0.4), a_job("c", 0.4)]
    threading.Timer(1.5, awaited.touch).start()
    ran = Ran(a_plan(tmp_path, *jobs), tmp_path / "out")
    assert ran.outcome.failures == ()
    assert ran.at("b", "goes") < ran.at("c", "goes") < ran.at("a", "goes")


def test_a_file_that_never_comes_costs_its_job_alone(tmp_path: Path) -> None:
    jobs = [a_job("a", after=str(tmp_path / "file.txt"), max_seconds=0.5), a_job("b", after="a"), a_job("c")]
    ran = Ran(a_plan(tmp_path, *jobs), tmp_path / "out")
    assert ran.jobs["a"]["exit_code"] == TIMED_OUT and ran.jobs["c"]["exit_code"] == 0
    assert ran.outcome.failures == (f"a: not run, {tmp_path}/file.txt did not come", "b: not run, since a failed")


def test_two_queues_in_one_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_run, "_LOCK_WAIT_S", 0.2)
    out = tmp_path / "out"
    thread = threading.Thread(target=Ran, args=(a_plan(tmp_path, a_job("a", 2.0)), out))
    thread.start()
    while not (out / "a.goes").exists():
        time.sleep(0.02)
    with pytest.raises(ConfigError, match="another queue works in this folder"):
        Ran(a_plan(tmp_path, a_job("a")), out)
    thread.join()


def test_a_state_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "state.yaml").write_text("jobs: 3\n")
    with pytest.raises(ConfigError, match=r"state\.yaml: has no mapping `jobs`"):
        Ran(a_plan(tmp_path, a_job("a")), tmp_path / "out")


# The compile step


def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_s: float, code: int = 0, **changes: Any) -> Compile:
    fields: dict[str, Any] = {"shots_after": "all", "max_seconds": 60.0} | changes
    step = Compile("M", (1, 2), 3, 512, **fields)

    def command(step: Compile, folder: Path) -> list[str]:
        return [sys.executable, FAKE, COMPILE, str(folder), "0", str(run_s), str(code)]

    monkeypatch.setattr(queue_run, "compile_command", command)
    return step


def test_only_jobs_with_a_cache_of_a_given_size_start_beside_the_compile_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = compiling(tmp_path, monkeypatch, 2.0)
    jobs = [a_job("a"), a_job("b", 0.3, 0, "--kv-cache-gib=4"), a_job("c", after=COMPILE)]
    ran = Ran(a_plan(tmp_path, *jobs, step=step), tmp_path / "out")
    assert ran.outcome.failures == ()
    assert ran.at("b", "goes") < ran.at(COMPILE, "ends") < ran.at("a", "goes") < ran.at("c", "goes")
    # a stands by meanwhile; b's engine is told which file ends its wait for the device, and it is there.
    assert ran.at("a", "stands") < ran.at(COMPILE, "ends") and ran.jobs["a"]["stood_by"]
    told = Path((tmp_path / "out" / "b.env").read_text())
    assert told == tmp_path / "out" / "compiled.all" and told.exists()
    assert (tmp_path / "out" / "a.env").read_text() == ""
    assert ran.jobs[COMPILE]["exit_code"] == 0 and ran.jobs[COMPILE]["seconds"] >= 2


def test_a_compile_step_that_fails_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = compiling(tmp_path, monkeypatch, 0.1, code=1)
    ran = Ran(a_plan(tmp_path, a_job("a"), a_job("b", after=COMPILE), step=step), tmp_path / "out")
    assert ran.outcome.failures == () and ran.outcome.ran == 2
    assert f"{COMPILE}: engines compile what is missing themselves; error: it went wrong" in ran.lines
    assert (tmp_path / "out" / "compiled.all").exists()


def test_a_compile_step_beyond_its_time_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = compiling(tmp_path, monkeypatch, 60, max_seconds=0.5, shots_after="first")
    ran = Ran(a_plan(tmp_path, a_job("a"), step=step), tmp_path / "out")
    assert ran.jobs[COMPILE]["exit_code"] == TIMED_OUT and ran.jobs["a"]["exit_code"] == 0
    assert ran.times(COMPILE, "ends") == [] and (tmp_path / "out" / "compiled.first").exists()


def test_caches_of_this_machine_are_not_filled_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, out = compiling(tmp_path, monkeypatch, 0.1), tmp_path / "out"
    Ran(a_plan(tmp_path, a_job("a", 0.1, 1), step=step), out)
    again = Ran(a_plan(tmp_path, a_job("a", 0.1, 1), step=step), out)
    assert len(again.times(COMPILE, "goes")) == 1 and f"{COMPILE}: done before" in again.lines
    monkeypatch.setattr(queue_run.platform, "node", lambda: "another")
    elsewhere = Ran(a_plan(tmp_path, a_job("a"), step=step), out)
    assert len(elsewhere.times(COMPILE, "goes")) == 2
    finished = Ran(a_plan(tmp_path, a_job("a"), step=step), out)
    assert len(finished.times(COMPILE, "goes")) == 2


def test_the_compile_step_is_the_compile_module(tmp_path: Path) -> None:
    step = Compile("M", (1, 8), 9, 16384, "first", 60.0)
    assert queue_run.compile_command(step, tmp_path)[1:] == [
        *("-m", "profiler.queue_standby", JIT, "--model", "M", "--tp", "1,8", "--workers", "9"),
        *("--max-tokens", "16384", "--first-done", str(tmp_path / "compiled.first")),
    ]


@pytest.mark.parametrize(
    ("module", "argv", "expected"),
    [
        ("profiler", "profile M --hardware H200", True),
        ("profiler", "slice M --hardware=H200 --tp 4 --category dense", True),
        ("profiler", "coverage M --hardware H200 --engine vllm", True),
        ("serving", "record M --hardware H200", True),
        ("profiler", "profile M --hardware cpu", False),
        ("profiler", "profile M --hardware H200 --engine=reference", False),
        ("profiler", "profile M --hardware H200 --tp 1,4", False),
        ("profiler", "profile M --hardware H200 --from-samples s.gz", False),
        ("profiler", "collectives --hardware H200", False),
        (JIT, "--model M", False),
    ],
)
def test_vllm_is_imported_ahead_where_the_process_starts_it(
    module: str, argv: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert uses_vllm(module, argv.split()) is False  # not installed here
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "vllm" or None)
    assert uses_vllm(module, argv.split()) is expected


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("profiler", "profile", "M", "--hardware", "H200"), "0 1"),
        (("serving", "record", "M", "--hardware", "H200"), "None None"),
        (("serving", "record", "M", "--hardware", "H200", "--single-stream"), "None 1"),
    ],
)
def test_a_process_imports_vllm_in_its_commands_environment_and_ends_with_its_input(
    arguments: tuple[str, ...], environment: str, tmp_path: Path
) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    package.joinpath("__init__.py").write_text(
        "import os, sys\n"
        "names = 'VLLM_USE_V2_MODEL_RUNNER', 'VLLM_DISABLE_SHARED_EXPERTS_STREAM'\n"
        "print('vllm with', *map(os.environ.get, names), os.environ.get('HF_HUB_OFFLINE'), file=sys.stderr)\n"
        "LLM = None\n"
    )
    root = Path(FAKE).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "profiler.queue_standby", *arguments],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    first, missing, stands = done.stderr.splitlines()[-3:]
    assert first == f"vllm with {environment} 1"
    # A part of another version that is not there stops nothing: the command says so itself where it needs it.
    assert missing == "not imported ahead: vllm: No module named 'vllm.v1'" and stands.startswith("stands by after ")
    assert done.returncode == 130 and done.stdout == ""
