"""From one instance of a cluster file to what the replay needs of it: cost, KV blocks and resolved settings."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from profiler.core.bundle import Bundle, find_bundle, variants
from profiler.core.errors import CapacityError, ConfigError, ContractError
from profiler.core.hardware import Hardware, known_hardware, load_hardware
from profiler.core.kv import KvLayout, kv_layout
from profiler.core.naming import variant_name
from profiler.core.registry import load_model, load_model_config, read_model
from profiler.core.siblings import tables_model
from profiler.core.stack import cut
from profiler.core.types import ModelSpec, Parallel
from profiler.core.units import GIB
from profiler.core.weights import engine_weights
from serving.capacity import default_batched_tokens, default_num_seqs, memory_budget, require_fit
from serving.collectives import from_fitted_link
from serving.config import UNLIMITED, EngineSettings, Instance, KvOffload, PeerMemory, naming
from serving.core.blocks import BlockPool
from serving.core.engine import Engine, Group
from serving.core.host_tier import HostMemory, HostUse, TieredPool
from serving.core.hosted import Behind, HostedGroup
from serving.core.pipeline import PipelineGroup
from serving.core.scheduler import Limits, Scheduler
from serving.core.walk import WalkEngine, WalkScheduler
from serving.cost import PipelineCost, TableCost, build_cost, default_capture_sizes
from serving.cost.build import build_pipeline, priced_from
from serving.cost.host import TableHost
from serving.cost.offload import OffloadCost
from serving.cost.speculative import SpeculativeCost, build_speculative
from serving.degree_tables import read_degrees
from serving.expert_load import redundant_experts, routed_load
from serving.host_rules import behind_of, host_source, inputs_ns, shared_stream, table_host_of
from serving.policies import load_policy
from serving.result import Deployment, Tables
from serving.speculation import Verified, check_speculation, kernel_notes

AnyCost = TableCost | PipelineCost | SpeculativeCost | OffloadCost

# First vLLM that schedules asynchronously unless told otherwise.
_ASYNC_SINCE = (0, 14)


@dataclass(frozen=True, slots=True)
class Deployed:
    """A deployment with its cost and its engines, ready to run once. meta: of the bundle that prices it.

    kv: what one rank stores.
    """

    deployment: Deployment
    cost: AnyCost
    groups: tuple[Group | PipelineGroup, ...]
    meta: Mapping[str, Any]
    kv: KvLayout

    @property
    def table_cost(self) -> TableCost:
        """The cost of an instance without stages or drafts. Raises ConfigError for others."""
        if isinstance(self.cost, PipelineCost):
            pp = self.deployment.parallel.pp
            raise ConfigError(f"pp {pp}: the step of a pipeline is not one list of kernels; use an instance with pp 1")
        if isinstance(self.cost, SpeculativeCost):
            raise ConfigError("speculative: a step with drafts is several passes; use an instance without")
        return self.cost.cost if isinstance(self.cost, OffloadCost) else self.cost

    def after_run(self) -> Deployment:
        """The deployment with what its engines counted."""
        one = self.deployment
        pools = [engine.scheduler.blocks for group in self.groups for engine in group.engines]
        uses = [pool.use for pool in pools if isinstance(pool, TieredPool)]
        if uses:
            return replace(one, host_use=_summed(uses))
        if one.verified is None:
            return one
        walks = [engine.walk for group in self.groups for engine in group.engines if isinstance(engine, WalkEngine)]
        counts = tuple(map(sum, zip(*(walk.verifications for walk in walks), strict=True)))
        return replace(one, verified=replace(one.verified, verifications=counts))


def _summed(uses: Sequence[HostUse]) -> HostUse:
    return HostUse(
        asked=sum(one.asked for one in uses),
        hit_gpu=sum(one.hit_gpu for one in uses),
        hit_host=sum(one.hit_host for one in uses),
        stored=sum(one.stored for one in uses),
        evicted=sum(one.evicted for one in uses),
        longest_backlog_ns=max(one.longest_backlog_ns for one in uses),
    )


@dataclass(frozen=True, slots=True)
class _Kv:
    """The KV pool of one rank: its layout, its blocks with the null block, and where their number comes from."""

    layout: KvLayout
    num_gpu_blocks: int
    source: str


def instance_model(instance: Instance) -> ModelSpec:
    """The model that an instance runs: the named one, or its first `layers` layers between embedding and head.

    Raises ConfigError for an unknown model, and for more layers than it has.
    """
    spec = load_model(instance.model)
    if instance.layers is None or instance.layers == spec.num_layers:
        return spec
    if instance.layers > spec.num_layers:
        raise ConfigError(f"layers is {instance.layers}; {spec.name} has {spec.num_layers}")
    return read_model(spec.name, cut(spec, load_model_config(instance.model), instance.layers))


def deploy(
    instance: Instance, first_engine: int, bundle_root: Path, allow_extrapolation: bool, allow_projected: bool = False
) -> Deployed:
    """The engines of one instance, numbered from `first_engine`. allow_projected: take tables that nobody measured.

    Data-parallel ranks of a model with experts step in lockstep; those of a dense model are independent engines.
    Raises ConfigError (unknown model or GPU, illegal split or setting), CoverageError (no bundle, missing table),
    ContractError (the bundle does not belong to this run) and CapacityError (it does not fit), each with the place of
    the instance in its file.
    """
    with naming(instance.source):
        return _deploy(instance, first_engine, bundle_root, allow_extrapolation, allow_projected)


def _deploy(
    instance: Instance, first_engine: int, bundle_root: Path, allow_extrapolation: bool, allow_projected: bool
) -> Deployed:
    spec = instance_model(instance)
    hardware = None if instance.memory else load_hardware(instance.hardware)
    hardware_name = hardware.name if hardware else instance.hardware
    limits = _limits(instance.engine, spec, hardware)
    owner = tables_model(bundle_root, hardware_name, spec)
    variant = instance.variant or _own_variant(instance, spec, hardware, bundle_root, owner)
    path = find_bundle(bundle_root, hardware_name, owner, variant)
    bundle = read_degrees(path, spec, instance.parallel)
    if bundle.meta["provenance"] == "projected" and not allow_projected:
        raise ContractError(
            f"{path}: {_projected_from(bundle)} A replay, size, explain and chakra take them with --allow-projected (a "
            "sweep with allow_projected: true), marked so in the result."
        )
    copies = redundant_experts(spec, instance.parallel, instance.routing)
    kv = _kv(instance, spec, hardware, limits, bundle, copies)
    lockstep = spec.moe is not None and instance.parallel.dp > 1
    asynchronous = _asynchronous(instance, bundle)
    own = hardware or (load_hardware(instance.hardware) if instance.hardware in known_hardware() else None)
    step_us, step_source = _step_overhead(instance, own)
    stated_us = instance.engine.host_overhead_us
    group = instance.parallel if lockstep else replace(instance.parallel, dp=1)
    speculation = instance.engine.speculation
    if speculation is not None:
        check_speculation(speculation, spec, limits.max_model_len_tokens)
    queries = 1 + speculation.tokens if speculation else 1
    capture_sizes = _capture_sizes(instance.engine, limits.max_num_seqs * queries)
    table_host = table_host_of(instance, own, spec, max(capture_sizes, default=0), asynchronous)
    priced = partial(
        _pricing(instance),
        bundle=bundle,
        spec=spec,
        parallel=group,
        hardware=hardware,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        kv=kv.layout,
        collectives=from_fitted_link(instance.links) if instance.links else None,
        capture_sizes=capture_sizes,
        prefills_in_graphs=instance.engine.graph_mode != "FULL_DECODE_ONLY",
        host_us=stated_us or 0.0,
        host_overlaps=asynchronous or group.pp > 1,
        routing=routed_load(spec, group, instance.routing, limits.max_num_batched_tokens * group.dp),
        all2all_backend=instance.engine.all2all_backend,
        allow_extrapolation=allow_extrapolation,
        dense_prefill=not instance.engine.sparse_mla_force_mqa,
        captured_keys=_captured_keys(instance.engine, limits.max_model_len_tokens),
    )
    stream = shared_stream(instance, spec, own, str(bundle.meta["engine"].get("name")))
    beside = {} if stream is None else {"more_by_tokens": stream}
    cost: AnyCost = priced(step_us=step_us, step_source=step_source, **beside)
    behind = behind_of(priced, spec, table_host, cost) if table_host else None
    copies_ns = inputs_ns(cost) if table_host else 0
    host = _host_memory(instance.engine.offload, kv.layout)
    if host is not None:
        assert isinstance(cost, TableCost)
        cost = OffloadCost(cost, host)
    deployment = Deployment(
        model=spec.name,
        hardware=hardware_name,
        parallel=instance.parallel,
        engines=tuple(range(first_engine, first_engine + instance.parallel.dp)),
        lockstep=lockstep,
        kv_layout=kv.layout.layout,
        block_tokens=kv.layout.tokens_per_block,
        num_gpu_blocks=kv.num_gpu_blocks,
        blocks_source=kv.source,
        limits=limits,
        prefix_caching=instance.engine.prefix_caching,
        policy=instance.engine.policy,
        eager=instance.engine.eager,
        host_overhead_us=stated_us or 0.0,
        async_scheduling=asynchronous,
        step_overhead_us=step_us,
        step_overhead_source=step_source,
        tables=_tables(bundle, group),
        gate=instance.routing.gate,
        expert_placement=instance.routing.placement,
        redundant_experts=copies,
        all2all_backend=instance.engine.all2all_backend,
        layers=instance.layers,
        role=instance.role,
        host=host,
        verified=Verified(speculation, (), kernel_notes(speculation, spec, hardware.architecture if hardware else None))
        if speculation
        else None,
        host_source=host_source(instance.engine, table_host),
    )
    groups = _groups(deployment, spec, cost, table_host, behind, copies_ns, instance.engine.dp_sync_interval)
    return Deployed(deployment, cost, groups, bundle.meta, kv.layout)


def _capture_sizes(engine: EngineSettings, sequences: int) -> tuple[int, ...]:
    if engine.eager:
        return ()
    return default_capture_sizes(sequences) if engine.capture_sizes is None else engine.capture_sizes


def _captured_keys(engine: EngineSettings, max_model_len_tokens: int) -> int:
    """Keys for which kernels of whole captured decode steps were divided, 0 where no step is captured whole."""
    whole = not engine.eager and engine.graph_mode != "PIECEWISE"
    return max_model_len_tokens - 1 if whole else 0


def _own_variant(
    instance: Instance, spec: ModelSpec, hardware: Hardware | None, bundle_root: Path, owner: str
) -> str | None:
    """Among several bundles of `owner` the one of the run's weights and KV layout; None leaves the choice, or the
    refusal."""
    if hardware is None or len(there := variants(bundle_root, hardware.name, owner)) < 2:
        return None
    asked = instance.engine.kv_cache_dtype
    layout = kv_layout(spec, instance.parallel, hardware.architecture, asked).layout
    name = variant_name(spec.quantization.weights, layout)
    return name if name in there else None


def _groups(
    one: Deployment,
    spec: ModelSpec,
    cost: AnyCost,
    table_host: TableHost | None,
    behind: Behind | None,
    inputs_ns: int,
    sync_steps: int,
) -> tuple[Group | PipelineGroup, ...]:
    """The engines of a deployment, those in lockstep together."""
    cap = spec.indexer.attended_cap_tokens if spec.indexer else None
    policy = load_policy(one.policy)

    def pool() -> BlockPool:
        if one.host is not None:
            return TieredPool(one.num_gpu_blocks, one.block_tokens, one.host, 2 if one.async_scheduling else 1)
        return BlockPool(one.num_gpu_blocks, one.block_tokens, one.prefix_caching)

    if isinstance(cost, PipelineCost | SpeculativeCost):
        speculation = one.verified.speculation if one.verified else None
        pp = one.parallel.pp
        walking = [
            WalkEngine(
                index,
                WalkScheduler(
                    one.limits,
                    pool(),
                    policy,
                    attended_cap_tokens=cap,
                    pipelined=pp > 1,
                    speculation=speculation,
                ),
            )
            for index in one.engines
        ]
        staged = [walking] if one.lockstep else [[engine] for engine in walking]
        return tuple(PipelineGroup(some, cost, pp, sync_steps=sync_steps) for some in staged)
    engines = [
        Engine(
            index,
            Scheduler(
                one.limits,
                pool(),
                policy,
                attended_cap_tokens=cap,
                asynchronous=one.async_scheduling,
                keeps_finished=one.role == "prefill",
            ),
        )
        for index in one.engines
    ]
    members = [engines] if one.lockstep else [[engine] for engine in engines]
    asynchronous = one.async_scheduling
    if table_host is not None:
        return tuple(
            HostedGroup(
                some,
                cost,
                table_host,
                behind=behind,
                inputs_ns=inputs_ns,
                asynchronous=asynchronous,
                sync_steps=sync_steps,
            )
            for some in members
        )
    return tuple(Group(some, cost, asynchronous=asynchronous, sync_steps=sync_steps) for some in members)


def _host_memory(asked: KvOffload | None, layout: KvLayout) -> HostMemory | None:
    """Raises ConfigError when not one block fits."""
    if asked is None:
        return None
    blocks = math.floor(asked.host_gib * GIB / layout.bytes_per_block)
    if not blocks:
        raise ConfigError(f"kv_offload.host_gib {asked.host_gib:g} holds no block of {layout.bytes_per_block:,} bytes")
    block_ns = max(1, round(layout.bytes_per_block / asked.bandwidth_gbps))
    return HostMemory(blocks, block_ns, round(asked.latency_us * 1e3))


def _pricing(instance: Instance) -> Callable[..., TableCost | PipelineCost | SpeculativeCost]:
    if instance.engine.speculation is not None:
        one = instance.engine.speculation
        return partial(build_speculative, one.tokens, one.verify_as)
    return build_cost if instance.parallel.pp == 1 else build_pipeline


def _asynchronous(instance: Instance, bundle: Bundle) -> bool:
    """As asked; else on, which is vLLM's default since 0.14, unless the tables are of an older vLLM.

    A pipeline has its batch queue instead: steps are composed while others run, on the tokens that are known. Steps
    with drafts are composed when the one before has ended.
    """
    asked = instance.engine
    if instance.parallel.pp > 1 or asked.speculation:
        return False
    if asked.async_scheduling is not None:
        return asked.async_scheduling
    version = (bundle.meta["engine"].get("versions") or {}).get("vllm")
    numbers = re.match(r"(\d+)\.(\d+)", str(version or ""))
    return numbers is None or (int(numbers[1]), int(numbers[2])) >= _ASYNC_SINCE


def _step_overhead(instance: Instance, hardware: Hardware | None) -> tuple[float, str]:
    """Device time per step outside the tables, and where it is from: the cluster file, the GPU's file, or nothing."""
    if instance.engine.step_overhead_us is not None:
        return instance.engine.step_overhead_us, "stated"
    if hardware is None or hardware.step_overhead_us is None:
        return 0.0, "not known"
    return hardware.step_overhead_us, "hardware file"


def _limits(asked: EngineSettings, spec: ModelSpec, hardware: Hardware | None) -> Limits:
    """The scheduler's limits with the engine's defaults filled in. Raises ConfigError where they contradict."""
    length = spec.max_position if asked.max_model_len_tokens is None else asked.max_model_len_tokens
    if length > spec.max_position:
        raise ConfigError(f"max_model_len is {length}; {spec.name} takes at most {spec.max_position} tokens")
    batched, seqs = asked.max_num_batched_tokens, asked.max_num_seqs
    if hardware is not None:
        batched = default_batched_tokens(hardware) if batched is None else batched
        seqs = default_num_seqs(hardware) if seqs is None else seqs
    if batched is None or seqs is None:
        raise ConfigError("max_num_batched_tokens and max_num_seqs are needed where no hardware file is used")
    batched = length if batched == UNLIMITED else batched
    if not asked.chunked_prefill and batched < length:
        raise ConfigError(
            f"without chunked prefill max_num_batched_tokens ({batched}) must be at least max_model_len ({length})"
        )
    return Limits(
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        max_model_len_tokens=length,
        long_prefill_threshold_tokens=asked.long_prefill_threshold_tokens,
        chunked_prefill=asked.chunked_prefill,
    )


def _kv(
    instance: Instance, spec: ModelSpec, hardware: Hardware | None, limits: Limits, bundle: Bundle, redundant: int
) -> _Kv:
    asked = instance.engine
    if instance.memory is not None:
        return _peer_kv(instance, spec, instance.memory, bundle)
    assert hardware is not None
    budget = memory_budget(
        spec,
        hardware,
        instance.parallel,
        max_model_len=limits.max_model_len_tokens,
        kv_dtype=asked.kv_cache_dtype,
        utilization=asked.gpu_memory_utilization,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        block_tokens=asked.block_tokens,
        available_kv_gib=asked.available_kv_gib,
        cuda_graph_gib=0.0 if asked.eager else None,
        mtp_layers=min(asked.speculation.tokens, spec.mtp_layers) if asked.speculation else 0,
        redundant_experts=redundant,
    )
    if asked.num_gpu_blocks is not None:
        return _Kv(budget.layout, asked.num_gpu_blocks, "num_gpu_blocks")
    require_fit(budget)
    source = "memory budget" if asked.available_kv_gib is None else "available_kv_gib"
    return _Kv(budget.layout, budget.num_gpu_blocks, source)


def _peer_kv(instance: Instance, spec: ModelSpec, memory: PeerMemory, bundle: Bundle) -> _Kv:
    """The peer's rule: mem_size x mem_util less the weights of the rank, in whole blocks."""
    architecture = load_hardware(instance.hardware).architecture if instance.hardware in known_hardware() else "unknown"
    block_tokens = instance.engine.block_tokens or bundle.meta["kv"]["block_tokens"]
    layout = kv_layout(spec, instance.parallel, architecture, instance.engine.kv_cache_dtype, block_tokens=block_tokens)
    weights_bytes = engine_weights(spec, instance.parallel).total_bytes
    available_bytes = memory.mem_size_gib * memory.mem_util * GIB - weights_bytes
    num_gpu_blocks = math.floor(available_bytes / layout.bytes_per_block)
    if num_gpu_blocks < 2:
        raise CapacityError(
            f"{spec.name} does not fit: mem_size {memory.mem_size_gib:g} GiB x mem_util {memory.mem_util:g} less "
            f"{weights_bytes / GIB:.2f} GiB of weights leaves {available_bytes / GIB:.2f} GiB for KV"
        )
    return _Kv(layout, num_gpu_blocks, "mem_size x mem_util less weights")


def _tables(bundle: Bundle, parallel: Parallel) -> Tables:
    meta = bundle.meta
    return Tables(
        hardware=str(meta["hardware"]),
        model=str(meta["model"]),
        variant=str(meta["variant"]),
        provenance=priced_from(bundle, parallel),
        engine=_engine_name(meta["engine"]),
    )


def _projected_from(bundle: Bundle) -> str:
    """What a projected bundle is, and how far its projection was off where that could be checked."""
    projection = bundle.meta.get("projection") or {}
    source = (projection.get("from") or {}).get("hardware", "another GPU")
    bands = projection.get("error_band") or []
    checked = "; ".join(
        f"{one['model']} was projected to {low:g} to {high:g} times its measured times (p10 to p90)"
        for one in bands
        for low, _, high in [one["projected_over_measured"]["all all"]]
    )
    known = checked or "how far that is off is not known"
    return f"its tables are projected from {source}, not measured; {known}."


def _engine_name(engine: Mapping[str, Any]) -> str:
    name = str(engine.get("name"))
    version = (engine.get("versions") or {}).get(name)
    return f"{name} {version}" if version else name
