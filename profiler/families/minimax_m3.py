"""MiniMax-M3: grouped-query attention, block-sparse (MSA) with a block indexer in most layers, mixture of experts.

The checkpoint's config is nested: the engine builds its backbone from `text_config` alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from profiler.core.errors import ConfigError
from profiler.core.stack import flags, text_config
from profiler.core.types import Component, IndexerDims, LayerKind, ModelSpec, MoeDims
from profiler.families._fields import Fields, dense
from profiler.families._gqa import DENSE_MLP, HEAD, PROLOGUE, attention_components, read_gqa_model

MODEL_TYPES = ("minimax_m3_vl", "minimax_m3", "minimax_m3_text")
ARCHITECTURES = ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM")

SPARSE_ATTENTION = (
    *dense("layernorm", "qkv_index_proj", "qknorm_rope_insert"),
    Component("indexer", "block_scores"),
    Component("indexer", "block_topk"),
    Component("sparse_attention", "sparse_gqa"),
    *dense("o_proj", "layernorm"),
)
MOE = (
    *dense("router_gate", "router_topk"),
    Component("moe", "experts"),
    *dense("shared_gate_up_proj", "shared_act_fn", "shared_down_proj", "moe_combine"),
)


def read(name: str, config: Mapping[str, Any]) -> ModelSpec:
    if config.get("text_config") is None:
        raise ConfigError(
            f"{name}: a MiniMax-M3 config must stay nested, with its text_config key. The engine builds the backbone "
            "from that key alone, so a flattened file would run an all-defaults backbone with none of these values"
        )
    text = Fields(text_config(config), f"{name}: text_config")
    layers = text.integer("num_hidden_layers")
    sparse = text.section("sparse_attention_config")
    try:
        runs_moe = (
            flags(text.values["moe_layer_freq"], layers, "moe_layer_freq")
            if text.has("moe_layer_freq")
            else (True,) * layers
        )
        selects = flags(sparse.values.get("sparse_attention_freq"), layers, "sparse_attention_freq")
        if sparse.has("sparse_disable_index_value"):
            flags(sparse.values["sparse_disable_index_value"], layers, "sparse_disable_index_value")
    except ConfigError as error:
        raise ConfigError(f"{text.where}: {error}") from None
    kinds = tuple(
        LayerKind("gqa", "block" if block else "none", "moe" if moe else "dense")
        for block, moe in zip(selects, runs_moe, strict=True)
    )
    indexer = IndexerDims(
        num_heads=sparse.integer("sparse_num_index_heads"),
        head_dim=sparse.integer("sparse_index_dim"),
        topk=sparse.integer("sparse_topk_blocks"),
        block_tokens=sparse.integer("sparse_block_size"),
    )
    spec = read_gqa_model(name, config, kinds, _moe(text), qk_norm=text.boolean("use_qk_norm", True))
    if spec.gqa is not None and indexer.num_heads != spec.gqa.num_kv_heads:
        raise ConfigError(
            f"{sparse.where}: {indexer.num_heads} index heads for {spec.gqa.num_kv_heads} key-value heads; the engine "
            "needs one index head per key-value head"
        )
    return replace(
        spec,
        intermediate=text.integer("dense_intermediate_size"),
        indexer=indexer if "block" in {kind.selection for kind in kinds} else None,
        mtp_layers=text.integer("num_mtp_modules", default=0, minimum=0),
        notes=("public copies of this config differ in num_mtp_modules (7 or 1), and no MTP weights ship",),
    )


def _moe(text: Fields) -> MoeDims:
    dims = MoeDims(
        num_experts=text.integer("num_local_experts"),
        topk=text.integer("num_experts_per_tok"),
        intermediate=text.integer("intermediate_size"),
        num_shared_experts=text.integer("n_shared_experts", default=0, minimum=0),
        shared_intermediate=text.integer("intermediate_size"),
        scoring=cast(Any, text.choice("scoring_func", ("sigmoid", "softmax"), "softmax")),
        has_bias=text.boolean("use_routing_bias", False),
        routed_scaling=text.number("routed_scaling_factor", 1.0),
        gate_bytes=4,
    )
    if dims.topk > dims.num_experts:
        raise ConfigError(f"{text.where}: num_experts_per_tok {dims.topk} exceeds num_local_experts {dims.num_experts}")
    return dims


def layer_components(spec: ModelSpec, kind: LayerKind) -> tuple[Component, ...]:
    attention = SPARSE_ATTENTION if kind.selection == "block" else attention_components(qk_norm=True)
    return (*attention, *(MOE if kind.mlp == "moe" else DENSE_MLP))


def prologue_components(spec: ModelSpec) -> tuple[Component, ...]:
    """With the input copies and attention metadata of every step, which the block-sparse layers build too."""
    return (*dense("step_inputs"), *PROLOGUE)


def head_components(spec: ModelSpec) -> tuple[Component, ...]:
    return HEAD
