"""Runs the jobs of a plan one after another on one card; while one measures, the process of the next one imports.

A folder holds NAME.out and NAME.err of every job, and state.yaml: when each began and ended, and its exit code. A queue
that was killed goes on from there: jobs that ended with 0 are not run again while their command and environment are
the same.
"""

import contextlib
import datetime
import fcntl
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from profiler.core.errors import ConfigError
from profiler.core.load import atomic_write, read_mapping
from profiler.engines.vllm_support.jit import SHOTS_AFTER_VARIABLE
from profiler.queue_plan import COMPILE, Compile, Plan, QueueJob, is_file
from profiler.queue_standby import JIT

TIMED_OUT: Final = 124
STATE: Final = "state.yaml"
_LOOK_EVERY_S: Final = 0.05
# The jobs of a queue that was killed end within moments of it; they hold its lock until then.
_LOCK_WAIT_S: Final = 10.0
_SIGNALLED: Final = 128
_LINE: Final = 160

Verdict = Literal["go", "wait", "never"]
Command = Callable[[QueueJob], list[str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """failures: a line per job that did not end with 0. ran, earlier: jobs run now, and found done.

    between_s: time in which none of the jobs ran, from the first one's turn to the last one's end, of seconds.
    """

    failures: tuple[str, ...]
    ran: int
    earlier: int
    seconds: float
    between_s: float


def standby_command(job: QueueJob) -> list[str]:
    return [sys.executable, "-m", "profiler.queue_standby", job.module, *job.argv]


def compile_command(step: Compile, folder: Path) -> list[str]:
    tps = ",".join(map(str, step.tps))
    asked = ["--model", step.model, "--tp", tps, "--workers", str(step.workers), "--max-tokens", str(step.max_tokens)]
    if step.shots_after == "first":
        asked += ["--first-done", str(_compiled(folder, "first"))]
    return [sys.executable, "-m", "profiler.queue_standby", JIT, *asked]


def run_queue(plan: Plan, folder: Path, say: Callable[[str], None], command: Command = standby_command) -> Outcome:
    """Runs what `folder` does not hold as done, and returns when nothing is left.

    say: gets a line at every beginning and end. command: of the process that runs a job on a line of standard input.
    Raises ConfigError when another queue works in the folder. No process of it is left when this returns or raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as lock:
        queue = _Queue(plan, folder, lock, say, command)
        try:
            queue.run()
        finally:
            queue.end_all()
        return queue.outcome()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"{folder}: another queue works in this folder") from None
                time.sleep(_LOOK_EVERY_S)
        yield lock
    finally:
        os.close(lock)


class _Queue:
    """A plan under way. ended: exit codes by job, of this call and of earlier ones; None was never run."""

    def __init__(self, plan: Plan, folder: Path, lock: int, say: Callable[[str], None], command: Command) -> None:
        self._plan, self._folder, self._lock, self._say, self._command = plan, folder, lock, say, command
        self._state = _read_state(folder / STATE)
        self._state["plan"] = plan.name
        done = [job for job in plan.jobs if _done(self._state["jobs"].get(job.name), job)]
        self._todo = [job for job in plan.jobs if job not in done]
        self._ended: dict[str, int | None] = {job.name: 0 for job in done}
        self._earlier = len(done)
        self._standing: dict[str, subprocess.Popen[bytes]] = {}
        self._running: subprocess.Popen[bytes] | None = None
        self._compiling: subprocess.Popen[bytes] | None = None
        self._compile_began = 0.0
        self._failures: dict[str, str] = {}
        self._began: float | None = None
        self._last_end = self._between_s = 0.0
        self._waits_since: float | None = None

    def run(self) -> None:
        for job in self._plan.jobs:
            if job not in self._todo:
                self._say(f"{job.name}: done before")
        self._start_compile()
        while self._todo:
            self._look_after_compile()
            self._drop_hopeless()
            ready = [job for job in self._todo if self._verdict(job) == "go"]
            if ready:
                self._waits_since = None
                self._todo.remove(ready[0])
                self._run_job(ready[0])
                continue
            self._stand_by(COMPILE)
            self._give_up_waiting()
            time.sleep(_LOOK_EVERY_S)

    def end_all(self) -> None:
        for process in (*self._standing.values(), self._running, self._compiling):
            if process is not None:
                _end_group(process)

    def outcome(self) -> Outcome:
        order = [job.name for job in self._plan.jobs]
        failures = tuple(self._failures[name] for name in order if name in self._failures)
        seconds = self._last_end - self._began if self._began is not None else 0.0
        return Outcome(failures, len(order) - self._earlier, self._earlier, seconds, self._between_s)

    # Which job is next

    def _verdict(self, job: QueueJob, *ended_well: str) -> Verdict:
        """Whether a job may run now, or would when what is named by `ended_well` has ended, and well."""
        compiles = self._compiling is not None and COMPILE not in ended_well
        if compiles and not job.sized_cache:
            return "wait"
        if job.after is None or job.after in ended_well:
            return "go"
        if job.after == COMPILE:
            return "wait" if compiles else "go"
        if job.after in self._ended:
            return "go" if self._ended[job.after] == 0 else "never"
        return "go" if is_file(job.after) and Path(job.after).exists() else "wait"

    def _drop_hopeless(self) -> None:
        hopeless = [job for job in self._todo if self._verdict(job) == "never"]
        for job in hopeless:
            self._refuse(job, None, f"not run, since {job.after} failed")

    def _give_up_waiting(self) -> None:
        """A file may be waited for as long as its job may take, counted while nothing runs."""
        now = time.monotonic()
        if self._compiling is not None or self._waits_since is None:
            self._waits_since = now
        waiting = [job for job in self._todo if job.after is not None and is_file(job.after)]
        for job in [job for job in waiting if now - self._waits_since > job.max_seconds]:
            self._refuse(job, TIMED_OUT, f"not run, {job.after} did not come")

    def _refuse(self, job: QueueJob, code: int | None, why: str) -> None:
        self._todo.remove(job)
        if (process := self._standing.pop(job.name, None)) is not None:
            _end_group(process)
        self._ended[job.name] = code
        self._failures[job.name] = f"{job.name}: {why}"
        self._say(self._failures[job.name])
        self._write(job.name, {**_asked(job), "exit_code": code, "note": why})

    # Processes

    def _start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a process that waits for its turn, in a group of its own that holds the lock until it ends."""
        with (self._folder / f"{name}.out").open("ab") as out, (self._folder / f"{name}.err").open("ab") as err:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
                start_new_session=True,
                pass_fds=(self._lock,),
            )

    def _start_job(self, job: QueueJob) -> subprocess.Popen[bytes]:
        env = dict(job.env)
        if self._plan.compile is not None and job.sized_cache:
            env[SHOTS_AFTER_VARIABLE] = str(_compiled(self._folder, self._plan.compile.shots_after))
        return self._start(job.name, self._command(job), env)

    def _stand_by(self, *running: str) -> None:
        """Starts the process of the job that is next when what is running ends well, unless one stands by."""
        if not self._standing:
            likely = [job for job in self._todo if self._verdict(job, *running) == "go"]
            for job in likely[:1]:
                self._standing[job.name] = self._start_job(job)

    def _run_job(self, job: QueueJob) -> None:
        process = self._standing.pop(job.name, None)
        if process is not None and _has_ended(process):
            _end_group(process)
            process = None
        stood_by = process is not None
        process = process or self._start_job(job)
        self._running = process
        begin = time.monotonic()
        if self._began is None:
            self._began = begin
        else:
            self._between_s += begin - self._last_end
        _go(process)
        entry = {**_asked(job), "begin": _now(), "stood_by": stood_by}
        self._write(job.name, entry)
        self._say(f"{job.name}: begins{', stood by' if stood_by else ''}")
        timed_out = not self._wait(job, process, begin)
        code = TIMED_OUT if timed_out else _end_group(process)
        self._running, self._last_end = None, time.monotonic()
        seconds = self._last_end - begin
        self._ended[job.name] = code
        self._write(job.name, {**entry, "end": _now(), "seconds": round(seconds, 1), "exit_code": code})
        self._say(f"{job.name}: exit code {code} after {seconds:.1f} s")
        if code != 0:
            why = f"killed after its {job.max_seconds:g} s" if timed_out else f"exit code {code} after {seconds:.0f} s"
            last = _last_line(self._folder / f"{job.name}.err")
            self._failures[job.name] = f"{job.name}: {why}{f'; {last}' if last else ''}"

    def _wait(self, job: QueueJob, process: subprocess.Popen[bytes], begin: float) -> bool:
        """Until the process ends, True, or its time is out, False; then its group is gone."""
        while not _has_ended(process):
            spent = time.monotonic() - begin
            if spent > job.max_seconds:
                _end_group(process)
                return False
            if spent >= self._plan.stand_by_after_s:
                self._stand_by(job.name, COMPILE)
            self._look_after_compile()
            time.sleep(_LOOK_EVERY_S)
        return True

    # The compile step

    def _start_compile(self) -> None:
        step = self._plan.compile
        if step is None or not self._todo:
            return
        for part in ("first", "all"):
            _compiled(self._folder, part).unlink(missing_ok=True)
        asked = {"argv": compile_command(step, self._folder)[3:], "host": platform.node()}
        before = self._state["jobs"].get(COMPILE) or {}
        # The caches are files of a machine.
        if before.get("exit_code") == 0 and all(before.get(key) == value for key, value in asked.items()):
            self._say(f"{COMPILE}: done before")
            _compiled(self._folder, step.shots_after).touch()
            return
        self._compile_began = time.monotonic()
        self._compiling = self._start(COMPILE, compile_command(step, self._folder), {})
        _go(self._compiling)
        self._write(COMPILE, {**asked, "begin": _now()})
        self._say(f"{COMPILE}: begins")

    def _look_after_compile(self) -> None:
        """Jobs go on when it has ended, however it did: an engine compiles what is missing itself."""
        process, step = self._compiling, self._plan.compile
        if process is None or step is None:
            return
        seconds = time.monotonic() - self._compile_began
        timed_out = seconds > step.max_seconds
        if not timed_out and not _has_ended(process):
            return
        code = _end_group(process)
        self._compiling = None
        code = TIMED_OUT if timed_out else code
        ended = {"end": _now(), "seconds": round(seconds, 1), "exit_code": code}
        self._write(COMPILE, {**self._state["jobs"][COMPILE], **ended})
        self._say(f"{COMPILE}: exit code {code} after {seconds:.1f} s")
        if code != 0:
            last = _last_line(self._folder / f"{COMPILE}.err")
            self._say(f"{COMPILE}: engines compile what is missing themselves{f'; {last}' if last else ''}")
        _compiled(self._folder, step.shots_after).touch()

    def _write(self, name: str, entry: Mapping[str, Any]) -> None:
        self._state["jobs"][name] = dict(entry)
        with atomic_write(self._folder / STATE) as stream:
            yaml.safe_dump(self._state, stream, sort_keys=False, width=120)


def done_before(plan: Plan, folder: Path) -> set[str]:
    """Names of jobs that ended with 0 in the folder. Raises ConfigError where its state is not readable."""
    jobs = _read_state(folder / STATE)["jobs"]
    return {job.name for job in plan.jobs if _done(jobs.get(job.name), job)}


def _read_state(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"plan": None, "jobs": {}}
    state = read_mapping(path)
    if not isinstance(state.get("jobs"), dict):
        raise ConfigError(f"{path}: has no mapping `jobs`; remove it to start anew")
    return state


def _asked(job: QueueJob) -> dict[str, Any]:
    return {"module": job.module, "argv": list(job.argv), "env": dict(job.env)}


def _done(entry: Any, job: QueueJob) -> bool:
    if not isinstance(entry, Mapping) or entry.get("exit_code") != 0:
        return False
    return all(entry.get(key) == value for key, value in _asked(job).items())


def _compiled(folder: Path, part: str) -> Path:
    """The file that tells that kernels of the first degree, or all, are compiled."""
    return (folder / f"compiled.{part}").absolute()


def _go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(b"go\n")
        process.stdin.flush()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Not taken off the system's list yet, so that its number, and its group's, is still its own."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_group(process: subprocess.Popen[bytes]) -> int:
    """Kills what is left of the process and its group. Exit code of the process, 128 + number for a signal."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    return code if code >= 0 else _SIGNALLED - code


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error:")] or lines
    return said[-1][:_LINE] if said else ""


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
