"""The reference engine: every component as its own call of profiler/ops, on the CPU or on a CUDA device.

It needs torch alone. On a CPU it really measures that CPU. Weights and activations are bf16 whatever the checkpoint's
format, so its tables are of the variant `bf16`; index keys are kept in the 132-byte rows that every engine uses.
"""

import os
import platform
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from profiler.core.errors import AcquisitionError, ConfigError, SparsightError
from profiler.core.kv import KvLayout, kv_layout
from profiler.core.shots import Shot
from profiler.core.types import Category, Parallel
from profiler.engines.base import EngineInfo, EngineOptions, KernelSample, ShotResult
from profiler.kernels._components import categories_of
from profiler.sweep import rank_spec

_KV_DTYPES: Final = ("auto", "bf16", "fp8", "fp8_ds_mla")
# Share of the free memory that the cached tokens of one shot may take, and copies of them that a call makes.
_KV_SHARE: Final = 0.5
_KV_COPIES: Final = 4


def create(options: EngineOptions) -> "ReferenceEngine":
    try:
        import torch  # noqa: F401
    except ImportError:
        raise AcquisitionError("the reference engine needs torch: pip install 'sparsight[torch]'") from None
    return ReferenceEngine(options)


class ReferenceEngine:
    """One model's components on one device."""

    def __init__(self, options: EngineOptions) -> None:
        import torch

        from profiler.engines.reference_support import attention, dense, experts
        from profiler.engines.reference_support.bench import Bench
        from profiler.ops.formats import SparseKVFormat
        from profiler.timing import cpu_timer, cuda_timer

        self._options = options
        self._layout = _layout(options)
        device = torch.device("cpu" if options.hardware == "CPU" else "cuda")
        packed = self._layout.layout == "fp8_ds_mla"
        kv_format = SparseKVFormat.FP8_PACKED if packed else SparseKVFormat.BF16
        self._bench = Bench(rank_spec(options.spec, options.tp), device, torch.bfloat16, kv_format)
        self._table_of = categories_of(options.spec)
        self._builders = {**dense.BUILDERS, **attention.BUILDERS, **experts.BUILDERS}
        self._timer = cpu_timer() if device.type == "cpu" else cuda_timer(device)

    def info(self) -> EngineInfo:
        import torch

        device = self._bench.device
        cuda = {} if device.type == "cpu" else {"cuda": str(torch.version.cuda)}
        return EngineInfo(
            name="reference",
            versions={"torch": torch.__version__, "python": platform.python_version(), **cuda},
            gpu=_cpu_facts(torch.get_num_threads()) if device.type == "cpu" else _cuda_facts(device),
            kv={
                "layout": self._layout.layout,
                "block_tokens": self._layout.block_tokens,
                "caches": [
                    {"name": cache.name, "bytes_per_token_layer": cache.bytes_per_token_layer}
                    for cache in self._layout.caches
                ],
                "tokens": self._kv_tokens(),
            },
            weights="bf16",
            layer_kinds=tuple(kind.name for kind in self._options.spec.kinds),
            whole_forward=False,
            settings={
                "components": "each timed alone, as an operator of profiler.ops",
                "index_scores": "random normal, distinct",
                "routing": "random, by the model's selection rule",
                "sampler": "greedy",
            },
        )

    def run(self, shots: Sequence[Shot], warmup: int, repeats: int) -> Iterator[ShotResult]:
        """One category and one expert slice after the other, so that only the weights of one are held at a time."""
        for _, group in groupby(enumerate(shots), key=lambda item: _held_together(item[1])):
            for index, shot in group:
                yield self._measure(index, shot, warmup, repeats)
            self._bench.clear()

    def close(self) -> None:
        self._bench.clear()

    def _measure(self, index: int, shot: Shot, warmup: int, repeats: int) -> ShotResult:
        samples: list[KernelSample] = []
        for fill in shot.fills:
            for name in fill.components:
                try:
                    times = self._timer(self._builders[name](self._bench, shot), warmup, repeats)
                except KeyError:
                    return ShotResult(index, tuple(samples), f"the reference engine has no operator for {name!r}")
                except (RuntimeError, ValueError, MemoryError, SparsightError) as error:
                    # torch reports a failed allocation and a failed kernel as RuntimeError alike.
                    return ShotResult(index, tuple(samples), f"{name}: {type(error).__name__}: {error}")
                samples += [KernelSample(index, r, self._table_of[name], name, us, 1) for r, us in enumerate(times)]
        return ShotResult(index, tuple(samples))

    def _kv_tokens(self) -> int:
        from profiler.engines.reference_support.bench import free_bytes

        per_token = sum(cache.bytes_per_token_layer for cache in self._layout.caches)
        return int(_KV_SHARE * free_bytes(self._bench.device)) // (_KV_COPIES * per_token)


def _held_together(shot: Shot) -> tuple[Category, int]:
    return shot.fills[0].category, shot.moe.ep if shot.moe else 0


def _layout(options: EngineOptions) -> KvLayout:
    """The caches of SM90's kernels, whose row formats profiler/ops implements; whole, not one rank's part."""
    legal = _KV_DTYPES if options.spec.mla else ("auto", "bf16")
    if options.kv_cache_dtype not in legal:
        raise ConfigError(
            f"--kv-cache-dtype {options.kv_cache_dtype}: the reference engine measures {', '.join(legal)} "
            f"for {options.spec.name}"
        )
    return kv_layout(options.spec, Parallel(), "sm90", options.kv_cache_dtype, block_tokens=options.block_tokens)


def _cpu_facts(threads: int) -> dict[str, Any]:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    model = names[0] if names else platform.machine()
    return {"name": "CPU", "model": model, "cores": os.cpu_count(), "threads": threads, "driver": None}


def _cuda_facts(device: Any) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "driver": None,
        "memory_total_mib": properties.total_memory // (1 << 20),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
    }
