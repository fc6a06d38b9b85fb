"""Cluster files: what runs where. Ours (YAML or JSON with `instances`) and the peer's JSON (with `nodes`).

    router: least_loaded                  serving/routers
    instances:
      - model: deepseek-ai/DeepSeek-V3.2-Exp
        hardware: H200
        variant: null                     of the bundle; needed only where several exist
        replicas: 1                       independent copies of this instance
        layers: null                      of the model, counted from the first; null for all
        parallel: {tp: 1, pp: 1, dp: 8, ep: 8}
        engine: {max_model_len: 81920}    EngineFile below names every key and its default

Every key that a file may have is a field of a class here or in serving/peer_config.py; any other is refused.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from profiler.core.errors import ConfigError, SparsightError
from profiler.core.hardware import Host, load_host
from profiler.core.load import read_mapping
from profiler.core.types import Parallel
from serving.backends import DEFAULT, sends
from serving.core.walk import Speculation
from serving.policies import load_policy
from serving.routers import create_router
from serving.speculation import SpeculativeFile, speculation_of
from serving.strict import Strict as Strict

UNLIMITED = 2**31 - 1
Role = Literal["both", "prefill", "decode"]
GraphMode = Literal["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "FULL", "NONE"]


@dataclass(frozen=True, slots=True)
class KvOffload:
    """Host memory of one rank for KV blocks, and the link to it: one direction, latency once per load."""

    host_gib: float
    bandwidth_gbps: float
    latency_us: float


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine. max_model_len_tokens: None is the model's own maximum. max_num_batched_tokens and
    max_num_seqs: None is what the engine picks for the card; UNLIMITED batched tokens mean max_model_len_tokens.

    num_gpu_blocks (the null block included) or available_kv_gib (per rank) replace the memory budget when given.
    block_tokens: None is what the engine picks for the model and the card. eager: no CUDA graphs, so steps are not
    padded to captured sizes. graph_mode: FULL_DECODE_ONLY captures decode steps alone. capture_sizes: None is what the
    engine captures for its max_num_seqs. host_overhead_us: time per step that the host takes, as stated by the user;
    None takes `host`, which a file of its own describes, else what the GPU's file says of its host, if anything.
    async_scheduling: None is what the engine version does by default.
    step_overhead_us: device time per step that the tables do not contain; None is the value of the GPU's file.
    dp_sync_interval: steps between two agreements of a data-parallel group on whether any of its engines has work.
    shared_stream: shared experts of small steps run on a stream of their own, beside the routed ones.
    sparse_mla_force_mqa: every prompt of DSA on the sparse path, short ones too.
    speculation: drafts of the model's own multi-token prediction, None without. offload: KV blocks in host memory.
    """

    max_model_len_tokens: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    long_prefill_threshold_tokens: int
    chunked_prefill: bool
    prefix_caching: bool
    policy: str
    kv_cache_dtype: str
    block_tokens: int | None
    gpu_memory_utilization: float
    num_gpu_blocks: int | None
    available_kv_gib: float | None
    eager: bool = False
    graph_mode: GraphMode = "FULL_AND_PIECEWISE"
    capture_sizes: tuple[int, ...] | None = None
    host_overhead_us: float | None = None
    async_scheduling: bool | None = None
    step_overhead_us: float | None = None
    all2all_backend: str = DEFAULT
    dp_sync_interval: int = 16
    speculation: Speculation | None = None
    offload: KvOffload | None = None
    host: Host | None = None
    shared_stream: bool = True
    sparse_mla_force_mqa: bool = False


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts and where these are. gate "even" is the expected even load, without a draw.

    options: of the gate. counts_path, picks_path, bias_path: files of the gates "histogram", "recorded" and
    "grouped_topk". placement: one of serving.expert_placement.STRATEGIES. nodes: over which "eplb" packs expert groups.
    redundant: copies of experts of every layer over all ranks, of the eplb placements; vLLM's num_redundant_experts.
    """

    gate: str = "even"
    options: tuple[tuple[str, float], ...] = ()
    counts_path: Path | None = None
    picks_path: Path | None = None
    bias_path: Path | None = None
    placement: str = "linear"
    nodes: int = 1
    seed: int = 0
    redundant: int = 0


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The peer's rule: KV gets mem_size_gib x mem_util per GPU less the weights, and nothing else is subtracted."""

    mem_size_gib: float
    mem_util: float


@dataclass(frozen=True, slots=True)
class Links:
    """One link between any two GPUs, per direction. GB/s are 1e9 bytes per second."""

    bandwidth_gbps: float
    latency_us: float


@dataclass(frozen=True, slots=True)
class Source:
    """Where an instance is described, for messages. key: such as instances[0]; replicas share it."""

    path: Path
    key: str

    def __str__(self) -> str:
        return f"{self.path}: {self.key}"


@dataclass(frozen=True, slots=True)
class Instance:
    """One deployment of a model: parallel.dp engines of parallel.tp x parallel.pp GPUs each.

    memory and links are None where the hardware file has them. layers: only the first of the model, None for all.
    role: "both" runs whole requests; "prefill" their prompts, "decode" what follows. source: None where no file
    describes it; no part of what the instance is.
    """

    model: str
    hardware: str
    variant: str | None
    parallel: Parallel
    engine: EngineSettings
    memory: PeerMemory | None = None
    links: Links | None = None
    routing: Routing = Routing()
    layers: int | None = None
    role: Role = "both"
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """Link of one GPU for caches sent from prefill to decode; None is the inter-node link of the hardware files."""

    bandwidth_gbps: float | None = None
    latency_us: float | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """kv_transfer: for clusters with prefill and decode instances."""

    name: str
    router: str
    instances: tuple[Instance, ...]
    kv_transfer: KvTransfer = KvTransfer()

    @property
    def disaggregated(self) -> bool:
        return any(one.role != "both" for one in self.instances)


@dataclass(frozen=True, slots=True)
class Overrides:
    """Command-line settings; None leaves the file's. They win over our files; in the peer's the instance's key wins."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_threshold_tokens: int | None = None
    prefix_caching: bool | None = None
    router: str | None = None
    chunked_prefill: bool | None = None
    policy: str | None = None
    async_scheduling: bool | None = None

    def given(self) -> dict[str, Any]:
        """The engine settings that are set, by the names of EngineSettings."""
        names = [one.name for one in fields(self) if one.name != "router"]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


File = TypeVar("File", bound=Strict)
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class ParallelFile(Strict):
    tp: Count = 1
    pp: Count = 1
    dp: Count = 1
    ep: Count = 1


class KvOffloadFile(Strict):
    host_gib: Positive
    bandwidth_gbps: Positive
    latency_us: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class EngineFile(Strict):
    """Names and meanings as in vLLM. Limits without a value are those of its API server for the model and the card."""

    max_model_len: Count | None = None
    max_num_batched_tokens: Count | None = None
    max_num_seqs: Count | None = None
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    async_scheduling: bool | None = None
    kv_cache_dtype: str = "auto"
    block_size: Count | None = None
    gpu_memory_utilization: Share = 0.9
    num_gpu_blocks: Annotated[int, Field(ge=2)] | None = None
    available_kv_gib: Positive | None = None
    enforce_eager: bool = False
    cudagraph_mode: GraphMode = "FULL_AND_PIECEWISE"
    cudagraph_capture_sizes: list[Count] | None = None
    host_overhead_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    host_file: str | None = None
    shared_experts_stream: bool = True
    sparse_mla_force_mqa: bool = False
    all2all_backend: str = DEFAULT
    dp_sync_interval: Count = 16
    step_overhead_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    speculative: SpeculativeFile | None = None
    kv_offload: KvOffloadFile | None = None


class RoutingFile(Strict):
    gate: str = "even"
    options: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=dict)
    counts: str | None = None
    picks: str | None = None
    bias: str | None = None
    placement: str = "linear"
    nodes: Count = 1
    seed: Annotated[int, Field(ge=0)] = 0
    # vLLM's EPLB has room for 1,023 copies of an expert.
    redundant: Annotated[int, Field(ge=0, le=1023)] = 0


class InstanceFile(Strict):
    model: str
    hardware: str
    variant: str | None = None
    replicas: Count = 1
    layers: Count | None = None
    parallel: ParallelFile = ParallelFile()
    engine: EngineFile = EngineFile()
    routing: RoutingFile = RoutingFile()
    role: Role = "both"


class KvTransferFile(Strict):
    bandwidth_gbps: Positive | None = None
    latency_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class ClusterFile(Strict):
    router: str = "least_loaded"
    kv_transfer: KvTransferFile | None = None
    instances: Annotated[list[InstanceFile], Field(min_length=1)]


def load_cluster(path: Path, overrides: Overrides | None = None) -> Cluster:
    """The cluster of a file. Raises ConfigError naming file and key for anything missing, unknown or illegal."""
    from serving.peer_config import peer_cluster

    overrides = overrides or Overrides()
    content = read_mapping(path)
    kinds = [key for key in ("nodes", "instances") if key in content]
    if len(kinds) != 1:
        raise ConfigError(
            f"{path}: a cluster file has either the key 'instances' (ours) or 'nodes' (the peer's JSON); "
            f"this one has {', '.join(map(str, content)) or 'no keys'}"
        )
    if kinds[0] == "nodes":
        cluster = peer_cluster(path, content, overrides)
    else:
        cluster = _ours(path, validated(ClusterFile, content, path), overrides)
    _check(path, cluster, overrides)
    return cluster


@contextmanager
def naming(where: Source | str | None) -> Iterator[None]:
    """Puts what a message is about in front of it: errors from within keep their class and so their exit code."""
    try:
        yield
    except SparsightError as error:
        if where is None:
            raise
        raise type(error)(f"{where}: {error}") from None


def validated(schema: type[File], content: Mapping[str, Any], path: Path) -> File:
    """`content` as `schema`. Raises ConfigError with the key path and the reason of the first fault."""
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        keys = [part for part in first["loc"] if not str(part).startswith("~")]  # without the tags of unions
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in keys).lstrip(".")
        reason = first["msg"] if first["type"] == "unknown_key" else f"{first['msg']}, found {first['input']!r}"
        if first["type"] == "missing":
            reason = "is required"
        more = f" ({error.error_count() - 1} more faults)" if error.error_count() > 1 else ""
        raise ConfigError(f"{path}: {where + ': ' if where else ''}{reason}{more}") from None


def _ours(path: Path, file: ClusterFile, overrides: Overrides) -> Cluster:
    instances = tuple(
        Instance(
            model=one.model,
            hardware=one.hardware,
            variant=one.variant,
            parallel=Parallel(one.parallel.tp, one.parallel.pp, one.parallel.dp, one.parallel.ep),
            engine=replace(_settings(Source(path, f"instances[{at}].engine"), one.engine), **overrides.given()),
            routing=_routing(path, one.routing),
            layers=one.layers,
            role=one.role,
            source=Source(path, f"instances[{at}]"),
        )
        for at, one in enumerate(file.instances)
        for _ in range(one.replicas)
    )
    link = KvTransfer()
    if file.kv_transfer is not None:
        if all(one.role == "both" for one in instances):
            raise ConfigError(f"{path}: kv_transfer: no instance has the role prefill or decode; nothing is sent")
        link = KvTransfer(file.kv_transfer.bandwidth_gbps, file.kv_transfer.latency_us)
    return Cluster(path.stem, overrides.router or file.router, instances, link)


def _routing(path: Path, routing: RoutingFile) -> Routing:
    """Paths of a routing block count from the folder of the cluster file."""
    return Routing(
        gate=routing.gate,
        options=tuple(sorted(routing.options.items())),
        counts_path=path.parent / routing.counts if routing.counts else None,
        picks_path=path.parent / routing.picks if routing.picks else None,
        bias_path=path.parent / routing.bias if routing.bias else None,
        placement=routing.placement,
        nodes=routing.nodes,
        seed=routing.seed,
        redundant=routing.redundant,
    )


def _settings(source: Source, engine: EngineFile) -> EngineSettings:
    """source: of the engine block."""
    folder = source.path.parent
    with naming(source):
        speculation = speculation_of(engine.speculative, folder) if engine.speculative else None
        host = load_host(folder / engine.host_file) if engine.host_file else None
    if engine.host_file is not None and engine.host_overhead_us is not None:
        raise ConfigError(f"{source}: host_file and host_overhead_us both say what the host takes; give one of them")
    return EngineSettings(
        max_model_len_tokens=engine.max_model_len,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        long_prefill_threshold_tokens=engine.long_prefill_token_threshold,
        chunked_prefill=engine.enable_chunked_prefill,
        prefix_caching=engine.enable_prefix_caching,
        policy=engine.policy,
        kv_cache_dtype=engine.kv_cache_dtype,
        block_tokens=engine.block_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        num_gpu_blocks=engine.num_gpu_blocks,
        available_kv_gib=engine.available_kv_gib,
        eager=engine.enforce_eager or engine.cudagraph_mode == "NONE",
        graph_mode=engine.cudagraph_mode,
        capture_sizes=_capture_sizes(source, engine.cudagraph_capture_sizes),
        host_overhead_us=engine.host_overhead_us,
        async_scheduling=engine.async_scheduling,
        step_overhead_us=engine.step_overhead_us,
        all2all_backend=engine.all2all_backend,
        dp_sync_interval=engine.dp_sync_interval,
        speculation=speculation,
        offload=KvOffload(**engine.kv_offload.model_dump()) if engine.kv_offload else None,
        shared_stream=engine.shared_experts_stream,
        sparse_mla_force_mqa=engine.sparse_mla_force_mqa,
        host=host,
    )


def _capture_sizes(source: Source, sizes: list[int] | None) -> tuple[int, ...] | None:
    if sizes is not None and sizes != sorted(set(sizes)):
        raise ConfigError(f"{source}.cudagraph_capture_sizes must ascend, found {sizes}")
    return None if sizes is None else tuple(sizes)


def _check(path: Path, cluster: Cluster, overrides: Overrides) -> None:
    with naming("--router" if overrides.router else f"{path}: router"):
        create_router(cluster.router)
    for one in cluster.instances:
        with naming("--scheduling-policy" if overrides.policy else f"{one.source}.engine.policy"):
            load_policy(one.engine.policy)
        with naming(f"{one.source}.engine.all2all_backend"):
            sends(one.engine.all2all_backend)
    roles = {one.role for one in cluster.instances}
    if roles != {"both"} and roles != {"prefill", "decode"}:
        raise ConfigError(
            f"{path}: instances have the roles {', '.join(sorted(roles))}; either none has a role, or some are prefill "
            "and the others decode"
        )
    for one in cluster.instances:
        where = one.source
        if one.role != "both" and (one.parallel.pp > 1 or one.engine.speculation):
            raise ConfigError(
                f"{where}: role {one.role} with pp above 1 or speculative is not simulated; leave one of both out"
            )
        engine = one.engine
        if one.parallel.pp > 1 and engine.async_scheduling:
            raise ConfigError(
                f"{where}: async_scheduling with pp {one.parallel.pp}: pipelines compose steps ahead in their own way "
                "(docs/guide/pipelines.md); leave it out"
            )
        if engine.speculation and engine.async_scheduling:
            raise ConfigError(
                f"{where}: async_scheduling with speculative: steps with drafts are composed when the one before has "
                "ended (docs/guide/speculative.md); leave it out"
            )
        if engine.speculation and one.parallel.pp > 1:
            raise ConfigError(f"{where}: speculative with pp {one.parallel.pp} is not simulated; one of both")
        if engine.offload and not engine.prefix_caching:
            raise ConfigError(f"{where}: kv_offload needs enable_prefix_caching: the host keeps what that would find")
        if engine.offload and (one.role != "both" or one.parallel.pp > 1 or engine.speculation):
            raise ConfigError(f"{where}: kv_offload with a role, pp above 1 or speculative is not simulated")
        if engine.num_gpu_blocks is not None and engine.available_kv_gib is not None:
            raise ConfigError(f"{where}: give num_gpu_blocks or available_kv_gib, not both")
