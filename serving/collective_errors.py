"""Measured collectives beside what the link model computes for them."""

from collections.abc import Sequence
from dataclasses import dataclass

from profiler.core.collective_table import CollectiveRow
from profiler.core.errors import CoverageError
from profiler.core.hardware import Hardware
from serving.collectives import Operation, from_hardware

LIBRARIES = ("nccl", "gloo")


@dataclass(frozen=True, slots=True)
class Compared:
    """One measured cell. way: "library" for NCCL's and its like, "engine" for the fastest back end of a size."""

    operation: str
    gpus: int
    way: str
    bytes: int
    measured_us: float
    computed_us: float

    @property
    def error(self) -> float:
        """(computed - measured) / measured."""
        return self.computed_us / self.measured_us - 1.0


def compare(hardware: Hardware, rows: Sequence[CollectiveRow], mode: str) -> list[Compared]:
    """Every cell of a launch mode against the links of a hardware file, in the order of the rows.

    A library's all-reduce is compared with the library's computed one; where an engine's own kernels were measured too,
    the fastest of a size is compared with the engine's. Raises CoverageError when nothing was measured in that mode.
    """
    own = [row for row in rows if row.mode == mode]
    if not own:
        there = ", ".join(sorted({row.mode for row in rows})) or "nothing"
        raise CoverageError(f"no collectives of {hardware.name} were measured in mode {mode}; there is {there}")
    links = from_hardware(hardware)
    found = []
    fastest: dict[tuple[Operation, int, int], float] = {}
    with_engine = {(row.operation, row.gpus) for row in own if not _of_library(row)}
    for row in own:
        operation: Operation = row.operation  # type: ignore[assignment]  # the table has no others
        key = operation, row.gpus, row.bytes
        if (row.operation, row.gpus) in with_engine:
            fastest[key] = min(row.time_us, fastest.get(key, row.time_us))
        if _of_library(row):
            if operation == "all_reduce" and links.node is not None:
                computed = links.node.library_all_reduce_us(row.bytes, row.gpus)
            else:
                computed = links.price(operation, row.bytes, row.gpus).us
            found.append(Compared(operation, row.gpus, "library", row.bytes, row.time_us, computed))
    for (operation, gpus, size), us in fastest.items():
        computed = links.price(operation, size, gpus).us
        found.append(Compared(operation, gpus, "engine", size, us, computed))
    return found


def _of_library(row: CollectiveRow) -> bool:
    return row.backend.split()[0] in LIBRARIES
