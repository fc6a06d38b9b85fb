"""Tables of a sibling variant that do not depend on the KV layout, so that one measurement serves every layout.

These are the experts, and the indexer of DSA, whose keys lie in a cache of their own. A source of experts is a samples
file or a bundle, one of both a bundle. It must be of the same model configuration, card, weights, engine and versions,
protocol and expert back end; what was taken from where is kept in meta.yaml.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from profiler.core.bundle import Bundle, read_bundle, table_path, write_bundle
from profiler.core.errors import ConfigError
from profiler.core.types import Category, ModelSpec
from profiler.engines.base import EngineInfo
from profiler.samples import Run, read_runs
from profiler.shared import Shared
from profiler.sweep import shared_categories

CATEGORY: Final[Category] = "moe"
TP: Final = 1
# Settings that change the time of experts.
_SETTINGS: Final = ("weights", "routing", "environment")


@dataclass(frozen=True, slots=True)
class Sources:
    """Where expert tables are taken from: runs of samples files, and bundles."""

    runs: tuple[tuple[Path, Run], ...]
    bundles: tuple[Bundle, ...]


@dataclass(frozen=True, slots=True)
class Lender:
    """A bundle of another KV layout, and the categories of its tables at one degree that serve this one too."""

    bundle: Bundle
    categories: tuple[Category, ...]
    tp: int = TP


def read_sources(paths: Sequence[Path], model: str, hardware: str, sha256: str, tp: int = TP) -> Sources:
    """Sources that have expert cells of this model, configuration and card: at tp 1 whole experts, above it those
    divided over the ranks. Raises ConfigError for others."""
    runs: list[tuple[Path, Run]] = []
    bundles: list[Bundle] = []
    for path in paths:
        if path.is_dir():
            bundle = read_bundle(path)
            facts = {key: bundle.meta.get(key) for key in ("model", "hardware", "model_config_sha256")}
            _refuse(path, facts, {"model": model, "hardware": hardware, "model_config_sha256": sha256})
            if (tp, CATEGORY) not in bundle.tables:
                raise ConfigError(f"{path}: has no table tp{tp}/{CATEGORY}")
            bundles.append(bundle)
            continue
        found = [run for run in read_runs([path]) if run.tp == TP and any(shot.moe for shot in run.shots)]
        if not found:
            raise ConfigError(f"{path}: holds no expert shots of tp {TP}")
        for run in found:
            facts = {"model": run.model, "hardware": run.hardware, "model_config_sha256": run.model_config_sha256}
            _refuse(path, facts, {"model": model, "hardware": hardware, "model_config_sha256": sha256})
            runs.append((path, run))
    return Sources(tuple(runs), tuple(bundles))


def expert_runs(sources: Sources, own: Run) -> list[Run]:
    """The expert shots of the sources' runs, as runs that go before those of `own`'s variant.

    Raises ConfigError naming the facts in which a source was measured otherwise.
    """
    return [_lent(path, run, own) for path, run in sources.runs]


def _lent(path: Path, run: Run, own: Run) -> Run:
    _refuse(path, _facts(run.info, run.protocol), _facts(own.info, own.protocol))
    settings = {key: value for key, value in run.info.settings.items() if key != "execution"}
    if "execution" in own.info.settings:
        settings["execution"] = own.info.settings["execution"]
    settings["experts_from"] = {"kv_layout": run.info.kv.get("layout"), "measured_at": run.started_at}
    kept = [index for index, shot in enumerate(run.shots) if shot.moe is not None]
    results = {}
    for new, old in enumerate(kept):
        if old in run.results:
            samples = tuple(replace(sample, shot_index=new) for sample in run.results[old].samples)
            results[new] = replace(run.results[old], shot_index=new, samples=samples)
    return replace(
        run,
        info=replace(own.info, settings=settings),
        shots=tuple(run.shots[index] for index in kept),
        left_out=tuple(shot for shot in run.left_out if shot.moe is not None),
        results=results,
        power=None,
    )


def with_origin(grid: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    """A bundle's grid in which the expert table names the run that it was taken from."""
    name = f"tp{TP}/{CATEGORY}"
    lent = [run for run in runs if "experts_from" in run.info.settings]
    own = any(shot.moe is not None for run in runs if run not in lent for shot in run.shots)
    if not lent or own or name not in grid:
        return dict(grid)
    origin = {"run": f"run {lent[-1].started_at} tp{TP}", "from": dict(lent[-1].info.settings["experts_from"])}
    return {**grid, name: {**grid[name], **origin, "name": lent[-1].limits.get("grid")}}


def read_lender(path: Path, spec: ModelSpec, tps: Sequence[int], hardware: str, sha256: str) -> Lender:
    """The bundle at `path` and which of its tables serve every KV layout of the model at these degrees.

    Raises ConfigError when it is of another model, configuration or card, or has no such table.
    """
    bundle = read_bundle(path)
    facts = {key: bundle.meta.get(key) for key in ("model", "hardware", "model_config_sha256")}
    _refuse(path, facts, {"model": spec.name, "hardware": hardware, "model_config_sha256": sha256})
    serving_all: list[Category] = [CATEGORY, *shared_categories(spec, tps)]
    lent = tuple(category for category in serving_all if (TP, category) in bundle.tables)
    if not lent:
        raise ConfigError(f"{path}: has none of the tables that serve every KV layout ({', '.join(serving_all)})")
    return Lender(bundle, lent)


def lent_tables(lender: Lender, meta: Mapping[str, Any]) -> Shared:
    """The lender's tables for a bundle of that meta. Raises ConfigError when they were measured otherwise."""
    source, tp, found = lender.bundle, lender.tp, Shared({}, {})
    keys = ("weights", "protocol")
    there, here = ({key: one[key] for key in keys} | _engine(one) for one in (source.meta, meta))
    if lender.categories != (CATEGORY,):
        there["index_keys"], here["index_keys"] = (_index_bytes(one) for one in (source.meta, meta))
    _refuse(source.path, there, here)
    for category in lender.categories:
        name = f"tp{tp}/{category}"
        entry = source.meta["grid"].get(name, {})
        file = source.meta["files"].get(f"{name}.csv", {})
        origin = {"kv_layout": source.meta["kv"]["layout"], "measured_at": file.get("measured_at")}
        if "from" in entry:
            origin["from"] = entry["from"]
        found.tables[tp, category] = source.tables[tp, category]
        found.grid[name] = {**entry, "from": origin}
        for run in (entry.get("run"), *(passes["run"] for passes in entry.get("whole_passes", ()))):
            if run in source.meta["grid"]:
                found.grid[run] = source.meta["grid"][run]
    return found


def take_experts(root: Path, bundle: Bundle, path: Path, tp: int = TP) -> Path:
    """Gives a bundle the table of experts of the bundle at `path`, of another KV layout; returns its folder.

    Time and command in `files` are those of the table taken. Raises ConfigError when it was measured otherwise.
    """
    meta = bundle.meta
    sources = read_sources([path], meta["model"], meta["hardware"], meta["model_config_sha256"], tp)
    if not sources.bundles or sources.bundles[0].meta["variant"] == meta["variant"]:
        raise ConfigError(f"{path}: a bundle of another KV layout than {bundle.path} is needed")
    source = sources.bundles[0]
    lent = lent_tables(Lender(source, (CATEGORY,), tp), meta)
    entry = source.meta["files"][table_path(tp, CATEGORY)]
    stamp = {key: entry[key] for key in ("measured_at", "command") if key in entry}
    grid = {**meta["grid"], **lent.grid}
    return write_bundle(root, {**meta, "grid": grid}, lent.tables, force=True, stamps={(tp, CATEGORY): stamp})


def _index_bytes(meta: Mapping[str, Any]) -> list[Any]:
    return [cache["bytes_per_token_layer"] for cache in meta["kv"]["caches"] if cache["name"] == "index_keys"]


def _engine(meta: Mapping[str, Any]) -> dict[str, Any]:
    engine = meta["engine"]
    return {"engine": engine["name"], "versions": dict(engine["versions"]), "card": meta["gpu"].get("name")}


def _facts(info: EngineInfo, protocol: Mapping[str, Any]) -> dict[str, Any]:
    """What two measurements of experts must share. The back end of all experts together is the engine's own."""
    backends = info.settings.get("moe_backend", {})
    return {
        "engine": info.name,
        "versions": dict(info.versions),
        "card": info.gpu.get("name"),
        "weights": info.weights,
        "protocol": dict(protocol),
        "expert back end": backends.get("1"),
        **{f"settings.{name}": info.settings.get(name) for name in _SETTINGS},
    }


def _refuse(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    lines = [f"  {key}: {there[key]!r} there, {here[key]!r} here" for key in here if there[key] != here[key]]
    if lines:
        raise ConfigError(f"{path}: measured otherwise, so its tables are not taken:\n" + "\n".join(lines))
