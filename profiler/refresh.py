"""Measuring one table of a bundle anew: with the settings it was measured with, into the same bundle or not at all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from profiler.acquire import Target
from profiler.card import hardware_name
from profiler.core.bundle import Bundle, disagreements, find_bundle, read_bundle
from profiler.core.errors import ConfigError, CoverageError
from profiler.core.registry import load_model
from profiler.engines.base import find_binding
from profiler.samples import Run
from profiler.tabulate import meta_of_runs

# How the engines' options name a cache layout.
_KV_DTYPE_OF_LAYOUT: Final = {"bf16": "auto", "fp8": "fp8", "fp8_ds_mla": "fp8"}


def recorded_settings(
    root: Path, model: str, hardware: str, variant: str | None, tp: int, category: str, model_root: Path | None = None
) -> tuple[dict[str, Any], Bundle]:
    """(options of `profile` that the table was measured with, its bundle).

    Raises CoverageError when there is no such bundle or table, ConfigError when the bundle is not one of ours or does
    not say how the table was measured.
    """
    bundle = measured_bundle(root, model, hardware, variant, model_root)
    path = bundle.path
    table = f"tp{tp}/{category}"
    if f"{table}.csv" not in bundle.meta["files"]:
        there = ", ".join(file.removesuffix(".csv") for file in bundle.meta["files"])
        raise CoverageError(f"{path}: has no table {table}, only {there}. Add it with: python -m profiler profile")
    entry = bundle.meta["grid"].get(table) or {}
    limits = (bundle.meta["grid"].get(entry.get("run")) or {}).get("limits")
    if limits is None:
        raise ConfigError(f"{path / 'meta.yaml'}: grid.{table} does not name the run that measured it")
    protocol, kv = bundle.meta["protocol"], bundle.meta["kv"]
    return {
        "grid": limits["grid"],
        "ep": tuple(limits["ep_degrees"]),
        "max_model_len": limits["max_model_len"],
        "max_num_batched_tokens": limits["max_num_batched_tokens"],
        "max_num_seqs": limits["max_num_seqs"],
        "engine": bundle.meta["engine"]["name"],
        "kv_cache_dtype": _KV_DTYPE_OF_LAYOUT.get(kv["layout"], kv["layout"]),
        "block_size": kv["block_tokens"],
        "contract": bundle.meta["contract"],
        "execution": bundle.meta["engine"].get("execution", "auto"),
        "warmup": protocol["warmup"],
        "repeats": protocol["repeats"],
    }, bundle


def measured_bundle(
    root: Path, model: str, hardware: str, variant: str | None, model_root: Path | None = None
) -> Bundle:
    """The bundle whose tables are refreshed. Raises CoverageError when there is none, ConfigError for one that was not
    measured by us."""
    path = find_bundle(root, hardware_name(hardware), load_model(model, model_root).name, variant)
    bundle = read_bundle(path)
    if "engine" not in bundle.meta or bundle.meta["provenance"] != "measured":
        raise ConfigError(
            f"{path}: its provenance is {bundle.meta['provenance']!r}; only measured tables are refreshed"
        )
    return bundle


def check_same(bundle: Bundle, runs: Sequence[Run], target: Target) -> None:
    """ConfigError listing every fact in which the runs differ from the bundle; nothing is written then."""
    new = meta_of_runs(runs, target.spec, find_binding(runs[-1].info, str(bundle.meta["contract"])))
    lines = disagreements(bundle.meta, new)
    if lines:
        raise ConfigError(
            f"{bundle.path}: measured otherwise than its other tables, so none is replaced:\n  " + "\n  ".join(lines)
        )
