"""The routed experts of a decode pass against the same kernel alone on the same inputs, on a GPU with vLLM.

    python tests/perf/experts_in_a_pass.py [MODEL] [--batches 1,2,4,8,16,32,48,64,65,128] [--out rows.json]

Per batch: the experts that the pass reached (counted), beside what independent tokens would reach; and microseconds of
the expert kernels (median of the repeats) in the pass, alone with the inputs of the pass, alone with its experts but
normal inputs, and alone with experts drawn by the model's rule. Says whether a pass is faster because it reaches fewer
experts, because of its inputs, or because of what runs before.
"""

import argparse
import inspect
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profiler.core.even_load import activated_experts
from profiler.core.registry import load_model, load_model_config
from profiler.core.shots import MoeBatch, Shot
from profiler.engines.base import EngineOptions
from profiler.engines.vllm_support import trace

KERNEL = "fused_moe"
WARMUP, REPEATS = 3, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="deepseek-ai/DeepSeek-V3.2-Exp")
    parser.add_argument("--batches", default="1,2,4,8,16,32,48,64,65,128")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    engine = _engine(options.model)
    rows = [measured(engine, int(text)) for text in options.batches.split(",")]
    for row in rows:
        print(json.dumps(row))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def _engine(model: str) -> Any:
    from profiler.engines.vllm_engine import create

    spec = load_model(model)
    return create(
        EngineOptions(
            model=spec.name,
            config=load_model_config(model),
            spec=spec,
            hardware="H200",
            tp=1,
            ep_degrees=(1,),
            kv_cache_dtype="auto",
            block_tokens=None,
            max_model_len=8192,
            max_num_batched_tokens=8192,
            max_num_seqs=256,
            kv_cache_gib=8.0,
        )
    )


def measured(engine: Any, batch: int) -> dict[str, Any]:
    """One row; times in microseconds of one layer."""
    import torch

    shot = Shot((), tuple((1, 1024) for _ in range(batch)))
    moe = engine._options.spec.moe
    given = _inputs(engine, shot)
    kernel = engine._routed_experts().quant_method.moe_kernel
    drawn_ids = engine._expert_input(MoeBatch(1, batch))[2]
    normal = torch.randn_like(given["hidden_states"])

    def alone(**changed: Any) -> Callable[[], object]:
        arguments = given | changed

        def run() -> object:
            from vllm.forward_context import set_forward_context

            with (
                set_forward_context(None, engine._boot.runner.vllm_config),
                torch.profiler.record_function(f"{trace.MODULE_PREFIX}alone"),
            ):
                return kernel.apply(**arguments)

        return run

    ids = given["topk_ids"]
    return {
        "tokens": batch,
        "reached": int(ids.unique().numel()),
        "expected": round(activated_experts(moe, 1, batch), 2),
        "drawn": int(drawn_ids.unique().numel()),
        "pass_us": _timed(engine, lambda: engine._step(shot)),
        "alone_us": _timed(engine, alone()),
        "alone_normal_us": _timed(engine, alone(hidden_states=normal)),
        "alone_drawn_us": _timed(engine, alone(topk_ids=drawn_ids.to(ids.dtype))),
    }


def _inputs(engine: Any, shot: Shot) -> dict[str, Any]:
    """Keyword arguments with which the pass calls the expert kernel of its first layer with experts."""
    import torch

    kernel = engine._routed_experts().quant_method.moe_kernel
    original, seen = kernel.apply, []

    def keep(*args: Any, **kwargs: Any) -> Any:
        if not seen:
            named = inspect.signature(original).bind(*args, **kwargs).arguments
            # Shared experts are not what is asked; weights stay where they are, the rest may be written over.
            named = {name: value for name, value in named.items() if not name.startswith("shared_experts")}
            moving = (name for name in ("hidden_states", "topk_weights", "topk_ids") if name in named)
            seen.append(named | {name: named[name].clone() for name in moving})
        return original(*args, **kwargs)

    kernel.apply = keep
    try:
        engine._step(shot)
    finally:
        kernel.apply = original
    torch.cuda.synchronize()
    return seen[0]


def _timed(engine: Any, step: Callable[[], object]) -> float:
    """Median over the repeats of the summed expert kernels of one layer."""
    import torch

    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    if engine._recorder is None:
        engine._recorder = engine._choose_recorder(Shot((), ((1, 1024),)))

    def block() -> None:
        for repeat in range(REPEATS):
            with trace.shot_range(0, repeat):
                step()

    sums: dict[int, float] = defaultdict(float)
    modules: set[str] = set()
    for (_, repeat, module, kernel), (us, _) in engine._recorder(block).items():
        if KERNEL in kernel:
            sums[repeat] += us
            modules.add(module)
    return round(statistics.median(sums.values()) / max(1, len(modules)), 2)


if __name__ == "__main__":
    main()
