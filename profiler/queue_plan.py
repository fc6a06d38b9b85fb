"""Plans of `python -m profiler queue`: acquisitions that follow one another on one card.

    name: h200-deepseek-v32
    stand_by_after_s: 40             the next job's process starts so long after the running one went; default 40
    compile:                         fp8 GEMM kernels compiled before the first job, or beside its start
      model: deepseek-ai/DeepSeek-V3.2-Exp
      tp: [1, 2, 4, 8]
      workers: 9
      max_tokens: 16384              largest batch; default 16384
      shots_after: all               or first: jobs beside it measure once the first degree is compiled; default all
      max_seconds: 600               default 600
    jobs:
      - name: tp1                    names NAME.out and NAME.err
        module: profiler             or serving; default profiler
        argv: profile MODEL --hardware H200
        max_seconds: 900             from its turn on; then it is killed
        after: tp1                   a job above that must have ended well, compile, or a file; default none
        env: {NCCL_DEBUG: WARN}

argv is what follows `python -m MODULE`, a text or a list of texts, each split as a shell splits it (so that an anchor
may hold what jobs share). A text of `after` with a slash or a dot is a file.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from profiler.core.errors import ConfigError, unknown
from profiler.core.load import read_mapping

COMPILE: Final = "compile"
COMMANDS: Final = {"profiler": ("profile", "slice", "coverage", "collectives"), "serving": ("record",)}
ShotsAfter = Literal["all", "first"]

_PLAN_KEYS: Final = ("name", "stand_by_after_s", COMPILE, "jobs")
_COMPILE_KEYS: Final = ("model", "tp", "workers", "max_tokens", "shots_after", "max_seconds")
_JOB_KEYS: Final = ("name", "module", "argv", "max_seconds", "after", "env")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Compile:
    """Kernels of a model's GEMMs at several degrees, by so many processes. shots_after: see the module's text."""

    model: str
    tps: tuple[int, ...]
    workers: int
    max_tokens: int
    shots_after: ShotsAfter
    max_seconds: float


@dataclass(frozen=True, slots=True)
class QueueJob:
    """One command. after: the name of an earlier job, COMPILE, a file's path, or None."""

    name: str
    module: str
    argv: tuple[str, ...]
    max_seconds: float
    after: str | None
    env: tuple[tuple[str, str], ...]

    @property
    def sized_cache(self) -> bool:
        """Its engine is told how much memory to take, so that it may start beside others."""
        return any(part.split("=")[0] == "--kv-cache-gib" for part in self.argv)


@dataclass(frozen=True, slots=True)
class Plan:
    path: Path
    name: str
    stand_by_after_s: float
    compile: Compile | None
    jobs: tuple[QueueJob, ...]

    def where(self, job: QueueJob) -> str:
        """How messages name a job."""
        return f"{self.path}: job {job.name}"


def only(plan: Plan, names: Sequence[str]) -> Plan:
    """The plan with these jobs alone, in its order; they no longer wait for jobs that are left out.

    Raises ConfigError for a name that the plan does not have.
    """
    known = [job.name for job in plan.jobs]
    for name in names:
        if name not in known:
            raise ConfigError(f"{plan.path}: {unknown('job', name, known)}")
    left_out = set(known) - set(names)
    jobs = (job for job in plan.jobs if job.name in names)
    return replace(plan, jobs=tuple(replace(job, after=None) if job.after in left_out else job for job in jobs))


def read_plan(path: Path) -> Plan:
    """Raises ConfigError naming the file, the job and the key of the first fault. What argv says is not looked at."""
    content = read_mapping(path)
    _known_keys(f"{path}", content, _PLAN_KEYS, ("name", "jobs"))
    entries = content["jobs"]
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: jobs must be a list of at least one job")
    step = _compile(f"{path}: {COMPILE}", content[COMPILE]) if COMPILE in content else None
    jobs: list[QueueJob] = []
    for number, entry in enumerate(entries, 1):
        jobs.append(_job(path, number, entry, jobs, step is not None))
    return Plan(
        path=path,
        name=_text(f"{path}", content, "name"),
        stand_by_after_s=_number(f"{path}", content, "stand_by_after_s", 40.0, least=0.0),
        compile=step,
        jobs=tuple(jobs),
    )


def _job(path: Path, number: int, entry: Any, above: Sequence[QueueJob], compiles: bool) -> QueueJob:
    where = f"{path}: jobs[{number}]"
    if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
        where = f"{path}: job {entry['name']}"
    _known_keys(where, entry, _JOB_KEYS, ("name", "argv", "max_seconds"))
    name = _text(where, entry, "name")
    if not _NAME.fullmatch(name) or name == COMPILE:
        raise ConfigError(f"{where}: a name is letters, digits, _ and -, and not {COMPILE}")
    if name in {job.name for job in above}:
        raise ConfigError(f"{where}: there is a job of this name above")
    module = _text(where, entry, "module", "profiler")
    if module not in COMMANDS:
        raise ConfigError(f"{where}: {unknown('module', module, COMMANDS)}")
    argv = _argv(where, entry["argv"])
    if argv[0] not in COMMANDS[module]:
        raise ConfigError(f"{where}: argv: {unknown(f'command of {module}', argv[0], COMMANDS[module])}")
    return QueueJob(
        name=name,
        module=module,
        argv=argv,
        max_seconds=_number(where, entry, "max_seconds"),
        after=_after(where, entry, above, compiles),
        env=_env(where, entry.get("env", {})),
    )


def _compile(where: str, entry: Any) -> Compile:
    _known_keys(where, entry, _COMPILE_KEYS, ("model", "tp", "workers"))
    tps = entry["tp"]
    if not isinstance(tps, list) or not tps or not all(_is_count(tp) for tp in tps) or len(set(tps)) < len(tps):
        raise ConfigError(f"{where}: tp must be a list of degrees, each once, found {tps!r}")
    for key in ("workers", "max_tokens"):
        if key in entry and not _is_count(entry[key]):
            raise ConfigError(f"{where}: {key} must be a positive integer, found {entry[key]!r}")
    shots_after = entry.get("shots_after", "all")
    if shots_after not in ("all", "first"):
        raise ConfigError(f"{where}: shots_after must be all or first, found {shots_after!r}")
    return Compile(
        model=_text(where, entry, "model"),
        tps=tuple(tps),
        workers=entry["workers"],
        max_tokens=entry.get("max_tokens", 16384),
        shots_after=shots_after,
        max_seconds=_number(where, entry, "max_seconds", 600.0),
    )


def _argv(where: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{where}: argv must be a text or a list of texts, found {value!r}")
    try:
        argv = tuple(part for text in texts for part in shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{where}: argv: {error}") from None
    if not argv:
        raise ConfigError(f"{where}: argv is empty")
    return argv


def _after(where: str, entry: Mapping[str, Any], above: Sequence[QueueJob], compiles: bool) -> str | None:
    if entry.get("after") is None:
        return None
    after = _text(where, entry, "after")
    names = [*([COMPILE] if compiles else []), *(job.name for job in above)]
    if after not in names and not is_file(after):
        raise ConfigError(
            f"{where}: after: {unknown('job above', after, names)} A file is written with a slash or a dot."
        )
    return after


def is_file(after: str) -> bool:
    """An `after` that is a path: no job's name has a slash or a dot."""
    return "/" in after or "." in after


def _env(where: str, value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: env must be a mapping, found {type(value).__name__}")
    for key, text in value.items():
        if not isinstance(key, str) or isinstance(text, bool) or not isinstance(text, str | int):
            raise ConfigError(f"{where}: env: {key} must be a text or an integer, found {text!r}")
    return tuple((key, str(text)) for key, text in value.items())


def _known_keys(where: str, value: Any, known: Iterable[str], needed: Iterable[str]) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: must be a mapping, found {type(value).__name__}")
    for key in value:
        if key not in known:
            raise ConfigError(f"{where}: {unknown('key', str(key), known)}")
    if lacking := [key for key in needed if key not in value]:
        raise ConfigError(f"{where}: lacks {', '.join(lacking)}")


def _text(where: str, value: Mapping[str, Any], key: str, default: str | None = None) -> str:
    found = value.get(key, default)
    if not isinstance(found, str) or not found:
        raise ConfigError(f"{where}: {key} must be a text, found {found!r}")
    return found


def _number(
    where: str, value: Mapping[str, Any], key: str, default: float | None = None, least: float | None = None
) -> float:
    """A number above 0, or of at least `least`."""
    found = value.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not found < float("inf"):
        raise ConfigError(f"{where}: {key} must be a number, found {found!r}")
    if found < least if least is not None else found <= 0:
        raise ConfigError(f"{where}: {key} must be {'positive' if least is None else f'at least {least:g}'}")
    return float(found)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
