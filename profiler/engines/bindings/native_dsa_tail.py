"""vLLM's native DeepSeek-V3.2 module with its attention tail as one component, for tables with the contract replay."""

from collections.abc import Mapping, Sequence

from profiler.core.types import ModelSpec
from profiler.engines.base import EngineInfo, Rule
from profiler.engines.bindings import native_dsa, vllm_decomposed_dsa
from profiler.families.deepseek_v32_tail import TAIL

CONTRACT = "replay"
FUSED: Mapping[str, str] = {}


def matches(info: EngineInfo) -> bool:
    return native_dsa.matches(info)


def rules(spec: ModelSpec) -> Sequence[Rule]:
    """Everything that the attention module launches itself, and the expansion of latents on the dense path."""
    return (
        Rule(native_dsa.TAIL_MODULE, "", "attention", TAIL),
        Rule(r"\.self_attn\.kv_b_proj$", "", "attention", TAIL),
        *vllm_decomposed_dsa.rules(spec),
    )
