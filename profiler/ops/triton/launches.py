"""Launch configurations by class of shape: the one place where measured choices stand.

They are fixed, never tuned at run time: a table of latencies must be repeatable and a captured graph must not compile.
`tests/perf/bench_ops.py --tune` times the alternatives on a card.
"""

from dataclasses import dataclass
from typing import Literal

MULTIPROCESSORS = 132


@dataclass(frozen=True)
class HopperLaunch:
    """How a Hopper kernel attends. kernel "turns" is `mla_hopper`, "roles" is `mla_roles`, whose options follow."""

    kernel: Literal["turns", "roles"]
    splits: int | None = None
    ahead: bool = True
    held: int = 0
    registers: tuple[int, int] | None = None


@dataclass(frozen=True)
class SelectLaunch:
    """How the wide selection runs: warps a program, columns a pass and passes in flight, programs at most in the grid.

    sample scores give the first pivot; registers bounds those of a thread, so that more programs fit.
    """

    warps: int
    block: int
    stages: int
    programs: int
    sample: int = 4096
    registers: int | None = None


# Sparse MLA on SM90 by (packed rows, class); None leaves the shape to Triton's kernel.
_ROLES = HopperLaunch("roles", held=256)
_HOPPER: dict[tuple[bool, str], HopperLaunch | None] = {
    (False, "16 heads or fewer"): _ROLES,
    (True, "16 heads or fewer"): HopperLaunch("turns"),
    (False, "decode"): _ROLES,
    (True, "decode"): HopperLaunch("turns"),
    (False, "prefill"): _ROLES,
    (True, "prefill"): HopperLaunch("turns"),
}

# Many rows share a multiprocessor, few rows have one each.
_SELECT_MANY = SelectLaunch(4, 1024, 2, programs=4 * MULTIPROCESSORS, sample=2048, registers=128)
_SELECT_FEW = SelectLaunch(8, 4096, 3, programs=MULTIPROCESSORS)


def hopper_launch(queries: int, heads: int, packed: bool) -> HopperLaunch | None:
    """The launch of a sparse MLA call on SM90, or None for Triton's own kernel."""
    if heads <= 16:
        return _HOPPER[packed, "16 heads or fewer"]
    programs = queries * -(-heads // 64)
    return _HOPPER[packed, "decode" if programs <= 2 * MULTIPROCESSORS else "prefill"]


def select_launch(rows: int, width: int) -> SelectLaunch | None:
    """The launch of a top-k selection by the wide kernel, or None where one block takes a row."""
    many = rows > 2 * MULTIPROCESSORS
    if width <= (4096 if many else 8192):
        return None
    return _SELECT_MANY if many else _SELECT_FEW
