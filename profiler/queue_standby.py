"""A process that imports what its command needs, waits for a line on its standard input, then runs the command.

    python -m profiler.queue_standby profiler profile MODEL --hardware H200

It ends with its whole process group when its standard input does, since then the queue that started it is gone and
another may be at the same samples file.
"""

import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Final

from profiler.core.errors import SparsightError

JIT: Final = "profiler.engines.vllm_support.jit"
_MEASURING: Final = ("profile", "slice", "coverage")
_QUEUE_IS_GONE: Final = 130


def main(arguments: Sequence[str]) -> None:
    module, *argv = arguments
    started = time.monotonic()
    orders = _taken_stdin()
    _import_ahead(module, argv)
    print(f"stands by after {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    if not orders.readline():
        sys.exit(_QUEUE_IS_GONE)
    threading.Thread(target=_end_with, args=(orders,), daemon=True).start()
    _run(module, argv)


def _taken_stdin() -> IO[bytes]:
    """Standard input under another number, so that no command and no child reads from it."""
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return orders


def _end_with(orders: IO[bytes]) -> None:
    orders.read()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(_QUEUE_IS_GONE)


def _run(module: str, argv: list[str]) -> None:
    if module == JIT:
        importlib.import_module(JIT).main(argv)
        return
    from profiler.cli import run

    sys.argv = [module, *argv]
    # By name: the profiler runs without serving.
    run(importlib.import_module(f"{module}.__main__").main, f"python -m {module}")


def _import_ahead(module: str, argv: list[str]) -> None:
    """What fails here fails again, with its message, where the command needs it."""
    for name in _modules(module, argv):
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"not imported ahead: {name}: {error}", file=sys.stderr)
    if uses_vllm(module, argv):
        from profiler.engines.vllm_support import boot

        environment = boot.ENVIRONMENT if module == "profiler" else dict(boot.SERVING_ENVIRONMENT)
        if "--single-stream" in argv:
            key = "VLLM_DISABLE_SHARED_EXPERTS_STREAM"
            environment = {**environment, key: boot.ENVIRONMENT[key]}
        try:
            boot.import_ahead(environment)
        except (ImportError, SparsightError) as error:
            print(f"not imported ahead: vllm: {error}", file=sys.stderr)


def _modules(module: str, argv: list[str]) -> list[str]:
    if module == JIT:
        return [JIT]
    names = [f"{module}.__main__", f"{module}.commands.{argv[0]}"]
    if argv[0] in _MEASURING:
        return [*names, "torch", "profiler.acquire", "profiler.engines.reference"]
    if argv[0] == "record":
        return [*names, "serving.recording.plays", "serving.recording.files", "serving.recording.vllm_driver"]
    return names


def uses_vllm(module: str, argv: list[str]) -> bool:
    """The command starts vLLM in its own process. Several degrees are measured in a process each."""
    if importlib.util.find_spec("vllm") is None:
        return False
    if module == "serving":
        return True
    if module != "profiler" or argv[0] not in _MEASURING or _value(argv, "--from-samples") is not None:
        return False
    if (_value(argv, "--hardware") or "").casefold() == "cpu" or _value(argv, "--engine") == "reference":
        return False
    return "," not in (_value(argv, "--tp") or "1")


def _value(argv: list[str], option: str) -> str | None:
    """The value that the option is last given."""
    found = None
    for part, following in zip(argv, [*argv[1:], ""], strict=True):
        if part == option:
            found = following
        elif part.startswith(f"{option}="):
            found = part.split("=", 1)[1]
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
