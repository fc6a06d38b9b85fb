"""Stored bundles of LLMServingSim (casys-kaist): measured on vLLM, attention of a whole batch in one launch.

    meta.yaml, tp<N>/{dense,per_sequence,attention,moe,skew,skew_fit}.csv       times in microseconds

Version 1.0 of its profiler and the later columns are both read. The later ones name the kernel of an attention row
(`attention`, `indexer`, `sparse_attention`), key prefill by `prefill_key`, the mean number of keys that a query of the
chunk sees, measure experts per expert-parallel degree, and carry a hash per row that is not checked. A chunk of c
tokens behind k cached ones has prefill_key k + c / 2, from which k follows. Sparse kernels clip it at the cap; such a
row stands for every longer context, and is kept at the shortest and at the model's longest.

Their attention table times one kernel launch for a whole batch: one prefill chunk and a decode batch together. It maps
onto our columns row by row, mixed rows included. Their expert table is measured once, at tp 1 with all experts on the
rank, and is looked up by the pairs and experts of any slice (`moe_slices: any` in the meta).
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from profiler.core.batch_text import batch_text
from profiler.core.bundle import SCHEMA_VERSION, Bundle, Table, Value, make_table, write_bundle
from profiler.core.errors import ConfigError, unknown
from profiler.core.load import read_mapping, read_text, sha256_of
from profiler.core.skew_fit import SkewFit
from profiler.core.types import Category

NAME = "LLMServingSim (meta.yaml with profiler_version and vllm_version)"

_DENSE = ("layer", "tokens", "time_us")
_SEQUENCES = ("layer", "sequences", "time_us")
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
_ATTENTION_BY_KERNEL = ("layer", "prefill_chunk", "prefill_key", "n_decode", "kv_decode", "decode_q_len", "time_us")
_MOE = ("tokens", "activated_experts", "time_us")
_MOE_BY_EP = ("ep", "tokens", "activated_experts", "time_us")
# Trailing columns of the later form that say how a row was measured.
_STAMPS = ("measurement_protocol", "measurement_sha256")
_KERNEL_TABLES: Mapping[str, Category] = {
    "attention": "attention",
    "indexer": "indexer",
    "sparse_attention": "sparse_attention",
}
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
        "moe.csv": ("moe", lambda file: _moe(file, topk)),
    }
    left_out = []
    by_ep = False
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
        attention = folder / "attention.csv"
        if attention.is_file():
            for category, rows in _attention(attention, lambda: _widest(meta)).items():
                tables[tp, category] = make_table(category, rows, str(attention))
            count = sum(len(tables[tp, category]) for category in _KERNEL_TABLES.values() if (tp, category) in tables)
            files[f"{folder.name}/attention.csv"] = {"sha256": sha256_of(attention), "rows": count}
        if (folder / "moe.csv").is_file():
            by_ep = by_ep or _header(folder / "moe.csv") == _MOE_BY_EP
        if (folder / "skew.csv").is_file():
            if _header(folder / "skew.csv") == _SKEW:
                skew[tp, "attention"] = _alphas(folder / "skew.csv")
            elif _header(folder / "skew.csv")[:1] == ("layer",):
                left_out.append(f"{folder.name}/skew.csv: corrections per kernel are not read")
            else:
                _refuse_header(folder / "skew.csv", _SKEW)
    if not tables:
        wanted = "tp<N>" if tps is None else " or ".join(f"tp{tp}" for tp in sorted(tps))
        raise ConfigError(f"{path}: no {wanted}/*.csv beside its meta.yaml")
    ours = dict(_meta(path, meta, files)) | {"left_out": left_out}
    if by_ep:
        del ours["moe_slices"]
    return Bundle(path, MappingProxyType(ours), MappingProxyType(tables), MappingProxyType(skew))


def convert(path: Path, out_root: Path, force: bool = False) -> tuple[Path, Mapping[tuple[int, Category], Table]]:
    """Writes the bundle folder `path` in our format below `out_root`; returns its folder and tables.

    The unequal batches of the old columns go with it, and the correction fitted to them. Raises ConfigError for a
    folder that this format does not recognise, or an existing bundle without `force`.
    """
    meta = read_mapping(path / "meta.yaml")
    if not recognises(meta):
        raise ConfigError(f"{path / 'meta.yaml'}: not a bundle of {NAME}")
    bundle = read(path, meta, None)
    tables, fits = dict(bundle.tables), {}
    for tp, kernel in bundle.skew:
        file = path / f"tp{tp}" / "skew.csv"
        tables[tp, "skew"] = make_table("skew", _unequal(file, kernel), str(file))
        points = bundle.skew[tp, kernel]
        counts = Counter((_count(at, row, "pc"), _count(at, row, "n")) for at, row in _rows(file, _SKEW))
        fits[tp] = [SkewFit(kernel, chunk, n, alpha, counts[chunk, n]) for chunk, n, alpha in points]
    written = {key: value for key, value in bundle.meta.items() if key != "files"}
    written["command"] = "python -m profiler import llmservingsim PATH"
    written["imported_from"] = {
        "package": "LLMServingSim",
        "version": str(meta["profiler_version"]),
        "licence": "MIT License, casys-kaist/LLMServingSim; columns renamed, no time changed",
        "files": {name: entry["sha256"] for name, entry in bundle.meta["files"].items()},
    }
    return write_bundle(out_root, written, tables, force=force, skew_fits=fits), tables


def _unequal(path: Path, kernel: str) -> list[Row]:
    """Rows of our `skew` table: nb of n decode requests are long, the others short."""
    found: dict[tuple[str, str], Row] = {}
    for at, row in _rows(path, _SKEW):
        n, long, chunk, context, short_kv, long_kv = (
            _count(at, row, name) for name in ("n", "nb", "pc", "kp", "kvs", "kv_big")
        )
        requests = [(1, long_kv - 1)] * long + [(1, short_kv - 1)] * (n - long)
        prefills, decodes = batch_text([*([(chunk, context)] if chunk else []), *requests])
        use = "joint" if chunk else "fit"
        found.setdefault((prefills, decodes), (kernel, prefills, decodes, use, row["t_skew_us"], _UNKNOWN))
    return list(found.values())


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


def _header(path: Path) -> tuple[str, ...]:
    """The names of a CSV's columns, without those that say how a row was measured."""
    found = tuple(next(csv.reader(io.StringIO(read_text(path))), []))
    return tuple(name for name in found if name not in _STAMPS)


def _refuse_header(path: Path, *headers: tuple[str, ...]) -> None:
    found = tuple(next(csv.reader(io.StringIO(read_text(path))), []))
    legal = " or ".join(",".join(header) for header in headers)
    raise ConfigError(f"{path}:1: the header is {','.join(found)}; this format has {legal}")


def _rows(path: Path, *headers: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """(file:line, row) of a CSV with exactly one of these headers, stamps aside."""
    if _header(path) not in headers:
        _refuse_header(path, *headers)
    lines = csv.reader(io.StringIO(read_text(path)), strict=True)
    header = next(lines)
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


def _attention(path: Path, widest: Callable[[], tuple[int, int | None]]) -> dict[Category, list[Row]]:
    """Rows by table. Kernel `attention` in the old columns, the row's own in the later ones."""
    found: dict[Category, list[Row]] = {}
    if _header(path) != _ATTENTION_BY_KERNEL:
        rows = found.setdefault("attention", [])
        for at, row in _rows(path, _ATTENTION, _ATTENTION_BY_KERNEL):
            chunk, context, requests, kv = (_count(at, row, name) for name in _ATTENTION[:4])
            rows.append(("attention", chunk, context, requests, kv, int(requests > 0), row["time_us"], _UNKNOWN))
        return found
    longest, cap = widest()
    for at, row in _rows(path, _ATTENTION_BY_KERNEL):
        name = row["layer"]
        if name not in _KERNEL_TABLES:
            raise ConfigError(f"{at}: {unknown('attention kernel', name, _KERNEL_TABLES)}")
        chunk, requests, kv, query = (
            _count(at, row, column) for column in ("prefill_chunk", "n_decode", "kv_decode", "decode_q_len")
        )
        query = query if requests else 0
        category = _KERNEL_TABLES[name]
        clip = cap if category == "sparse_attention" else None
        for context in _contexts(at, row, chunk, clip, longest):
            key = (name, chunk, context, requests, kv, query)
            found.setdefault(category, []).append((*key, row["time_us"], _UNKNOWN))
    return found


def _contexts(at: str, row: Mapping[str, str], chunk: int, cap: int | None, longest: int) -> tuple[int, ...]:
    """Cached tokens of a row: prefill_key less half the chunk; at the cap, the least that clips and the longest."""
    if not chunk:
        return (0,)
    try:
        keys = float(row["prefill_key"])
    except ValueError:
        raise ConfigError(f"{at}: prefill_key must be a number, found {row['prefill_key']!r}") from None
    context = max(0, round(keys - chunk / 2))
    if cap is None or keys < cap:
        return (context,)
    return (context, max(longest - chunk, context + 1))


def _widest(meta: Mapping[str, Any]) -> tuple[int, int | None]:
    """(longest context, cap on attended keys) of the model, in tokens."""
    from profiler.core.registry import load_model

    spec = load_model(str(meta["model"]))
    return spec.max_position, spec.indexer.attended_cap_tokens if spec.indexer else None


def _moe(path: Path, topk: Callable[[], int]) -> Iterator[Row]:
    """The later columns give the slice; a rank's pairs are then its even share."""
    experts_per_token = topk()
    for at, row in _rows(path, _MOE, _MOE_BY_EP):
        tokens = _count(at, row, "tokens")
        ep = _count(at, row, "ep") if "ep" in row else 1
        if ep < 1:
            raise ConfigError(f"{at}: ep must be an integer of at least 1, found {row['ep']!r}")
        yield "experts", ep, tokens, row["activated_experts"], tokens * experts_per_token / ep, row["time_us"], _UNKNOWN


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
