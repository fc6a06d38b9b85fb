"""Picks that were recorded: `picks`, one list of topk expert ids per token, as read by serving.routing.read_picks.

A batch is a run of consecutive recorded tokens from a drawn starting point, wrapping around at the end, so that what
neighbouring tokens share stays together.
"""

from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.types import MoeDims
from serving.gates import Draw, Options

OPTIONS = ("picks",)


def create(moe: MoeDims, options: Options) -> Draw:
    import numpy as np

    picks = options.get("picks")
    if picks is None or not len(picks):
        raise ConfigError("a recorded gate needs picks, one list of expert ids per token")
    for token, row in enumerate(picks):
        check_row(row, moe, f"picks of token {token}")
    ids = np.asarray(picks, dtype=np.int32)

    def draw(tokens: int, rng: Any) -> Any:
        start = int(rng.integers(len(ids)))
        return ids[(start + np.arange(tokens)) % len(ids)]

    return draw


def check_row(row: Any, moe: MoeDims, where: str) -> list[int]:
    """topk different expert ids. Raises ConfigError that begins with `where`."""
    if not isinstance(row, list | tuple) or len(row) != moe.topk:
        raise ConfigError(f"{where}: a list of {moe.topk} expert ids is needed, found {row!r}")
    for expert in row:
        if isinstance(expert, bool) or not isinstance(expert, int) or not 0 <= expert < moe.num_experts:
            raise ConfigError(f"{where}: {expert!r} is no expert; ids are 0 to {moe.num_experts - 1}")
    if len(set(row)) != moe.topk:
        raise ConfigError(f"{where}: the experts of a token must differ, found {row!r}")
    return list(row)
