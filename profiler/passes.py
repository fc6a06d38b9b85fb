"""Cells that a pass fills besides those it was run for.

An engine that runs whole passes multiplies every token of a batch by the same matrices, whichever requests they belong
to, so that a pass of another table (66 decodes, a chunk of 257 tokens) also says what the projections take at its
number of tokens. Block-scaled products step behind 64, 128 and 256 tokens, where decode batches are, and no line
through few points finds that.
"""

from collections.abc import Sequence
from dataclasses import replace

from profiler.bind import Row, bind
from profiler.core.shots import Fill, Shot
from profiler.core.types import ModelSpec
from profiler.engines.base import Binding, EngineInfo
from profiler.kernels.dense import BY_REQUESTS, CATEGORY
from profiler.visits import Latest


def dense_of_passes(measured: Latest, spec: ModelSpec, info: EngineInfo, binding: Binding) -> list[Row]:
    """Dense rows at the numbers of tokens that no dense shot has, each from one pass; none where dense was not run.

    Of several passes of as many tokens the one with the fewest requests and keys counts. Passes on the dense attention
    path run other projections, and components that go with requests rather than tokens are left out.
    """
    planned = [fill for shot in measured.shots for fill in shot.fills if fill.category == CATEGORY]
    if not planned or not info.whole_forward:
        return []
    names = tuple(name for name in planned[0].components if name not in BY_REQUESTS)
    known = {fill.key for fill in planned}
    chosen: dict[int, int] = {}
    for index, shot in enumerate(measured.shots):
        result = measured.results.get(index)
        if shot.moe is not None or shot.regime == "dense" or result is None or result.failure is not None:
            continue
        tokens = shot.new_tokens
        if (tokens,) not in known and (tokens not in chosen or _size(shot) < _size(measured.shots[chosen[tokens]])):
            chosen[tokens] = index
    return _rows(chosen, names, measured, spec, info, binding)


def _rows(
    chosen: dict[int, int],
    names: Sequence[str],
    measured: Latest,
    spec: ModelSpec,
    info: EngineInfo,
    binding: Binding,
) -> list[Row]:
    shots = list(measured.shots)
    for tokens, index in chosen.items():
        shots[index] = replace(shots[index], fills=(Fill(CATEGORY, (tokens,), tuple(names)),))
    # A pass in which a component did not run gives no rows, and that is no failure: it was run for another table.
    return list(bind([measured.results[index] for index in chosen.values()], shots, spec, info, binding).rows)


def _size(shot: Shot) -> tuple[int, int]:
    return len(shot.requests), shot.kv_tokens
