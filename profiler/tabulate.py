"""From runs of samples to the tables and the meta of a bundle. Pure: needs neither device nor engine."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from profiler.bind import Bound, Row, Unbound, bind, decode_threshold_tokens, functions, selection_in_dense_prefill
from profiler.card import CPU
from profiler.contract import execution_of, variant_suffix
from profiler.core.bundle import SCHEMA_VERSION, Table, make_table
from profiler.core.errors import AcquisitionError
from profiler.core.grid import number
from profiler.core.hardware import Hardware, load_hardware
from profiler.core.naming import variant_name
from profiler.core.shots import Key, Shot
from profiler.core.tables import KEY_COLUMNS
from profiler.core.types import Category, ModelSpec
from profiler.core.units import MIB
from profiler.engines.base import Binding, EngineInfo
from profiler.kernels._axes import Limits
from profiler.kernels._components import ATTENTION_LIKE, categories_of
from profiler.kernels._placement import Ran, ran_of
from profiler.passes import (
    EXPERTS,
    Cell,
    ExpertPasses,
    cells_of_passes,
    dense_of_passes,
    experts_of_passes,
    origin_of,
    remaining_origin,
    with_passes,
)
from profiler.quality import quality
from profiler.recheck import check_outliers
from profiler.samples import Run
from profiler.sweep import batch_of, contained, rank_spec, work_of
from profiler.visits import Latest, kv_of_all_ranks, latest, one_engine

# Keys of a GPU description that change between two moments on the same card.
_MOMENTARY: Final = ("pstate", "sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")
# A cell may beat its roofline by this much before it counts as missing work: boost clocks and decimal peaks.
_ROOFLINE_SLACK: Final = 0.95


@dataclass(frozen=True, slots=True)
class Acquired:
    """What one tp yielded. tables: complete categories. refused: category -> why it is not published, line by line."""

    tp: int
    tables: Mapping[Category, Table]
    refused: Mapping[Category, tuple[str, ...]]
    unbound: tuple[Unbound, ...]
    bound_share: float
    grid: Mapping[str, Any]


def config_sha256(config: Mapping[str, Any]) -> str:
    """Hash of a raw model configuration, independent of its formatting and key order."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def variant_of(info: EngineInfo, contract: str) -> str:
    """The variant that an engine's tables belong to."""
    return variant_name(info.weights, str(info.kv["layout"])) + variant_suffix(info, contract)


def tabulate(runs: Sequence[Run], spec: ModelSpec, binding: Binding, categories: Iterable[str] | None) -> Acquired:
    """Tables of one tp from its runs; where a shot was run twice, the later run that did not fail counts.

    `categories` are those wanted, None for all that the runs have shots of.

    A category is refused when a shot of it is missing or failed, a component has no kernel, or a cell is faster than
    the card's peak rates allow. Where the run's grid contains a coarser one, its shots alone may not be missing. Raises
    AcquisitionError when kernels of material time belong to no component: then nothing of this tp can be trusted.
    Raises ConfigError when the runs are not of one engine and layout.
    """
    info = one_engine(runs)
    measured = _of_model(latest(runs), spec)
    shots, results = measured.shots, measured.results
    bound = bind(results.values(), shots, spec, info, binding)
    _refuse_material(bound)
    refused: dict[Category, list[str]] = defaultdict(list)
    for category, lines in bound.problems.items():
        refused[category] += lines
    planned = (fill.category for shot in (*shots, *runs[-1].left_out) for fill in shot.fills)
    wanted = [c for c in dict.fromkeys(planned) if categories is None or c in categories]
    needed = _needed(runs[-1], spec, wanted)
    for index, shot in enumerate(shots):
        if index not in results and (not needed or batch_of(shot, info.whole_forward) in needed):
            for category in dict.fromkeys(fill.category for fill in shot.fills):
                refused[category].append(f"{shot.label}: not run")
    if "dense" in wanted:
        bound = replace(bound, rows=(*bound.rows, *dense_of_passes(measured, spec, info, binding)))
    passes = ExpertPasses()
    if EXPERTS in wanted or (runs[-1].tp > 1 and "dense" in wanted):
        passes = experts_of_passes(measured, spec, info, binding)
    if passes.rows and EXPERTS not in wanted:
        # Above tp 1 the stack has experts divided over the ranks, and only its passes run them.
        wanted.append(EXPERTS)
    # Equal parts of one kernel's time say nothing of the work of each.
    shared = binding.FUSED.keys() | set(binding.FUSED.values())
    whole = [row for row in bound.rows if row.name not in shared]
    for category, impossible in _too_fast([*whole, *passes.rows], spec, runs[-1], info).items():
        refused[category] += impossible
    cells = _cells(bound.rows)
    if passes.rows and spec.moe is not None:
        cells[EXPERTS] = with_passes(cells[EXPERTS], passes.cells(spec.moe))
    for category in wanted:
        if not cells.get(category) and not refused[category]:
            refused[category].append("no shot was measured")
    tables = {
        category: make_table(category, cells[category], f"tp{runs[-1].tp}/{category}")
        for category in wanted
        if not refused[category]
    }
    unlike = check_outliers(tables, measured, spec, info, binding)
    if runs[-1].hardware != CPU:
        # A processor shared with other work has such cells by itself.
        for category, lines in unlike.refused.items():
            refused[category] += lines
            del tables[category]
    reasons = {category: tuple(lines) for category, lines in refused.items() if lines and category in wanted}
    not_run = [shot for index, shot in enumerate(shots) if index not in results]
    grid = _grid(runs, tables, bound, reasons, not_run)
    if passes.rows and EXPERTS in tables:
        grid[f"tp{runs[-1].tp}/{EXPERTS}"]["whole_passes"] = [_origin(passes, runs[-1])]
    ran = _ran(runs[-1], spec)
    ran_where = functions(results.values(), shots, spec, info, binding)
    for category, table in tables.items():
        own = quality(table, spec, ran, _by_row(table, ran_where)) | (
            {"confirmed": found} if (found := unlike.confirmed.get(category)) else {}
        )
        grid[f"tp{runs[-1].tp}/{category}"]["quality"] = own
    if "attention" in tables and any(shot.regime == "dense" for shot in shots):
        grid[f"tp{runs[-1].tp}/attention"]["dense_prefill"] = {
            "longer_than_tokens": decode_threshold_tokens(info),
            "selects": selection_in_dense_prefill(results.values(), shots, spec, info, binding),
        }
    return Acquired(runs[-1].tp, tables, reasons, bound.unbound, bound.bound_share, grid)


def with_own_passes(
    table: Table, entry: Mapping[str, Any], runs: Sequence[Run], spec: ModelSpec, binding: Binding
) -> tuple[Table, dict[str, Any]]:
    """A table of experts from elsewhere, and its entry in meta.yaml's grid, with all experts together as whole passes
    of these runs have them; unchanged where the runs have none.

    Raises AcquisitionError when a pass is faster than the card's peak rates allow.
    """
    info = one_engine(runs)
    passes = experts_of_passes(_of_model(latest(runs), spec), spec, info, binding)
    if not passes.rows or spec.moe is None:
        return table, dict(entry)
    if impossible := _too_fast(passes.rows, spec, runs[-1], info).get(EXPERTS):
        raise AcquisitionError("experts of whole passes: " + "\n".join(impossible))
    earlier = [left for one in entry.get("whole_passes", ()) if (left := remaining_origin(one, passes))]
    return _merged(table, entry, passes.cells(spec.moe), [*earlier, _origin(passes, runs[-1])], spec)


def with_earlier_passes(
    table: Table, entry: Mapping[str, Any], earlier: Table, origins: Sequence[Mapping[str, Any]], spec: ModelSpec
) -> tuple[Table, dict[str, Any]]:
    """A table of experts measured without passes, and its entry, with the cells of passes that the table before it
    had."""
    return _merged(table, entry, cells_of_passes(earlier, origins), origins, spec)


def _merged(
    table: Table,
    entry: Mapping[str, Any],
    cells: Sequence[Cell],
    origins: Sequence[Mapping[str, Any]],
    spec: ModelSpec,
) -> tuple[Table, dict[str, Any]]:
    merged = make_table(EXPERTS, with_passes(table.rows(), cells), EXPERTS)
    facts = {"axes": _axes_text(merged), "quality": quality(merged, spec), "whole_passes": list(origins)}
    return merged, {**entry, **facts}


def _origin(passes: ExpertPasses, run: Run) -> dict[str, Any]:
    return origin_of(passes, _name(run), str(run.info.kv["layout"]))


def _needed(run: Run, spec: ModelSpec, categories: Sequence[Category]) -> Collection[Shot]:
    """Batches without which tables are not whole where they are fewer than all: those of the grid within the run's."""
    known = {field.name: run.limits[field.name] for field in fields(Limits) if field.name in run.limits}
    if not run.info.whole_forward or len(known) < len(fields(Limits)):
        return ()
    limits = Limits(**known | {"ep_degrees": tuple(known["ep_degrees"])})
    return contained(spec, limits, categories)


def _by_row(table: Table, ran_where: Mapping[tuple[Category, str, Key], tuple[str, ...]]) -> dict[int, tuple[str, ...]]:
    """The functions behind each row of a table of batches. Products of matrices have another for every few sizes, which
    says nothing of their time, so other tables have none."""
    if table.category not in ATTENTION_LIKE:
        return {}
    of_cell = {
        (name, key): functions for (category, name, key), functions in ran_where.items() if category == table.category
    }
    names = KEY_COLUMNS[table.category]
    found = {}
    for row in range(len(table)):
        name, *key = (table.columns[column][row] for column in names)
        found[row] = of_cell.get((str(name), tuple(int(value) for value in key)), ())
    return found


def _ran(run: Run, spec: ModelSpec) -> Ran | None:
    dense = {"dense_prefill": {"longer_than_tokens": decode_threshold_tokens(run.info)}}
    meta = {
        "provenance": "measured",
        "hardware": run.hardware,
        "engine": {"name": run.info.name},
        "kv": run.info.kv,
        "grid": {f"tp{run.tp}/attention": dense},
    }
    return ran_of(meta, spec, run.tp)


def _of_model(measured: Latest, spec: ModelSpec) -> Latest:
    """Without cells of components that this catalog does not have: a file may hold runs of several contracts."""
    known = categories_of(spec).keys()
    shots = [replace(s, fills=tuple(f for f in s.fills if known >= set(f.components))) for s in measured.shots]
    return replace(measured, shots=shots)


def _refuse_material(bound: Bound) -> None:
    material = [kernel for kernel in bound.unbound if kernel.material]
    if not material:
        return
    lines = "\n".join(
        f"  {k.duration_us:10.1f} us  {100 * k.share:5.1f} %  {k.module or '(no module)'}  {k.kernel[:100]}"
        for k in material[:20]
    )
    raise AcquisitionError(
        f"{len(material)} kernels of material time belong to no component, so no table is published (time and share "
        f"of the shot where it is largest):\n{lines}"
    )


def _cells(rows: Iterable[Row]) -> dict[Category, list[tuple[str | int | float, ...]]]:
    """Table rows by category; a cell measured by two shots counts once, the earlier one."""
    seen: dict[tuple[Category, str, Key], Row] = {}
    for row in rows:
        seen.setdefault((row.category, row.name, row.key), row)
    cells: dict[Category, list[tuple[str | int | float, ...]]] = defaultdict(list)
    for row in seen.values():
        spread = round(row.spread_rel, 4) if math.isfinite(row.spread_rel) else row.spread_rel
        cells[row.category].append((row.name, *row.key, float(f"{row.time_us:.6g}"), spread))
    return cells


def _too_fast(rows: Iterable[Row], spec: ModelSpec, run: Run, info: EngineInfo) -> dict[Category, list[str]]:
    """Cells below the time that the card's peak arithmetic and bandwidth need: their work was not all counted."""
    if run.hardware == CPU:
        return {}
    hardware, sizes = load_hardware(run.hardware), rank_spec(spec, run.tp, expert_ranks=run.tp)
    found: dict[Category, list[str]] = defaultdict(list)
    for row in rows:
        least = least_us(sizes, row, info.weights, hardware)
        if row.time_us < _ROOFLINE_SLACK * least:
            at = ", ".join(f"{c}={v}" for c, v in zip(KEY_COLUMNS[row.category][1:], row.key, strict=True))
            found[row.category].append(
                f"{row.name} at {at}: {row.time_us:.2f} us, but {hardware.name} needs {least:.2f} us at peak rates: "
                "work is missing from it"
            )
    return found


def least_us(spec: ModelSpec, row: Row, weights: str, hardware: Hardware) -> float:
    """Lower bound of a cell's time: its products at the highest tensor peak, its bytes beyond the L2 at HBM speed.

    `spec` has per-rank sizes. 0 for a component whose work is not known.
    """
    work = work_of(spec, row.category, row.name, row.key, weights)
    if work is None:
        return 0.0
    compute = work.flops / (max(hardware.fp8_tflops, hardware.bf16_tflops) * 1e6)
    memory = max(0.0, work.bytes - hardware.l2_mib * MIB) / (hardware.hbm_gbps * 1e3)
    return max(compute, memory)


def _grid(
    runs: Sequence[Run],
    tables: Mapping[Category, Table],
    bound: Bound,
    refused: Mapping[Category, tuple[str, ...]],
    not_run: Sequence[Shot],
) -> dict[str, Any]:
    """Per table its axes and the run that filled it, and per run what it ran under.

    not_run: shots of the plan that whole tables could do without.
    """
    run = runs[-1]
    failed = {category: len(lines) for category, lines in refused.items()}
    grid: dict[str, Any] = {}
    for category, table in tables.items():
        left_out = sum(any(f.category == category for f in shot.fills) for shot in run.left_out)
        missing = sum(any(f.category == category for f in shot.fills) for shot in not_run)
        grid[f"tp{run.tp}/{category}"] = {
            "name": run.limits.get("grid"),
            "axes": _axes_text(table),
            "left_out": left_out,
            **({"not_run": missing} if missing else {}),
            "run": _name(run),
        }
    for each in runs:
        grid[_name(each)] = {
            "tp": each.tp,
            "limits": dict(each.limits),
            "kv_tokens": each.info.kv.get("tokens"),
            "bound_share": round(bound.bound_share, 6),
            "cells_failed": failed,
            "card": {key: each.info.gpu[key] for key in _MOMENTARY if key in each.info.gpu},
            "layer_kinds": list(each.info.layer_kinds),
            "settings": dict(each.info.settings),
        }
    return grid


def _name(run: Run) -> str:
    """A run's entry in meta.yaml's grid."""
    return f"run {run.started_at} tp{run.tp}"


def _axes_text(table: Table) -> dict[str, str]:
    return {name: _axis_text(table.columns[name]) for name in KEY_COLUMNS[table.category][1:]}


def _axis_text(values: Iterable[str | int | float]) -> str:
    """The distinct values of a key column, of text their number alone."""
    distinct = set(values)
    numbers = sorted(float(value) for value in distinct if not isinstance(value, str))
    return " ".join(number(value) for value in numbers) or f"{len(distinct)} different"


def bundle_meta(runs: Sequence[Run], spec: ModelSpec, acquired: Acquired, binding: Binding) -> dict[str, Any]:
    """meta.yaml of a bundle, without `files`."""
    return meta_of_runs(runs, spec, binding) | {"grid": dict(acquired.grid)}


def meta_of_runs(runs: Sequence[Run], spec: ModelSpec, binding: Binding) -> dict[str, Any]:
    """What runs say of all their tables alike. Time and command are those of the last one."""
    run, info = runs[-1], runs[-1].info
    contract = str(getattr(binding, "CONTRACT", "serving"))
    engine = {"name": info.name, "versions": dict(info.versions)}
    if (execution := execution_of(info)) is not None:
        engine["execution"] = execution
    return {
        "schema_version": SCHEMA_VERSION,
        "provenance": "measured",
        "hardware": run.hardware,
        "gpu": {key: value for key, value in info.gpu.items() if key not in _MOMENTARY},
        "engine": engine,
        "model": run.model,
        "model_config_sha256": run.model_config_sha256,
        "variant": variant_of(info, contract),
        "weights": info.weights,
        "kv": kv_of_all_ranks(info, spec, run.tp),
        "contract": contract,
        "attended_cap_tokens": spec.indexer.attended_cap_tokens if spec.indexer else None,
        "protocol": dict(run.protocol),
        "layer_kinds": list(info.layer_kinds),
        "shared_kernels": dict(binding.FUSED),
        **({"dense_prefill": "never"} if info.settings.get("dense_prefill") == "never" else {}),
        "grid": {},
        "measured_at": run.started_at,
        "command": run.command,
    }
