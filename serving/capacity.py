"""The memory budget of one rank, as vLLM computes it: device total, weights, activations, graphs, then KV blocks.

Each term is named and has its source, so that it can be compared with an engine's log and overridden where the log
says otherwise. What no formula gives is a stated reserve (docs/guide/weights-and-placement.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from profiler.core.errors import CapacityError, ConfigError
from profiler.core.hardware import Hardware
from profiler.core.kv import KvLayout, blocks_for, kv_layout
from profiler.core.shard import describe, geometry
from profiler.core.types import ModelSpec, Parallel
from profiler.core.units import GIB
from profiler.core.weights import stage_weights
from serving.activation import Term, activation_terms, profiled_step

DEFAULT_UTILIZATION = 0.9

HEADROOM_GIB = 5.0
HEADROOM_SOURCE = (
    "DeepSeek-V3.2-FP8 with tp 1 dp 8 ep 8 on 8 x H200 ran out of memory at max_model_len 163,840 and worked at 81,920 "
    "(docs.gpustack.ai performance lab, vLLM 0.13); this budget leaves 4.2 and 7.8 GiB there with fp8 KV; with bf16 "
    "KV it refuses the first and leaves 5.5 GiB in the second"
)

OTHER_ACTIVATION_GIB = 0.25
NON_TORCH_ALONE_GIB = 0.25
NON_TORCH_GROUP_GIB = 1.4
CUDA_GRAPH_GIB_PER_LAYER = 4.99 / 78


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of one rank, of the pipeline stage that holds the fewest KV blocks.

    terms: parts of the device's memory in the order of the computation. With the KV memory and what the utilisation
    leaves unused they sum to total_gib; empty when the available KV memory was given. layout: of the widest stage.
    kv_available_gib may be negative: by how much the rest does not fit. num_gpu_blocks includes the engine's null
    block, as its logs do. largest_max_model_len and safe_max_model_len: of which one sequence fits, and fits with the
    headroom; 0 when none does. weights_bytes: engine view, of the stage with most of them.
    """

    spec: ModelSpec
    parallel: Parallel
    layout: KvLayout
    total_gib: float
    utilization: float
    terms: tuple[Term, ...]
    kv_available_gib: float
    num_gpu_blocks: int
    max_model_len: int
    largest_max_model_len: int
    safe_max_model_len: int
    headroom_gib: float
    weights_bytes: int
    stage: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache of one engine holds: its ranks hold them together or each the same ones."""
        return self.num_gpu_blocks * self.layout.tokens_per_block

    @property
    def needed_blocks(self) -> int:
        """Blocks of one sequence of max_model_len tokens; the engine does not start with fewer."""
        return blocks_for(self.layout, self.max_model_len)

    @property
    def needed_kv_gib(self) -> float:
        return self.needed_blocks * self.layout.bytes_per_block / GIB

    @property
    def max_concurrency(self) -> float:
        """Sequences of max_model_len tokens at once, as the engine prints it."""
        return self.num_gpu_blocks / self.needed_blocks

    @property
    def fits(self) -> bool:
        return self.num_gpu_blocks >= self.needed_blocks

    @property
    def margin_gib(self) -> float:
        """KV memory beyond one sequence of max_model_len tokens."""
        return self.kv_available_gib - self.needed_kv_gib

    @property
    def risk(self) -> str | None:
        """Why a budget that fits may still fail, or None. A given KV size carries no risk: the engine logged it."""
        if not self.fits or not self.terms or self.margin_gib >= self.headroom_gib:
            return None
        return (
            f"risky: {self.margin_gib:.1f} GiB beyond one sequence, under the headroom of {self.headroom_gib:g} GiB "
            f"for workspaces that have no formula here; {HEADROOM_SOURCE}"
        )

    def parts(self) -> dict[str, float]:
        """GiB by name, summing to total_gib: the terms, `kv`, and `outside_utilization`. Without terms only `kv`."""
        parts = {term.name: term.gib for term in self.terms}
        parts["kv"] = self.kv_available_gib
        if self.terms:
            parts["outside_utilization"] = self.total_gib * (1 - self.utilization)
        return parts

    def gib(self, name: str) -> float:
        return sum(term.gib for term in self.terms if term.name == name)

    def explain(self) -> str:
        """Every term on one line."""
        parts = [f"{term.name} {term.gib:.2f}" for term in self.terms]
        return f"{self.total_gib:.2f} GiB x {self.utilization:g}: {', '.join(parts)}, KV {self.kv_available_gib:.2f}"


def default_batched_tokens(hardware: Hardware) -> int:
    """max_num_batched_tokens of vLLM's API server on a GPU of this size (facts of vLLM 0.31, arg_utils)."""
    if hardware.memory_total_gib >= 160:
        return 16384
    return 8192 if hardware.memory_total_gib >= 70 else 2048


def default_num_seqs(hardware: Hardware) -> int:
    """max_num_seqs of vLLM on a GPU of this size."""
    return 1024 if hardware.memory_total_gib >= 70 else 256


def memory_budget(
    spec: ModelSpec,
    hardware: Hardware,
    parallel: Parallel,
    *,
    max_model_len: int,
    kv_dtype: str = "auto",
    utilization: float = DEFAULT_UTILIZATION,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    block_tokens: int | None = None,
    index_dtype: str = "auto",
    mtp_layers: int = 0,
    redundant_experts: int = 0,
    dcp: int = 1,
    other_activation_gib: float = OTHER_ACTIVATION_GIB,
    non_torch_gib: float | None = None,
    cuda_graph_gib: float | None = None,
    headroom_gib: float = HEADROOM_GIB,
    available_kv_gib: float | None = None,
) -> Budget:
    """The memory of one rank and the KV blocks that it holds.

    max_model_len in tokens; max_num_batched_tokens and max_num_seqs default to the engine's choice for the GPU.
    redundant_experts: copies of the experts of every layer, as profiler.core.weights.engine_weights counts them.
    other_activation_gib, non_torch_gib and cuda_graph_gib replace the stated reserves; headroom_gib is what
    has to remain beyond one sequence for a budget not to be marked risky. available_kv_gib, as a log
    prints it, replaces the whole budget. A budget that does not fit is returned, not raised: see Budget.fits and
    require_fit. Raises ConfigError for an illegal split, dtype or block size, or a number out of range.
    """
    batched = default_batched_tokens(hardware) if max_num_batched_tokens is None else max_num_batched_tokens
    seqs = default_num_seqs(hardware) if max_num_seqs is None else max_num_seqs
    _check_range(spec, hardware, max_model_len, utilization, batched, seqs, available_kv_gib)
    for name, value in (
        ("other_activation_gib", other_activation_gib),
        ("non_torch_gib", non_torch_gib),
        ("cuda_graph_gib", cuda_graph_gib),
        ("headroom_gib", headroom_gib),
    ):
        if value is not None and not 0 <= value < hardware.memory_total_gib:
            raise ConfigError(f"{name} is {value}; it must be between 0 and the device's memory")

    split = geometry(spec, parallel, dcp)
    weights = stage_weights(spec, parallel, mtp_layers=mtp_layers, redundant_experts=redundant_experts)
    layouts = {
        stage: kv_layout(
            spec,
            parallel,
            hardware.architecture,
            kv_dtype,
            index_dtype=index_dtype,
            block_tokens=block_tokens,
            dcp=dcp,
            mtp_layers=mtp_layers,
            stage=stage,
        )
        for stage in (None, *range(parallel.pp))
    }
    reserves = _reserves(spec, parallel, non_torch_gib, cuda_graph_gib, other_activation_gib)
    ranks = []
    for stage in range(parallel.pp):
        held = Term("weights", weights[stage].total_bytes / GIB, "engine view of the weights")
        ranks.append(
            _Rank(
                stage,
                layouts[stage],
                hardware.memory_total_gib * utilization,
                (held, *reserves) if available_kv_gib is None else (),
                available_kv_gib,
                partial(activation_terms, profiled_step(spec, parallel, split, layouts[stage], stage, batched, seqs)),
            )
        )
    fullest = min(ranks, key=lambda rank: (rank.blocks(max_model_len), rank.kv_gib(max_model_len)))
    widest = layouts[None]
    return Budget(
        spec=spec,
        parallel=parallel,
        layout=widest,
        total_gib=hardware.memory_total_gib,
        utilization=utilization,
        terms=fullest.terms(max_model_len),
        kv_available_gib=fullest.kv_gib(max_model_len),
        num_gpu_blocks=fullest.blocks(max_model_len),
        max_model_len=max_model_len,
        largest_max_model_len=_largest_length(spec, widest, fullest, 0.0),
        safe_max_model_len=_largest_length(spec, widest, fullest, headroom_gib if fullest.fixed else 0.0),
        headroom_gib=headroom_gib,
        weights_bytes=max(held.total_bytes for held in weights),
        stage=fullest.stage,
    )


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank of one stage: memory to share out, terms that do not depend on max_model_len, and those that do."""

    stage: int
    layout: KvLayout
    requested_gib: float
    fixed: tuple[Term, ...]
    given_kv_gib: float | None
    activations: Callable[[int], tuple[Term, ...]]

    def terms(self, length: int) -> tuple[Term, ...]:
        return (*self.fixed, *self.activations(length)) if self.given_kv_gib is None else ()

    def kv_gib(self, length: int) -> float:
        if self.given_kv_gib is not None:
            return self.given_kv_gib
        return self.requested_gib - sum(term.gib for term in self.terms(length))

    def blocks(self, length: int) -> int:
        return max(0, math.floor(self.kv_gib(length) * GIB / self.layout.bytes_per_block))


def require_fit(budget: Budget) -> None:
    """Raises CapacityError with every term when one sequence of max_model_len does not fit."""
    if budget.fits:
        return
    raise CapacityError(
        f"{budget.spec.name} with {describe(budget.parallel)} does not fit: {budget.explain()} GiB, but one sequence "
        f"of {budget.max_model_len} tokens needs {budget.needed_kv_gib:.2f} GiB; "
        + (
            f"the largest max_model_len that fits is {budget.largest_max_model_len}"
            if budget.largest_max_model_len
            else "no max_model_len fits"
        )
    )


def _reserves(
    spec: ModelSpec,
    parallel: Parallel,
    non_torch_gib: float | None,
    cuda_graph_gib: float | None,
    other_gib: float,
) -> tuple[Term, ...]:
    given = "given"
    group = parallel.gpus > 1
    non_torch = (NON_TORCH_GROUP_GIB if group else NON_TORCH_ALONE_GIB) if non_torch_gib is None else non_torch_gib
    layers = -(-spec.num_layers // parallel.pp)
    graphs = CUDA_GRAPH_GIB_PER_LAYER * layers if cuda_graph_gib is None else cuda_graph_gib
    return (
        Term(
            "non_torch",
            non_torch,
            given
            if non_torch_gib is not None
            else "reserve: 0.16-0.23 GiB logged on one GPU, 0.95 and 1.38 GiB in groups",
        ),
        Term(
            "cuda_graphs",
            graphs,
            given if cuda_graph_gib is not None else "reserve: 4.99 GiB estimated by the engine for 78 layers",
        ),
        Term("other_activation", other_gib, "reserve for what has no formula here"),
    )


def _largest_length(spec: ModelSpec, layout: KvLayout, rank: _Rank, margin_gib: float) -> int:
    """Largest max_model_len up to the model's own of which one sequence fits and leaves margin_gib; 0 for none."""

    def fits(length: int) -> bool:
        blocks = blocks_for(layout, length)
        spare_gib = rank.kv_gib(length) - blocks * rank.layout.bytes_per_block / GIB
        return rank.blocks(length) >= blocks and spare_gib >= margin_gib

    if fits(spec.max_position):
        return spec.max_position
    low, high = 0, blocks_for(layout, spec.max_position)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * layout.tokens_per_block) else (low, middle)
    return low * layout.tokens_per_block


def _check_range(
    spec: ModelSpec,
    hardware: Hardware,
    max_model_len: int,
    utilization: float,
    batched_tokens: int,
    num_seqs: int,
    available_kv_gib: float | None,
) -> None:
    if not 1 <= max_model_len <= spec.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}; {spec.name} takes 1 to {spec.max_position} (max_position_embeddings)"
        )
    if not 0 < utilization <= 1:
        raise ConfigError(f"utilization is {utilization}; it must be above 0 and at most 1")
    for name, value, largest in (
        ("max_num_batched_tokens", batched_tokens, 1 << 22),
        ("max_num_seqs", num_seqs, 1 << 20),
    ):
        if not 1 <= value <= largest:
            raise ConfigError(f"{name} is {value}; it must be between 1 and {largest}")
    if available_kv_gib is not None and not 0 < available_kv_gib <= hardware.memory_total_gib:
        raise ConfigError(
            f"available_kv_gib is {available_kv_gib}; it must be above 0 and at most the {hardware.memory_total_gib} "
            f"GiB of {hardware.name}"
        )
