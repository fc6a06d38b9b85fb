"""Service-level objectives and whether a replay meets them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from profiler.core.errors import ConfigError, unknown
from profiler.core.units import NS_PER_MS, NS_PER_S
from serving.core.runlog import RequestRecord
from serving.result import Result
from serving.traces import TraceRequest

LATENCIES: Final = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
_KEYS: Final = (*LATENCIES, "percentile", "goodput_share")


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in milliseconds and how many requests have to keep them.

    percentile: each bounded latency's percentile over all requests has to keep its bound. goodput_share: this share of
    all requests has to keep every bound at once. Exactly one of the two is given. A request that is rejected or
    unfinished breaks every bound. ITL: with `percentile`, over every gap between two tokens; with `goodput_share`, a
    request keeps the bound when the 99th percentile of its own gaps does.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None
    percentile: float | None = None
    goodput_share: float | None = None

    @property
    def bounds(self) -> dict[str, float]:
        values = {name: getattr(self, name) for name in LATENCIES}
        return {name: value for name, value in values.items() if value is not None}

    def describe(self) -> str:
        how = f"p{self.percentile:g}" if self.percentile is not None else f"{self.goodput_share:.4g} of requests with"
        return f"{how} " + ", ".join(f"{name[:-3].upper()} <= {value:g} ms" for name, value in self.bounds.items())


@dataclass(frozen=True, slots=True)
class Judgement:
    """attained_ms: the percentile of each bounded latency, infinite where a request that breaks every bound decides.
    limiting: the bound that is broken most, or nearest to it, and worst_ratio what was attained over what is allowed.
    good: requests that keep every bound; goodput_per_s: of them per second of the makespan."""

    met: bool
    attained_ms: Mapping[str, float]
    limiting: str
    worst_ratio: float
    good: int
    good_share: float
    goodput_per_s: float


def slo_of(values: Mapping[str, Any], where: str) -> Slo:
    """An Slo of a mapping. Raises ConfigError naming `where`: unknown keys, numbers out of range, contradictions, as
    no bound at all, none or both of percentile and goodput_share, no bound that sees queueing (ttft_ms or e2e_ms)."""
    for key, value in values.items():
        if key not in _KEYS:
            raise ConfigError(f"{where}: {unknown('key', str(key), _KEYS)}")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{where}.{key}: must be a number above 0, found {value!r}")
    slo = Slo(**{key: None if value is None else float(value) for key, value in values.items()})
    if not slo.bounds:
        raise ConfigError(f"{where}: needs a bound, one of {', '.join(LATENCIES)}")
    if (slo.percentile is None) == (slo.goodput_share is None):
        raise ConfigError(f"{where}: needs one of percentile (50 to 100) and goodput_share (above 0, at most 1)")
    if slo.percentile is not None and not 50 <= slo.percentile <= 100:
        raise ConfigError(f"{where}.percentile: must be between 50 and 100, found {slo.percentile:g}")
    if slo.goodput_share is not None and slo.goodput_share > 1:
        raise ConfigError(f"{where}.goodput_share: must be at most 1, found {slo.goodput_share:g}")
    if slo.ttft_ms is None and slo.e2e_ms is None:
        raise ConfigError(f"{where}: without ttft_ms or e2e_ms requests could wait for ever; bound one of them")
    if slo.ttft_ms is not None and slo.e2e_ms is not None and slo.e2e_ms < slo.ttft_ms:
        raise ConfigError(
            f"{where}: e2e_ms {slo.e2e_ms:g} is below ttft_ms {slo.ttft_ms:g}; no request can use the rest"
        )
    return slo


def judge(slo: Slo, result: Result) -> Judgement:
    """Whether a replay keeps an SLO, and by how much.

    Percentiles are linear between ranks. TPOT and ITL count requests of at least two output tokens.
    """
    rows = list(_latencies_ms(result))
    good = sum(1 for row in rows if all(row[name] <= bound for name, bound in slo.bounds.items()))
    attained = {name: _attained_ms(slo, name, rows, result) for name in slo.bounds}
    ratios = {name: attained[name] / bound for name, bound in slo.bounds.items()}
    limiting = max(ratios, key=lambda name: (ratios[name], name))
    share = good / len(rows)
    if slo.percentile is not None:
        met, worst = all(ratio <= 1 for ratio in ratios.values()), ratios[limiting]
    else:
        assert slo.goodput_share is not None
        broken = {name: sum(1 for row in rows if row[name] > bound) for name, bound in slo.bounds.items()}
        limiting = max(broken, key=lambda name: (broken[name], ratios[name]))
        met, worst = share >= slo.goodput_share, slo.goodput_share / share if share else math.inf
    span_ns = _makespan_ns(result)
    return Judgement(met, attained, limiting, worst, good, share, good * NS_PER_S / span_ns if span_ns else 0.0)


def _latencies_ms(result: Result) -> Iterator[dict[str, float]]:
    """One row per request; infinite for one that did not finish, 0 where a single token has no time between tokens."""
    for asked, got in zip(result.trace.requests, result.records, strict=True):
        if got.outcome != "finished" or got.first_token_ns is None or got.finish_ns is None:
            yield dict.fromkeys(LATENCIES, math.inf)
            continue
        decoded = asked.output_tokens - 1
        yield {
            "ttft_ms": (got.first_token_ns - arrived_ns(asked, got)) / NS_PER_MS,
            "tpot_ms": (got.finish_ns - got.first_token_ns) / decoded / NS_PER_MS if decoded else 0.0,
            "itl_ms": (got.itl_p99_ns or 0) / NS_PER_MS,
            "e2e_ms": (got.finish_ns - arrived_ns(asked, got)) / NS_PER_MS,
        }


def arrived_ns(asked: TraceRequest, got: RequestRecord) -> int:
    """When a request arrived: the trace's time, or for a later call of a session when it was released."""
    return asked.arrival_ns if got.arrival_ns is None else got.arrival_ns


def _attained_ms(slo: Slo, name: str, rows: Sequence[Mapping[str, float]], result: Result) -> float:
    percent = slo.percentile if slo.percentile is not None else 100 * (slo.goodput_share or 1.0)
    if name == "itl_ms" and slo.percentile is not None:
        if any(row[name] == math.inf for row in rows):
            return math.inf
        return _gap_percentile_ms(result, percent)
    several = [asked.output_tokens > 1 for asked in result.trace.requests]
    skips = name in ("tpot_ms", "itl_ms")
    values = [row[name] for row, counts in zip(rows, several, strict=True) if counts or not skips]
    return percentile_of(values, percent) if values else 0.0


def _gap_percentile_ms(result: Result, percent: float) -> float:
    pairs = sorted((value, times) for value, times in zip(*result.gaps_ns, strict=True) if times > 0 and value > 0)
    total = sum(times for _, times in pairs)
    rank = math.ceil(total * percent / 100)
    seen = 0
    for value, times in pairs:
        seen += times
        if seen >= rank:
            return value / NS_PER_MS
    return 0.0


def percentile_of(values: Sequence[float], percent: float) -> float:
    """Linear between ranks, as numpy's default; infinite as soon as one of the two ranks is. Raises on no values."""
    ascending = sorted(values)
    rank = (len(ascending) - 1) * percent / 100
    below = int(rank)
    low = ascending[below]
    if rank == below:
        return low
    high = ascending[below + 1]
    return high if math.isinf(high) else low + (high - low) * (rank - below)


def _makespan_ns(result: Result) -> int:
    first_ns = result.trace.requests[0].arrival_ns
    return max((got.finish_ns or 0 for got in result.records), default=first_ns) - first_ns
