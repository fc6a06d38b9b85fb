"""Where AIConfigurator's tables are, what there is, and reading one of them.

<root>/<system>.yaml
<root>/data/<system>/<family>/<backend>/<version>/<table>.parquet         (or .csv)
"""

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from profiler.core.errors import ConfigError, CoverageError, unknown
from profiler.core.load import read_mapping

if TYPE_CHECKING:
    import pandas as pd

PACKAGE: Final = "aiconfigurator-core"
PACKAGE_VERSION: Final = "0.12.0"
INSTALL: Final = f"python -m pip install {PACKAGE}=={PACKAGE_VERSION}"
LICENCE: Final = (
    f"Tables of {PACKAGE} {PACKAGE_VERSION}, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES, Apache License "
    "2.0 (https://www.apache.org/licenses/LICENSE-2.0); changed: see `changes`"
)
BACKENDS: Final = ("vllm", "sglang", "trtllm")
_SUFFIXES: Final = (".parquet", ".csv")


@dataclass(frozen=True, slots=True)
class System:
    """One system's folder of tables and what its description says about small kernels.

    hbm_bytes_per_us: achieved bandwidth, small_kernel_us: time of a kernel without work; the package's own estimates,
    used for the elementwise kernels that it has no tables of.
    """

    name: str
    folder: Path
    hbm_bytes_per_us: float
    small_kernel_us: float


@dataclass(frozen=True, slots=True)
class Source:
    """One table: its file and the version of the back end that it was measured on."""

    path: Path
    version: str


def systems_root(given: Path | None = None) -> Path:
    """The folder of system descriptions: `given`, or that of the installed package.

    Raises ConfigError with the command that installs the package when there is none.
    """
    if given is not None:
        if not (given / "data").is_dir():
            raise ConfigError(f"{given}: has no folder data; give a folder in the layout of {PACKAGE}'s systems")
        return given
    spec = importlib.util.find_spec("aiconfigurator_core")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(location) / "systems"
        if (root / "data").is_dir():
            return root
    raise ConfigError(f"{PACKAGE} with its tables is not installed. Install it with: {INSTALL}")


def load_system(root: Path, name: str) -> System:
    """Raises ConfigError for an unknown system (listing those that exist) or one whose description lacks a number."""
    known = sorted(path.name for path in (root / "data").iterdir() if path.is_dir())
    if name not in known:
        raise unknown("system", name, known)
    path = root / f"{name}.yaml"
    gpu = read_mapping(path).get("gpu")
    keys = ("mem_bw", "mem_bw_empirical_scaling_factor", "mem_empirical_constant_latency")
    values = [gpu.get(key) if isinstance(gpu, Mapping) else None for key in keys]
    if not all(isinstance(value, int | float) and value > 0 for value in values):
        raise ConfigError(f"{path}: gpu must give {', '.join(keys)} as positive numbers")
    bandwidth, share, latency = (float(value) for value in values if value is not None)
    return System(name, root / "data" / name, bandwidth * share / 1e6, latency * 1e6)


def version_key(text: str) -> tuple[int, ...]:
    """Numbers of a version in order, for comparing two of one back end. A final release comes after its candidates."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", text))
    return numbers if "rc" in text else (*numbers, 1 << 30)


def versions(system: System, family: str, backend: str, table: str) -> dict[str, Path]:
    """The versions that have a table, oldest first, with its file."""
    found = {}
    for path in (system.folder / family / backend).glob(f"*/{table}_perf.*"):
        if path.suffix in _SUFFIXES:
            found[path.parent.name] = path
    return dict(sorted(found.items(), key=lambda item: version_key(item[0])))


def candidates(system: System, family: str, backend: str, table: str, version: str | None, exact: bool) -> list[Source]:
    """Tables to try, best first: the version asked for, then older ones from the newest, then newer ones.

    exact: that version alone. Raises CoverageError naming the table and what exists when there is none.
    """
    found = versions(system, family, backend, table)
    if not found or (exact and version is not None and version not in found):
        raise CoverageError(_missing(system, family, backend, table, version, found))
    if version is None:
        ordered = list(reversed(found))
    elif exact:
        ordered = [version]
    else:
        older = [one for one in found if version_key(one) <= version_key(version)]
        ordered = [*reversed(older), *(one for one in found if one not in older)]
    return [Source(found[one], one) for one in ordered]


def _missing(
    system: System, family: str, backend: str, table: str, version: str | None, found: Mapping[str, Path]
) -> str:
    asked = f" {version}" if version else ""
    if found:
        return f"{system.name}: no table {table} of {backend}{asked}; versions that have it: {', '.join(found)}"
    elsewhere = sorted(
        {
            f"{path.parents[3].name} {path.parents[1].name} {path.parent.name}"
            for path in system.folder.parent.glob(f"*/{family}/*/*/{table}_perf.*")
        }
    )
    where = "; ".join(elsewhere) or "none"
    return f"{system.name}: no table {table} of {backend}{asked}. Systems that have one: {where}"


def read(path: Path, needed: Iterable[str]) -> "pd.DataFrame":
    """A table with at least the columns `needed`. Raises ConfigError naming the columns that are missing."""
    import pandas as pd

    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except ImportError:
        raise ConfigError(f"{path}: reading Parquet needs pyarrow. Install it with: {INSTALL}") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: not a readable table: {error}") from None
    if missing := [name for name in needed if name not in frame.columns]:
        raise ConfigError(f"{path}: has no column {', '.join(missing)}; it has {', '.join(map(str, frame.columns))}")
    return frame


def choose(frame: "pd.DataFrame", path: Path, **wanted: Any) -> "pd.DataFrame":
    """The rows with these values. Raises CoverageError naming the first column that has no such row, and its values."""
    for column, value in wanted.items():
        rows = frame[frame[column] == value]
        if rows.empty:
            have = ", ".join(map(str, sorted(frame[column].unique().tolist(), key=str)))
            raise CoverageError(f"{path}: no rows with {column} {value}; there are {have}")
        frame = rows
    return frame
