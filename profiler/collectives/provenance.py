"""What is kept beside measured collectives: when, how, on what, over which links."""

import datetime
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from profiler.collectives.launch import environment
from profiler.collectives.outcome import Outcome

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "NVSHMEM_", "VLLM_", "CUDA_VISIBLE")
_PROTOCOL = (
    "bf16, median over batches of the slowest rank's time per call; graph: difference of two CUDA graphs of 4 to 32 "
    "back-to-back calls and of a quarter of them; eager: 4 to 32 calls launched by hosts that start together"
)


def started(command: str, ranks: int, cpu: bool) -> dict[str, Any]:
    """Before measuring. The variables are those that a worker has; no value with a path in it is kept."""
    variables = {
        name: value
        for name, value in sorted(environment(os.environ).items())
        if name.startswith(_PREFIXES) and "/" not in value
    }
    run: dict[str, Any] = {
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "command": command,
        "gpus": ranks,
        "environment": variables,
    }
    if cpu:
        return run
    names = _output(
        ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    )
    return run | {"cards": names.splitlines(), "topology": _output(["nvidia-smi", "topo", "-m"]).splitlines()}


def finished(run: Mapping[str, Any], facts: Mapping[str, Any], result: Outcome, batches: int) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for row in result.rows:
        counts[row.backend] = counts.get(row.backend, 0) + 1
    return {**run, "versions": dict(facts), "rows": counts, "batches": batches, "protocol": _PROTOCOL}


def _output(command: list[str]) -> str:
    """Standard output without colours; empty where the program is missing or refuses."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "".join(part.split("m", 1)[-1] if i else part for i, part in enumerate(done.stdout.split("\x1b["))).strip()
