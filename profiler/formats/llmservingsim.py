"""Stored bundles of LLMServingSim (casys-kaist), version 1.0 of its profiler: measured on vLLM, pooled attention.

    meta.yaml, tp<N>/{dense,per_sequence,attention,moe,skew,skew_fit}.csv       times in microseconds

Their attention table times one kernel launch for a whole batch: one prefill chunk and a decode batch together. It maps
onto our columns row by row, mixed rows included. Their expert table is measured once, at tp 1 with all experts on the
rank, and is looked up by the pairs and experts of any slice (`moe_slices: any` in the meta).
"""

import csv
import io
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from profiler.core.bundle import SCHEMA_VERSION, Bundle, Table, Value, make_table
from profiler.core.errors import ConfigError
from profiler.core.load import read_text, sha256_of
from profiler.core.types import Category

NAME = "LLMServingSim (meta.yaml with profiler_version and vllm_version)"

_DENSE = ("layer", "tokens", "time_us")
_SEQUENCES = ("layer", "sequences", "time_us")
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
_MOE = ("tokens", "activated_experts", "time_us")
_SKEW = ("regime", "n", "nb", "ratio", "skew", "pc", "kp", "kvs", "kv_big", "kv_mean",
         "t_mean_us", "t_max_us", "t_skew_us", "alpha")  # fmt: skip
# Their measurements have no spread.
_UNKNOWN = ""

Row = tuple[Value, ...]


def recognises(meta: Mapping[str, Any]) -> bool:
    return "profiler_version" in meta and "vllm_version" in meta


def read(path: Path, meta: Mapping[str, Any], tps: Collection[int] | None) -> Bundle:
    """Reads the bundle folder, or only those tensor-parallel degrees.

    Raises ConfigError naming the file and line, or the key of meta.yaml, that is wrong.
    """
    tables: dict[tuple[int, Category], Table] = {}
    skew: dict[tuple[int, str], tuple[tuple[int, int, float], ...]] = {}
    files = {}
    topk = _topk(meta)
    readers: dict[str, tuple[Category, Callable[[Path], Iterator[Row]]]] = {
        "dense.csv": ("dense", _dense),
        "per_sequence.csv": ("per_sequence", _per_sequence),
        "attention.csv": ("attention", _attention),
        "moe.csv": ("moe", lambda file: _moe(file, topk)),
    }
    for folder in sorted(path.glob("tp*")):
        if not folder.name[2:].isdecimal():
            continue
        tp = int(folder.name[2:])
        if tps is not None and tp not in tps:
            continue
        for name, (category, reader) in readers.items():
            if (folder / name).is_file():
                tables[tp, category] = make_table(category, reader(folder / name), str(folder / name))
                files[f"{folder.name}/{name}"] = {"sha256": sha256_of(folder / name), "rows": len(tables[tp, category])}
        if (folder / "skew.csv").is_file():
            skew[tp, "attention"] = _alphas(folder / "skew.csv")
    if not tables:
        wanted = "tp<N>" if tps is None else " or ".join(f"tp{tp}" for tp in sorted(tps))
        raise ConfigError(f"{path}: no {wanted}/*.csv beside its meta.yaml")
    return Bundle(path, _meta(path, meta, files), MappingProxyType(tables), MappingProxyType(skew))


def _meta(path: Path, meta: Mapping[str, Any], files: Mapping[str, Any]) -> Mapping[str, Any]:
    """Their meta in our words. What they do not record stays None."""
    engine = meta.get("engine_effective") or {}
    variant = _need(path, meta, "variant")
    weights, _, kv = str(variant).partition("-kv")
    return MappingProxyType(
        {
            "schema_version": SCHEMA_VERSION,
            "provenance": "imported",
            "hardware": _need(path, meta, "hardware"),
            "gpu": {"name": meta.get("gpu")},
            "engine": {
                "name": "vllm",
                "versions": {"vllm": meta["vllm_version"], "cuda": meta.get("cuda_version")},
            },
            "model": _need(path, meta, "model"),
            "model_config_sha256": None,
            "variant": variant,
            "weights": weights,
            "kv": {"layout": kv or "bf16", "block_tokens": engine.get("block_size"), "caches": []},
            "contract": "serving",
            "attended_cap_tokens": None,
            "protocol": {"repeats": meta.get("measurement_iterations"), "statistic": "mean"},
            "grid": dict(meta.get("attention_grid") or {}),
            "measured_at": meta.get("profiled_at"),
            "command": None,
            "moe_slices": "any",
            "files": dict(files),
        }
    )


def _need(path: Path, meta: Mapping[str, Any], key: str) -> str:
    if not isinstance(meta.get(key), str) or not meta[key]:
        raise ConfigError(f"{path / 'meta.yaml'}: {key} is missing")
    return str(meta[key])


def _topk(meta: Mapping[str, Any]) -> Callable[[], int]:
    """Experts per token of the model, which the tables presuppose but do not name."""

    def read_topk() -> int:
        from profiler.core.registry import load_model

        spec = load_model(str(meta["model"]))
        if spec.moe is None:
            raise ConfigError(f"{meta['model']} has no experts, yet its bundle has a moe table")
        return spec.moe.topk

    return read_topk


def _rows(path: Path, header: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """(file:line, row) of a CSV with exactly this header."""
    lines = csv.reader(io.StringIO(read_text(path)), strict=True)
    found = tuple(next(lines, []))
    if found != header:
        raise ConfigError(f"{path}:1: the header is {','.join(found)}; this format has {','.join(header)}")
    try:
        for cells in lines:
            at = f"{path}:{lines.line_num}"
            if len(cells) != len(header):
                raise ConfigError(f"{at}: {len(cells)} fields, {len(header)} needed: {','.join(header)}")
            yield at, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{path}:{lines.line_num}: not a CSV row: {error}") from None


def _count(at: str, row: Mapping[str, str], name: str) -> int:
    text = row[name]
    if not text.isdecimal():
        raise ConfigError(f"{at}: {name} must be an integer of at least 0, found {text!r}")
    return int(text)


def _dense(path: Path) -> Iterator[Row]:
    for at, row in _rows(path, _DENSE):
        yield row["layer"], _count(at, row, "tokens"), row["time_us"], _UNKNOWN


def _per_sequence(path: Path) -> Iterator[Row]:
    for at, row in _rows(path, _SEQUENCES):
        yield row["layer"], _count(at, row, "sequences"), row["time_us"], _UNKNOWN


def _attention(path: Path) -> Iterator[Row]:
    """Kernel `attention`. Their newer form keys prefill by a clipped mean key length and is refused by its header."""
    for at, row in _rows(path, _ATTENTION):
        chunk, context, requests, kv = (_count(at, row, name) for name in _ATTENTION[:4])
        yield "attention", chunk, context, requests, kv, int(requests > 0), row["time_us"], _UNKNOWN


def _moe(path: Path, topk: Callable[[], int]) -> Iterator[Row]:
    experts_per_token = topk()
    for at, row in _rows(path, _MOE):
        tokens = _count(at, row, "tokens")
        yield "experts", 1, tokens, row["activated_experts"], tokens * experts_per_token, row["time_us"], _UNKNOWN


def _alphas(path: Path) -> tuple[tuple[int, int, float], ...]:
    """Least-squares alpha of t_skew = t_mean + alpha (t_max - t_mean), one per (prefill chunk, decode requests).

    Not below zero: unequal lengths cannot make a batch with the same keys faster, so less is noise.
    """
    sums: dict[tuple[int, int], tuple[float, float]] = {}
    for at, row in _rows(path, _SKEW):
        try:
            mean, most, skewed = (float(row[name]) for name in ("t_mean_us", "t_max_us", "t_skew_us"))
        except ValueError:
            raise ConfigError(f"{at}: times must be numbers") from None
        key = _count(at, row, "pc"), _count(at, row, "n")
        above, square = sums.get(key, (0.0, 0.0))
        # Relative to the mean, so that a long batch does not outweigh a hundred short ones.
        rise = (most - mean) / mean
        sums[key] = above + rise * (skewed - mean) / mean, square + rise * rise
    return tuple(
        (chunk, requests, max(0.0, above / square))
        for (chunk, requests), (above, square) in sorted(sums.items())
        if square > 0
    )
