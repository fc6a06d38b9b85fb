"""Round robin: pick number i of the batch goes to expert i modulo the experts, so loads differ by one at most.

Not a router of any model: the even load that expert balancing aims at. A token's topk experts are neighbours, so it
reaches few ranks of a linear placement.
"""

from typing import Any

from profiler.core.types import MoeDims
from serving.gates import Draw, Options

OPTIONS = ()


def create(moe: MoeDims, options: Options) -> Draw:
    import numpy as np

    def draw(tokens: int, rng: Any) -> Any:
        return (np.arange(tokens * moe.topk) % moe.num_experts).astype(np.int32).reshape(tokens, moe.topk)

    return draw
