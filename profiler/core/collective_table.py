"""Measured collectives of a hardware: `<root>/<hardware>/collectives.csv`.

One row per operation, backend, number of GPUs, element type, message size and launch mode. `bytes` is the size of the
message of one call as its library counts it: the whole result of an all-gather, the whole input of a reduce-scatter or,
on one rank, of an all-to-all, the tensor of an all-reduce or of a send between two GPUs. `time_us` is the median until
the last rank is done, `spread_rel` (p90 - p10) / median.

`collectives.yaml` beside it says how rows were measured: one entry per run.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final, get_type_hints

import yaml

from profiler.core.errors import ConfigError, CoverageError, unknown
from profiler.core.grid import Curve, Outside
from profiler.core.load import atomic_write, read_text, read_yaml

FILE: Final = "collectives.csv"
RUNS_FILE: Final = "collectives.yaml"
OPERATIONS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
MODES: Final = ("graph", "eager")
# Ends the back end's name in rows that others measured; no column says so, so that tables keep their form.
IMPORTED: Final = " of AIConfigurator"


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One measured call. backend: the library or kernel, such as nccl or custom; dtype: of the elements, bf16.

    mode: replayed from a captured graph, or launched by the host.
    """

    operation: str
    backend: str
    gpus: int
    dtype: str
    bytes: int
    mode: str
    time_us: float
    spread_rel: float

    @property
    def key(self) -> tuple[str, str, int, str, int, str]:
        return self.operation, self.backend, self.gpus, self.dtype, self.bytes, self.mode

    @property
    def provenance(self) -> str:
        """ "imported" where others measured it, else "measured"."""
        return "imported" if self.backend.endswith(IMPORTED) else "measured"


COLUMNS: Final = tuple(field.name for field in fields(CollectiveRow))
_TYPES: Final = {name: hint for name, hint in get_type_hints(CollectiveRow).items() if name in COLUMNS}


def collectives_path(root: Path, hardware: str) -> Path:
    return root / hardware / FILE


def check_row(row: CollectiveRow, at: str) -> None:
    """Raises ConfigError naming `at` for a value that no measurement has."""
    if row.operation not in OPERATIONS:
        raise ConfigError(f"{at}: {unknown('operation', row.operation, OPERATIONS)}")
    if row.mode not in MODES:
        raise ConfigError(f"{at}: {unknown('mode', row.mode, MODES)}")
    if row.gpus < 2 or row.bytes < 1:
        raise ConfigError(f"{at}: at least 2 gpus and 1 byte are needed, found {row.gpus} and {row.bytes}")
    if not (math.isfinite(row.time_us) and row.time_us > 0):
        raise ConfigError(f"{at}: time_us must be a positive number, found {row.time_us}")
    if not (math.isnan(row.spread_rel) or (math.isfinite(row.spread_rel) and row.spread_rel >= 0)):
        raise ConfigError(f"{at}: spread_rel must be a number of at least 0 or empty, found {row.spread_rel}")
    for name in ("backend", "dtype"):
        text = getattr(row, name)
        if not text or text != text.strip():
            raise ConfigError(f"{at}: {name} must be a name, found {text!r}")


def collectives_text(rows: Iterable[CollectiveRow]) -> str:
    """The CSV form, sorted; equal rows give equal bytes."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in sorted(rows, key=lambda row: row.key):
        cells = astuple(row)
        writer.writerow("" if isinstance(cell, float) and math.isnan(cell) else cell for cell in cells)
    return stream.getvalue()


def write_collectives(root: Path, hardware: str, rows: Sequence[CollectiveRow], force: bool = False) -> Path:
    """Adds rows to the table of a hardware and returns its path; the file is replaced whole, by one rename.

    Raises ConfigError for an illegal row, a row given twice, or one that is measured already unless `force` replaces
    it.
    """
    path = collectives_path(root, hardware)
    new: dict[tuple[str, str, int, str, int, str], CollectiveRow] = {}
    for number, row in enumerate(rows, start=1):
        check_row(row, f"row {number}")
        if row.key in new:
            raise ConfigError(f"row {number}: {', '.join(map(str, row.key))} appears twice")
        new[row.key] = row
    old = {row.key: row for row in read_collectives(path)} if path.exists() else {}
    twice = sorted(new.keys() & old.keys())
    if twice and not force:
        raise ConfigError(
            f"{path}: has {', '.join(map(str, twice[0]))} already ({len(twice)} rows). --force replaces them."
        )
    with atomic_write(path) as stream:
        stream.write(collectives_text({**old, **new}.values()))
    return path


def add_run(root: Path, hardware: str, run: Mapping[str, Any]) -> Path:
    """Adds how rows were measured (plain values only) to the list beside the table, and returns that file's path.

    Raises ConfigError when the file is there and is no list under `runs`.
    """
    path = root / hardware / RUNS_FILE
    earlier: Any = read_yaml(path) if path.exists() else {"runs": []}
    if not isinstance(earlier, dict) or not isinstance(earlier.get("runs"), list):
        raise ConfigError(f"{path}: a list under the key runs is needed")
    with atomic_write(path) as stream:
        yaml.safe_dump({"runs": [*earlier["runs"], dict(run)]}, stream, sort_keys=False, width=120)
    return path


def read_collectives(path: Path) -> tuple[CollectiveRow, ...]:
    """Rows sorted by key. Raises ConfigError naming file and line when it is malformed."""
    lines = csv.reader(io.StringIO(read_text(path)))
    header = tuple(next(lines, []))
    if header != COLUMNS:
        raise ConfigError(f"{path}:1: the header is {','.join(header)}; it must be {','.join(COLUMNS)}")
    found: dict[tuple[str, str, int, str, int, str], CollectiveRow] = {}
    try:
        for cells in lines:
            at = f"{path}:{lines.line_num}"
            row = _row(cells, at)
            check_row(row, at)
            if row.key in found:
                raise ConfigError(f"{at}: {', '.join(map(str, row.key))} appears twice")
            found[row.key] = row
    except csv.Error as error:
        raise ConfigError(f"{path}:{lines.line_num}: not a CSV row: {error}") from None
    if not found:
        raise ConfigError(f"{path}: no rows")
    return tuple(found[key] for key in sorted(found))


def _row(cells: Sequence[str], at: str) -> CollectiveRow:
    if len(cells) != len(COLUMNS):
        raise ConfigError(f"{at}: {len(cells)} fields, {len(COLUMNS)} needed: {','.join(COLUMNS)}")
    values = []
    for name, cell in zip(COLUMNS, cells, strict=True):
        kind = _TYPES[name]
        try:
            values.append(kind("nan" if name == "spread_rel" and cell == "" else cell))
        except ValueError:
            raise ConfigError(
                f"{at}: {name} must be {'an integer' if kind is int else 'a number'}, found {cell!r}"
            ) from None
    return CollectiveRow(*values)


def collective_curve(
    rows: Iterable[CollectiveRow],
    operation: str,
    gpus: int,
    mode: str,
    backend: str | None = None,
    dtype: str | None = None,
    allow_extrapolation: bool = False,
) -> Curve:
    """Microseconds against bytes of one operation: linear between sizes, that of the smallest below it.

    backend and dtype None: whichever was measured; of several the fastest at each size, as libraries choose by size.
    Raises CoverageError naming what is measured when nothing fits; `Curve.at` raises it beyond the largest message.
    """
    own = [row for row in rows if row.operation == operation and row.gpus == gpus and row.mode == mode]
    fitting = [row for row in own if backend in (None, row.backend) and dtype in (None, row.dtype)]
    name = f"{operation} of {gpus} GPUs, {mode}"
    if not fitting:
        there = sorted({(row.operation, row.gpus, row.mode, row.backend, row.dtype) for row in own or rows})
        have = "; ".join(", ".join(map(str, one)) for one in there) or "nothing"
        raise CoverageError(
            f"{name}: not measured with backend {backend or 'any'} and dtype {dtype or 'any'}; there is {have}"
        )
    best: dict[float, float] = {}
    for row in fitting:
        best[float(row.bytes)] = min(row.time_us, best.get(float(row.bytes), math.inf))
    first = min(best)
    points = sorted({1.0: best[first], **best}.items())
    outside = Outside(name, "a run of the collectives on that many GPUs", allow_extrapolation)
    return Curve("bytes", tuple(x for x, _ in points), tuple(t for _, t in points), outside)
