"""Runs jobs on worker processes that may die, or on a Ray cluster.

Each worker holds one job at a time, so that a death is the fault of that job alone: the job is tried once more on a
fresh worker, and reported as failed when that one dies or fails, too. The others go on.
"""

import contextlib
import logging
import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, Generic, TypeVar

from profiler.core.errors import ConfigError

ATTEMPTS: Final = 2

J = TypeVar("J")
Work = Callable[[J], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Done(Generic[J]):
    """A job that ended: what `work` returned, or why both attempts failed."""

    job: J
    value: dict[str, Any] | None
    failure: str | None = None


@dataclass(slots=True)
class _Worker(Generic[J]):
    process: BaseProcess
    pipe: Connection
    job: J | None = None
    attempt: int = 1


def run_local(work: Work[J], jobs: Sequence[J], workers: int) -> Iterator[Done[J]]:
    """The jobs in the order in which they end. `work` must be importable by name and its jobs must be picklable.

    Raises ConfigError for less than one worker. Leaving the iterator early ends the workers.
    """
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be at least 1")
    context = multiprocessing.get_context("spawn")
    waiting = deque((job, 1) for job in jobs)
    crew: list[_Worker[J]] = []

    def start() -> _Worker[J]:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(work, theirs), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def give(one: _Worker[J]) -> None:
        one.job = None
        if waiting:
            one.job, one.attempt = waiting.popleft()
            # It may have died between two jobs: then its pipe ends, and the job is tried again.
            with contextlib.suppress(OSError):
                one.pipe.send(one.job)

    try:
        crew += [start() for _ in range(min(workers, len(jobs)))]
        for one in crew:
            give(one)
        while busy := [one for one in crew if one.job is not None]:
            ready = set(wait([one.pipe for one in busy]))
            for one in busy:
                if one.pipe not in ready:
                    continue
                job, attempt = one.job, one.attempt
                assert job is not None
                try:
                    value, failure = one.pipe.recv()
                except (EOFError, OSError):
                    one.process.join()
                    value, failure = None, f"the worker died ({_exit(one.process.exitcode)})"
                    one.pipe.close()
                    crew.remove(one)
                    one = start()
                    crew.append(one)
                if failure is not None and attempt < ATTEMPTS:
                    waiting.append((job, attempt + 1))
                    give(one)
                    continue
                give(one)
                yield Done(job, value, None if failure is None else f"{failure}, {ATTEMPTS} times")
            for one in crew:
                if one.job is None and waiting:
                    give(one)
    finally:
        for one in crew:
            one.process.terminate()
        for one in crew:
            one.process.join()
            one.pipe.close()


def run_ray(work: Work[J], jobs: Sequence[J], workers: int, address: str | None = None) -> Iterator[Done[J]]:
    """The same on a Ray cluster; `address` None starts one on this machine with `workers` CPUs.

    Raises ConfigError when Ray is not installed or the cluster is not reached.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("--executor ray needs Ray: pip install 'sparsight[ray]'") from None
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be at least 1")
    try:
        ray.init(
            address=address,
            num_cpus=None if address else workers,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--ray-address {address}: {error}") from None
    try:
        remote: Any = ray.remote(max_retries=0)(_guarded)
        pending = {remote.remote(work, job): (job, 1) for job in jobs}
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1)
            job, attempt = pending.pop(ready[0])
            try:
                value, failure = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                value, failure = None, f"the worker died ({type(error).__name__})"
            if failure is not None and attempt < ATTEMPTS:
                pending[remote.remote(work, job)] = (job, attempt + 1)
                continue
            yield Done(job, value, None if failure is None else f"{failure}, {ATTEMPTS} times")
    finally:
        ray.shutdown()


def _serve(work: Work[J], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(_guarded(work, job))


def _guarded(work: Work[J], job: J) -> tuple[dict[str, Any] | None, str | None]:
    try:
        return work(job), None
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return None, f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
