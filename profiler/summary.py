"""What a bundle holds, in a few lines per table: rows, range, spread, error of interpolation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profiler.core.bundle import Bundle
from profiler.core.errors import ConfigError
from profiler.core.registry import load_model
from profiler.core.tables import KEY_COLUMNS
from profiler.core.types import Category, ModelSpec
from profiler.kernels._placement import ran_of
from profiler.quality import quality


@dataclass(frozen=True, slots=True)
class TableSummary:
    """quality: as `profiler.quality.quality` gives it, empty when the model's configuration is not here. origin: `from`
    of meta.yaml where another degree's or another KV layout's measurement stands here, else empty. whole_passes: where
    the experts' cells of whole passes are from, as meta.yaml has it."""

    tp: int
    category: Category
    rows: int
    components: tuple[str, ...]
    axes: Mapping[str, tuple[float, ...]]
    least_us: float
    most_us: float
    quality: Mapping[str, Any]
    origin: Mapping[str, Any]
    whole_passes: tuple[Mapping[str, Any], ...] = ()


def summarise(bundle: Bundle) -> list[TableSummary]:
    """Every table, by tp and category; quality as meta.yaml has it, else computed from the tables themselves."""
    spec = model_of(bundle)
    return [_table(tp, category, bundle, spec) for tp, category in sorted(bundle.tables)]


def model_of(bundle: Bundle) -> ModelSpec | None:
    """The bundle's model, None when its configuration is not stored here."""
    try:
        return load_model(str(bundle.meta["model"]))
    except ConfigError:
        return None


def _table(tp: int, category: Category, bundle: Bundle, spec: ModelSpec | None) -> TableSummary:
    table = bundle.tables[tp, category]
    axes = {
        name: tuple(sorted({float(value) for value in table.columns[name]}))
        for name in KEY_COLUMNS[category][1:]
        if not any(isinstance(value, str) for value in table.columns[name])
    }
    times = [float(value) for value in table.columns["time_us"]]
    # What was found when the table was built knows the functions that ran, too.
    entry = (bundle.meta.get("grid") or {}).get(f"tp{tp}/{category}") or {}
    found = entry.get("quality") or (quality(table, spec, ran_of(bundle.meta, spec, tp)) if spec else {})
    origin = entry.get("from") or {}
    passes = tuple(entry.get("whole_passes") or ())
    return TableSummary(tp, category, len(table), table.names, axes, min(times), max(times), found, origin, passes)


def skew_of(bundle: Bundle, tp: int) -> Mapping[str, Any]:
    """Errors of the forms of unequal batches as meta.yaml keeps them, per kernel; empty when there are none."""
    entry = bundle.meta.get("grid", {}).get(f"tp{tp}/skew") or {}
    found: Mapping[str, Any] = entry.get("fit") or {}
    return found


def percent(found: Mapping[str, Any], name: str) -> str:
    """`p50 1.2% p90 3.4%` of one figure, a dash when there is none."""
    value = found.get(name)
    return f"p50 {value['p50']:.1%} p90 {value['p90']:.1%}" if value else "-"


def origin_text(origin: Mapping[str, Any], whole_passes: Sequence[Mapping[str, Any]] = ()) -> str:
    """`of tp 1`, `of the bf16 cache`, `ep 1 in whole passes of the fp8_ds_mla cache, the rest of the bf16 cache`;
    nothing for a table that was measured as it stands. Of a table lent on, the first lender is named."""
    while "from" in origin:
        origin = origin["from"]
    lent = f"of tp {origin['tp']}" if "tp" in origin else ""
    if "kv_layout" in origin:
        lent = f"of the {origin['kv_layout']} cache"
    if not whole_passes:
        return lent
    if not lent:
        return f"ep {whole_passes[0]['ep']} in whole passes"
    caches = " and ".join(dict.fromkeys(str(one["kv_layout"]) for one in whole_passes))
    return f"ep {whole_passes[0]['ep']} in whole passes of the {caches} cache, the rest {lent}"


def share(found: Mapping[str, Any]) -> str:
    """Neighbouring pairs out of order, of all of them."""
    value = found.get("disorder")
    return f"{value['wrong']} of {value['pairs']}" if value else "-"


def flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Nested mappings and lists as (dotted name, text) pairs."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in flat(item, f"{name}.{key}" if name else str(key))]
    if isinstance(value, list | tuple):
        if all(not isinstance(item, Mapping | list | tuple) for item in value):
            return [(name, ", ".join(map(str, value)))]
        return [pair for index, item in enumerate(value) for pair in flat(item, f"{name}.{index}")]
    return [(name, str(value))]
