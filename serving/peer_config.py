"""The peer's cluster files (JSON with `nodes`), translated into the specs of serving/config.py.

Its names and defaults are kept: 128 sequences and 2048 batched tokens unless the instance or the command line says
otherwise, 0 for no limit, link_bw in units of 2**30 bytes per second, link_latency in nanoseconds. Keys without
influence on time (cpu_mem, power, memory bandwidths) are read and not used. Features that would change the result and
are not simulated here are refused.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator

from profiler.core.errors import ConfigError
from profiler.core.registry import load_model
from profiler.core.types import Parallel
from profiler.core.units import GIB, NS_PER_US
from serving.config import (
    UNLIMITED,
    Cluster,
    Count,
    EngineSettings,
    Instance,
    Links,
    Overrides,
    PeerMemory,
    Positive,
    Share,
    Source,
    Strict,
    naming,
    validated,
)

Value = TypeVar("Value")
_SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "fp8": "fp8", "int8": "int8"}
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CpuMemory(Strict):
    mem_size: NonNegative | None = None
    mem_bw: NonNegative | None = None
    mem_latency: NonNegative | None = None
    pim_config: str | None = None


class NpuMemory(Strict):
    mem_size: Positive
    mem_bw: NonNegative | None = None
    mem_latency: NonNegative | None = None
    mem_util: Share = 0.9


class PeerInstance(Strict):
    model_name: str
    hardware: str
    npu_mem: NpuMemory
    pd_type: Literal["prefill", "decode"] | None = None
    num_npus: Count | None = None
    tp_size: Count | None = None
    pp_size: Count | None = None
    ep_size: Count | None = None
    dp_group: str | None = None
    placement: dict[str, Any] | None = None
    max_num_seqs: Annotated[int, Field(ge=0)] | None = None
    max_num_batched_tokens: Annotated[int, Field(ge=0)] | None = None
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] | None = None
    block_size: Count | None = None
    dtype: Literal["bfloat16", "float16", "float32", "fp8", "int8"] | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    reserve_full_isl: bool = True
    enable_local_offloading: bool = False
    enable_attn_offloading: bool = False
    enable_sub_batch_interleaving: bool = False
    enable_block_copy: bool = True


class PeerNode(Strict):
    num_instances: Count
    instances: list[PeerInstance]
    cpu_mem: CpuMemory | None = None
    power: dict[str, Any] | None = None


class PeerFile(Strict):
    num_nodes: Count
    nodes: Annotated[list[PeerNode], Field(min_length=1)]
    link_bw: list[Positive]
    link_latency: list[NonNegative]
    cxl_mem: dict[str, Any] | None = None

    @field_validator("link_bw", "link_latency", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value]


def peer_cluster(path: Path, content: Mapping[str, Any], overrides: Overrides) -> Cluster:
    """The cluster that the peer's file describes. Raises ConfigError naming file and key."""
    file = validated(PeerFile, content, path)
    if file.num_nodes != len(file.nodes):
        raise ConfigError(f"{path}: num_nodes is {file.num_nodes}, but nodes has {len(file.nodes)} entries")
    if file.cxl_mem is not None:
        raise ConfigError(f"{path}: cxl_mem: memory expansion is not simulated; remove the key")
    if len(file.link_bw) > 1 or len(file.link_latency) > 1:
        raise ConfigError(
            f"{path}: link_bw and link_latency must be single numbers; several dimensions are not simulated"
        )
    links = Links(file.link_bw[0] * GIB / 1e9, file.link_latency[0] / NS_PER_US)
    groups: dict[str, list[Instance]] = {}
    for at, node in enumerate(file.nodes):
        if node.num_instances != len(node.instances):
            raise ConfigError(
                f"{path}: nodes[{at}].num_instances is {node.num_instances}, "
                f"but instances has {len(node.instances)} entries"
            )
        for position, one in enumerate(node.instances):
            where = Source(path, f"nodes[{at}].instances[{position}]")
            group = f"dp_group {one.dp_group}" if one.dp_group is not None else where.key
            groups.setdefault(group, []).append(_instance(one, links, overrides, where))
    instances = tuple(_merge(path, group, members) for group, members in groups.items())
    return Cluster(path.stem, overrides.router or "least_loaded", instances)


def _instance(one: PeerInstance, links: Links, overrides: Overrides, where: Source) -> Instance:
    _refuse_unsimulated(one, where)
    tp = one.tp_size if one.tp_size is not None else (one.num_npus or 1) // (one.pp_size or 1)
    pp = one.pp_size or 1
    if one.num_npus is not None and one.num_npus != tp * pp:
        raise ConfigError(f"{where}: num_npus is {one.num_npus}, but tp_size x pp_size is {tp * pp}")
    ep = one.ep_size
    if ep is None:
        with naming(f"{where}.model_name"):
            ep = tp if load_model(one.model_name).moe is not None else 1
    return Instance(
        model=one.model_name,
        hardware=one.hardware,
        variant=_variant(one, where),
        parallel=Parallel(tp=tp, pp=pp, dp=1, ep=ep),
        engine=_engine(one, overrides),
        memory=PeerMemory(one.npu_mem.mem_size, one.npu_mem.mem_util),
        links=links,
        source=where,
    )


def _refuse_unsimulated(one: PeerInstance, where: Source) -> None:
    refused = {
        "pd_type": one.pd_type,
        "placement": one.placement,
        "enable_local_offloading": one.enable_local_offloading,
        "enable_attn_offloading": one.enable_attn_offloading,
        "enable_sub_batch_interleaving": one.enable_sub_batch_interleaving,
    }
    for key, value in refused.items():
        if value:
            raise ConfigError(f"{where}: {key} = {value!r} is not simulated; remove the key")
    if not one.reserve_full_isl:
        raise ConfigError(f"{where}: reserve_full_isl = false is not simulated; admission reserves the whole sequence")


def _variant(one: PeerInstance, where: Source) -> str | None:
    """The peer names a bundle by its weight dtype and, where it is not the default, its KV dtype."""
    if one.dtype is None and one.kv_cache_dtype != "auto":
        raise ConfigError(f"{where}: kv_cache_dtype {one.kv_cache_dtype!r} needs dtype, which names the bundle with it")
    if one.dtype is None:
        return None
    return _SHORT_DTYPE[one.dtype] + ("" if one.kv_cache_dtype == "auto" else f"-kv{one.kv_cache_dtype}")


def _engine(one: PeerInstance, overrides: Overrides) -> EngineSettings:
    seqs = _first(one.max_num_seqs, overrides.max_num_seqs, 128)
    batched = _first(one.max_num_batched_tokens, overrides.max_num_batched_tokens, 2048)
    return EngineSettings(
        max_model_len_tokens=None,
        max_num_batched_tokens=batched or UNLIMITED,
        max_num_seqs=seqs or UNLIMITED,
        long_prefill_threshold_tokens=_first(
            one.long_prefill_token_threshold, overrides.long_prefill_threshold_tokens, 0
        ),
        chunked_prefill=_first(one.enable_chunked_prefill, overrides.chunked_prefill, True),
        prefix_caching=_first(one.enable_prefix_caching, overrides.prefix_caching, True),
        policy=overrides.policy or "fcfs",
        kv_cache_dtype=one.kv_cache_dtype,
        block_tokens=one.block_size,
        gpu_memory_utilization=one.npu_mem.mem_util,
        num_gpu_blocks=None,
        available_kv_gib=None,
        async_scheduling=overrides.async_scheduling,
    )


def _first(own: Value | None, flag: Value | None, default: Value) -> Value:
    return next(value for value in (own, flag, default) if value is not None)


def _merge(path: Path, group: str, members: list[Instance]) -> Instance:
    """The members of a dp_group as one instance with as many data-parallel ranks. They must be alike."""
    first = members[0]
    for other in members[1:]:
        for field in (one for one in fields(Instance) if one.compare):
            mine, theirs = getattr(first, field.name), getattr(other, field.name)
            if mine != theirs:
                raise ConfigError(f"{path}: {group}: members disagree on {field.name}: {mine} and {theirs}")
    parallel = first.parallel
    return Instance(
        model=first.model,
        hardware=first.hardware,
        variant=first.variant,
        parallel=Parallel(tp=parallel.tp, pp=parallel.pp, dp=len(members), ep=parallel.ep),
        engine=first.engine,
        memory=first.memory,
        links=first.links,
        source=first.source,
    )
