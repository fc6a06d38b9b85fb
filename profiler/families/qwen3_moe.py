"""Qwen3-MoE: grouped-query attention, mixture of experts without a shared expert. A control.

Stored tables time the router with the experts, so a MoE layer has the one component `experts`.
"""

from collections.abc import Mapping
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.stack import text_config
from profiler.core.types import Component, LayerKind, ModelSpec, MoeDims
from profiler.families._fields import Fields
from profiler.families._gqa import DENSE_MLP, HEAD, PROLOGUE, attention_components, read_gqa_model

MODEL_TYPES = ("qwen3_moe",)
ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def read(name: str, config: Mapping[str, Any]) -> ModelSpec:
    text = Fields(text_config(config), name)
    layers = text.integer("num_hidden_layers")
    moe = MoeDims(
        num_experts=text.integer("num_experts"),
        topk=text.integer("num_experts_per_tok"),
        intermediate=text.integer("moe_intermediate_size"),
        num_shared_experts=0,
        shared_intermediate=0,
        scoring="softmax",
        renormalize=text.boolean("norm_topk_prob", False),
    )
    if moe.topk > moe.num_experts:
        raise ConfigError(f"{name}: num_experts_per_tok {moe.topk} exceeds num_experts {moe.num_experts}")
    every = text.integer("decoder_sparse_step", default=1)
    plain = text.values.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(i) is int and 0 <= i < layers for i in plain):
        raise ConfigError(f"{name}: mlp_only_layers must list layers from 0 to {layers - 1}, found {plain!r}")
    kinds = tuple(
        LayerKind("gqa", "none", "moe" if (i + 1) % every == 0 and i not in plain else "dense") for i in range(layers)
    )
    return read_gqa_model(name, config, kinds, moe, qk_norm=True)


def layer_components(spec: ModelSpec, kind: LayerKind) -> tuple[Component, ...]:
    mlp = (Component("moe", "experts"),) if kind.mlp == "moe" else DENSE_MLP
    return (*attention_components(qk_norm=True), *mlp)


def prologue_components(spec: ModelSpec) -> tuple[Component, ...]:
    return PROLOGUE


def head_components(spec: ModelSpec) -> tuple[Component, ...]:
    return HEAD
