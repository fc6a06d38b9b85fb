"""Small tables in the layout of AIConfigurator's package, from closed forms, for the tests of the importer."""

from collections.abc import Iterable, Sequence
from pathlib import Path

HEADS = (128, 64, 32, 16)
ISLS = (16, 64, 256, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8)
REQUESTS = (1, 16, 256, 1024)
STEPS = (1, 2047, 16383)
FLOOR_MS = 1.5


def write(root: Path, place: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """`place` is <system>/<family>/<backend>/<version>/<table>."""
    path = root / "data" / f"{place}_perf.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def context_ms(heads: int, batch: int, isl: int) -> float:
    """What the device needs: linear in tokens and in heads, and quadratic in the prompt."""
    return batch * (isl * (1e-3 * heads / 128 + 2e-4) + 1e-8 * isl * isl)


def decode_ms(heads: int, requests: int, step: int) -> float:
    return 0.1 + requests * (4e-4 * heads / 128 + 5e-4) + 1e-8 * requests * step


def dsa(root: Path, system: str = "h200_sxm", kv: Sequence[str] = ("bfloat16", "fp8")) -> None:
    """DSA modules of DeepSeek-V3.2, prefill with a floor of FLOOR_MS for the launches."""
    where = f"{system}/sparse_attention/vllm/0.24.0"
    common = ("model", "kv_cache_dtype", "gemm_type", "num_heads", "batch_size")
    model = "deepseek-ai/DeepSeek-V3.2"
    write(
        root,
        f"{where}/dsa_context_module",
        (*common, "isl", "step", "latency"),
        [
            (model, cache, "fp8_block", heads, batch, isl, step, max(FLOOR_MS, context_ms(heads, batch, isl)))
            for cache in kv
            for heads in HEADS
            for batch in BATCHES
            for isl in ISLS
            for step in (0, 128)
        ],
    )
    write(
        root,
        f"{where}/dsa_generation_module",
        (*common, "step", "latency"),
        [
            (model, cache, "fp8_block", heads, requests, step, decode_ms(heads, requests, step))
            for cache in kv
            for heads in HEADS
            for requests in REQUESTS
            for step in STEPS
        ],
    )


def gemm_ms(m: int, n: int, k: int) -> float:
    """Bilinear in n and k, so that interpolation between shapes is exact."""
    return 1e-3 * (3 + m * 1e-3) + 1e-9 * n * k * (1 + m / 100)


def gemm(root: Path, system: str = "h200_sxm") -> None:
    """Products of bf16 weights, and of fp8 ones that take half of that but never less than 60 us of launches."""
    sizes = (32, 512, 2048, 8192, 16384)
    shapes = [(m, n, k) for m in (1, 64, 1024, 8192) for n in (*sizes, 65536) for k in sizes]
    write(
        root,
        f"{system}/gemm/vllm/0.24.0/gemm",
        ("gemm_dtype", "m", "n", "k", "latency"),
        [("bfloat16", *shape, gemm_ms(*shape)) for shape in shapes]
        + [("fp8_block", *shape, max(0.06, gemm_ms(*shape) / 2)) for shape in shapes],
    )


def expert_ms(pairs: float, experts: float, hidden: int) -> float:
    return hidden / 7168 * (1e-3 * experts + 1e-5 * pairs)


MOE = (
    *("moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
    *("distribution", "latency"),
)


def system(root: Path, name: str = "h200_sxm") -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / f"{name}.yaml").write_text(
        "gpu:\n  mem_bw: 4800000000000\n  mem_bw_empirical_scaling_factor: 0.8\n"
        "  mem_empirical_constant_latency: 0.000003\n"
    )


def collectives(root: Path, system: str = "h200_sxm") -> None:
    """message_size counts two-byte elements."""
    write(
        root,
        f"{system}/comm/nccl/2.29.2/nccl",
        ("nccl_dtype", "num_gpus", "message_size", "op_name", "latency"),
        [
            (dtype, gpus, size, operation, 1e-3 * (5 + size / 1e5))
            for dtype in ("half", "int8")
            for gpus in (2, 8)
            for size in (1024, 1 << 20)
            for operation in ("all_gather", "all_reduce", "reduce_scatter", "alltoall")
        ],
    )
    write(
        root,
        f"{system}/comm/vllm/0.24.0/custom_allreduce",
        ("allreduce_dtype", "num_gpus", "message_size", "latency", "backend"),
        [("bfloat16", 8, 1024, 0.004, "vllm_graph"), ("bfloat16", 8, 1024, 0.02, "vllm_eager")],
    )


def attention(root: Path, system: str) -> None:
    """Plain attention of MiniMax-M3's dense layers, per rank at tp 1 to 8."""
    where = f"{system}/attention/vllm/0.24.0"
    common = ("kv_cache_dtype", "num_heads", "num_key_value_heads", "head_dim", "batch_size")
    ranks = [("bfloat16", 64 // tp, max(1, 4 // tp), 128) for tp in (1, 2, 4, 8)]
    write(
        root,
        f"{where}/context_attention",
        (*common, "isl", "step", "latency"),
        [(*rank, 1, isl, 0, 1e-3 * (3 + isl * isl * 1e-5)) for rank in ranks for isl in ISLS],
    )
    write(
        root,
        f"{where}/generation_attention",
        (*common, "step", "latency"),
        [(*rank, n, step, 1e-3 * (5 + n * step * 1e-4)) for rank in ranks for n in REQUESTS for step in STEPS],
    )
