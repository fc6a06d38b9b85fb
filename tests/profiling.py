"""A small sparse-attention model, and an engine without a device, for the profiler's tests."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from profiler.acquire import Job
from profiler.core.registry import load_model, load_model_config
from profiler.core.shots import Shot
from profiler.engines.base import EngineInfo, EngineOptions, KernelSample, ShotResult
from profiler.kernels._components import categories_of

SMALL = "small/Sparse"

_WIDTHS = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "vocab_size": 1024,
    "index_n_heads": 4,
    "num_hidden_layers": 5,
    "quantization_config": None,
}


def small_root(folder: Path) -> Path:
    """A folder of model configurations with SMALL: DeepSeek-V3.2's structure, narrow, 3 dense and 2 expert layers."""
    config = load_model_config("deepseek-ai/DeepSeek-V3.2-Exp") | _WIDTHS
    path = folder / f"{SMALL}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}), encoding="utf-8")
    return folder


def job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": SMALL,
        "hardware": "CPU",
        "tps": (1,),
        "ep_degrees": (1,),
        "engine": "auto",
        "grid": "tiny",
        "categories": None,
        "kv_cache_dtype": "auto",
        "block_tokens": None,
        "max_model_len": None,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "warmup": 0,
        "repeats": 3,
        "command": "python -m profiler profile",
    }
    return Job(**fields | changes)


def quiet(done: int, total: int, label: str) -> None:
    pass


_TABLE_OF = categories_of(load_model("deepseek-ai/DeepSeek-V3.2-Exp"))

SampleMaker = Callable[[int, Shot, int], list[KernelSample]]


class FakeEngine:
    """Yields what `make(index, shot, repeat)` returns; a shot whose label contains a key of `failures` fails."""

    def __init__(self, options: EngineOptions, make: SampleMaker, **facts: Any) -> None:
        self.failures: dict[str, str] = facts.pop("failures", {})
        self.stop_after: int | None = facts.pop("stop_after", None)
        self.ran: list[Shot] = []
        self._make = make
        kinds = tuple(kind.name for kind in options.spec.layers[:4])
        fields: dict[str, Any] = {
            "name": "reference",
            "versions": {"torch": "0"},
            "gpu": {"name": options.hardware, "pstate": "P0"},
            "kv": {
                "layout": "bf16",
                "block_tokens": 64,
                "caches": [{"name": "mla_latent", "bytes_per_token_layer": 1152}],
                "tokens": None,
            },
            "weights": "bf16",
            "layer_kinds": kinds,
            "whole_forward": True,
        }
        self._info = EngineInfo(**fields | facts)

    def info(self) -> EngineInfo:
        return self._info

    def run(self, shots: Sequence[Shot], warmup: int, repeats: int) -> Iterator[ShotResult]:
        for index, shot in enumerate(shots):
            if self.stop_after is not None and len(self.ran) >= self.stop_after:
                raise KeyboardInterrupt
            self.ran.append(shot)
            failure = next((why for part, why in self.failures.items() if part in shot.label), None)
            samples = [] if failure else [s for repeat in range(repeats) for s in self._make(index, shot, repeat)]
            yield ShotResult(index, tuple(samples), failure)

    def close(self) -> None:
        pass


def each_component(index: int, shot: Shot, repeat: int) -> list[KernelSample]:
    """One kernel per expected component, 100 us in total per pass plus one per repeat."""
    return [
        KernelSample(index, repeat, _TABLE_OF[name], name, 100.0 + repeat, 1)
        for fill in shot.fills
        for name in fill.components
    ]
