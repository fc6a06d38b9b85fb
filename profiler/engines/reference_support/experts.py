"""The routed experts of one rank, on a routing drawn by the model's rule."""

from typing import Final

import torch

from profiler.core.shots import Shot
from profiler.engines.reference_support.bench import Bench, Builder, Call
from profiler.kernels.moe import local_experts, topk_ids
from profiler.ops.layers import swiglu, swiglu_clipped
from profiler.ops.moe import expert_gemm


def _experts(bench: Bench, shot: Shot) -> Call:
    moe, batch, hidden = bench.spec.moe, shot.moe, bench.spec.hidden
    if moe is None or batch is None:
        raise ValueError(f"experts: {shot.label} is not an expert shot of {bench.spec.name}")
    count = local_experts(moe, batch.ep)
    slice_name = f"{count} of {moe.num_experts} experts (ep {batch.ep})"
    w13 = bench.weight(f"w13 of {slice_name}", count, 2 * moe.intermediate, hidden)
    w2 = bench.weight(f"w2 of {slice_name}", count, hidden, moe.intermediate)
    ids = torch.from_numpy(topk_ids(moe, batch)).to(bench.device)
    weights = torch.full(ids.shape, moe.routed_scaling / moe.topk, device=bench.device, dtype=torch.float32)
    x = bench.random(batch.tokens, hidden)
    activation = swiglu_clipped if bench.spec.family == "minimax_m3" else swiglu
    return lambda: expert_gemm(x, ids, weights, w13, w2, activation=activation, checked=False)


BUILDERS: Final[dict[str, Builder]] = {"experts": _experts}
