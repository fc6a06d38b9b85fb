"""DeepSeek-V3.2 as vLLM's native module runs it, with all that lies between its projections as one component.

That module launches norms, rotary embeddings, cache writes, selection, absorbed products and attention itself, with no
child module around them, so a table by modules has a single number per layer for them: the tail. It contains the scores
of every key, so it is keyed by the whole context. No checkpoint is read by this family; `profiler.contract` switches a
DeepSeek-V3.2 to it for tables with the contract `replay`.
"""

from collections.abc import Mapping
from typing import Any, Final

from profiler.core.types import Component, LayerKind, ModelSpec
from profiler.families import deepseek_v32
from profiler.families._deepseek import HEAD, PROLOGUE, mlp_components
from profiler.families._fields import dense

MODEL_TYPES: tuple[str, ...] = ()
ARCHITECTURES: tuple[str, ...] = ()

TAIL: Final = "dsa_attention_tail"
PROJECTIONS = dense(
    "input_norm",
    "fused_qkv_a_proj",
    "q_b_proj",
    "indexer_wq_b",
    "indexer_wk_weights",
    "o_proj",
    "post_attention_norm",
)


def read(name: str, config: Mapping[str, Any]) -> ModelSpec:
    return deepseek_v32.read(name, config)


def layer_components(spec: ModelSpec, kind: LayerKind) -> tuple[Component, ...]:
    return (*PROJECTIONS, Component("attention", TAIL), *mlp_components(kind))


def prologue_components(spec: ModelSpec) -> tuple[Component, ...]:
    return PROLOGUE


def head_components(spec: ModelSpec) -> tuple[Component, ...]:
    return HEAD
