"""One system and model of AIConfigurator's tables as a bundle of module granularity."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from profiler.aiconfigurator import source
from profiler.aiconfigurator.attention import (
    CONTEXT_COLUMNS,
    GENERATION_COLUMNS,
    Cells,
    LeastTime,
    decode_cells,
    prefill_cells,
    table_rows,
)
from profiler.aiconfigurator.collectives import collective_rows, collectives_run
from profiler.aiconfigurator.experts import COLUMNS as EXPERT_COLUMNS
from profiler.aiconfigurator.experts import expert_rows
from profiler.aiconfigurator.gemm import COLUMNS as GEMM_COLUMNS
from profiler.aiconfigurator.gemm import Products
from profiler.core.bundle import SCHEMA_VERSION, Table, Value, make_table
from profiler.core.collective_table import CollectiveRow
from profiler.core.errors import ConfigError, CoverageError, unknown
from profiler.core.hardware import Hardware, load_hardware
from profiler.core.kv import kv_layout
from profiler.core.modules import fold_modules
from profiler.core.registry import load_model
from profiler.core.types import Category, Component, ModelSpec, Parallel
from profiler.kernels.dense import UNQUANTIZED, matrix
from profiler.module_work import module_flops
from profiler.sweep import rank_spec, work_of

if TYPE_CHECKING:
    import pandas as pd

# Our module -> (family of tables, context table, generation table, op_name suffix of its rows, timed eagerly).
_TABLES: Final = {
    "dsa_module": ("sparse_attention", "dsa", "", True),
    "dsa_shared_module": ("sparse_attention", "dsa", "_skip_indexer", True),
    "msa_module": ("msa", "msa", "", False),
    "mla_module": ("mla", "mla", "", False),
}
# Models that the tables name, with (hidden size, heads). Equal widths make equal modules.
_MEASURED: Final = {
    "deepseek-ai/DeepSeek-V3.2": (7168, 128),
    "deepseek-ai/DeepSeek-V3": (7168, 128),
    "zai-org/GLM-5-FP8": (6144, 64),
    "zai-org/GLM-5": (6144, 64),
    "zai-org/GLM-5.2-FP8": (6144, 64),
    "zai-org/GLM-5.2": (6144, 64),
    "MiniMaxAI/MiniMax-M3": (6144, 64),
}
_GEMM_DTYPE: Final = {"bf16": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4"}
# Components that are several small kernels, as many as their time in our own H200 tables is that of one.
_PASSES: Final = {"step_inputs": 11, "sampler": 8}
_ELEMENTWISE_TOKENS: Final = tuple(1 << power for power in range(16))
_SEQUENCES: Final = tuple(1 << power for power in range(11))

Tables = dict[tuple[int, Category], Table]


@dataclass(frozen=True, slots=True)
class Imported:
    """A bundle to be written, and the collectives of its hardware with what is said of them.

    changes: rows dropped or corrected, by reason; left_out: what has no table.
    """

    meta: Mapping[str, Any]
    tables: Tables
    collectives: tuple[CollectiveRow, ...]
    collectives_run: Mapping[str, Any]
    changes: Mapping[str, int]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What to import. version: None is the newest that has the model's attention modules; extend_context_tokens: see
    profiler.aiconfigurator.attention."""

    system: str
    model: str
    backend: str
    version: str | None = None
    tps: tuple[int, ...] = (1, 2, 4, 8)
    kv_dtype: str = "auto"
    extend_context_tokens: int | None = None


class _Import:
    """One import in progress: the tables that it has open, and what it counted."""

    def __init__(self, asked: Request, root: Path, model_config_root: Path | None) -> None:
        self.asked = asked
        self.spec = load_model(asked.model, model_config_root) if model_config_root else load_model(asked.model)
        if asked.backend not in source.BACKENDS:
            raise unknown("back end", asked.backend, source.BACKENDS)
        self.system = source.load_system(root, asked.system)
        self.card: Hardware = load_hardware(asked.system)
        self.changes: Counter[str] = Counter()
        self.versions: dict[str, str] = {}
        self.left_out: list[str] = []
        self.computed: list[str] = []
        self.weights = self.spec.quantization.weights
        self.frames: dict[Path, pd.DataFrame] = {}
        self.products: dict[str, Products] = {}

    def frame(self, path: Path, needed: Sequence[str]) -> "pd.DataFrame":
        if path not in self.frames:
            self.frames[path] = source.read(path, needed)
        return self.frames[path]

    def first(
        self,
        family: str,
        table: str,
        needed: Sequence[str],
        rows: "Callable[[pd.DataFrame, Path], pd.DataFrame]",
        exact: bool = False,
    ) -> "tuple[pd.DataFrame, Path]":
        """The rows of the first version of a table that has some. Raises CoverageError of the first one tried."""
        wanted = self.asked.version or self.versions.get("module")
        missing: CoverageError | None = None
        for found in source.candidates(self.system, family, self.asked.backend, table, wanted, exact and bool(wanted)):
            try:
                chosen = rows(self.frame(found.path, needed), found.path)
            except CoverageError as error:
                missing = missing or error
                continue
            self.versions[table] = found.version
            return chosen, found.path
        assert missing is not None
        raise missing


def convert(asked: Request, root: Path, model_config_root: Path | None = None) -> Imported:
    """Reads the tables of `asked` under `root` (profiler.aiconfigurator.source.systems_root).

    Our sizes of KV caches and weights are our own, never the tables'. Raises ConfigError (unknown system, back end or
    model, missing columns) and CoverageError (no such table, version, dtype or head count; what exists is listed).
    """
    job = _Import(asked, root, model_config_root)
    tables: Tables = {}
    components = [component for component, _ in fold_modules(job.spec).components]
    components.sort(key=lambda one: one.name not in _TABLES)  # the modules decide on the version
    tps = _legal_tps(job)
    for tp in tps:
        rank = rank_spec(job.spec, tp)
        attention = [row for one in components if one.category == "attention" for row in _attention(job, rank, one, tp)]
        tables[tp, "attention"] = make_table("attention", attention, f"{asked.system} attention tp {tp}")
        dense, sequences = _token_rows(job, rank, components)
        tables[tp, "dense"] = make_table("dense", dense, f"{asked.system} dense tp {tp}")
        tables[tp, "per_sequence"] = make_table("per_sequence", sequences, f"{asked.system} per_sequence tp {tp}")
        if job.spec.moe is not None and (rows := _experts(job, tp)):
            tables[tp, "moe"] = make_table("moe", rows, f"{asked.system} moe tp {tp}")
    collectives, used = collective_rows(job.system, asked.backend, job.versions.get("module", ""))
    meta = _meta(job, tps, used)
    return Imported(
        meta=meta,
        tables=tables,
        collectives=tuple(collectives),
        collectives_run=collectives_run(collectives, meta, used),
        changes=dict(sorted(job.changes.items())),
        left_out=tuple(dict.fromkeys(job.left_out)),
    )


def _legal_tps(job: _Import) -> tuple[int, ...]:
    """The tensor-parallel degrees that the model allows. Raises ConfigError when none does."""
    legal, reasons = [], []
    for tp in job.asked.tps:
        try:
            rank_spec(job.spec, tp)
            legal.append(tp)
        except ConfigError as error:
            reasons.append(str(error))
    if not legal:
        raise ConfigError("; ".join(reasons))
    job.left_out += reasons
    return tuple(legal)


def _attention(job: _Import, rank: ModelSpec, one: Component, tp: int) -> list[tuple[Value, ...]]:
    if one.name in _TABLES:
        cells = _module_cells(job, rank, one.name)
    elif one.name == "attention" and rank.gqa is not None:
        cells = _plain_cells(job, rank)
    else:
        raise CoverageError(f"AIConfigurator has no table for the component {one.name} of {job.spec.name}")
    return list(table_rows(one.name, cells))


def _module_cells(job: _Import, rank: ModelSpec, name: str) -> Cells:
    family, prefix, suffix, eager = _TABLES[name]
    wanted = {"kv_cache_dtype": _kv_rows(job), "gemm_type": _gemm_type(job), "num_heads": rank.num_heads}

    def rows(frame: "pd.DataFrame", path: Path) -> "pd.DataFrame":
        return _of_model(job, source.choose(_of_op(frame, path, suffix), path, **wanted))

    context, _ = job.first(family, f"{prefix}_context_module", (*CONTEXT_COLUMNS, "gemm_type"), rows, exact=True)
    job.versions.setdefault("module", job.versions[f"{prefix}_context_module"])
    generation, _ = job.first(
        family, f"{prefix}_generation_module", (*GENERATION_COLUMNS, "gemm_type"), rows, exact=True
    )
    changes: Counter[str] = Counter()
    decode = decode_cells(generation, changes)
    peak = job.card.bf16_tflops * 1e6
    prompts = {
        (int(isl), int(step)) for isl, step in zip(context["isl"].tolist(), context["step"].tolist(), strict=True)
    }
    least = {cell: module_flops(rank, name, (*cell, 0, 0, 0), job.weights) / peak for cell in prompts if cell[0] > 1}
    prefill = prefill_cells(
        context,
        decode,
        changes,
        eager=eager,
        least_us=LeastTime(least),
        extend_context_tokens=job.asked.extend_context_tokens,
    )
    job.changes.update(changes)
    return Cells(prefill, decode)


def _plain_cells(job: _Import, rank: ModelSpec) -> Cells:
    """Grouped-query attention over every key: the kernel alone."""
    assert rank.gqa is not None
    wanted = {
        "head_dim": rank.gqa.head_dim,
        "kv_cache_dtype": _kv_rows(job),
        "num_heads": rank.num_heads,
        "num_key_value_heads": rank.gqa.num_kv_heads,
    }

    def rows(frame: "pd.DataFrame", path: Path) -> "pd.DataFrame":
        return source.choose(_full_window(frame), path, **wanted)

    needed = ("head_dim", "num_key_value_heads")
    context, _ = job.first("attention", "context_attention", (*CONTEXT_COLUMNS, *needed), rows)
    job.versions.setdefault("module", job.versions["context_attention"])
    generation, _ = job.first("attention", "generation_attention", (*GENERATION_COLUMNS, *needed), rows)
    changes: Counter[str] = Counter()
    decode = decode_cells(generation, changes)
    prefill = prefill_cells(
        context,
        decode,
        changes,
        eager=False,
        least_us=LeastTime(),
        extend_context_tokens=job.asked.extend_context_tokens,
    )
    job.changes.update(changes)
    return Cells(prefill, decode)


def _full_window(frame: "pd.DataFrame") -> "pd.DataFrame":
    return frame[frame["window_size"] == 0] if "window_size" in frame.columns else frame


def _of_op(frame: "pd.DataFrame", path: Path, suffix: str) -> "pd.DataFrame":
    """Rows of modules with an indexer of their own, or of those that reuse a selection."""
    if "op_name" not in frame.columns:
        if suffix:
            raise CoverageError(f"{path}: has no column op_name, so no rows of layers that reuse a selection")
        return frame
    skips = frame["op_name"].astype(str).str.endswith("_skip_indexer")
    rows = frame[skips] if suffix else frame[~skips]
    if rows.empty:
        raise CoverageError(f"{path}: no rows of layers that {'reuse a selection' if suffix else 'select'}")
    return rows


def _of_model(job: _Import, frame: "pd.DataFrame") -> "pd.DataFrame":
    """Rows of the model itself, else of one with the same widths."""
    if "model" not in frame.columns:
        return frame
    spec = job.spec
    named = list(dict.fromkeys(frame["model"].tolist()))
    same = [name for name in named if _MEASURED.get(name) == (spec.hidden, spec.num_heads)]
    chosen = spec.name if spec.name in named else same[0] if same else None
    if chosen is None:
        raise CoverageError(
            f"{job.asked.system} {job.asked.backend}: no rows of a model with hidden size {spec.hidden} and "
            f"{spec.num_heads} heads like {spec.name}; measured: {', '.join(map(str, named))}"
        )
    # Whole models whose rows were measured under this name have their own heads per rank.
    return frame[frame["model"] == chosen]


def _gemm_type(job: _Import) -> str:
    quantization = job.spec.quantization
    name = _GEMM_DTYPE.get(quantization.weights)
    if name is None:
        raise CoverageError(f"AIConfigurator has no {quantization.weights} products; it has bf16, fp8 and nvfp4")
    return "fp8_block" if name == "fp8" and quantization.block else name


def _kv_rows(job: _Import) -> str:
    """The tables' name for the cache's elements."""
    layout = kv_layout(job.spec, Parallel(), job.card.architecture, job.asked.kv_dtype).layout
    return "bfloat16" if layout == "bf16" else "fp8"


def _token_rows(
    job: _Import, rank: ModelSpec, components: Sequence[Component]
) -> tuple[list[tuple[Value, ...]], list[tuple[Value, ...]]]:
    """Rows of `dense` and of `per_sequence`: products from their table, elementwise kernels by the package's rule."""

    def product(dtype: str) -> Products:
        if dtype not in job.products:
            rows, path = job.first(
                "gemm", "gemm", GEMM_COLUMNS, lambda frame, path: source.choose(frame, path, gemm_dtype=dtype)
            )
            job.products[dtype] = Products(rows, path)
        return job.products[dtype]

    dense: list[tuple[Value, ...]] = []
    sequences: list[tuple[Value, ...]] = []
    for one in components:
        if one.category not in ("dense", "per_sequence"):
            continue
        rows = dense if one.category == "dense" else sequences
        shape = (1, rank.hidden, rank.vocab) if one.name == "lm_head" else matrix(rank, one.name)
        if shape is not None:
            curve = product("bfloat16").curve(shape[2], shape[1])
            if _gemm_type(job) != "bfloat16" and one.name not in UNQUANTIZED and one.name != "lm_head":
                bound = {m: us + job.system.small_kernel_us for m, us in curve.items()}
                curve = _bounded(product(_gemm_type(job)).curve(shape[2], shape[1]), bound, job.changes)
            rows += [(one.name, m, shape[0] * us, "") for m, us in curve.items()]
            continue
        points = _ELEMENTWISE_TOKENS if one.category == "dense" else _SEQUENCES
        for count in points:
            work = work_of(rank, one.category, one.name, (count,), job.weights)
            if work is None:
                job.left_out.append(f"{one.name}: no table and no known amount of work")
                break
            us = job.system.small_kernel_us + work.bytes / job.system.hbm_bytes_per_us
            rows.append((one.name, count, _PASSES.get(one.name, 1) * us, ""))
        else:
            job.computed.append(one.name)
    return dense, sequences


def _bounded(quantised: Mapping[int, float], bounds: Mapping[int, float], changes: Counter[str]) -> dict[int, float]:
    """Products of quantised weights, no slower than in bf16 after one small kernel that quantises the input.

    Block-scaled products were timed with their launches (58 us on H200, 180 to 270 on B200, whatever the shape), bf16
    ones in a CUDA graph. Half the bytes at twice the rate cannot take longer.
    """
    changes["product_at_launch_floor"] += sum(us > bounds.get(rows, us) for rows, us in quantised.items())
    return {rows: min(us, bounds.get(rows, us)) for rows, us in quantised.items()}


def _experts(job: _Import, tp: int) -> list[tuple[Value, ...]]:
    moe = job.spec.moe
    assert moe is not None
    wanted = {"moe_dtype": _gemm_type(job), "num_experts": moe.num_experts, "topk": moe.topk}
    rows, _ = job.first("moe", "moe", EXPERT_COLUMNS, lambda frame, path: source.choose(frame, path, **wanted))
    changes: Counter[str] = Counter()
    found = expert_rows(rows, moe, job.spec.hidden, tp, changes)
    if not found:
        job.left_out.append(f"experts at tp {tp}: no rows of {moe.num_experts} experts of width {moe.intermediate}")
    job.changes.update(changes)
    return list(found)


def _meta(job: _Import, tps: Sequence[int], used: Mapping[str, str]) -> Mapping[str, Any]:
    asked, spec = job.asked, job.spec
    layout = kv_layout(spec, Parallel(tp=tps[0]), job.card.architecture, asked.kv_dtype)
    version = job.versions.get("module", "unknown")
    variant = f"{job.weights}-aic-{asked.backend}-{version}"
    if asked.kv_dtype != "auto":
        variant += f"-kv{layout.layout}"
    command = (
        f"python -m profiler import aiconfigurator --system {asked.system} --model {spec.name} "
        f"--backend {asked.backend} --version {version} --tp {','.join(map(str, tps))}"
    )
    if asked.kv_dtype != "auto":
        command += f" --kv-cache-dtype {asked.kv_dtype}"
    if asked.extend_context_tokens:
        command += f" --extend-context {asked.extend_context_tokens}"
    return {
        "schema_version": SCHEMA_VERSION,
        "provenance": "imported",
        "granularity": "module",
        "hardware": job.card.name,
        "gpu": {"name": asked.system},
        "engine": {"name": asked.backend, "versions": {asked.backend: version}},
        "model": spec.name,
        "model_config_sha256": None,
        "variant": variant,
        "weights": job.weights,
        "kv": {
            "layout": layout.layout,
            "block_tokens": layout.block_tokens,
            "caches": [
                {"name": cache.name, "bytes_per_token_layer": cache.bytes_per_token_layer} for cache in layout.caches
            ],
        },
        "contract": "serving",
        "attended_cap_tokens": spec.indexer.attended_cap_tokens if spec.indexer else None,
        "protocol": {
            "statistic": "as collected for AIConfigurator: one time per shape, constant inputs, no spread",
            "prefill": "without a CUDA graph for DSA modules, in one for the others",
            "decode": "in a CUDA graph",
        },
        "grid": {f"tp{tp}/attention": {"name": "AIConfigurator"} for tp in tps},
        "measured_at": None,
        "command": command,
        "imported_from": {
            "package": source.PACKAGE,
            "version": source.PACKAGE_VERSION,
            "licence": source.LICENCE,
            "system": asked.system,
            "tables": {**{k: v for k, v in sorted(job.versions.items()) if k != "module"}, **used},
        },
        "changes": dict(sorted(job.changes.items())),
        "computed": sorted(set(job.computed)),
        "left_out": list(dict.fromkeys(job.left_out)),
    }
