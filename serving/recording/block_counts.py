"""KV blocks of a recorded engine against the capacity model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.hardware import Hardware
from profiler.core.types import ModelSpec, Parallel
from serving.capacity import memory_budget

_ENGINE_TERMS = {
    "weights": "weights",
    "peak_activation_memory": "activations",
    "non_torch_memory": "non_torch",
    "cudagraph_memory_estimate": "cuda_graphs",
}


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """KV blocks of a recorded engine, the null block included.

    recorded: its own, before a play's limits. given: of the capacity model on the KV memory that the engine found.
    predicted: of the model alone. terms_gib: by name, the engine's memory and the model's; None where one has no such.
    """

    recorded: int
    given: int
    predicted: int
    terms_gib: Mapping[str, tuple[float | None, float | None]]

    @property
    def predicted_percent(self) -> float:
        return 100.0 * (self.predicted / self.recorded - 1.0)


def block_counts(
    spec: ModelSpec, hardware: Hardware, meta: Mapping[str, Any], engine: Mapping[str, Any]
) -> BlockCounts | None:
    """From meta.json and engine.json of a recording; None where the number of blocks was given to the engine.

    Raises ConfigError when they lack what the engine counts.
    """
    try:
        asked, memory = meta["engine_kwargs"], engine["memory_gib"]
        if "num_gpu_blocks_override" in asked:
            return None
        limits: dict[str, Any] = {
            "max_model_len": int(asked["max_model_len"]),
            "kv_dtype": str(asked["kv_cache_dtype"]),
            "utilization": float(asked["gpu_memory_utilization"]),
            "max_num_batched_tokens": int(asked["max_num_batched_tokens"]),
            "max_num_seqs": int(asked["max_num_seqs"]),
            "block_tokens": asked.get("block_size"),
            "cuda_graph_gib": 0.0 if asked.get("enforce_eager") else None,
        }
        recorded, available = int(engine["own_num_gpu_blocks"]), float(memory["available_kv_cache_memory"])
    except KeyError as error:
        raise ConfigError(f"meta.json and engine.json lack {error}; recorded by an older version") from None
    alone = Parallel()
    given = memory_budget(spec, hardware, alone, available_kv_gib=available, **limits)
    predicted = memory_budget(spec, hardware, alone, **limits)
    ours: dict[str, float] = {}
    for term in predicted.terms:
        name = term.name if term.name in _ENGINE_TERMS.values() else "activations"
        ours[name] = ours.get(name, 0.0) + term.gib
    terms: dict[str, tuple[float | None, float | None]] = {
        name: (memory.get(key), ours.get(name)) for key, name in _ENGINE_TERMS.items()
    }
    terms["requested"] = memory.get("requested_memory"), hardware.memory_total_gib * limits["utilization"]
    terms["kv"] = available, predicted.kv_available_gib
    return BlockCounts(recorded, given.num_gpu_blocks, predicted.num_gpu_blocks, terms)
