"""What the grouped-query-attention families share: fields and components."""

from collections.abc import Mapping
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.stack import text_config
from profiler.core.types import Component, GqaDims, LayerKind, ModelSpec, MoeDims
from profiler.families._fields import Fields, architecture, dense, quantization

PROLOGUE = dense("embedding")
HEAD = (*dense("final_layernorm"), Component("per_sequence", "lm_head"), Component("per_sequence", "sampler"))
DENSE_MLP = dense("gate_up_proj", "act_fn", "down_proj")


def gqa_dims(text: Fields, qk_norm: bool) -> GqaDims:
    heads = text.integer("num_attention_heads")
    kv_heads = text.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"{text.where}: {heads} attention heads are no multiple of {kv_heads} key-value heads")
    hidden = text.integer("hidden_size")
    if not text.has("head_dim") and hidden % heads:
        raise ConfigError(f"{text.where}: head_dim is missing and hidden_size {hidden} / {heads} heads is not whole")
    return GqaDims(
        num_kv_heads=kv_heads,
        head_dim=text.integer("head_dim", default=hidden // heads),
        qkv_bias=text.boolean("attention_bias", False),
        qk_norm=qk_norm,
    )


def read_gqa_model(
    name: str, config: Mapping[str, Any], layers: tuple[LayerKind, ...], moe: MoeDims | None, qk_norm: bool
) -> ModelSpec:
    text = Fields(text_config(config), name)
    return ModelSpec(
        name=name,
        family="",
        architecture=architecture(config),
        hidden=text.integer("hidden_size"),
        vocab=text.integer("vocab_size"),
        num_heads=text.integer("num_attention_heads"),
        intermediate=text.integer("intermediate_size"),
        max_position=text.integer("max_position_embeddings"),
        layers=layers,
        mla=None,
        gqa=gqa_dims(text, qk_norm),
        indexer=None,
        moe=moe,
        quantization=quantization(config, text),
        tie_embeddings=text.boolean("tie_word_embeddings", False),
    )


def attention_components(qk_norm: bool) -> tuple[Component, ...]:
    """Attention of one layer with its two norms; names are those of stored tables of dense models."""
    norm = dense("qk_norm") if qk_norm else ()
    return (
        *dense("layernorm", "qkv_proj"),
        *norm,
        *dense("rotary_emb"),
        Component("attention", "attention"),
        *dense("o_proj", "layernorm"),
    )
