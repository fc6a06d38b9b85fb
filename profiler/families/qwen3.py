"""Qwen3: dense grouped-query attention with norms on queries and keys. A control."""

from collections.abc import Mapping
from typing import Any

from profiler.core.stack import text_config
from profiler.core.types import Component, LayerKind, ModelSpec
from profiler.families._fields import Fields
from profiler.families._gqa import DENSE_MLP, HEAD, PROLOGUE, attention_components, read_gqa_model

MODEL_TYPES = ("qwen3",)
ARCHITECTURES = ("Qwen3ForCausalLM",)


def read(name: str, config: Mapping[str, Any]) -> ModelSpec:
    layers = Fields(text_config(config), name).integer("num_hidden_layers")
    return read_gqa_model(name, config, (LayerKind("gqa", "none", "dense"),) * layers, None, qk_norm=True)


def layer_components(spec: ModelSpec, kind: LayerKind) -> tuple[Component, ...]:
    return (*attention_components(qk_norm=True), *DENSE_MLP)


def prologue_components(spec: ModelSpec) -> tuple[Component, ...]:
    return PROLOGUE


def head_components(spec: ModelSpec) -> tuple[Component, ...]:
    return HEAD
