"""The GPU that this process sees, as its driver reports it: where several are in one host, never another one."""

import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, Final

# nvidia-smi's field -> the name in the tables, and whether it is a number.
_FIELDS: Final = (
    ("name", "name", False),
    ("driver_version", "driver", False),
    ("memory.total", "memory_total_mib", True),
    ("clocks.max.sm", "max_sm_clock_mhz", True),
    ("clocks.max.mem", "max_memory_clock_mhz", True),
    ("power.limit", "power_limit_w", True),
    ("pstate", "pstate", False),
    ("clocks.sm", "sm_clock_mhz", True),
    ("clocks.mem", "memory_clock_mhz", True),
    ("power.draw", "power_w", True),
    ("temperature.gpu", "temperature_c", True),
)


def visible_id() -> str | None:
    """How the driver's tools name this process's first CUDA device: its UUID, else its number; None when unknown."""
    try:
        import torch

        uuid = str(torch.cuda.get_device_properties(0).uuid)
    except (ImportError, AttributeError, RuntimeError, AssertionError):
        uuid = ""
    if uuid:
        return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return _visible_number()


def _visible_number() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or None


def gpu_facts() -> dict[str, Any]:
    """Name, driver, clocks, power and limits of the visible GPU as nvidia-smi reports them at this moment."""
    text = _query([field for field, _, _ in _FIELDS], [visible_id(), _visible_number() or "0"], _run)
    if text is None:
        import torch

        return {"name": torch.cuda.get_device_name(0)}
    return _facts(text)


def _facts(line: str) -> dict[str, Any]:
    """One line of nvidia-smi's CSV; a field that the card does not report is left out."""
    facts: dict[str, Any] = {}
    for (_, name, number), value in zip(_FIELDS, (v.strip() for v in line.split(",")), strict=True):
        if not number:
            facts[name] = value
            continue
        try:
            facts[name] = float(value)
        except ValueError:
            continue
    return facts


def _query(
    fields: Sequence[str], names: Sequence[str | None], run: Callable[[Sequence[str]], str | None]
) -> str | None:
    """The line of the first of `names` that nvidia-smi knows; None when it knows none, or is absent."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    for gpu in names:
        lines = (run([*command, f"--id={gpu}"]) or "").strip().splitlines() if gpu else []
        if len(lines) == 1:
            return lines[0]
    return None


def _run(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
