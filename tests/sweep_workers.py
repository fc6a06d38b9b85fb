"""Jobs that end in every way, for the tests of the executor; importable by name in worker processes."""

import os
import signal
from pathlib import Path
from typing import Any


def double(number: int) -> dict[str, Any]:
    return {"value": 2 * number}


def die_once(marker: str) -> dict[str, Any]:
    """Kills its process unless the marker file exists, which it leaves behind."""
    path = Path(marker)
    if path.name != "well" and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"value": path.name}


def die_at_three(number: int) -> dict[str, Any]:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"value": number}


def raise_at_three(number: int) -> dict[str, Any]:
    if number == 3:
        raise ValueError("three is not liked")
    return {"value": number}
