"""A replay in the JSON of `vllm bench serve --save-result`, so that tools which read those files read this one.

Definitions are vLLM's: only completed requests count, throughput is per second of the whole run (first arrival to last
token), percentiles are linear between ranks, standard deviations those of the population, and a figure without any
sample is 0. Times are milliseconds in the figures and seconds in the lists. The date is left empty, so that equal runs
give equal files; there is no text, no tokenizer and no client, hence no generated_texts and queue times of 0.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from profiler.core.errors import ConfigError, unknown
from profiler.core.units import NS_PER_MS, NS_PER_S
from serving.core.runlog import RequestRecord
from serving.result import Result
from serving.traces import TraceRequest

GOALS: Final = ("ttft", "tpot", "e2el")
_Pair = tuple[TraceRequest, RequestRecord]


def parse_goals(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:500` and the like, milliseconds, as {"ttft": 500.0}. Raises ConfigError for anything else."""
    goals: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in GOALS:
            raise unknown("goodput metric", name, GOALS)
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if not math.isfinite(limit) or limit < 0:
            raise ConfigError(f"--goodput {text}: give METRIC:MILLISECONDS, such as ttft:500")
        if name in goals:
            raise ConfigError(f"--goodput: {name} is given twice")
        goals[name] = limit
    return goals


def bench_result(result: Result, *, goals: Mapping[str, float] | None = None, detailed: bool = False) -> dict[str, Any]:
    """The file's content. goals: milliseconds per metric of GOALS, for request_goodput, which is null without.

    detailed: with the lists that --save-detailed keeps, one entry per request in trace order; of a request that did not
    complete the times are 0, and `errors` says what became of it. The result must have been made with keep_itl.
    """
    import numpy as np

    pairs = list(zip(result.trace.requests, result.records, strict=True))
    done = [pair for pair in pairs if pair[1].outcome == "finished"]
    first_ns = result.trace.requests[0].arrival_ns
    duration_s = max((got.finish_ns or 0) - first_ns for _, got in done) / NS_PER_S if done else 0.0
    prompt_tokens = sum(asked.prompt_tokens for asked, _ in done)
    output_tokens = sum(asked.output_tokens for asked, _ in done)
    gaps = [np.asarray(result.itl_ns.get(got.index, ()), dtype=np.int64) for _, got in done]
    ttft_ns = [_since(got, got.first_token_ns) for _, got in done]
    e2el_ns = [_since(got, got.finish_ns) for _, got in done]
    tpot_ns = [_tpot(pair) for pair in done]
    good = None
    if goals:
        named: dict[str, Sequence[float]] = {"ttft": ttft_ns, "tpot": tpot_ns, "e2el": e2el_ns}
        met = (all(named[name][i] <= limit * NS_PER_MS for name, limit in goals.items()) for i in range(len(done)))
        good = _rate(sum(met), duration_s)
    content: dict[str, Any] = {
        "date": None,
        "endpoint_type": "sparsight",
        "backend": "sparsight",
        "label": result.cluster,
        "model_id": ", ".join(dict.fromkeys(one.model for one in result.deployments)),
        "tokenizer_id": None,
        "num_prompts": len(pairs),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": result.max_concurrency,
        "duration": duration_s,
        "completed": len(done),
        "failed": len(pairs) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _rate(len(done), duration_s),
        "request_goodput": good,
        "output_throughput": _rate(output_tokens, duration_s),
        "total_token_throughput": _rate(prompt_tokens + output_tokens, duration_s),
        "max_output_tokens_per_s": _most_tokens_in_a_second(done, result.itl_ns),
        "max_concurrent_requests": _most_at_once(done),
        "rtfx": 0.0,
    }
    if detailed:
        content |= _details(pairs, result.itl_ns)
    samples: dict[str, Sequence[float] | np.ndarray[Any, Any]] = {
        "ttft": ttft_ns,
        "tpot": [value for value, (asked, _) in zip(tpot_ns, done, strict=True) if asked.output_tokens > 1],
        "itl": np.concatenate(gaps) if gaps else [],
        "e2el": e2el_ns,
    }
    for name, values in samples.items():
        ms = np.asarray(values if len(values) else [0], dtype=np.float64) / NS_PER_MS
        content[f"mean_{name}_ms"] = float(ms.mean())
        content[f"median_{name}_ms"] = float(np.median(ms))
        content[f"std_{name}_ms"] = float(ms.std())
        content[f"p99_{name}_ms"] = float(np.percentile(ms, 99))
    return content


def _details(pairs: Sequence[_Pair], itl_ns: Mapping[int, Sequence[int]]) -> dict[str, list[Any]]:
    done = [got.outcome == "finished" for _, got in pairs]
    return {
        "input_lens": [asked.prompt_tokens for asked, _ in pairs],
        "output_lens": [asked.output_tokens if ok else 0 for (asked, _), ok in zip(pairs, done, strict=True)],
        "ttfts": [
            _since(got, got.first_token_ns) / NS_PER_S if ok else 0.0 for (_, got), ok in zip(pairs, done, strict=True)
        ],
        "itls": [
            [gap / NS_PER_S for gap in itl_ns.get(got.index, ())] if ok else []
            for (_, got), ok in zip(pairs, done, strict=True)
        ],
        "latencies": [
            _since(got, got.finish_ns) / NS_PER_S if ok else 0.0 for (_, got), ok in zip(pairs, done, strict=True)
        ],
        "start_times": [(got.arrival_ns or 0) / NS_PER_S for _, got in pairs],
        "queue_times": [0.0] * len(pairs),
        "errors": ["" if ok else got.outcome for (_, got), ok in zip(pairs, done, strict=True)],
    }


def _since(got: RequestRecord, end_ns: int | None) -> int:
    assert end_ns is not None and got.arrival_ns is not None
    return end_ns - got.arrival_ns


def _tpot(pair: _Pair) -> float:
    """Nanoseconds; 0 for a single token, as vLLM counts it for goodput."""
    asked, got = pair
    assert got.finish_ns is not None and got.first_token_ns is not None
    return (got.finish_ns - got.first_token_ns) / (asked.output_tokens - 1) if asked.output_tokens > 1 else 0.0


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s else 0.0


def _most_tokens_in_a_second(done: Sequence[_Pair], itl_ns: Mapping[int, Sequence[int]]) -> float:
    """Output tokens of the busiest second, seconds counted from the first arrival of a completed request."""
    import numpy as np

    if not done:
        return 0.0
    start_ns = min(got.arrival_ns or 0 for _, got in done)
    last_ns = max(got.finish_ns or 0 for _, got in done)
    counts = np.zeros((last_ns - start_ns) // NS_PER_S + 1, dtype=np.int64)
    for _, got in done:
        first_ns = (got.first_token_ns or 0) - start_ns
        later_ns = first_ns + np.cumsum(np.asarray(itl_ns.get(got.index, ()), dtype=np.int64))
        counts += np.bincount(later_ns // NS_PER_S, minlength=len(counts))
        counts[first_ns // NS_PER_S] += 1
    return float(counts.max())


def _most_at_once(done: Sequence[_Pair]) -> int:
    """Most completed requests between arrival and last token at one moment; one that ends as another begins is over."""
    changes = sorted([(got.arrival_ns or 0, 1) for _, got in done] + [(got.finish_ns or 0, -1) for _, got in done])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
