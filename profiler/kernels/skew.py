"""Batches of unequal requests: decodes of unequal lengths, a prefill beside decodes, several prefills in one step.

Engines launch a kernel once for all requests of a step, so its time need not be that of equal requests with the same
total: blocks of a grid wait for the longest request, or short requests fill the gaps that a long one leaves. Each row
is measured per kernel, and each kernel gets a correction of its own (profiler/skew.py).
"""

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Final

from profiler.core.batch_text import batch_text
from profiler.core.shots import Fill, Regime, Shot
from profiler.core.types import Category, ModelSpec
from profiler.kernels._axes import Limits
from profiler.kernels._components import components_of, sparse_regime
from profiler.kernels._work import Work

CATEGORY: Final[Category] = "skew"
UNITS: Final = {"prefills": "requests x tokens", "decodes": "requests x tokens", "use": "fit or check"}
DRIVERS: Final = ("prefill", "decode")

Requests = tuple[tuple[int, int], ...]

# Deviation of the logarithm of lengths, as in conversation traces, whose longest requests are many times the median.
_LOG_DEVIATION: Final = 1.0


def kv_cap_tokens(spec: ModelSpec) -> int | None:
    return None


def shots(spec: ModelSpec, limits: Limits) -> list[Shot]:
    components = components_of(spec, CATEGORY)
    always = tuple(c.name for c in components if c.when != "prefill_dense")
    prefilling = tuple(c.name for c in components if c.when not in ("prefill_dense", "decode"))
    dense = tuple(c.name for c in components if c.when == "prefill_dense")
    axes, regime = limits.axes.skew, sparse_regime(spec)
    cap = spec.indexer.attended_cap_tokens if spec.indexer and dense else 0
    found = [_shot(batch, always, "fit", "auto") for batch in _two_lengths(limits)]
    found += [_shot(batch, always, "held_out", "auto") for batch in _spread_lengths(limits)]
    for chunk, context in ((chunk, context) for chunk in axes.chunk_tokens for context in axes.context_tokens):
        for requests, keys in axes.decodes:
            batch = (*((1, keys - 1),) * requests, (chunk, context))
            found.append(_shot(batch, always, "joint", regime))
            if chunk + context <= cap:
                found.append(_shot(batch, dense, "joint", "dense"))
    for groups in axes.prefills:
        batch = tuple((chunk, context) for count, chunk, context in groups for _ in range(count))
        found.append(_shot(batch, prefilling, "prefills", regime))
        if max(chunk + context for chunk, context in batch) <= cap:
            found.append(_shot(batch, dense, "prefills", "dense"))
    return [shot for shot in dict.fromkeys(found) if _within(shot, limits)]


def work(spec: ModelSpec, name: str, key: tuple[int, ...], weights: str) -> Work | None:
    """Not known for a batch that is a text; its parts have rows of their own."""
    return None


def _shot(requests: Requests, names: tuple[str, ...], use: str, regime: Regime) -> Shot:
    return Shot(fills=(Fill(CATEGORY, (*batch_text(requests), use), names),), requests=requests, regime=regime)


def _within(shot: Shot, limits: Limits) -> bool:
    return (
        bool(shot.fills[0].components)
        and len(shot.requests) <= limits.max_num_seqs
        and shot.new_tokens <= limits.max_num_batched_tokens
        and max(new + context for new, context in shot.requests) <= limits.longest
    )


def _decodes(lengths: list[int]) -> Requests:
    return tuple((1, keys - 1) for keys in lengths)


def _two_lengths(limits: Limits) -> Iterator[Requests]:
    """Some requests several times the mean, the others equally short, so that the mean is that of an equal batch."""
    for requests in limits.axes.skew.requests:
        shares = ((1, 2), (requests // 4, 2), (requests // 8, 4), (1, 8)) if requests >= 16 else ((1, 2), (1, 3))
        for mean in limits.axes.skew.mean_kv_tokens:
            for many, ratio in dict.fromkeys(shares):
                rest, short = requests - many, requests * mean - many * ratio * mean
                if many and ratio * mean <= limits.longest and short >= 2 * rest:
                    extra = short % rest
                    yield _decodes(
                        [ratio * mean] * many + [short // rest + 1] * extra + [short // rest] * (rest - extra)
                    )


def _spread_lengths(limits: Limits) -> Iterator[Requests]:
    """Log-normal lengths, and lengths spread evenly from a tenth of the mean to nearly twice."""
    for requests in limits.axes.skew.held_out_requests:
        places = [(i + 0.5) / requests for i in range(requests)]
        for mean in limits.axes.skew.held_out_mean_kv_tokens:
            normal = NormalDist(0.0, _LOG_DEVIATION)
            scale = mean * math.exp(-(_LOG_DEVIATION**2) / 2)
            yield _decodes([_clip(scale * math.exp(normal.inv_cdf(p)), limits) for p in places])
            yield _decodes([_clip(mean * (0.1 + 1.8 * p), limits) for p in places])


def _clip(keys: float, limits: Limits) -> int:
    return min(max(2, round(keys)), limits.longest)
