"""Start vLLM in this process on a shrunken stack with dummy weights, and reach its worker and model runner."""

import importlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.core.errors import AcquisitionError
from profiler.engines.vllm_support import msa, rotary

SUPPORTED_VERSIONS = ("0.26",)
# vLLM refuses to start where less than its utilisation is free. With a cache of a given size that is all it is for, and
# half leaves room beside those who hold the rest.
UTILIZATION_BESIDE_OTHERS = 0.5

SERVING_ENVIRONMENT = {
    # The engine core in this process, so that its worker can be reached.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
ENVIRONMENT = {
    **SERVING_ENVIRONMENT,
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # One stream, so that the times of a layer's kernels add up.
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",
}

# Not recorded, since no step that is timed sees it: requests are greedy. As it starts, vLLM draws one sample by top-k
# and top-p, for which FlashInfer compiles a module on a fresh host, for a minute and more.
_UNSEEN = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}

# What starting an engine on DeepSeek's and GLM's models imports beside vllm.LLM.
_IMPORTED_AHEAD = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.models.deepseek_v2",
    "torch.profiler",
)


@dataclass(frozen=True)
class Boot:
    """A running engine. `runner` executes steps; `kv_caches` maps layer name to cache tensor."""

    started: "Started"
    worker: Any
    runner: Any
    model: Any
    num_blocks: int
    block_tokens: int
    kv_caches: Mapping[str, Any]


def set_environment(wanted: Mapping[str, str] = ENVIRONMENT) -> None:
    """Sets variables that vLLM reads on import. Raises AcquisitionError when vLLM was imported before they were set."""
    import sys

    wrong = {k: os.environ.get(k) for k, v in wanted.items() if os.environ.get(k, v) != v}
    if wrong:
        raise AcquisitionError(f"these environment variables change what is measured, unset them first: {wrong}")
    # Where all are there already, this process or its parent set them in time.
    if "vllm" in sys.modules and any(k not in os.environ for k in wanted):
        raise AcquisitionError("vllm was imported before its environment was set; start a fresh process")
    os.environ.update({**_UNSEEN, **os.environ, **wanted})


def import_ahead(wanted: Mapping[str, str] = ENVIRONMENT) -> None:
    """Imports what an engine's start imports otherwise, 20 to 27 s on an H200's host; holds 0.5 GiB of the GPU.

    Raises as `set_environment` does, or ImportError.
    """
    set_environment(wanted)
    import vllm

    _ = vllm.LLM  # looked up on first use
    for name in _IMPORTED_AHEAD:
        importlib.import_module(name)


def check_version(version: str) -> None:
    if not version.startswith(SUPPORTED_VERSIONS):
        raise AcquisitionError(
            f"vllm {version}: the module and kernel names of this version are not in the catalog; "
            f"supported: {', '.join(f'{v}.x' for v in SUPPORTED_VERSIONS)}"
        )


def register_native() -> None:
    """Serve DeepSeek-V3.2 by the native module, which vLLM 0.26 ships and does not register."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("DeepseekV32ForCausalLM", "vllm.models.deepseek_v32:DeepseekV32ForCausalLM")


def installed_version() -> str:
    """The version of vllm here. Raises AcquisitionError when it is absent or outside the catalog."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise AcquisitionError("vllm is not installed: pip install 'sparsight[vllm]'") from None
    check_version(version)
    return version


@dataclass(frozen=True)
class Started:
    """An engine in this process and its parts; the folder holds its config.json and goes with it."""

    llm: Any
    core: Any
    worker: Any
    runner: Any
    folder: Any


def start(config: Mapping[str, Any], **keywords: Any) -> Started:
    """vllm.LLM on dummy weights of a raw HF config (already shrunk and sharded), with further `keywords` of its own.

    Raises AcquisitionError with the engine's own message when it does not start.
    """
    if msa.is_msa(config):
        keywords = {"block_size": msa.block_tokens(config)} | keywords
        msa.prepare(config, keywords)
        config = msa.backbone(config)
    folder = tempfile.TemporaryDirectory(prefix="sparsight-model-")
    Path(folder.name, "config.json").write_text(json.dumps(dict(config)))
    import vllm

    try:
        llm = vllm.LLM(
            model=folder.name, load_format="dummy", skip_tokenizer_init=True, trust_remote_code=False, **keywords
        )
    except Exception as error:
        folder.cleanup()
        raise AcquisitionError(f"vllm did not start: {type(error).__name__}: {error}") from error
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker
    worker = getattr(worker, "worker", worker)
    return Started(llm, core, worker, worker.model_runner, folder)


def _memory(utilization: float, kv_cache_gib: float | None) -> dict[str, Any]:
    if kv_cache_gib is None:
        return {"gpu_memory_utilization": utilization}
    return {
        "gpu_memory_utilization": min(utilization, UTILIZATION_BESIDE_OTHERS),
        "kv_cache_memory_bytes": int(kv_cache_gib * 2**30),
    }


def boot(
    config: Mapping[str, Any],
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    kv_cache_dtype: str,
    block_tokens: int | None,
    utilization: float,
    kv_cache_gib: float | None = None,
) -> Boot:
    """Start an engine for profiling: eager, no prefix cache, steps driven from outside. Raises as `start` does.

    kv_cache_gib: None lets vLLM measure what is free, during which others may neither take nor leave memory.
    """
    started = start(
        config,
        enforce_eager=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        kv_cache_dtype=kv_cache_dtype,
        **_memory(utilization, kv_cache_gib),
        **({} if block_tokens is None else {"block_size": block_tokens}),
    )
    if msa.is_msa(config):
        msa.without_overlap()
    runner = started.runner
    model = runner.get_model()
    rotary.separate(model)
    cache_config = runner.vllm_config.cache_config
    caches = {
        name: layer.kv_cache
        for name, layer in runner.vllm_config.compilation_config.static_forward_context.items()
        if getattr(layer, "kv_cache", None) is not None and layer.kv_cache.numel()
    }
    return Boot(
        started=started,
        worker=started.worker,
        runner=runner,
        model=model,
        num_blocks=int(runner.kv_cache_config.num_blocks),
        block_tokens=int(cache_config.block_size),
        kv_caches=caches,
    )
