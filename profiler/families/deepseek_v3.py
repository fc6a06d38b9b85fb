"""DeepSeek-V3 and R1: MLA whose every layer attends every key. The control of the sparse models."""

import re
from collections.abc import Mapping
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.stack import text_config
from profiler.core.types import Component, LayerKind, ModelSpec, SelectionBranch
from profiler.families._deepseek import HEAD, MLA, PROLOGUE, mlp_components, read_mla_model
from profiler.families._fields import Fields, dense

MODEL_TYPES = ("deepseek_v3",)
ARCHITECTURES = ("DeepseekV3ForCausalLM",)

# Queries and outputs pass through the latent space around the attention kernel.
ATTEND = (*dense("absorb_q", "absorb_v"), Component("attention", "mla"))


def read(name: str, config: Mapping[str, Any]) -> ModelSpec:
    text = Fields(text_config(config), name)
    if re.search(r"v3[._-]?2(?!\d)", name, re.IGNORECASE):
        raise ConfigError(
            f"{name}: model_type {config.get('model_type')!r} without index_* keys is the config of DeepSeek-V3, which "
            "has no indexer; DeepSeek-V3.2 has model_type deepseek_v32 and index_topk, index_n_heads, index_head_dim"
        )
    if text.has("index_topk"):
        raise ConfigError(f"{name}: index_topk in a config of model_type deepseek_v3; V3.2 has model_type deepseek_v32")
    every_key: SelectionBranch = "none"
    return read_mla_model(name, config, (every_key,) * text.integer("num_hidden_layers"), None)


def layer_components(spec: ModelSpec, kind: LayerKind) -> tuple[Component, ...]:
    return (*MLA, *ATTEND, *mlp_components(kind))


def prologue_components(spec: ModelSpec) -> tuple[Component, ...]:
    return PROLOGUE


def head_components(spec: ModelSpec) -> tuple[Component, ...]:
    return HEAD
