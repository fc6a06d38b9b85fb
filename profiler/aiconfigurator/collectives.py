"""Collective operations: AIConfigurator's tables as rows of ours.

NCCL's rows are launches back to back, so that the device's time counts and not the host's; they stand for calls in a
graph. The engine's own all-reduce was timed both in a graph and launched by the host.
"""

import math
from pathlib import Path
from typing import Final

from profiler.aiconfigurator.source import System, candidates, read, version_key, versions
from profiler.core.collective_table import CollectiveRow
from profiler.core.errors import CoverageError

OPERATIONS: Final = ("all_reduce", "all_gather", "reduce_scatter")
# message_size counts elements: half takes twice the time of int8 where bandwidth rules.
_TWO_BYTES: Final = 2
_NCCL: Final = ("nccl_dtype", "num_gpus", "message_size", "op_name", "latency")
_OWN: Final = ("allreduce_dtype", "num_gpus", "message_size", "latency")


def collective_rows(system: System, backend: str, version: str) -> tuple[list[CollectiveRow], dict[str, str]]:
    """Rows of two-byte elements, and the version of each table used. Empty where the system has no NCCL table."""
    found = versions(system, "comm", "nccl", "nccl")
    if not found:
        return [], {}
    newest = max(found, key=version_key)
    rows, used = _nccl(found[newest], f"nccl {newest} of AIConfigurator"), {"nccl": newest}
    try:
        own = candidates(system, "comm", backend, "custom_allreduce", version or None, exact=False)[0]
    except CoverageError:
        return rows, used
    used["custom_allreduce"] = own.version
    return rows + _own(own.path, f"{backend} {own.version} of AIConfigurator"), used


def _nccl(path: Path, name: str) -> list[CollectiveRow]:
    frame = read(path, _NCCL)
    frame = frame[frame["nccl_dtype"] == "half"]
    times: dict[tuple[str, int, int], float] = {}
    columns = (frame[column].tolist() for column in ("op_name", "num_gpus", "message_size", "latency"))
    for operation, gpus, size, ms in zip(*columns, strict=True):
        if operation in OPERATIONS and ms > 0:
            times[str(operation), int(gpus), _TWO_BYTES * int(size)] = float(ms) * 1e3
    return [
        CollectiveRow(op, name, gpus, "fp16", size, "graph", us, math.nan) for (op, gpus, size), us in times.items()
    ]


def _own(path: Path, name: str) -> list[CollectiveRow]:
    frame = read(path, _OWN)
    launched = (
        frame["backend"].astype(str).str.endswith("_eager") if "backend" in frame.columns else frame["latency"] < 0
    )
    times: dict[tuple[int, int, str], float] = {}
    columns = (frame[column].tolist() for column in ("num_gpus", "message_size", "latency"))
    for gpus, size, ms, eager in zip(*columns, launched.tolist(), strict=True):
        if ms > 0:
            times[int(gpus), _TWO_BYTES * int(size), "eager" if eager else "graph"] = float(ms) * 1e3
    return [
        CollectiveRow("all_reduce", name, gpus, "bf16", size, mode, us, math.nan)
        for (gpus, size, mode), us in times.items()
    ]
