"""Per-rank shapes of a tensor-parallel degree on one card: the raw config with the divided fields divided.

Attention heads, MLP widths and the vocabulary divide; hidden size, latent ranks, DSA index heads and the number of
experts do not (index heads and the latent caches are replicated on every rank).
"""

import copy
from collections.abc import Mapping
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.stack import text_config

# moe_intermediate_size also sets the width of the shared expert, which divides like a dense MLP.
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")


def per_rank_config(config: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """A deep copy of `config` whose sharded fields are those of one of tp ranks.

    Raises ConfigError naming the field that tp does not divide, or whose fp8 blocks it would cut. Only MLA models are
    emulated above tp 1.
    """
    result = copy.deepcopy(dict(config))
    if tp == 1:
        return result
    if "kv_lora_rank" not in text_config(config):
        raise ConfigError(f"emulating tp {tp} on one card is written for MLA models only; profile this one at tp 1")
    for key in DIVIDED:
        if key not in result:
            continue
        if result[key] % tp:
            raise ConfigError(f"tp {tp} does not divide {key} = {result[key]}")
        result[key] //= tp
    block = result.get("quantization_config", {}).get("weight_block_size")
    for key in ("intermediate_size", "moe_intermediate_size"):
        if block and result.get(key, 0) % block[0]:
            raise ConfigError(f"tp {tp} cuts {key} into {result[key]}, no multiple of the fp8 block {block[0]}")
    return result
