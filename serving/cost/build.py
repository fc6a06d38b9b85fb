"""From a bundle and a split to the StepCost of one data-parallel group."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from profiler.core.bundle import Bundle
from profiler.core.collective_table import FILE, CollectiveRow, read_collectives
from profiler.core.errors import ConfigError, ContractError, CoverageError
from profiler.core.grid import Curve, Outside, batch_rows, curve, fixed_us
from profiler.core.grid_mixed import mixed_grid
from profiler.core.grid_moe import moe_grid
from profiler.core.hardware import Hardware
from profiler.core.kv import KvLayout
from profiler.core.modules import fold_for
from profiler.core.registry import family
from profiler.core.shard import moe_tensor_parallel, stage_layers
from profiler.core.siblings import longest_of
from profiler.core.types import Category, Component, ModelSpec, Parallel
from profiler.core.unequal import forms_of, make_skew
from profiler.core.wider_experts import degrees_of, wider_from, wider_table
from profiler.kernels._beside import beside_of
from profiler.kernels._placement import decode_lookup, prefill_lookup, ran_of, steps_of
from profiler.kernels._unequal import captured_of, launch_of, sharing_of
from serving.backends import DEFAULT, sends
from serving.collectives import Collectives, from_hardware
from serving.cost.communication import Communication, group_lines
from serving.cost.experts import Experts, expert_lines
from serving.cost.kernels import Kernel, PrefillWhen
from serving.cost.lines import Line
from serving.cost.padded import PaddedExperts, own_rows
from serving.cost.pipeline import PipelineCost, stage_sends
from serving.cost.step import DensePrefill, TableCost
from serving.cost.tokens import Folded, curve_lines
from serving.routing import BusiestRank, ExpertLoad, own_reach

# Architectures whose sparse MLA back ends have no dense prefill kernel (vLLM 0.31, FlashInfer for SM120).
_WITHOUT_DENSE_PREFILL = ("sm120",)
_INPUT_NORMS = ("input_norm", "layernorm")


class Stage(NamedTuple):
    """One pipeline stage: its layers as a model of their own, and whether the embedding and the head are here.

    norms: norms of a layer's input that it runs beyond its layers' own.
    """

    spec: ModelSpec
    first: bool
    last: bool
    norms: int = 0

    def counts(self, bundle: Bundle) -> dict[Component, int]:
        """The components that the stage runs in one pass, with their counts."""
        model = family(self.spec.family)
        counts = Counter(dict(fold_for(self.spec, bundle.meta).components))
        if not self.first:
            counts.subtract(model.prologue_components(self.spec))
        if not self.last:
            counts.subtract(model.head_components(self.spec))
        if self.norms:
            counts[next(one for one in counts if one.name in _INPUT_NORMS)] += self.norms
        return {one: count for one, count in counts.items() if count}


def pipeline_stages(spec: ModelSpec, parallel: Parallel) -> tuple[Stage, ...]:
    """The stages of a split, as profiler.core.shard.stage_layers cuts the layers."""
    cuts = stage_layers(spec, parallel)
    last = len(cuts) - 1
    return tuple(
        Stage(replace(spec, layers=tuple(spec.layers[i] for i in layers)), at == 0, at == last)
        for at, layers in enumerate(cuts)
    )


def build_cost(
    *,
    bundle: Bundle,
    spec: ModelSpec,
    parallel: Parallel,
    hardware: Hardware | None,
    max_num_batched_tokens: int,
    kv: KvLayout | None = None,
    collectives: Collectives | None = None,
    capture_sizes: Sequence[int] = (),
    prefills_in_graphs: bool = True,
    host_us: float = 0.0,
    host_overlaps: bool = False,
    step_us: float = 0.0,
    step_source: str = "stated",
    routing: ExpertLoad | None = None,
    all2all_backend: str = DEFAULT,
    allow_extrapolation: bool = False,
    stage: Stage | None = None,
    decode_query_tokens: int = 1,
    dummy_tokens: int = 1,
    dense_prefill: bool = True,
    more_by_tokens: Callable[[int], list[Line]] | None = None,
    captured_keys: int = 0,
) -> TableCost:
    """The StepCost of one group of `parallel.dp` engines, or of one of its pipeline stages.

    bundle: tables of `spec` at parallel.tp. hardware may be None where a cluster file brings its own link numbers as
    `collectives`; else the collectives come from its links. kv: the run's layout, compared with the bundle's.
    max_num_batched_tokens: the token budget of a step; dense tables that end below it are refused at once.
    capture_sizes: CUDA-graph sizes (serving.cost.default_capture_sizes), empty for eager; without prefills_in_graphs
    only steps of decodes alone are padded to them. host_us: host time per step, as stated by the caller; where
    `host_overlaps` (asynchronous scheduling) only what it exceeds the device's time by counts. step_us: device time
    per step that the tables do not contain; step_source says where it is from.
    routing: what the busiest expert-parallel rank gets, None for an even load. all2all_backend: see serving.backends.
    decode_query_tokens: query tokens of every decode request; tables need rows of that many. dummy_tokens: of a rank
    without work. dense_prefill: as the engine of the tables does where it attends short prompts densely; without, every
    prefill runs on the sparse path. more_by_tokens: further lines by the tokens of a rank.
    captured_keys: the most keys of a request where the engine captures whole decode steps, 0 where it does not; kernels
    that divide their work by these are then priced so.

    Raises ContractError when the bundle is not meant for serving or its KV layout or cap disagrees, CoverageError when
    a table or kernel is missing, ConfigError for a split that is not priced.
    """
    _check_contract(bundle, spec, kv)
    if stage is None:
        if parallel.pp > 1:
            raise ConfigError(f"pp {parallel.pp}: pipeline stages are priced one by one")
        stage = Stage(spec, True, True)
    _check_split(spec, parallel)
    captured = (max(capture_sizes), captured_keys) if capture_sizes and captured_keys else (0, 0)
    build = _Builder(bundle, spec, parallel, allow_extrapolation, decode_query_tokens, captured)
    counts = stage.counts(bundle)
    if bundle.meta.get("dense_prefill") == "never" or not dense_prefill:
        # Every prefill on the sparse path: of a bundle that says so no table has another.
        counts = {one: count for one, count in counts.items() if one.when != "prefill_dense"}
    if collectives is None and parallel.gpus > 1:
        collectives = _own_collectives(hardware, bundle)
    provenance = str(bundle.meta["provenance"])
    every_token = {one: count for one, count in counts.items() if one.when != "prefill_sparse"}
    sparse_tokens = {one: count for one, count in counts.items() if one.when == "prefill_sparse"}
    dense = build.curves("dense", every_token)
    sparse = curve_lines(build.curves("dense", sparse_tokens), provenance)
    sequences = build.curves("per_sequence", counts)
    experts = build.experts(counts, routing.busiest if routing and parallel.ep > 1 else None)
    kernels = build.kernels(counts)
    rows = own_rows(spec, parallel, str(bundle.meta["engine"].get("name")))
    padded_experts = None if rows is None else PaddedExperts(Folded(expert_lines(experts), build.outside), rows)
    group = [expert_lines(experts)] if padded_experts is None else []
    parts = [curve_lines(dense, provenance)], [curve_lines(sequences, provenance)], group
    if more_by_tokens is not None:
        parts[0].append(more_by_tokens)
    if collectives is not None:
        sent = sends(all2all_backend)
        if sent != "gather" and parallel.ep == 1 and parallel.dp > 1:
            raise ConfigError(f"all2all_backend {all2all_backend} sends tokens to whole experts, and ep 1 divides them")
        reach = _reach(spec, parallel, routing) if sent == "per_rank" else 1.0
        between = spread(collectives, parallel)
        comm = Communication(stage.spec, parallel, collectives, sent, reach, stage.first, stage.last, between)
        for part, lines in zip(parts, (comm.tensor_lines, comm.head_lines, comm.expert_lines), strict=True):
            part.append(lines)
    by_tokens, by_sequences, by_group = (Folded(group_lines(*part), build.outside) for part in parts)
    cost = TableCost(
        by_tokens=by_tokens,
        by_sparse_tokens=Folded(sparse, build.outside),
        by_sequences=by_sequences,
        by_group_tokens=by_group,
        kernels=kernels,
        dense_prefill=_dense_prefill(spec, parallel.tp, kernels, hardware, bundle),
        capture_sizes=tuple(sorted(capture_sizes)),
        prefills_in_graphs=prefills_in_graphs,
        host_us=host_us,
        host_overlaps=host_overlaps,
        step_us=step_us,
        step_source=step_source,
        outside=tuple(build.outside),
        dummy_tokens=dummy_tokens,
        padded_experts=padded_experts,
    )
    if not allow_extrapolation:
        cost.by_tokens.ns(max_num_batched_tokens)
    return cost


def build_pipeline(
    *,
    bundle: Bundle,
    spec: ModelSpec,
    parallel: Parallel,
    hardware: Hardware | None,
    collectives: Collectives | None = None,
    **rest: Any,
) -> PipelineCost:
    """The cost of one group of `parallel.dp` engines of parallel.pp stages. rest: as build_cost, which every stage is
    built with."""
    if collectives is None:
        collectives = _own_collectives(hardware, bundle)
    stages = tuple(
        build_cost(
            bundle=bundle,
            spec=spec,
            parallel=parallel,
            hardware=hardware,
            collectives=collectives,
            stage=stage,
            **rest,
        )
        for stage in pipeline_stages(spec, parallel)
    )
    return PipelineCost(stages, stage_sends(spec, parallel, collectives))


def priced_from(bundle: Bundle, parallel: Parallel) -> str:
    """The provenance of what prices a split: the bundle's, and where its experts are derived from other degrees."""
    provenance = str(bundle.meta["provenance"])
    table = bundle.tables.get((moe_tensor_parallel(parallel), "moe"))
    if table is None or bundle.meta.get("moe_slices") == "any":
        return provenance
    found = dict.fromkeys(wider_from(degrees_of(table, name), parallel.ep) for name in table.names)
    derived = [f", experts of ep {parallel.ep} projected from ep {one[0]} and {one[1]}" for one in found if one]
    return provenance + "".join(derived)


def _own_collectives(hardware: Hardware | None, bundle: Bundle) -> Collectives:
    if hardware is None:
        raise ConfigError("more than one GPU needs a hardware file or link numbers in the cluster file")
    return from_hardware(hardware, _measured_collectives(bundle))


class _Builder:
    """Turns the tables of one bundle into curves and grids, collecting what each does outside its bounds."""

    def __init__(
        self,
        bundle: Bundle,
        spec: ModelSpec,
        parallel: Parallel,
        allow_extrapolation: bool,
        query_tokens: int,
        captured: tuple[int, int] = (0, 0),
    ) -> None:
        self.bundle = bundle
        self.spec = spec
        self.parallel = parallel
        self.query_tokens = query_tokens
        self.captured = captured  # tokens of the largest whole captured decode step, keys that it was captured for
        self.provenance = str(bundle.meta["provenance"])
        self.ran = ran_of(bundle.meta, spec, parallel.tp)
        self.outside: list[Outside] = []
        self._allow = allow_extrapolation
        owner = str(bundle.meta["model"])
        self._longest = None if owner == spec.name else longest_of(owner)
        self._own = bundle.profile_command(parallel.tp, model=spec.name)

    def _beyond(self, name: str, tp: int, category: Category) -> Outside:
        command = self.bundle.profile_command(tp, category)
        self.outside.append(Outside(name, command, self._allow, longest_tokens=self._longest, instead=self._own))
        return self.outside[-1]

    def curves(self, category: Category, counts: Mapping[Component, int]) -> list[tuple[str, int, Curve]]:
        table = self.bundle.table(self.parallel.tp, category)
        return [
            (one.name, count, curve(table, one.name, self._beyond(one.name, self.parallel.tp, category)))
            for one, count in counts.items()
            if one.category == category
        ]

    def kernels(self, counts: Mapping[Component, int]) -> tuple[Kernel, ...]:
        attention_like = ("attention", "indexer", "sparse_attention")
        return tuple(self._kernel(one, count) for one, count in counts.items() if one.category in attention_like)

    def _kernel(self, one: Component, count: int) -> Kernel:
        tp = self.parallel.tp
        outside = self._beyond(one.name, tp, one.category)
        rows = batch_rows(self.bundle.table(tp, one.category), one.name, self.query_tokens)
        if self.query_tokens > 1 and one.when in ("always", "decode") and not any(row.requests for row in rows):
            raise CoverageError(
                f"{self.bundle.path}: tp{tp}/{one.category}.csv has no decode rows of {one.name} with "
                f"decode_query_tokens {self.query_tokens}, which verify {self.query_tokens - 1} draft tokens; "
                "no profile command runs such batches yet. verify_as: rows or prefill in the cluster file prices them "
                "from rows that are there, and the result says so"
            )
        prefill = prefill_lookup(rows, one.name, self.spec, self.ran, outside) if one.when != "decode" else None
        decode = decode_lookup(rows, one.name, self.ran, outside) if one.when in ("always", "decode") else None
        steps, forms = steps_of(self.spec, one.name), forms_of(self.bundle.meta, tp, one.name)
        # Bundles without a choice of forms have no correction of kernels that read capped lengths.
        skewed = self.query_tokens == 1 and (forms.decode is not None or not self._cap_tokens(one))
        fixed = fixed_us(prefill, steps) if prefill else 0.0
        beside = launch = None
        if forms.joint and prefill and decode and self.query_tokens == 1:
            if forms.joint == "beside":
                beside = beside_of(rows, one.name, self.spec, self.ran, outside, forms.prefills == "together")
            if forms.joint == "launch":
                launch = launch_of(one.name, self.ran, prefill, fixed)
        return Kernel(
            name=one.name,
            count=count,
            prefill=prefill,
            decode=decode,
            mixed=mixed_grid(rows, outside) if decode and prefill else None,
            skew=make_skew(self.bundle.skew.get((tp, one.name), ()), forms.longest_at) if skewed else None,
            together=sharing_of(forms.prefills, one.name, self.spec, self.ran),
            fixed_us=fixed,
            cap_tokens=self._cap_tokens(one),
            prefill_when=_prefill_when(one),
            provenance=self.provenance,
            beside=beside,
            launch=launch,
            captured=captured_of(one.name, self.ran, *self.captured)
            if self.captured[0] and self.query_tokens == 1
            else None,
        )

    def _cap_tokens(self, one: Component) -> int:
        """Most keys that the kernel reads of each request, 0 for all."""
        indexer = self.spec.indexer
        return indexer.attended_cap_tokens if indexer and one.category == "sparse_attention" else 0

    def experts(self, counts: Mapping[Component, int], busiest: BusiestRank | None) -> tuple[Experts, ...]:
        moe, ep = self.spec.moe, self.parallel.ep
        if moe is None:
            return ()
        # Whole experts are measured once, at tp 1; without ep they are divided over all ranks of the group.
        tp = moe_tensor_parallel(self.parallel)
        if tp > 1 and (tp, "moe") not in self.bundle.tables:
            raise CoverageError(
                f"{self.bundle.path}: no table tp{tp}/moe: experts divided over {tp} ranks, as ep 1 has them, are not "
                f"measured (python -m profiler profile at --tp {tp} does, with an engine that runs whole passes). "
                f"ep {tp} spreads whole experts over the ranks"
            )
        any_slice = self.bundle.meta.get("moe_slices") == "any"
        measured_ep = 1 if any_slice else ep
        slots = moe.num_experts // measured_ep
        found = []
        for one, count in counts.items():
            if one.category == "moe":
                outside = self._beyond(one.name, tp, "moe")
                table = self.bundle.table(tp, "moe")
                provenance = self.provenance
                if (sources := wider_from(degrees_of(table, one.name), measured_ep)) is not None:
                    table, provenance = wider_table(table, one.name, moe, sources, measured_ep), "projected"
                grid = moe_grid(table, one.name, measured_ep, slots, outside)
                found.append(Experts(one.name, count, moe, ep, grid, provenance, slots, busiest))
        return tuple(found)


def _measured_collectives(bundle: Bundle) -> tuple[CollectiveRow, ...]:
    """The collectives table beside the bundles of its hardware, where there is one."""
    levels = len(str(bundle.meta["model"]).split("/"))
    if len(bundle.path.parents) <= levels:
        return ()
    path = bundle.path.parents[levels] / FILE
    return read_collectives(path) if path.is_file() else ()


def _reach(spec: ModelSpec, parallel: Parallel, routing: ExpertLoad | None) -> float:
    """Share of the group's tokens that the busiest rank receives; under an even load that of the model's own rule."""
    if routing is not None:
        return routing.reach
    return own_reach(spec.moe, parallel.ep) if spec.moe and parallel.ep > 1 else 1.0


def _prefill_when(one: Component) -> PrefillWhen:
    """For which steps the kernel takes prefill rows: always, dense or sparse ones, or those that need a selection."""
    if one.when == "prefill_dense":
        return "dense"
    if one.when == "decode":
        return "never"
    if one.category == "indexer":
        return "selection"
    return "sparse" if one.category == "sparse_attention" or one.when == "prefill_sparse" else "always"


def _dense_prefill(
    spec: ModelSpec, tp: int, kernels: Sequence[Kernel], hardware: Hardware | None, bundle: Bundle
) -> DensePrefill | None:
    """The rule as the bundle's engine followed it: meta.yaml keeps what was seen beside the attention table."""
    if spec.indexer is None or not any(kernel.prefill_when == "dense" for kernel in kernels):
        return None
    if hardware is not None and hardware.architecture in _WITHOUT_DENSE_PREFILL:
        return None
    grid = bundle.meta.get("grid") or {}
    seen = (grid.get(f"tp{tp}/attention") or {}).get("dense_prefill") or {}
    return DensePrefill(
        limit_tokens=spec.indexer.attended_cap_tokens,
        longer_than_tokens=int(seen.get("longer_than_tokens", 0)),
        selects=bool(seen.get("selects", False)),
    )


def _check_contract(bundle: Bundle, spec: ModelSpec, kv: KvLayout | None) -> None:
    meta = bundle.meta
    if meta["contract"] != "serving":
        raise ContractError(
            f"{bundle.path}: its contract is {meta['contract']!r}: the tables hold durations of whole passes for local "
            "replay and say nothing about serving. Measure a bundle with contract 'serving'."
        )
    cap = meta["attended_cap_tokens"]
    own_cap = spec.indexer.attended_cap_tokens if spec.indexer else None
    if cap is not None and cap != own_cap:
        raise ContractError(f"{bundle.path}: measured with {cap} attended tokens, {spec.name} attends {own_cap}")
    if kv is None:
        return
    stored = meta["kv"]
    if stored["layout"] != kv.layout:
        raise ContractError(f"{bundle.path}: measured on a {stored['layout']} KV cache, the run has {kv.layout}")
    if stored["block_tokens"] is not None and stored["block_tokens"] != kv.block_tokens:
        raise ContractError(
            f"{bundle.path}: measured with KV blocks of {stored['block_tokens']} tokens, the run has {kv.block_tokens}"
        )
    if not stored["caches"] or any(cache.tp_sharded for cache in kv.caches):
        return  # a cache that tensor parallelism divides has other bytes at every tp; the layout says the rest
    measured = sorted(cache["bytes_per_token_layer"] for cache in stored["caches"])
    wanted = sorted(cache.bytes_per_token_layer for cache in kv.caches)
    if measured != wanted:
        raise ContractError(
            f"{bundle.path}: measured with caches of {measured} bytes per token and layer, the run has {wanted}"
        )


def spread(collectives: Collectives, parallel: Parallel) -> Collectives | None:
    """Links of a stage's experts, whose ranks lie pp x tp apart from one data-parallel engine to the next: those of an
    engine's stage together, or with divided experts one of each engine."""
    per_node, engine = collectives.gpus_per_node, parallel.pp * parallel.tp
    together = parallel.tp if parallel.ep > 1 else 1
    if engine == together or parallel.gpus <= per_node:
        return None
    return replace(collectives, gpus_per_node=together * max(1, per_node // engine), measured=None)


def _check_split(spec: ModelSpec, parallel: Parallel) -> None:
    if spec.moe is None:
        return
    if parallel.ep > 1 and parallel.ep != parallel.dp * parallel.tp:
        raise ConfigError(
            f"ep {parallel.ep}: experts are spread over all ranks of the group, ep {parallel.dp * parallel.tp}, "
            "or over none, ep 1"
        )
    if spec.moe.num_experts % parallel.ep:
        raise ConfigError(f"ep {parallel.ep} does not divide {spec.moe.num_experts} experts")
