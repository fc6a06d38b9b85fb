"""The model's own rule, on independent scores of every token and expert.

scores = sigmoid or softmax of the logits; choice = scores + bias; a group scores the sum of its two best choices where
the model has a bias and its best one otherwise; the topk_group best groups stay; top-k by choice (vLLM's
grouped_topk_router). The mixing weights, which are the unbiased scores, do not matter for who computes what.

Logits are normal with deviation `logit_std`; `popularity_std` adds a part per expert that all tokens share. bias: one
number per expert, added to the choice alone. Groups of DeepSeek-V3.2 compete with their two best members, so winners
spread over the chosen groups more evenly than under groups drawn at random: see random_groups.
"""

import math
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.types import MoeDims
from serving.gates import Draw, Options, number
from serving.gates._pick import chunks, keep_groups, top

OPTIONS = ("logit_std", "popularity_std", "bias", "popularity_seed")


def create(moe: MoeDims, options: Options) -> Draw:
    import numpy as np

    logit_std = number(options, "logit_std", 1.0)
    bias = None if "bias" not in options else np.asarray(check_bias(options["bias"], moe), dtype=np.float32)
    own = np.random.Generator(np.random.PCG64(int(number(options, "popularity_seed", 0))))
    shared = (number(options, "popularity_std", 0.0) * own.standard_normal(moe.num_experts)).astype(np.float32)

    def draw(tokens: int, rng: Any) -> Any:
        parts = []
        for rows in chunks(tokens):
            logits = rng.standard_normal((rows, moe.num_experts), dtype=np.float32)
            logits *= np.float32(logit_std)
            logits += shared
            parts.append(select(logits, moe, bias))
        return np.concatenate(parts) if parts else np.empty((0, moe.topk), np.int32)

    return draw


def select(logits: Any, moe: MoeDims, bias: Any) -> Any:
    """int32 expert ids (rows, topk) by the rule above. logits float32 (rows, experts); bias (experts,) or None."""
    import numpy as np

    if moe.scoring == "sigmoid":
        choice = 1.0 / (1.0 + np.exp(-logits))
    else:
        choice = np.exp(logits - logits.max(axis=1, keepdims=True))
        choice /= choice.sum(axis=1, keepdims=True)
    if bias is not None:
        choice = choice + bias
    if moe.topk_group < moe.n_group:
        grouped = choice.reshape(len(choice), moe.n_group, -1)
        size = grouped.shape[2]
        best = min(2, size) if moe.has_bias else 1
        keep_groups(choice, np.partition(grouped, size - best, axis=2)[:, :, size - best :].sum(axis=2), moe)
    return top(choice, moe.topk)


def check_bias(bias: Any, moe: MoeDims) -> list[float]:
    """The bias as floats. Raises ConfigError for a wrong length, a value that is no number, or a router without one."""
    if not isinstance(bias, list | tuple):
        raise ConfigError(
            f"a bias is {moe.num_experts} numbers, one for each expert: a file, named by the routing's `bias`"
        )
    if not moe.has_bias:
        raise ConfigError("the router of this model adds no bias to its scores; leave it out")
    if len(bias) != moe.num_experts:
        raise ConfigError(f"the bias has {len(bias)} numbers for {moe.num_experts} experts; one each is needed")
    for expert, value in enumerate(bias):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"number {expert} of the bias is {value!r}; it must be finite")
    return [float(value) for value in bias]
