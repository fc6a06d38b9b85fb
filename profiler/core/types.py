"""Frozen values shared by the whole product: what a model is, how it is split, what is measured.

Lengths are in tokens, sizes in elements unless a name ends in `_bytes`, `_gib`, `_us` or `_ns`.
"""

from dataclasses import dataclass
from typing import Literal

AttentionType = Literal["mla", "gqa"]
SelectionBranch = Literal["none", "full", "shared", "block"]
MlpType = Literal["dense", "moe"]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one decoder layer runs.

    selection: "none" attends every key; "full" runs a token indexer of its own (DSA); "shared" reuses the pick of
    the last full layer (IndexShare: no indexer weights and no indexer cache); "block" runs a block indexer (MSA).
    """

    attention: AttentionType
    selection: SelectionBranch
    mlp: MlpType

    @property
    def name(self) -> str:
        return f"{self.attention}-{self.selection}-{self.mlp}"


@dataclass(frozen=True, slots=True)
class MlaDims:
    """Multi-head latent attention. q_lora_rank is None where queries are projected directly.

    rotary_tables: tables of cosines and sines that the engine keeps, one more where the indexer rotates its halves
    otherwise than the attention does. rotary_bytes: per element of one.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rotary_tables: int = 1
    rotary_bytes: int = 2

    @property
    def latent_dim(self) -> int:
        """Cached elements per token: the latent and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class GqaDims:
    """Grouped-query attention."""

    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class IndexerDims:
    """The selection branch. topk counts tokens for DSA and blocks of `block_tokens` tokens for MSA."""

    num_heads: int
    head_dim: int
    topk: int
    block_tokens: int = 1

    @property
    def attended_cap_tokens(self) -> int:
        """The most KV tokens that one query reads: top-k tokens, or top-k blocks x block length."""
        return self.topk * self.block_tokens


@dataclass(frozen=True, slots=True)
class MoeDims:
    """Mixture of experts. n_group = topk_group = 1 is unrestricted; gate_bytes is the width of a router weight."""

    num_experts: int
    topk: int
    intermediate: int
    num_shared_experts: int
    shared_intermediate: int
    n_group: int = 1
    topk_group: int = 1
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    has_bias: bool = False
    renormalize: bool = True
    routed_scaling: float = 1.0
    gate_bytes: int = 2


@dataclass(frozen=True, slots=True)
class Quantization:
    """Weight format of the checkpoint. block is the scale block of fp8 weights, (rows, columns)."""

    weights: Literal["bf16", "fp8", "nvfp4", "fp16", "fp32"]
    block: tuple[int, int] | None = None
    scale_bytes: int = 4


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A checkpoint's architecture, normalised from its HF config by its family.

    notes: what the reader of the config flags without refusing it, one sentence each.
    """

    name: str
    family: str
    architecture: str
    hidden: int
    vocab: int
    num_heads: int
    intermediate: int
    max_position: int
    layers: tuple[LayerKind, ...]
    mla: MlaDims | None
    gqa: GqaDims | None
    indexer: IndexerDims | None
    moe: MoeDims | None
    quantization: Quantization
    tie_embeddings: bool = False
    mtp_layers: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def block_sparse(self) -> bool:
        """Whether some layers attend to blocks that an indexer selects (MSA)."""
        return any(layer.selection == "block" for layer in self.layers)

    def count(self, kind: LayerKind) -> int:
        return self.layers.count(kind)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct layer kinds in the order of their first appearance."""
        return tuple(dict.fromkeys(self.layers))


@dataclass(frozen=True, slots=True)
class Parallel:
    """Degrees of tensor, pipeline, data and expert parallelism. ep counts ranks over the whole data-parallel group."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp


Category = Literal["dense", "per_sequence", "attention", "indexer", "sparse_attention", "moe", "skew"]


@dataclass(frozen=True, slots=True)
class Component:
    """One priced part of a forward pass: a row family `name` of the table `category`.

    when: "always"; "prefill_dense" only for prefill requests of steps in which all of them attend every key (at or
    below top-k); "prefill_sparse" for every row that does not take that path, decode rows too; "decode" only for
    decode requests. It selects among kernels that replace each other, so that one kernel's table is never used for
    another.
    """

    category: Category
    name: str
    when: Literal["always", "prefill_dense", "prefill_sparse", "decode"] = "always"


@dataclass(frozen=True, slots=True)
class StackCost:
    """How often each component runs in one forward pass of a model, folded over its layers."""

    components: tuple[tuple[Component, int], ...]
