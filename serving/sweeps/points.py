"""The points of a sweep: what can run, and what was refused and why."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from profiler.core.errors import CapacityError, ConfigError, CoverageError, SparsightError
from profiler.core.hardware import Hardware, load_hardware
from profiler.core.load import sha256_of
from profiler.core.registry import load_model
from profiler.core.shard import broken_rules, describe, is_launchable
from profiler.core.types import ModelSpec, Parallel
from serving.config import Cluster, EngineSettings, Instance
from serving.placement import MAX_GPUS, Placement, place, splits
from serving.sweeps.slo import Slo
from serving.sweeps.spec import LimitSet, Sweep

Kind = Literal["illegal", "not launchable", "capacity", "coverage", "left out", "contract", "input"]


@dataclass(frozen=True, slots=True)
class Layout:
    """One instance: a model on a split of GPUs with its settings."""

    model: str
    hardware: str
    parallel: Parallel
    kv_dtype: str
    utilization: float
    limits: LimitSet

    @property
    def gpus(self) -> int:
        return self.parallel.gpus

    @property
    def name(self) -> str:
        """Unique among layouts."""
        return f"{self.model} on {self.hardware}, {self.label}, utilization {self.utilization:g}"

    @property
    def label(self) -> str:
        """Short and unique among layouts of one model and GPU that differ in what people compare."""
        limits = self.limits
        parts = [describe(self.parallel)]
        parts += [f"kv {self.kv_dtype}"] if self.kv_dtype != "auto" else []
        parts += [f"seqs {limits.max_num_seqs}"] if limits.max_num_seqs else []
        parts += [f"batched {limits.max_num_batched_tokens}"] if limits.max_num_batched_tokens else []
        parts += [f"len {limits.max_model_len}"] if limits.max_model_len else []
        return ", ".join(parts)

    def columns(self) -> dict[str, Any]:
        """The layout's part of a result row."""
        split, limits = self.parallel, self.limits
        return {
            "model": self.model, "hardware": self.hardware, "gpus": self.gpus, "tp": split.tp, "pp": split.pp,
            "dp": split.dp, "ep": split.ep, "kv_dtype": self.kv_dtype, "utilization": self.utilization,
            "max_model_len": limits.max_model_len, "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_num_seqs": limits.max_num_seqs,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that may run: its memory, and what the planner says of it."""

    layout: Layout
    placement: Placement


@dataclass(frozen=True, slots=True)
class Refused:
    """A layout that does not run. kind: of the reason; suggestion: what would change it, where that is known."""

    layout: Layout
    kind: Kind
    reason: str
    suggestion: str | None = None
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One replay, ready to be sent to a worker. rate_per_s 0: all at once; steps: keep a step's parts.

    concurrency: most requests in flight, as of so many clients that wait, with a rate of 0; None for any number.
    """

    layout: Layout
    replicas: int
    router: str
    workload: Path
    workload_sha256: str
    requests: int
    rate_per_s: float
    seed: int
    slo: Slo | None
    bundle_root: Path
    allow_extrapolation: bool
    allow_projected: bool = False
    steps: bool = False
    concurrency: int | None = None

    @property
    def key(self) -> str:
        """Equal for equal points: 16 hexadecimal digits of everything that the result depends on. Without a concurrency
        it is that of results from before there was one."""
        left_out = ("workload", "bundle_root", "steps", *(("concurrency",) if self.concurrency is None else ()))
        content = {name: value for name, value in asdict(self).items() if name not in left_out}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def cluster(self) -> Cluster:
        layout = self.layout
        engine = EngineSettings(
            max_model_len_tokens=layout.limits.max_model_len,
            max_num_batched_tokens=layout.limits.max_num_batched_tokens,
            max_num_seqs=layout.limits.max_num_seqs,
            long_prefill_threshold_tokens=0,
            chunked_prefill=True,
            prefix_caching=True,
            policy="fcfs",
            kv_cache_dtype=layout.kv_dtype,
            block_tokens=None,
            gpu_memory_utilization=layout.utilization,
            num_gpu_blocks=None,
            available_kv_gib=None,
        )
        instance = Instance(layout.model, layout.hardware, None, layout.parallel, engine)
        return Cluster(layout.label, self.router, (instance,) * self.replicas)


def layouts(sweep: Sweep) -> Iterator[Candidate | Refused]:
    """Every layout of a sweep: one that fits and may be launched, or a refusal with its reason.

    Raises ConfigError for an unknown model, GPU or KV dtype, and for limits that no layout of a model takes.
    """
    specs = {name: load_model(name) for name in sweep.models}
    cards = {name: load_hardware(name) for name in sweep.hardware}
    if too_many := [gpus for gpus in sweep.gpus if gpus > MAX_GPUS]:
        raise ConfigError(f"gpus is {too_many[0]}; it must be at most {MAX_GPUS}")
    named = {id(spec): name for name, spec in specs.items()}
    for spec, card, gpus, kv_dtype, utilization, limits in product(
        specs.values(), cards.values(), sweep.gpus, sweep.kv_dtypes, sweep.utilizations, sweep.limits
    ):
        for split in _splits(sweep, spec, gpus):
            layout = Layout(named[id(spec)], card.name, split, kv_dtype, utilization, limits)
            yield judge_layout(
                layout,
                spec,
                card,
                not_launchable=sweep.placements == "all",
                pipelines=sweep.pipelines or sweep.mode == "screen",
            )


def _splits(sweep: Sweep, spec: ModelSpec, gpus: int) -> Iterator[Parallel]:
    if isinstance(sweep.placements, str):
        yield from splits(spec, gpus)
    else:
        yield from (split for split in sweep.placements if split.gpus == gpus)


def judge_layout(
    layout: Layout, spec: ModelSpec, card: Hardware, *, not_launchable: bool = False, pipelines: bool = True
) -> Candidate | Refused:
    """Whether a layout may run. not_launchable: take splits that vLLM does not offer, too. pipelines: and
    splits with pipeline stages."""
    if rules := broken_rules(spec, layout.parallel):
        return Refused(layout, "illegal", "; ".join(rules))
    try:
        placed = place(
            spec,
            card,
            layout.parallel,
            max_model_len=layout.limits.max_model_len or spec.max_position,
            kv_dtype=layout.kv_dtype,
            utilization=layout.utilization,
            max_num_batched_tokens=layout.limits.max_num_batched_tokens,
            max_num_seqs=layout.limits.max_num_seqs,
        )
    except ConfigError as error:
        return Refused(layout, "input", str(error))
    if not placed.budget.fits:
        return Refused(layout, "capacity", placed.reason, placed.suggestion, placed)
    if not is_launchable(layout.parallel) and not not_launchable:
        return Refused(layout, "not launchable", "vLLM does not offer this split", None, placed)
    if not pipelines and layout.parallel.pp > 1:
        return Refused(
            layout, "left out", "pipeline stages are replayed only where asked for (pipelines)", None, placed
        )
    return Candidate(layout, placed)


def kind_of(error: SparsightError) -> Kind:
    """The kind of a refusal that a replay ended with."""
    if isinstance(error, CoverageError):
        return "coverage"
    if isinstance(error, CapacityError):
        return "capacity"
    return "input" if isinstance(error, ConfigError) else "contract"


def jobs(sweep: Sweep, candidates: list[Candidate]) -> list[Job]:
    """The replays of a sweep, layout by layout, by rate or concurrency; the last of each keeps a step's parts."""
    assert sweep.workload is not None
    sha256 = sha256_of(sweep.workload)
    loads: list[tuple[float, int | None]] = [(rate, None) for rate in sorted(sweep.rates_per_s)]
    loads += [(0.0, concurrency) for concurrency in sorted(sweep.concurrencies)]
    made = []
    for candidate, replicas in product(candidates, sweep.replicas):
        points = [
            Job(
                candidate.layout, replicas, sweep.router, sweep.workload, sha256, sweep.requests, rate, seed, sweep.slo,
                sweep.bundle_root, sweep.allow_extrapolation,
                sweep.allow_projected, concurrency=concurrency,
            )
            for (rate, concurrency), seed in product(loads, sweep.seeds)
        ]  # fmt: skip
        made += [*points[:-1], *(replace(last, steps=True) for last in points[-1:])]
    return made


def memory_columns(placement: Placement | None) -> dict[str, Any]:
    """The planner's part of a result row; empty cells where no budget could be made."""
    names = ("weights_gib", "kv_available_gib", "num_gpu_blocks", "kv_tokens_total", "max_concurrency", "risk")
    if placement is None:
        return dict.fromkeys((*names, "launchable"))
    budget = placement.budget
    values = (
        round(placement.weights_gib, 4), round(budget.kv_available_gib, 4), budget.num_gpu_blocks,
        placement.kv_tokens_total, round(budget.max_concurrency, 4), budget.risk,
    )  # fmt: skip
    return dict(zip(names, values, strict=True)) | {"launchable": placement.launchable}
