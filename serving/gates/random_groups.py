"""topk_group groups drawn at random, then topk of their experts at random: the case with a closed form.

serving.routing.reach_probability is exact for it. With n_group = 1 it is the uniform gate.
"""

from typing import Any

from profiler.core.types import MoeDims
from serving.gates import Draw, Options
from serving.gates._pick import chunks, keep_groups, top

OPTIONS = ()


def create(moe: MoeDims, options: Options) -> Draw:
    import numpy as np

    def draw(tokens: int, rng: Any) -> Any:
        parts = []
        for rows in chunks(tokens):
            scores = rng.random((rows, moe.num_experts), dtype=np.float32)
            keep_groups(scores, rng.random((rows, moe.n_group), dtype=np.float32), moe)
            parts.append(top(scores, moe.topk))
        return np.concatenate(parts) if parts else np.empty((0, moe.topk), np.int32)

    return draw
