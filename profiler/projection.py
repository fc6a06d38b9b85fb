"""Tables of a GPU that nobody measured, scaled from those of one that somebody did.

Every row has an amount of work (FLOPs and bytes, of each kernel of a module), and so a roofline time on each card: the
slower of its products at the dense peak of their type and its bytes at the memory's peak. The share of the roofline
that the source card reached is taken to the target:

    time on target = floor + (time on source - floor) x roofline on target / roofline on source

`floor` is what a kernel takes whatever its work: the time of its fastest row beyond that row's roofline. It is launch
and latency on the device and is carried over unchanged. Rows whose work is not known are carried over whole, counted.

How wrong that is can be said where both cards have tables of the same model: `error_band` projects one onto the other
and gives percentiles of projected / measured.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from profiler.core.bundle import Bundle, Table, Value, find_bundle, make_table, read_bundle, variants
from profiler.core.errors import ConfigError, CoverageError
from profiler.core.hardware import Hardware
from profiler.core.kv import kv_layout
from profiler.core.modules import granularity
from profiler.core.registry import load_model
from profiler.core.types import Category, ModelSpec, Parallel
from profiler.module_work import parts_of_row, roofline_us
from profiler.sweep import rank_spec
from profiler.timing import percentile

METHOD: Final = "roofline scaling of each row, with the kernel's floor carried over unchanged"
_COST_COLUMNS: Final = 2

RowKey = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Projected:
    """tables: as the source's. unscaled: rows per kernel without a known amount of work, carried over."""

    tables: Mapping[tuple[int, Category], Table]
    unscaled: Counter[str]


@dataclass(frozen=True, slots=True)
class Band:
    """Percentiles of projected / measured over the rows that both cards have of one kernel and phase."""

    kernel: str
    phase: str
    rows: int
    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class Check:
    """One pair of cards that both have tables of a model: how far the projection was off."""

    model: str
    source: str
    target: str
    variant: str
    bands: tuple[Band, ...]
    whole: Band


def project_tables(bundle: Bundle, spec: ModelSpec, source: Hardware, target: Hardware) -> Projected:
    """Every table of `bundle`, measured on `source`, as `target` would have it. Unequal batches (skew) are left out."""
    weights = str(bundle.meta["weights"])
    tables: dict[tuple[int, Category], Table] = {}
    unscaled: Counter[str] = Counter()
    for (tp, category), table in sorted(bundle.tables.items()):
        if category == "skew":
            continue
        rank = rank_spec(spec, tp)
        rooflines = [_rooflines(rank, category, row, weights, source, target) for row in table.rows()]
        floors = _floors(table, rooflines)
        rows = []
        for row, (here, there) in zip(table.rows(), rooflines, strict=True):
            *key, time, _ = row
            if not here:
                unscaled[str(row[0])] += 1
                rows.append((*key, float(time), ""))
                continue
            floor = floors[str(row[0])]
            rows.append((*key, floor + (float(time) - floor) * there / here, ""))
        tables[tp, category] = make_table(category, rows, f"projected {category} tp {tp}")
    return Projected(tables, unscaled)


def _rooflines(
    rank: ModelSpec, category: Category, row: RowKey, weights: str, source: Hardware, target: Hardware
) -> tuple[float, float]:
    """Roofline microseconds of a row on both cards; 0 where its work is not known."""
    name, *key = row[:-_COST_COLUMNS]
    parts = parts_of_row(rank, category, str(name), tuple(_number(part) for part in key), weights)
    return roofline_us(parts, source), roofline_us(parts, target)


def _number(value: Value) -> int:
    # Averages of pairs and experts enter the work as whole numbers; everything else is a count.
    return round(float(value))


def _floors(table: Table, rooflines: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Per kernel, the time of its fastest row beyond that row's roofline, at least 0."""
    fastest: dict[str, tuple[float, float]] = {}
    for row, (here, _) in zip(table.rows(), rooflines, strict=True):
        name, time = str(row[0]), float(row[-_COST_COLUMNS])
        if here and (name not in fastest or time < fastest[name][0]):
            fastest[name] = (time, here)
    return {name: max(0.0, time - here) for name, (time, here) in fastest.items()}


def compare_tables(
    projected: Mapping[tuple[int, Category], Table], measured: Mapping[tuple[int, Category], Table]
) -> tuple[tuple[Band, ...], Band]:
    """Bands per kernel and phase at the rows that both have, and over all of them.

    Raises CoverageError when no row is common.
    """
    ratios: dict[tuple[str, str], list[float]] = {}
    for key, table in projected.items():
        if key not in measured:
            continue
        there = {row[:-_COST_COLUMNS]: float(row[-_COST_COLUMNS]) for row in measured[key].rows()}
        for row in table.rows():
            if (time := there.get(row[:-_COST_COLUMNS])) is not None:
                ratios.setdefault((str(row[0]), _phase(key[1], row)), []).append(float(row[-_COST_COLUMNS]) / time)
    if not ratios:
        raise CoverageError("the projected and the measured tables have no row in common")
    bands = tuple(_band(kernel, phase, found) for (kernel, phase), found in sorted(ratios.items()))
    return bands, _band("all", "all", [ratio for found in ratios.values() for ratio in found])


def _phase(category: Category, row: RowKey) -> str:
    if category not in ("attention", "indexer", "sparse_attention"):
        return "all"
    return "prefill" if row[1] else "decode"


def _band(kernel: str, phase: str, ratios: Sequence[float]) -> Band:
    return Band(kernel, phase, len(ratios), *(percentile(ratios, q) for q in (10, 50, 90)))


def error_band(source_bundle: Bundle, target_bundle: Bundle, source: Hardware, target: Hardware) -> Check:
    """Projects a measured or imported bundle onto a card that has one of the same model, and compares.

    Kernels that an import computed by one rule on both cards say nothing and are left out.
    """
    spec = load_model(str(source_bundle.meta["model"]))
    projected = project_tables(source_bundle, spec, source, target)
    measured = {key: table for key, table in target_bundle.tables.items() if key[1] in _WITH_TABLES}
    bands, whole = compare_tables(
        {key: _only(table, _computed(source_bundle)) for key, table in projected.tables.items()}, measured
    )
    return Check(spec.name, source.name, target.name, str(source_bundle.meta["variant"]), bands, whole)


_WITH_TABLES: Final = ("dense", "per_sequence", "attention", "indexer", "sparse_attention", "moe")


def _computed(bundle: Bundle) -> frozenset[str]:
    """Kernels of an imported bundle that come from a rule instead of a table."""
    return frozenset(bundle.meta.get("computed") or ())


def _only(table: Table, without: Iterable[str]) -> Table:
    left_out = set(without)
    return make_table(table.category, [row for row in table.rows() if str(row[0]) not in left_out], table.category)


def checks(root: Path, source: Hardware, target: Hardware) -> list[Check]:
    """Error bands of every model with measured or imported tables of both cards under `root`, equal variants each."""
    found = []
    for path in sorted((root / source.name).glob("*/*/*/meta.yaml")):
        variant, model = path.parent.name, "/".join(path.parts[-4:-2])
        if variant.startswith(".") or variant not in variants(root, target.name, model):
            continue
        here, there = (read_bundle(root / name / model / variant) for name in (source.name, target.name))
        if "projected" in (here.meta["provenance"], there.meta["provenance"]):
            continue
        if granularity(here.meta) == granularity(there.meta):
            found.append(error_band(here, there, source, target))
    return found


def source_bundle(root: Path, source: Hardware, target: Hardware, model: str, variant: str | None) -> Bundle:
    """The bundle to project. Raises ConfigError when its KV layout is not what the target's engine stores."""
    bundle = read_bundle(find_bundle(root, source.name, model, variant))
    if bundle.meta["provenance"] == "projected":
        raise ConfigError(f"{bundle.path}: is a projection itself; project from measured or imported tables")
    if bundle.meta["contract"] != "serving":
        raise ConfigError(f"{bundle.path}: its contract is {bundle.meta['contract']!r}, not serving")
    stored = str(bundle.meta["kv"]["layout"])
    wanted = kv_layout(load_model(model), Parallel(), target.architecture, _asked(bundle, stored)).layout
    if wanted != stored:
        others = ", ".join(variants(root, source.name, model))
        raise ConfigError(
            f"{bundle.path}: measured on a {stored} KV cache, on {target.name} the engine stores {wanted}. "
            f"Variants of {model} on {source.name}: {others}. A bundle of that cache comes from: python -m profiler "
            f"profile {model} --hardware {source.name} --kv-cache-dtype {wanted}"
        )
    return bundle


def _asked(bundle: Bundle, layout: str) -> str:
    """The KV dtype that was asked for: the layout where the variant names it, else the engine's own choice."""
    return layout if str(bundle.meta["variant"]).endswith(f"-kv{layout}") and layout != "fp8_ds_mla" else "auto"


def projected_meta(
    bundle: Bundle, source: Hardware, target: Hardware, unscaled: Mapping[str, int], found: Sequence[Check]
) -> dict[str, Any]:
    """The source's meta with the target's card, what was scaled by what, and the error band."""
    meta = {key: value for key, value in bundle.meta.items() if key not in ("files", "changes", "imported_from")}
    limits = ("hbm_gbps", "bf16_tflops", "fp8_tflops")
    meta |= {
        "provenance": "projected",
        "hardware": target.name,
        "gpu": {"name": target.name},
        "protocol": {"statistic": METHOD},
        "measured_at": None,
        "command": f"python -m profiler project {bundle.meta['model']} --from {source.name} --to {target.name} "
        f"--variant {bundle.meta['variant']}",
        "projection": {
            "from": {
                "hardware": source.name,
                "variant": bundle.meta["variant"],
                "provenance": bundle.meta["provenance"],
                "command": bundle.meta["command"],
                "imported_from": bundle.meta.get("imported_from"),
            },
            "limits": {card.name: {name: getattr(card, name) for name in limits} for card in (source, target)},
            "unscaled_rows": dict(sorted(unscaled.items())),
            "error_band": [
                {
                    "model": check.model,
                    "from": check.source,
                    "to": check.target,
                    "variant": check.variant,
                    "projected_over_measured": {
                        f"{band.kernel} {band.phase}": [_rounded(x) for x in (band.p10, band.p50, band.p90)]
                        for band in (*check.bands, check.whole)
                    },
                }
                for check in found
            ]
            or None,
        },
    }
    return meta


def _rounded(value: float) -> float:
    return float(f"{value:.4g}") if math.isfinite(value) else value
