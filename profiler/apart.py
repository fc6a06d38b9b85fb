"""A piece of work in a process of its own: it starts clean, and what it holds of the device goes with it."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Final

from profiler.core.errors import AcquisitionError, SparsightError

LOOK_EVERY_S: Final = 0.5
# To stop the engine and leave the device, before the process is killed.
CLOSING_S: Final = 60.0
_INTERRUPTED: Final = 130


def run_apart(work: Callable[..., object], arguments: tuple[Any, ...], name: str, advice: str) -> None:
    """Calls `work`, importable by name, in a new process and waits for its end; what it returns is dropped.

    A SparsightError of the work is raised here. AcquisitionError with the `advice` when a signal ended the process,
    SparsightError when it ended otherwise; `name` says whose process it was. The process does not outlive this one.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    # Not a daemon, which could start no processes of its own.
    process = context.Process(target=_serve, args=(theirs, work, arguments))
    try:
        process.start()
        theirs.close()
        said = _said(process, ours)
    except BaseException:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGINT)
        raise
    finally:
        if process.pid is not None:
            _end(process)
        ours.close()
    if not said:
        _refuse_death(process.exitcode, name, advice)
    for error in said:
        if error is not None:
            raise error


def _said(process: BaseProcess, pipe: Connection) -> list[SparsightError | None]:
    """The error of the work, None when it is done; empty when its process ended without a word."""
    # The process is looked at too: the pipe stays open while a process that it forked lives on.
    while process.is_alive() and not pipe.poll(LOOK_EVERY_S):
        pass
    try:
        return [pipe.recv()] if pipe.poll() else []
    except EOFError:
        return []


def _end(process: BaseProcess) -> None:
    try:
        if process.is_alive():
            process.join(CLOSING_S)
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def _refuse_death(code: int | None, name: str, advice: str) -> None:
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    if code is not None and code < 0:
        why = f"signal {-code} ({signal.strsignal(-code)})"
        raise AcquisitionError(f"{name}: its process was ended by {why}; {advice}")
    raise SparsightError(f"{name}: its process ended with exit code {code} before it was done; {advice}")


def _serve(pipe: Connection, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, _interrupt_once)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    error: SparsightError | None = None
    try:
        work(*arguments)
    except SparsightError as found:
        error = found
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    pipe.send(error)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    # Ctrl-C comes from the terminal and again from the parent: the second must not cut short how the engine closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    # Without its parent it would hold the device and write to a file that the next run continues.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
