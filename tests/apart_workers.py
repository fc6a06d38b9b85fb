"""Work that ends in every way, for the tests of processes of their own; importable by name in them."""

import os
import signal
import time
from pathlib import Path

from profiler.apart import run_apart
from profiler.core import errors


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return text


def refuse(kind: str, message: str) -> None:
    raise getattr(errors, kind)(message)


def crash() -> None:
    raise ValueError("three is not liked")


def leave(code: int) -> None:
    os._exit(code)


def kill_itself(number: int) -> None:
    os.kill(os.getpid(), number)


def fork_and_die(orphan: Path) -> None:
    """Dies while a process that it forked lives on and holds all its open files."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    orphan.write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


def linger(folder: Path) -> None:
    """Writes its process number, and on the way out that it closed."""
    try:
        (folder / "part").write_text(str(os.getpid()))
        (folder / "part").rename(folder / "pid")
        time.sleep(60)
    finally:
        (folder / "closing").touch()
        time.sleep(0.5)
        (folder / "closed").touch()


def wait_for_lingering(folder: str) -> None:
    run_apart(linger, (Path(folder),), "tp 2", "go on")
