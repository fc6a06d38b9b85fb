"""What DeepSeek-V3, V3.2 and GLM-5 share: fields, MoE rule and components of the MLA stack."""

from collections.abc import Mapping
from typing import Any, cast

from profiler.core.errors import ConfigError
from profiler.core.stack import text_config
from profiler.core.types import (
    Component,
    IndexerDims,
    LayerKind,
    MlpType,
    ModelSpec,
    MoeDims,
    SelectionBranch,
)
from profiler.families._fields import Fields, architecture, dense, mla_dims, quantization

MLA = dense(
    "input_norm",
    "fused_qkv_a_proj",
    "q_a_norm",
    "q_b_proj",
    "kv_a_norm",
    "rotary",
    "kv_cache_write",
    "o_proj",
    "post_attention_norm",
)
DENSE_MLP = dense("gate_up_proj", "activation", "down_proj")
MOE = (
    *dense("router_gate", "router_topk"),
    Component("moe", "experts"),
    *dense("shared_gate_up_proj", "shared_activation", "shared_down_proj", "moe_combine"),
)
# step_inputs: the copies, slot mapping and attention metadata that every step puts on the device before the model.
PROLOGUE = dense("step_inputs", "embedding")
HEAD = (*dense("final_norm"), Component("per_sequence", "lm_head"), Component("per_sequence", "sampler"))


def read_moe(text: Fields) -> MoeDims:
    experts, groups = text.integer("n_routed_experts"), text.integer("n_group", default=1)
    dims = MoeDims(
        num_experts=experts,
        topk=text.integer("num_experts_per_tok"),
        intermediate=text.integer("moe_intermediate_size"),
        num_shared_experts=text.integer("n_shared_experts", default=0, minimum=0),
        shared_intermediate=text.integer("moe_intermediate_size"),
        n_group=groups,
        topk_group=text.integer("topk_group", default=1),
        scoring=cast(Any, text.choice("scoring_func", ("sigmoid", "softmax"), "softmax")),
        has_bias=text.text("topk_method") == "noaux_tc",
        renormalize=text.boolean("norm_topk_prob", True),
        routed_scaling=text.number("routed_scaling_factor", 1.0),
    )
    if experts % groups or dims.topk_group > groups or dims.topk > dims.topk_group * (experts // groups):
        raise ConfigError(
            f"{text.where}: {experts} experts in {groups} groups of which {dims.topk_group} are picked cannot give "
            f"{dims.topk} experts per token"
        )
    return dims


def mlp_types(text: Fields, num_layers: int) -> tuple[MlpType, ...]:
    """MoE from first_k_dense_replace on, in every moe_layer_freq-th layer."""
    first = text.integer("first_k_dense_replace", default=0, minimum=0)
    every = text.integer("moe_layer_freq", default=1)
    return tuple("moe" if i >= first and i % every == 0 else "dense" for i in range(num_layers))


def read_mla_model(
    name: str,
    config: Mapping[str, Any],
    selection: tuple[SelectionBranch, ...],
    indexer: IndexerDims | None,
    notes: tuple[str, ...] = (),
) -> ModelSpec:
    text = Fields(text_config(config), name)
    mlps = mlp_types(text, len(selection))
    heads = text.integer("num_attention_heads")
    return ModelSpec(
        name=name,
        family="",
        architecture=architecture(config),
        hidden=text.integer("hidden_size"),
        vocab=text.integer("vocab_size"),
        num_heads=heads,
        intermediate=text.integer("intermediate_size"),
        max_position=text.integer("max_position_embeddings"),
        layers=tuple(LayerKind("mla", s, m) for s, m in zip(selection, mlps, strict=True)),
        mla=mla_dims(text),
        gqa=None,
        indexer=indexer,
        moe=read_moe(text) if "moe" in mlps else None,
        quantization=quantization(config, text),
        tie_embeddings=text.boolean("tie_word_embeddings", False),
        mtp_layers=text.integer("num_nextn_predict_layers", default=0, minimum=0),
        notes=notes,
    )


def mlp_components(kind: LayerKind) -> tuple[Component, ...]:
    return MOE if kind.mlp == "moe" else DENSE_MLP
