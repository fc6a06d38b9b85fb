"""Collective operations: AIConfigurator's tables as rows of ours.

NCCL's rows are launches back to back, so that the device's time counts and not the host's; they stand for calls in a
graph. The engine's own all-reduce was timed both in a graph and launched by the host.

Of an all-to-all the size is what one rank sends, its own part included, as in our tables: on H200 (n - 1) / n of it
over the time is 298 to 319 GB/s on 2, 4 and 8 GPUs; without the own part two GPUs would reach 595 GB/s over a link of
450.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from profiler.aiconfigurator.source import System, candidates, read, version_key, versions
from profiler.core.collective_table import IMPORTED, CollectiveRow
from profiler.core.errors import CoverageError

# The tables' names and ours.
OPERATIONS: Final = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
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
    rows, used = _nccl(found[newest], f"nccl {newest}{IMPORTED}"), {"nccl": newest}
    try:
        own = candidates(system, "comm", backend, "custom_allreduce", version or None, exact=False)[0]
    except CoverageError:
        return rows, used
    used["custom_allreduce"] = own.version
    return rows + _own(own.path, f"{backend} {own.version}{IMPORTED}"), used


def collectives_run(rows: Sequence[CollectiveRow], meta: Mapping[str, Any], used: Mapping[str, str]) -> dict[str, Any]:
    """What collectives.yaml says of imported rows: the command and source of the bundle beside them."""
    return {
        "provenance": "imported",
        "command": meta["command"],
        "imported_from": {**meta["imported_from"], "tables": dict(used)},
        "rows": dict(sorted(Counter(row.backend for row in rows).items())),
        "protocol": "as collected for AIConfigurator: one time per size; NCCL in launches back to back",
    }


def _nccl(path: Path, name: str) -> list[CollectiveRow]:
    frame = read(path, _NCCL)
    frame = frame[frame["nccl_dtype"] == "half"]
    times: dict[tuple[str, int, int], float] = {}
    columns = (frame[column].tolist() for column in ("op_name", "num_gpus", "message_size", "latency"))
    for operation, gpus, size, ms in zip(*columns, strict=True):
        if operation in OPERATIONS and ms > 0:
            times[OPERATIONS[operation], int(gpus), _TWO_BYTES * int(size)] = float(ms) * 1e3
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
