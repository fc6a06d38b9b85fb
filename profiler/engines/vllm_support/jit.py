"""Compile the block-scaled fp8 GEMM kernels of a model in parallel, before the engine needs them.

Each shape and batch size that vLLM's linear layers meet compiles a kernel on first use, one after the other, for
minutes. The caches are files, so worker processes can fill them beforehand:

    python -m profiler.engines.vllm_support.jit --share 0/12 --gemm 7168x16384 --gemm 2112x7168 --tokens 1,32,8192
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence


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


def start_workers(
    shapes: Sequence[tuple[int, int]], tokens: Sequence[int], workers: int
) -> list[subprocess.Popen[bytes]]:
    """Start `workers` processes that together run every (shape, tokens) once."""
    arguments = [f"--gemm={n}x{k}" for n, k in shapes] + [f"--tokens={','.join(map(str, tokens))}"]
    return [
        subprocess.Popen([sys.executable, "-m", __name__, f"--share={i}/{workers}", *arguments]) for i in range(workers)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", default="0/1", help="this worker's part, i/n")
    parser.add_argument("--gemm", action="append", required=True, metavar="NxK")
    parser.add_argument("--tokens", required=True, help="comma-separated batch sizes")
    options = parser.parse_args(argv)
    share, of = map(int, options.share.split("/"))
    gemms = [tuple(map(int, g.split("x"))) for g in options.gemm]
    # The kernels below 32 rows share one extension module that takes minutes to build: the first worker starts with it,
    # the others come to it last.
    tokens = sorted(map(int, options.tokens.split(",")), reverse=share > 0)
    work = [(n, k, m) for m in tokens for n, k in gemms][share::of]

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
