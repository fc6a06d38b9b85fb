"""Weights in parameters and bytes: a nominal view with one dtype for all, and what the engine really holds per rank.

Both views start from the same list of matrices of a layer, cut to one rank's widths. Sources: the layer shapes of
vLLM 0.31 (docs/guide/weights-and-placement.md).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from profiler.core.kv import mtp_kind
from profiler.core.shard import Geometry, ceil_div, geometry, stage_layers
from profiler.core.types import LayerKind, ModelSpec, Parallel

Group = Literal[
    "embedding", "head", "attention", "indexer", "dense_mlp", "gate", "routed", "shared", "norm", "absorbed", "mtp"
]
Held = Literal["weight", "wide", "gate", "fp32"]

_WIDE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2, "nvfp4": 2}
_WEIGHT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
_EXPERT_GROUPS = ("routed", "shared", "gate")


@dataclass(frozen=True, slots=True)
class Matrix:
    """`copies` matrices of rows x columns.

    held: "weight" in the checkpoint's weight format, "wide" in the dtype of activations, "gate" in the router's
    dtype, "fp32". stored: False for a copy that the engine makes of a weight which is also counted itself.
    """

    name: str
    group: Group
    rows: int
    columns: int
    held: Held
    copies: int = 1
    stored: bool = True

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * self.copies


def whole(spec: ModelSpec) -> Geometry:
    """Widths of the unsplit model."""
    return geometry(spec, Parallel())


def layer_matrices(spec: ModelSpec, kind: LayerKind, split: Geometry) -> tuple[Matrix, ...]:
    """The matrices of one layer of this kind, at one rank's widths."""
    attention = _mla_matrices(spec, split) if kind.attention == "mla" else _gqa_matrices(spec, split)
    indexer = _indexer_matrices(spec, split) if kind.selection in ("full", "block") else ()
    mlp = (
        _moe_matrices(spec, split) if kind.mlp == "moe" else _mlp_matrices("dense_mlp", spec.hidden, split.intermediate)
    )
    norms = Matrix("layer_norms", "norm", 2, spec.hidden, "wide")
    return (*attention, *indexer, *mlp, norms)


def _mla_matrices(spec: ModelSpec, split: Geometry) -> tuple[Matrix, ...]:
    mla, hidden, heads = spec.mla, spec.hidden, split.heads
    assert mla is not None
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    values = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    queries = (
        (Matrix("q_proj", "attention", query, hidden, "weight"),)
        if mla.q_lora_rank is None
        else (
            Matrix("q_a_proj", "attention", mla.q_lora_rank, hidden, "weight"),
            Matrix("q_b_proj", "attention", query, mla.q_lora_rank, "weight"),
            Matrix("q_a_norm", "norm", 1, mla.q_lora_rank, "wide"),
        )
    )
    return (
        *queries,
        Matrix("kv_a_proj", "attention", mla.latent_dim, hidden, "weight"),
        Matrix("kv_b_proj", "attention", values, mla.kv_lora_rank, "weight"),
        Matrix("o_proj", "attention", hidden, heads * mla.v_head_dim, "weight"),
        Matrix("kv_a_norm", "norm", 1, mla.kv_lora_rank, "wide"),
        Matrix("absorbed_kv_b", "absorbed", values, mla.kv_lora_rank, "wide", stored=False),
    )


def _gqa_matrices(spec: ModelSpec, split: Geometry) -> tuple[Matrix, ...]:
    gqa, hidden = spec.gqa, spec.hidden
    assert gqa is not None
    rows = (split.heads + 2 * split.kv_heads) * gqa.head_dim
    bias = (Matrix("qkv_bias", "attention", 1, rows, "wide"),) if gqa.qkv_bias else ()
    norms = (Matrix("qk_norm", "norm", 2, gqa.head_dim, "wide"),) if gqa.qk_norm else ()
    return (
        Matrix("qkv_proj", "attention", rows, hidden, "weight"),
        Matrix("o_proj", "attention", hidden, split.heads * gqa.head_dim, "weight"),
        *bias,
        *norms,
    )


def _indexer_matrices(spec: ModelSpec, split: Geometry) -> tuple[Matrix, ...]:
    """A token indexer is whole on every rank and keeps its key and weight projections wide; a block indexer's
    projections are rows of the fused qkv projection, its query heads split like the key-value heads."""
    indexer, hidden = spec.indexer, spec.hidden
    assert indexer is not None
    if spec.mla is None:
        return (
            Matrix("index_qk_proj", "indexer", (split.index_heads + 1) * indexer.head_dim, hidden, "weight"),
            Matrix("index_qk_norm", "norm", 2, indexer.head_dim, "wide"),
        )
    return (
        Matrix("index_wq_b", "indexer", indexer.num_heads * indexer.head_dim, spec.mla.q_lora_rank or hidden, "weight"),
        Matrix("index_wk", "indexer", indexer.head_dim, hidden, "wide"),
        Matrix("index_weights", "indexer", indexer.num_heads, hidden, "wide"),
        Matrix("index_k_norm", "norm", 2, indexer.head_dim, "wide"),
    )


def _mlp_matrices(group: Group, hidden: int, width: int, copies: int = 1) -> tuple[Matrix, ...]:
    return (
        Matrix(f"{group}_gate_up", group, 2 * width, hidden, "weight", copies),
        Matrix(f"{group}_down", group, hidden, width, "weight", copies),
    )


def _moe_matrices(spec: ModelSpec, split: Geometry) -> tuple[Matrix, ...]:
    moe, hidden = spec.moe, spec.hidden
    assert moe is not None
    bias = (Matrix("routing_bias", "gate", 1, moe.num_experts, "fp32"),) if moe.has_bias else ()
    shared = _mlp_matrices("shared", hidden, split.shared_intermediate) if moe.num_shared_experts else ()
    return (
        Matrix("gate", "gate", moe.num_experts, hidden, "gate"),
        *bias,
        *_mlp_matrices("routed", hidden, split.moe_intermediate, split.experts),
        *shared,
    )


def _ends(spec: ModelSpec, vocab: int) -> tuple[Matrix, ...]:
    embedding = Matrix("embedding", "embedding", vocab, spec.hidden, "wide")
    head = () if spec.tie_embeddings else (Matrix("lm_head", "head", vocab, spec.hidden, "wide"),)
    return (embedding, *head, Matrix("final_norm", "norm", 1, spec.hidden, "wide"))


def mtp_matrices(spec: ModelSpec, split: Geometry) -> tuple[Matrix, ...]:
    """One multi-token prediction layer: a whole layer, the projection of its two inputs, its norms and its head.

    The embedding is the model's own.
    """
    hidden = spec.hidden
    return (
        *layer_matrices(spec, mtp_kind(spec), split),
        Matrix("eh_proj", "mtp", hidden, 2 * hidden, "wide"),
        Matrix("mtp_norms", "norm", 3, hidden, "wide"),
        Matrix("mtp_head", "head", split.vocab, hidden, "wide"),
    )


def parameters(spec: ModelSpec) -> dict[Group, int]:
    """Parameters of the whole checkpoint by group, without multi-token prediction layers and vision towers.

    Engine copies are left out; the vocabulary is counted unpadded.
    """
    totals: dict[Group, int] = {}
    split = whole(spec)
    for kind in spec.kinds:
        _count(totals, layer_matrices(spec, kind, split), spec.count(kind))
    _count(totals, _ends(spec, spec.vocab), 1)
    return totals


def mtp_parameters(spec: ModelSpec) -> int:
    """Parameters of one multi-token prediction layer with its head."""
    return sum(matrix.parameters for matrix in mtp_matrices(spec, whole(spec)) if matrix.stored)


def _count(totals: dict[Group, int], matrices: Iterable[Matrix], times: int) -> None:
    for matrix in matrices:
        if matrix.stored:
            totals[matrix.group] = totals.get(matrix.group, 0) + times * matrix.parameters


@dataclass(frozen=True, slots=True)
class NominalWeights:
    """The model with one dtype for every parameter: no scales, no copies, no multi-token prediction.

    The shared expert and the router count with the experts, embedding and head with the dense part.
    """

    bytes_per_parameter: float
    dense_bytes: float
    experts_bytes: float

    @property
    def expert_share(self) -> float:
        return self.experts_bytes / (self.dense_bytes + self.experts_bytes)

    def per_rank_bytes(self, parallel: Parallel) -> float:
        """Dense bytes over tp x pp, expert bytes over all GPUs. At tp = pp = 1 this is dense + experts / N."""
        return self.dense_bytes / (parallel.tp * parallel.pp) + self.experts_bytes / parallel.gpus


def nominal_weights(spec: ModelSpec) -> NominalWeights:
    """The nominal view of the whole model. Bytes per parameter: 1 for fp8, 2 for bf16 and fp16, 4 for fp32."""
    totals, size = parameters(spec), _WEIGHT_BYTES[spec.quantization.weights]
    experts = sum(count for group, count in totals.items() if group in _EXPERT_GROUPS)
    return NominalWeights(size, size * (sum(totals.values()) - experts), size * experts)


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """Bytes that one rank holds, by group. `mtp` has the whole of the multi-token prediction layers."""

    groups: Mapping[Group, int] = field(hash=False)

    @property
    def total_bytes(self) -> int:
        return sum(self.groups.values())


def engine_weights(
    spec: ModelSpec, parallel: Parallel, *, mtp_layers: int = 0, redundant_experts: int = 0
) -> EngineWeights:
    """What vLLM holds on the fullest rank: of the stage with most bytes, with the most experts.

    redundant_experts: copies of experts of every layer (EPLB), over all ranks; a rank holds (experts + copies) / ep.

    Against the nominal view: embedding, head, router and norms in 2 bytes, fp8 block scales, the absorbed copies of
    an fp8 kv_b_proj, whole query, key-value and indexer down-projections on each tensor-parallel rank, the shared
    expert on each data-parallel rank. Raises ConfigError for an illegal split.
    """
    stages = stage_weights(spec, parallel, mtp_layers=mtp_layers, redundant_experts=redundant_experts)
    return max(stages, key=lambda weights: weights.total_bytes)


def stage_weights(
    spec: ModelSpec, parallel: Parallel, *, mtp_layers: int = 0, redundant_experts: int = 0
) -> tuple[EngineWeights, ...]:
    """Bytes per rank of each pipeline stage, as engine_weights."""
    split = geometry(spec, parallel, redundant_experts=redundant_experts)
    stages = stage_layers(spec, parallel)
    result = []
    for stage, layers in enumerate(stages):
        groups: dict[Group, int] = {}
        kinds = [spec.layers[i] for i in layers]
        for kind in dict.fromkeys(kinds):
            _hold(groups, spec, layer_matrices(spec, kind, split), kinds.count(kind))
        first, last = stage == 0, stage == len(stages) - 1
        ends = [m for m in _ends(spec, split.vocab) if (first if m.group == "embedding" else last)]
        _hold(groups, spec, ends, 1)
        if last and mtp_layers:
            groups["mtp"] = mtp_layers * sum(held_bytes(spec, matrix) for matrix in mtp_matrices(spec, split))
        result.append(EngineWeights(groups))
    return tuple(result)


def _hold(groups: dict[Group, int], spec: ModelSpec, matrices: Iterable[Matrix], times: int) -> None:
    for matrix in matrices:
        groups[matrix.group] = groups.get(matrix.group, 0) + times * held_bytes(spec, matrix)


def held_bytes(spec: ModelSpec, matrix: Matrix) -> int:
    """Bytes of a matrix on the card, the fp32 scale of each block of an fp8 weight included; none of a copy that the
    engine makes of fp8 weights alone."""
    quantization = spec.quantization
    if matrix.held == "gate":
        return matrix.parameters * (spec.moe.gate_bytes if spec.moe else 2)
    if matrix.held == "fp32":
        return matrix.parameters * 4
    if not matrix.stored and quantization.weights in ("bf16", "fp16"):
        # Halves of a weight that the engine multiplies by as it is are views of it.
        return 0
    if matrix.held == "wide":
        return matrix.parameters * _WIDE_BYTES[quantization.weights]
    scales = 0
    if quantization.block:
        rows, columns = quantization.block
        scales = ceil_div(matrix.rows, rows) * ceil_div(matrix.columns, columns) * quantization.scale_bytes
    return matrix.parameters * _WEIGHT_BYTES[quantization.weights] + scales * matrix.copies
