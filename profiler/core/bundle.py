"""Bundles: one folder of measured tables per hardware, model and variant, with its provenance.

    <root>/<hardware>/<org>/<model>/<variant>/meta.yaml
                                              tp<N>/<category>.csv

A bundle is written whole into a temporary sibling folder and then takes the place of the old one, so a killed writer
never leaves a half-written table behind. Every CSV is listed in `meta.yaml` with its sha256 and its row count, and is
checked against both on reading. Columns are those of `profiler/core/tables.py`, exactly.
"""

import csv
import io
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import yaml

from profiler.core.errors import ConfigError, ContractError, CoverageError, unknown
from profiler.core.load import read_mapping, read_text, sha256_of
from profiler.core.skew_fit import FILE as FIT_FILE
from profiler.core.skew_fit import SkewFit, by_kernel, fit_text, read_fits
from profiler.core.tables import COST_COLUMNS, KEY_COLUMNS, columns
from profiler.core.types import Category

SCHEMA_VERSION = 1
PROVENANCES = ("measured", "imported", "projected", "computed")
CONTRACTS = ("serving", "replay")
CATEGORIES: tuple[Category, ...] = get_args(Category)

# What a bundle says about itself. `files` is added by the writer.
REQUIRED_META = (
    "schema_version", "provenance", "hardware", "gpu", "engine", "model", "model_config_sha256", "variant", "weights",
    "kv", "contract", "attended_cap_tokens", "protocol", "grid", "measured_at", "command",
)  # fmt: skip
# What two acquisitions may differ in and still share one bundle.
_PER_ACQUISITION = ("grid", "measured_at", "command", "files")

_TEXT_COLUMNS = ("layer", "kernel", "prefills", "decodes", "use")
# Under realistic routing these two are averages over layers or repeats, or expected, hence not integers.
_REAL_COLUMNS = ("activated_experts", "local_pairs")

Value = str | int | float
_Rows = TypeVar("_Rows", bound=Sized)


@dataclass(frozen=True, slots=True)
class Table:
    """One CSV: `columns` maps a column name to its values, all of one length, rows sorted by their key columns.

    Text columns hold str, token and request counts int, times and averages float; an unknown spread is nan.
    """

    category: Category
    columns: Mapping[str, tuple[Value, ...]]

    def __len__(self) -> int:
        return len(self.columns["time_us"])

    def rows(self) -> Iterator[tuple[Value, ...]]:
        return zip(*self.columns.values(), strict=True)

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct components (first column) in their order of appearance."""
        return tuple(dict.fromkeys(str(name) for name in self.columns[KEY_COLUMNS[self.category][0]]))


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle in memory. `tables` is keyed by (tp, category).

    skew[(tp, kernel)]: (prefill_chunk_tokens, decode_requests, alpha) points of the correction for batches of unequal
    lengths, time = t(mean) + alpha (t(max) - t(mean)); empty where it was not measured.
    """

    path: Path
    meta: Mapping[str, Any]
    tables: Mapping[tuple[int, Category], Table]
    skew: Mapping[tuple[int, str], tuple[tuple[int, int, float], ...]] = field(default_factory=dict)

    @property
    def tps(self) -> tuple[int, ...]:
        return tuple(sorted({tp for tp, _ in self.tables}))

    def table(self, tp: int, category: Category) -> Table:
        """The table of one tensor-parallel degree. Raises CoverageError naming the degrees or tables that exist."""
        found = self.tables.get((tp, category))
        if found is not None:
            return found
        if self.tables and tp not in self.tps:
            raise CoverageError(
                f"{self.path}: no tables of tp {tp}, only of tp {', '.join(map(str, self.tps))}. "
                f"Measure them with: {self.profile_command(tp)}"
            )
        have = ", ".join(f"tp{t}/{c}" for t, c in sorted(self.tables)) or "none"
        raise CoverageError(
            f"{self.path}: no table tp{tp}/{category}; the bundle has {have}. "
            f"Measure it with: {self.profile_command(tp, category)}"
        )

    def profile_command(
        self, tp: int, category: Category | None = None, extra: str = "", model: str | None = None
    ) -> str:
        """The command that would measure a table of this bundle, or without a category all tables of a degree.

        model: by default the bundle's.
        """
        named = model or self.meta["model"]
        command = f"python -m profiler profile {named} --hardware {self.meta['hardware']} --tp {tp}"
        if category is not None:
            # Divided experts come with the passes of the projections, up to the tokens of a step.
            wanted = "dense --max-num-batched-tokens N" if category == "moe" and tp > 1 else category
            command += f" --categories {wanted}"
        layout = self.meta["kv"]["layout"]
        if str(self.meta["variant"]).endswith(f"-kv{layout}"):
            command += f" --kv-cache-dtype {layout}"
        return f"{command} {extra}".rstrip()


def make_table(category: Category, rows: Iterable[Sequence[Value]], where: str = "table") -> Table:
    """A table from rows in column order, sorted by key.

    Raises ConfigError, naming `where` and the row's number counted from 1, for a wrong number of fields, a value that
    its column does not allow, or a key that appears twice.
    """
    return _table(category, enumerate(rows, start=1), where, " row ")


def _table(category: Category, rows: Iterable[tuple[int, Sequence[Value]]], where: str, joint: str) -> Table:
    if category not in KEY_COLUMNS:
        raise unknown("table category", category, CATEGORIES)
    names = columns(category)
    width = len(KEY_COLUMNS[category])
    seen: dict[tuple[Value, ...], tuple[Value, ...]] = {}
    for number, row in rows:
        at = f"{where}{joint}{number}"
        if len(row) != len(names):
            raise ConfigError(f"{at}: {len(row)} fields, {len(names)} needed: {','.join(names)}")
        values = tuple(_value(name, cell, at) for name, cell in zip(names, row, strict=True))
        key = values[:width]
        if key in seen:
            raise ConfigError(f"{at}: the key {', '.join(map(str, key))} appears twice")
        seen[key] = values
    ordered = [seen[key] for key in sorted(seen)]
    cells = zip(*ordered, strict=True) if ordered else [()] * len(names)
    return Table(category, MappingProxyType(dict(zip(names, map(tuple, cells), strict=True))))


def _value(name: str, cell: Value, at: str) -> Value:
    if name in _TEXT_COLUMNS:
        if not isinstance(cell, str) or not cell or cell != cell.strip():
            raise ConfigError(f"{at}: {name} must be a name, found {cell!r}")
        return cell
    if name in COST_COLUMNS or name in _REAL_COLUMNS:
        return _real(name, cell, at)
    try:
        number = int(cell)
    except ValueError:
        number = -1
    if isinstance(cell, float) or number < 0:
        raise ConfigError(f"{at}: {name} must be an integer of at least 0, found {cell!r}")
    return number


def _real(name: str, cell: Value, at: str) -> float:
    if name == "spread_rel" and cell == "":
        return math.nan
    try:
        number = float(cell)
    except ValueError:
        number = math.inf
    if name == "spread_rel" and math.isnan(number):
        return number
    if not math.isfinite(number) or number < 0 or (name == "time_us" and number == 0):
        legal = "a positive number" if name == "time_us" else "a number of at least 0"
        raise ConfigError(f"{at}: {name} must be {legal}, found {cell!r}")
    return number


def _cell(value: Value) -> str:
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value)


def table_text(table: Table) -> str:
    """The CSV form of a table, header included; equal tables give equal bytes."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([_cell(value) for value in row] for row in table.rows())
    return stream.getvalue()


def read_table(path: Path, category: Category) -> Table:
    """A CSV of the native columns. Raises ConfigError naming file and line when it is malformed."""
    lines = csv.reader(io.StringIO(read_text(path)))
    header = next(lines, [])
    if tuple(header) != columns(category):
        extra = [name for name in header if name not in columns(category)]
        missing = [name for name in columns(category) if name not in header]
        trouble = f"unknown columns {extra}" if extra else f"missing columns {missing}" if missing else "wrong order"
        raise ConfigError(f"{path}:1: {trouble}; the header must be {','.join(columns(category))}")
    try:
        return _table(category, ((lines.line_num, row) for row in lines), str(path), ":")
    except csv.Error as error:
        raise ConfigError(f"{path}:{lines.line_num}: not a CSV row: {error}") from None


def table_path(tp: int, category: Category) -> str:
    return f"tp{tp}/{category}.csv"


def _settled(path: Path) -> Path:
    """The folder to read: the bundle, or the copy set aside by a writer that was killed between its two renames."""
    aside = path.with_name(f".{path.name}.old")
    return path if path.exists() or not aside.is_dir() else aside


def _replace_folder(new: Path, target: Path) -> None:
    if not target.exists():
        new.rename(target)
        return
    aside = target.with_name(f".{target.name}.old")
    if aside.exists():
        shutil.rmtree(aside)
    target.rename(aside)
    new.rename(target)
    shutil.rmtree(aside)


def write_bundle(
    root: Path,
    meta: Mapping[str, Any],
    tables: Mapping[tuple[int, Category], Table],
    force: bool = False,
    skew_fits: Mapping[int, Sequence[SkewFit]] | None = None,
    stamps: Mapping[tuple[int, Category], Mapping[str, str]] | None = None,
) -> Path:
    """Writes `<root>/<hardware>/<model>/<variant>` and returns that folder.

    `meta` holds REQUIRED_META (and what else the writer wants to tell); `files` is filled in here. Where the bundle
    exists already, the new tables are added to it when its meta agrees in everything but grid, time and command. A
    table that exists, or a meta that disagrees, is refused with ConfigError unless `force` is given: then the table is
    replaced, or the whole bundle is written anew when the meta disagrees. skew_fits: per tp, the corrections for
    unequal batches; they replace those that the bundle has for that tp. stamps: `measured_at` and `command` of tables
    that were measured otherwise than meta says.
    """
    check_meta(meta, "new bundle")
    if not tables:
        raise ConfigError("a bundle needs at least one table")
    target = root / str(meta["hardware"]) / str(meta["model"]) / str(meta["variant"])
    aside = target.with_name(f".{target.name}.old")
    if not target.exists() and aside.is_dir():
        aside.rename(target)
    merged_meta, merged = dict(meta), dict(tables)
    fits = dict(skew_fits or {})
    kept_files: dict[str, Any] = {}
    if target.exists():
        kept_files, kept, kept_grid, kept_fits = _kept(target, meta, tables, force)
        merged = {**kept, **merged}
        merged_meta["grid"] = {**kept_grid, **meta["grid"]}
        fits = {**kept_fits, **fits}
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp"))
    try:
        folder.chmod(0o755)
        files: dict[str, Any] = {}
        for (tp, category), table in sorted(merged.items()):
            name = table_path(tp, category)
            _write(folder / name, table_text(table))
            own = {"sha256": sha256_of(folder / name), "rows": len(table)}
            when = (stamps or {}).get((tp, category)) or {key: meta[key] for key in ("measured_at", "command")}
            files[name] = own | dict(when if (tp, category) in tables else kept_files[name])
        for tp, own_fits in sorted(fits.items()):
            if (tp, "skew") in merged:
                name = f"tp{tp}/{FIT_FILE}"
                _write(folder / name, fit_text(own_fits))
                files[name] = {"sha256": sha256_of(folder / name), "rows": len(own_fits)}
        merged_meta["files"] = files
        _write(
            folder / "meta.yaml", yaml.safe_dump(_plain(merged_meta), sort_keys=False, allow_unicode=True, width=120)
        )
        _replace_folder(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return target


def disagreements(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What two metas say differently of the things that all tables of a bundle share, one line each."""
    return [
        f"{key}: {old.get(key)!r} there, {new[key]!r} now"
        for key in REQUIRED_META
        if key not in _PER_ACQUISITION and old.get(key) != _plain(new[key])
    ]


def _kept(
    target: Path, meta: Mapping[str, Any], tables: Mapping[tuple[int, Category], Table], force: bool
) -> tuple[dict[str, Any], dict[tuple[int, Category], Table], dict[str, Any], dict[int, Sequence[SkewFit]]]:
    old = read_bundle(target)
    disagree = disagreements(old.meta, meta)
    if disagree and force:
        return {}, {}, {}, {}
    if disagree:
        raise ConfigError(f"{target}: exists with other settings ({'; '.join(disagree)}). --force writes it anew.")
    twice = sorted(table_path(*key) for key in tables if key in old.tables)
    if twice and not force:
        raise ConfigError(f"{target}: has {', '.join(twice)} already. --force replaces them.")
    stamps = {
        name: {key: entry[key] for key in ("measured_at", "command") if key in entry}
        for name, entry in old.meta["files"].items()
    }
    fits: dict[int, Sequence[SkewFit]] = {}
    for tp in old.tps:
        if (tp, "skew") in old.tables and (path := target / f"tp{tp}/{FIT_FILE}").is_file():
            fits[tp] = read_fits(path)
    return stamps, dict(old.tables), dict(old.meta["grid"]), fits


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _plain(value: Any) -> Any:
    """Mappings and sequences as the dicts and lists that YAML gives back."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def check_meta(meta: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError naming `where` and the key that is missing or has an illegal value."""
    missing = [key for key in REQUIRED_META if key not in meta]
    if missing:
        raise ConfigError(f"{where}: meta has no {', '.join(missing)}")
    if meta["schema_version"] != SCHEMA_VERSION:
        raise ConfigError(f"{where}: schema_version {meta['schema_version']!r}, this version reads {SCHEMA_VERSION}")
    for key, legal in (("provenance", PROVENANCES), ("contract", CONTRACTS)):
        if meta[key] not in legal:
            raise ConfigError(f"{where}: {key} is {meta[key]!r}, must be one of {', '.join(legal)}")
    for key in ("hardware", "model", "variant"):
        parts = str(meta[key]).split("/")
        if not all(parts) or any(part.startswith(".") or "\\" in part for part in parts):
            raise ConfigError(f"{where}: {key} {meta[key]!r} cannot name a folder")
    for key in ("gpu", "engine", "kv", "protocol", "grid"):
        if not isinstance(meta[key], Mapping):
            raise ConfigError(f"{where}: {key} must be a mapping, found {type(meta[key]).__name__}")
    _check_kv(meta["kv"], where)


def _check_kv(kv: Mapping[str, Any], where: str) -> None:
    missing = [key for key in ("layout", "block_tokens", "caches") if key not in kv]
    if missing:
        raise ConfigError(f"{where}: kv has no {', '.join(missing)}")
    for cache in kv["caches"]:
        if not isinstance(cache, Mapping) or not {"name", "bytes_per_token_layer"} <= cache.keys():
            raise ConfigError(f"{where}: kv.caches lists name and bytes_per_token_layer of each cache, found {cache!r}")


def read_bundle(path: Path, tps: Collection[int] | None = None) -> Bundle:
    """Reads a bundle folder, ours or one of the formats of `profiler/formats`; `tps` leaves out other degrees.

    Raises ConfigError for a missing or malformed file (file and line) and ContractError when a CSV differs from the
    sha256 or row count that its meta.yaml records.
    """
    folder = _settled(path)
    meta_path = folder / "meta.yaml"
    meta = read_mapping(meta_path)
    if "schema_version" not in meta:
        from profiler.formats import read_foreign

        return read_foreign(folder, meta, tps)
    check_meta(meta, str(meta_path))
    if not isinstance(meta.get("files"), Mapping) or not meta["files"]:
        raise ConfigError(f"{meta_path}: lists no files")
    tables = {}
    fits: dict[int, tuple[SkewFit, ...]] = {}
    for name, entry in meta["files"].items():
        if (fit_tp := _tp_of_fits(str(name))) is not None:
            if tps is None or fit_tp in tps:
                fits[fit_tp] = _checked(folder / name, entry, meta_path, read_fits)
            continue
        tp, category = _parse_table_path(str(name), meta_path)
        if tps is not None and tp not in tps:
            continue
        tables[tp, category] = _checked(folder / name, entry, meta_path, partial(read_table, category=category))
    return Bundle(path, MappingProxyType(meta), MappingProxyType(tables), MappingProxyType(by_kernel(fits)))


def _tp_of_fits(name: str) -> int | None:
    folder, _, file = name.partition("/")
    tp = folder.removeprefix("tp")
    return int(tp) if file == FIT_FILE and tp.isdecimal() and name == f"tp{int(tp)}/{FIT_FILE}" else None


def _parse_table_path(name: str, meta_path: Path) -> tuple[int, Category]:
    folder, _, file = name.partition("/")
    tp, category = folder.removeprefix("tp"), file.removesuffix(".csv")
    if tp.isdecimal() and category in CATEGORIES and name == f"tp{int(tp)}/{category}.csv":
        return int(tp), category
    raise ConfigError(f"{meta_path}: files names {name!r}; tables are tp<N>/<category>.csv of {', '.join(CATEGORIES)}")


def _checked(path: Path, entry: Any, meta_path: Path, read: Callable[[Path], _Rows]) -> _Rows:
    """What a listed file holds, once its contents are those that meta.yaml records."""
    if not isinstance(entry, Mapping) or not {"sha256", "rows"} <= entry.keys():
        raise ConfigError(f"{meta_path}: files must give sha256 and rows of {path.name}")
    if not path.is_file():
        raise ContractError(f"{path}: listed in meta.yaml but missing")
    # A malformed file is named by its line first; one that still parses was edited.
    rows = read(path)
    if sha256_of(path) != entry["sha256"]:
        raise ContractError(
            f"{path}: its contents differ from the sha256 in meta.yaml ({len(rows)} rows, {entry['rows']} recorded): "
            "it was truncated or edited. Restore the file, or remove the bundle and measure it again."
        )
    if len(rows) != entry["rows"]:
        raise ContractError(f"{path}: {len(rows)} rows, meta.yaml records {entry['rows']}")
    return rows


def variants(root: Path, hardware: str, model: str) -> tuple[str, ...]:
    """The variants that exist of a model on a GPU, sorted."""
    folder = root / hardware / model
    if not folder.is_dir():
        return ()
    names = {path.parent.name for path in folder.glob("*/meta.yaml")}
    aside = {name.removeprefix(".").removesuffix(".old") for name in names if name.endswith(".old")}
    return tuple(sorted({name for name in names if not name.startswith(".")} | aside))


def bundle_named(root: Path, name: str) -> Path:
    """The folder of a bundle that a user names: a folder, or HARDWARE/ORG/MODEL/VARIANT below `root`.

    Raises ConfigError that proposes the nearest where there is none.
    """
    if Path(name).is_dir():
        return Path(name)
    models = sorted({str(path.parents[1].relative_to(root)) for path in root.glob("*/*/*/*/meta.yaml")})
    known = [f"{model}/{variant}" for model in models for variant in variants(root, *model.split("/", 1))]
    if name.strip("/") not in known:
        raise unknown("bundle", name, known)
    return root / name.strip("/")


def find_bundle(root: Path, hardware: str, model: str, variant: str | None = None) -> Path:
    """The folder of a bundle.

    Raises CoverageError that lists what exists, or ConfigError when a variant must be chosen or is unknown.
    """
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder of bundles")
    found = variants(root, hardware, model)
    if not found:
        there = sorted({str(path.parents[1].relative_to(root)) for path in root.glob("*/*/*/*/meta.yaml")})
        raise CoverageError(
            f"no bundle of {model} on {hardware} under {root}. Bundles there: {', '.join(there) or 'none'}. "
            f"Measure one with: python -m profiler profile {model} --hardware {hardware}"
        )
    if variant is None and len(found) > 1:
        raise ConfigError(f"{model} on {hardware} has the variants {', '.join(found)}: name one")
    if variant is not None and variant not in found:
        raise unknown(f"variant of {model} on {hardware}", variant, found)
    return root / hardware / model / (variant or found[0])
