"""Per-rank shapes of a tensor-parallel degree on one card: the raw config with the divided fields divided.

Attention heads, MLP widths and the vocabulary divide (of MiniMax-M3 key-value and index heads too); hidden size,
latent ranks, DSA index heads and the number of experts do not (those index heads and the latent caches are replicated
on every rank).
"""

import copy
from collections.abc import Mapping
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.stack import text_config
from profiler.engines.vllm_support import msa

# moe_intermediate_size also sets the width of the shared expert, which divides like a dense MLP.
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")


# Fields of a nested MiniMax-M3 backbone; its key-value and index heads are replicated where there are fewer than ranks.
DIVIDED_MSA = (
    "num_attention_heads",
    "dense_intermediate_size",
    "intermediate_size",
    "shared_intermediate_size",
    "vocab_size",
)


def per_rank_config(config: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """A deep copy of `config` whose sharded fields are those of one of tp ranks.

    Raises ConfigError naming the field that tp does not divide, or whose fp8 blocks it would cut. Only MLA models and
    MiniMax-M3 are emulated above tp 1.
    """
    result = copy.deepcopy(dict(config))
    if tp == 1:
        return result
    if msa.is_msa(config):
        _divide(result["text_config"], DIVIDED_MSA, tp)
        _replicate_heads(result["text_config"], tp)
        return result
    if "kv_lora_rank" not in text_config(config):
        raise ConfigError(
            f"emulating tp {tp} on one card is written for MLA models and MiniMax-M3 only; profile this one at tp 1"
        )
    _divide(result, DIVIDED, tp)
    block = result.get("quantization_config", {}).get("weight_block_size")
    for key in ("intermediate_size", "moe_intermediate_size"):
        if block and result.get(key, 0) % block[0]:
            raise ConfigError(f"tp {tp} cuts {key} into {result[key]}, no multiple of the fp8 block {block[0]}")
    return result


def _divide(fields: dict[str, Any], keys: tuple[str, ...], tp: int) -> None:
    for key in keys:
        if key not in fields:
            continue
        if fields[key] % tp:
            raise ConfigError(f"tp {tp} does not divide {key} = {fields[key]}")
        fields[key] //= tp


def _replicate_heads(text: dict[str, Any], tp: int) -> None:
    """Key-value heads of one rank, and as many index heads, which the engine asks for."""
    heads = text["num_key_value_heads"]
    if heads % tp and tp % heads:
        raise ConfigError(f"{heads} key-value heads neither divide by tp {tp} nor replicate evenly over it")
    text["num_key_value_heads"] = text["sparse_attention_config"]["sparse_num_index_heads"] = max(1, heads // tp)
