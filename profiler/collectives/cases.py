"""What is measured: operation x backend x launch mode x message size, and what of it is possible where."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from profiler.core.collective_table import MODES, OPERATIONS, CollectiveRow
from profiler.core.errors import ConfigError, unknown
from profiler.core.units import KIB, MIB

NCCL: Final = "nccl"
GLOO: Final = "gloo"
CUSTOM: Final = "vllm-custom"
BACKENDS: Final = (NCCL, CUSTOM, GLOO)
DTYPE: Final = "bf16"
ELEMENT_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the table. bytes: of the message of one call, see `profiler.core.collective_table`."""

    operation: str
    backend: str
    mode: str
    bytes: int

    def key(self, gpus: int) -> tuple[str, str, int, str, int, str]:
        """The key of its row in the table of a hardware."""
        return self.operation, self.backend, gpus, DTYPE, self.bytes, self.mode

    @property
    def calls(self) -> int:
        """Back-to-back calls of one timed batch: more of the short ones."""
        for calls, most in ((32, 256 * KIB), (16, 4 * MIB), (8, 32 * MIB)):
            if self.bytes <= most:
                return calls
        return 4

    @property
    def short_calls(self) -> int:
        """Calls of the shorter batch whose time is subtracted, so that what a batch costs once falls out."""
        return self.calls // 4


def powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """The powers of two from `least` to `most`, in bytes. Raises ConfigError when there is none."""
    sizes = tuple(1 << exponent for exponent in range(1, 41) if least <= 1 << exponent <= most)
    if not sizes:
        raise ConfigError(f"no power of two lies between --min-bytes {least} and --max-bytes {most}")
    return sizes


def plan(
    ranks: int, operations: Sequence[str], backends: Sequence[str], modes: Sequence[str], sizes: Sequence[int]
) -> tuple[Case, ...]:
    """All cells that exist for `ranks` GPUs, backend by backend.

    A send is between two. The engine's kernels only reduce. gloo, on CPUs, has no graphs. Raises ConfigError for
    unknown names and for messages that do not divide among the ranks.
    """
    for kind, given, known in (
        ("operation", operations, OPERATIONS),
        ("backend", backends, BACKENDS),
        ("mode", modes, MODES),
    ):
        for name in given:
            if name not in known:
                raise unknown(kind, name, known)
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: a collective needs at least 2")
    if uneven := [size for size in sizes if size % (ranks * ELEMENT_BYTES)]:
        raise ConfigError(f"--ranks {ranks}: {uneven[0]} bytes of {DTYPE} do not divide among them")
    return tuple(
        Case(operation, backend, mode, size)
        for backend in backends
        for operation in operations
        for size in sizes
        for mode in modes
        if not (operation == "send" and ranks != 2)
        and not (backend == CUSTOM and operation != "all_reduce")
        and not (backend == GLOO and mode != "eager")
    )


def missing(cases: Sequence[Case], ranks: int, rows: Sequence[CollectiveRow]) -> tuple[Case, ...]:
    """The cells of a plan that a table does not have yet."""
    there = {row.key for row in rows}
    return tuple(case for case in cases if case.key(ranks) not in there)
