"""Compile the block-scaled fp8 GEMM kernels of a model in parallel, before the engine needs them.

Each shape and batch size that vLLM's linear layers meet compiles a kernel on first use, one after the other, for
minutes. The caches are files, so worker processes can fill them beforehand:

    python -m profiler.engines.vllm_support.jit --share 0/12 --gemm 7168x16384 --gemm 2112x7168 --tokens 1,32,8192
    python -m profiler.engines.vllm_support.jit --model deepseek-ai/DeepSeek-V3.2-Exp --tp 1,2,4,8 --workers 12

The second form is a model's every shape at several tensor-parallel degrees.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from profiler.core.errors import ConfigError
from profiler.kernels._axes import GRIDS

# A file that ends the wait of an engine that has started, because others compile on its card: see `wait_for_others`.
SHOTS_AFTER_VARIABLE: Final = "SPARSIGHT_SHOTS_AFTER"
_LOOK_EVERY_S: Final = 0.1
_MODULE: Final = "profiler.engines.vllm_support.jit"


def step_sizes(max_tokens: int) -> list[int]:
    """Tokens of the passes of the full grid up to a step's most: a kernel is chosen by them, and a few serve all."""
    axes = GRIDS["full"]
    sizes = {*axes.tokens, *axes.chunk_tokens, *axes.dense_chunk_tokens, *axes.decode_requests}
    sizes |= {chunk + requests for chunk in axes.skew.chunk_tokens for requests, _ in axes.skew.decodes}
    sizes |= {sum(count * chunk for count, chunk, _ in groups) for groups in axes.skew.prefills}
    sizes |= {*axes.skew.requests, *axes.skew.held_out_requests, max_tokens}
    return sorted(size for size in sizes if size <= max_tokens)


def fp8_gemm_shapes(config: dict[str, object]) -> tuple[tuple[int, int], ...]:
    """(out, in) features of the block-scaled fp8 linear layers of a DeepSeek-type config, per rank."""

    def number(key: str) -> int:
        value = config[key]
        assert isinstance(value, int)
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    nope, rope, v = number("qk_nope_head_dim"), number("qk_rope_head_dim"), number("v_head_dim")
    q_rank, kv_rank = number("q_lora_rank"), number("kv_lora_rank")
    shared = number("moe_intermediate_size") * number("n_shared_experts")
    shapes = [
        (q_rank + kv_rank + rope, hidden),
        (heads * (nope + rope), q_rank),
        (heads * (nope + v), kv_rank),
        (hidden, heads * v),
        (2 * number("intermediate_size"), hidden),
        (hidden, number("intermediate_size")),
        (2 * shared, hidden),
        (hidden, shared),
    ]
    if "index_n_heads" in config:
        shapes.append((number("index_n_heads") * number("index_head_dim"), q_rank))
    return tuple(dict.fromkeys(shapes))


def shapes_by_degree(model: str, tps: Sequence[int], model_root: Path | None = None) -> list[list[tuple[int, int]]]:
    """Shapes of a model at each degree, in order, without those of the degrees before.

    Raises ConfigError for a model without block-scaled fp8 layers of this type.
    """
    from profiler.core.registry import load_model, load_model_config
    from profiler.core.stack import stack_of
    from profiler.engines.vllm_support.overrides import per_rank_config

    spec, config = load_model(model, model_root), load_model_config(model, model_root)
    _, shrunk = stack_of(spec, config, None)
    if "q_lora_rank" not in shrunk or "quantization_config" not in shrunk:
        raise ConfigError(f"{spec.name} has none of the block-scaled fp8 GEMMs that are compiled ahead")
    seen: set[tuple[int, int]] = set()
    found = []
    for tp in tps:
        new = [shape for shape in fp8_gemm_shapes(per_rank_config(shrunk, tp)) if shape not in seen]
        seen.update(new)
        found.append(new)
    return found


def compile_ahead(model: str, tps: Sequence[int], workers: int, max_tokens: int, first_done: Path | None) -> bool:
    """Compiles the shapes of all degrees, those of the first one first where a file is to tell its end.

    True when no worker failed.
    """
    first, *others = shapes_by_degree(model, tps)
    rest = [shape for shapes in others for shape in shapes]
    tokens = step_sizes(max_tokens)
    well = True
    for shapes in [first + rest] if first_done is None else [first, rest]:
        started = time.monotonic()
        if shapes:
            codes = [process.wait() for process in start_workers(shapes, tokens, workers)]
            well &= not any(codes)
            print(f"GEMMs of {len(shapes)} shapes compiled in {time.monotonic() - started:.0f} s", file=sys.stderr)
        if first_done is not None:
            first_done.touch()
    return well


def wait_for_others() -> None:
    """Returns when the file of SHOTS_AFTER_VARIABLE is there: times beside compile workers are not what is asked."""
    name = os.environ.get(SHOTS_AFTER_VARIABLE)
    if not name:
        return
    started = time.monotonic()
    while not Path(name).exists():
        time.sleep(_LOOK_EVERY_S)
    print(f"waited {time.monotonic() - started:.0f} s for compile workers", file=sys.stderr)


def share_of(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int], share: int, of: int
) -> list[tuple[int, int, int]]:
    """(out, in, tokens) that worker `share` of `of` runs; together the workers run every one once.

    The kernels below 32 rows share one extension module that takes minutes to build: the first worker starts with it,
    the others come to it last.
    """
    own = [(n, k, m) for m in sorted(tokens) for n, k in shapes][share::of]
    return own if share == 0 else sorted(own, key=lambda one: -one[2])


def start_workers(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int], workers: int
) -> list[subprocess.Popen[bytes]]:
    """Start `workers` processes that together run every (shape, tokens) once."""
    arguments = [f"--gemm={n}x{k}" for n, k in shapes] + [f"--tokens={','.join(map(str, tokens))}"]
    return [
        subprocess.Popen([sys.executable, "-m", _MODULE, f"--share={i}/{workers}", *arguments]) for i in range(workers)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", default="0/1", help="this worker's part, i/n")
    parser.add_argument("--gemm", action="append", metavar="NxK")
    parser.add_argument("--tokens", help="comma-separated batch sizes")
    parser.add_argument("--model", help="instead of --gemm: all shapes of this model")
    parser.add_argument("--tp", default="1", help="comma-separated degrees of --model")
    parser.add_argument("--workers", type=int, default=1, help="processes for --model")
    parser.add_argument("--max-tokens", type=int, default=16_384, help="largest batch of --model")
    parser.add_argument("--first-done", type=Path, help="made when the shapes of the first degree are compiled")
    options = parser.parse_args(argv)
    if options.model is not None:
        tps = [int(tp) for tp in options.tp.split(",")]
        if not compile_ahead(options.model, tps, options.workers, options.max_tokens, options.first_done):
            sys.exit("a compile worker failed; the engine compiles what is missing itself")
        return
    if not options.gemm or not options.tokens:
        parser.error("give --gemm and --tokens, or --model")
    share, of = map(int, options.share.split("/"))
    gemms = [(int(n), int(k)) for n, k in (gemm.split("x") for gemm in options.gemm)]
    work = share_of(gemms, [int(count) for count in options.tokens.split(",")], share, of)

    import torch
    import vllm.model_executor.kernels.linear.scaled_mm.flashinfer  # noqa: F401  (registers the custom operators)
    from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT, is_deep_gemm_e8m0_used

    DeepGemmQuantScaleFMT.init_oracle_cache()
    e8m0 = is_deep_gemm_e8m0_used()
    started = time.monotonic()
    for n, k, m in work:
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        scale = torch.full((-(-n // 128), k // 128), 2.0**-6, device="cuda", dtype=torch.float32)
        rows = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        torch.ops.vllm.dynamic_flashinfer_deepgemm_blockscale_gemm(rows, weight, scale, 128, e8m0)
        torch.cuda.synchronize()
    print(f"jit worker {share}/{of}: {len(work)} GEMMs in {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
