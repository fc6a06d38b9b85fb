"""What a replay returns: frozen values that metrics, reports and comparisons read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from profiler.core.types import Parallel
from serving.core.disaggregated import Traffic, Wire
from serving.core.host_tier import HostMemory, HostUse
from serving.core.runlog import RequestRecord
from serving.core.scheduler import Limits
from serving.speculation import Verified
from serving.traces import Trace


@dataclass(frozen=True, slots=True)
class Tables:
    """The bundle that priced a deployment, and where its numbers come from. model: whose kernels were timed, which may
    be another one of the same kernels (profiler.core.siblings)."""

    hardware: str
    model: str
    variant: str
    provenance: str
    engine: str

    def variant_of(self, model: str) -> str:
        """The variant, with its model where that is another one than `model`."""
        return self.variant if self.model == model else f"{self.variant} of {self.model}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """One instance of the cluster as it ran, with every setting resolved.

    engines: the instance_ids of its data-parallel ranks. lockstep: they step together. num_gpu_blocks (per rank)
    includes the null block; block_tokens is the tokens of a sequence that one block stands for. layers: only the first
    of the model, None for all. verified: what came of speculative decoding, None without. host, host_use: KV blocks in
    the host memory of one rank, and what came of them over all ranks; None without. host_source: where the time of an
    engine's own thread is from, "stated" for host_overhead_us.
    """

    model: str
    hardware: str
    parallel: Parallel
    engines: tuple[int, ...]
    lockstep: bool
    kv_layout: str
    block_tokens: int
    num_gpu_blocks: int
    blocks_source: str
    limits: Limits
    prefix_caching: bool
    policy: str
    eager: bool
    host_overhead_us: float
    async_scheduling: bool
    step_overhead_us: float
    step_overhead_source: str
    tables: Tables
    gate: str = "even"
    expert_placement: str = "linear"
    redundant_experts: int = 0
    all2all_backend: str = "allgather_reducescatter"
    layers: int | None = None
    verified: Verified | None = None
    role: str = "both"
    host: HostMemory | None = None
    host_use: HostUse | None = None
    host_source: str = "not known"

    @property
    def kv_tokens(self) -> int:
        """Tokens that the usable blocks of one rank hold."""
        return (self.num_gpu_blocks - 1) * self.block_tokens


@dataclass(frozen=True, slots=True)
class Sent:
    """Caches sent from prefill to decode engines. bytes_per_token: of one rank, over all its caches. link_source: where
    the link's numbers are from."""

    traffic: Traffic
    wire: Wire
    bytes_per_token: int
    link_source: str


@dataclass(frozen=True, slots=True)
class Result:
    """One replay. `records` follow the trace; `gaps_ns` are the times between two tokens over all requests: values,
    in no order, and how often each occurred.

    itl_ns: the times between the tokens of each request with a token, in order, by trace index; kept on demand.
    extrapolated_lookups: table lookups outside the measured range, only ever above 0 when they were allowed.
    sent: between prefill and decode engines, None without roles.
    max_concurrency: most requests in flight that the clients allowed, None for any number.
    """

    cluster: str
    router: str
    trace: Trace
    records: tuple[RequestRecord, ...]
    gaps_ns: tuple[Sequence[int], Sequence[int]]
    deployments: tuple[Deployment, ...]
    steps: int
    extrapolated_lookups: int
    seed: int
    horizon_ns: int | None
    itl_ns: Mapping[int, Sequence[int]] = field(default_factory=dict)
    sent: Sent | None = None
    max_concurrency: int | None = None
