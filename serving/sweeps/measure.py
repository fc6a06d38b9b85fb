"""One point, measured by a replay: its row and the curves that a report draws."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from profiler.core.bundle import find_bundle
from profiler.core.errors import SparsightError
from profiler.core.load import read_mapping
from profiler.core.registry import load_model
from profiler.core.stack import fold
from profiler.core.units import NS_PER_MS, NS_PER_S
from serving.api import replay
from serving.core.shape import StepShape
from serving.cost import Line
from serving.deployment import deploy
from serving.metrics import PERCENTS, summary
from serving.pricing import kernel_watts, step_joules
from serving.result import Deployment, Result
from serving.sweeps.points import Job, kind_of
from serving.sweeps.slo import arrived_ns, judge, percentile_of
from serving.sweeps.traffic import open_traffic

_SERIES_POINTS: Final = 120
_CDF_PERCENTS: Final = (0, 1, 2, 5, *range(10, 91, 5), 92, 94, 95, 96, 97, 98, 99, 99.5, 100)


def measured(job: Job) -> dict[str, Any]:
    """{"row": one result row, "detail": curves} of a job, or a row with status "refused" and its reason where the
    tables, the memory or the input forbid it. JSON-ready and equal for equal jobs."""
    row = point_columns(job)
    try:
        trace = open_traffic(job.workload).at(job.rate_per_s, job.seed, job.requests)
        result = replay(
            job.cluster,
            trace,
            bundle_root=job.bundle_root,
            allow_extrapolation=job.allow_extrapolation,
            allow_projected=job.allow_projected,
            max_concurrency=job.concurrency,
            seed=job.seed,
        )
        row |= result_columns(job, result)
        detail = _detail(job, result)
    except SparsightError as error:
        return {"row": row | {"status": "refused", "kind": kind_of(error), "reason": str(error)}, "detail": {}}
    return {"row": row, "detail": detail}


def point_columns(job: Job) -> dict[str, Any]:
    """The columns that name a point."""
    return {
        "key": job.key,
        "status": "done",
        "kind": None,
        "reason": None,
        **job.layout.columns(),
        "replicas": job.replicas,
        "gpus_total": job.layout.gpus * job.replicas,
        "rate_per_s": job.rate_per_s if job.concurrency is None else None,
        "concurrency": job.concurrency,
        "seed": job.seed,
    }


def result_columns(job: Job, result: Result) -> dict[str, Any]:
    """The columns of a replay that ended."""
    figures = summary(result)
    span_s = figures["makespan_ns"] / NS_PER_S
    first = result.deployments[0]
    columns: dict[str, Any] = {
        "max_model_len": first.limits.max_model_len_tokens,
        "max_num_batched_tokens": first.limits.max_num_batched_tokens,
        "max_num_seqs": first.limits.max_num_seqs,
        **{name: figures["requests"][name] for name in ("finished", "rejected", "unfinished")},
        "makespan_s": span_s,
        "requests_per_s": figures["requests_per_s"],
        "in_flight_mean": _in_flight(figures, span_s),
        "prompt_tokens_per_s": figures["prompt_tokens"] / span_s if span_s else None,
        "output_tokens_per_s": figures["output_tokens_per_s"],
        "output_tokens_per_s_per_gpu": (figures["output_tokens_per_s"] or 0.0) / (job.layout.gpus * job.replicas),
        "user_tokens_per_s": _inverse_s(figures["tpot_ns"]["p50"]),
    }
    for name in ("ttft", "tpot", "itl", "e2e"):
        for which in ("mean", *(f"p{percent}" for percent in PERCENTS)):
            value = figures[f"{name}_ns"][which]
            columns[f"{name}_ms_{which}"] = None if value is None else value / NS_PER_MS
    if job.slo is not None:
        found = judge(job.slo, result)
        columns |= {
            "slo_met": found.met,
            "slo_limiting": found.limiting,
            "slo_worst_ratio": _finite(found.worst_ratio),
            "goodput_share": found.good_share,
            "goodput_per_s": found.goodput_per_s,
        }
    return columns | {
        "preemptions": figures["preemptions"],
        "prefix_hit_tokens": figures["prefix_hit_tokens"],
        "kv_layout": first.kv_layout,
        "variant": first.tables.variant_of(first.model),
        "provenance": first.tables.provenance,
        "table_engine": first.tables.engine,
        "steps": figures["steps"],
        "extrapolated_lookups": figures["extrapolated_lookups"],
    }


def _in_flight(figures: Mapping[str, Any], span_s: float) -> float | None:
    """Finished requests in the system, averaged over the makespan."""
    mean_ns = figures["e2e_ns"]["mean"]
    return figures["requests"]["finished"] * mean_ns / NS_PER_S / span_s if mean_ns and span_s else None


def _inverse_s(value_ns: float | None) -> float | None:
    return NS_PER_S / value_ns if value_ns else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _detail(job: Job, result: Result) -> dict[str, Any]:
    detail: dict[str, Any] = {"cdf_percents": list(_CDF_PERCENTS), "cdf_ms": _curves(result), "series": series(result)}
    if job.steps and job.layout.parallel.pp == 1:
        detail["steps"] = _steps(job, result)
    return detail


def _curves(result: Result) -> dict[str, list[float]]:
    """Percentiles of finished requests in milliseconds, to four significant digits."""
    ttft, tpot, e2e = [], [], []
    for asked, got in zip(result.trace.requests, result.records, strict=True):
        if got.outcome != "finished" or got.first_token_ns is None or got.finish_ns is None:
            continue
        ttft.append((got.first_token_ns - arrived_ns(asked, got)) / NS_PER_MS)
        e2e.append((got.finish_ns - arrived_ns(asked, got)) / NS_PER_MS)
        if asked.output_tokens > 1:
            tpot.append((got.finish_ns - got.first_token_ns) / (asked.output_tokens - 1) / NS_PER_MS)
    named = {"ttft": ttft, "tpot": tpot, "e2e": e2e}
    return {
        name: [float(f"{percentile_of(values, percent):.4g}") for percent in _CDF_PERCENTS]
        for name, values in named.items()
        if values
    }


def series(result: Result) -> dict[str, list[float]]:
    """Waiting and running requests and the KV use at up to 120 moments of the run.

    From the requests' times: a request waits from its arrival until it is first scheduled and runs until its last
    token. Its KV is taken to grow evenly, by the prompt until the first token and by the output after it; shared
    prefixes count once per request, so with prefix caching the true use is at most this. kv_share: over all ranks.
    """
    rows = [
        (asked, got)
        for asked, got in zip(result.trace.requests, result.records, strict=True)
        if got.scheduled_ns is not None and got.finish_ns is not None and got.first_token_ns is not None
    ]
    if not rows:
        return {"time_s": [], "waiting": [], "running": [], "kv_share": []}
    start_ns = result.trace.requests[0].arrival_ns
    end_ns = max(got.finish_ns or 0 for _, got in rows)
    capacity = sum(one.kv_tokens * len(one.engines) for one in result.deployments)
    times = [start_ns + (end_ns - start_ns) * place // _SERIES_POINTS for place in range(_SERIES_POINTS + 1)]
    waiting, running, held = [0] * len(times), [0] * len(times), [0.0] * len(times)
    for asked, got in rows:
        assert got.scheduled_ns is not None and got.first_token_ns is not None and got.finish_ns is not None
        width = max(1, end_ns - start_ns)
        first = -(-(arrived_ns(asked, got) - start_ns) * _SERIES_POINTS // width)
        last = (got.finish_ns - start_ns) * _SERIES_POINTS // width
        for place in range(max(0, first), min(last, _SERIES_POINTS) + 1):
            at = times[place]
            if at < arrived_ns(asked, got) or at >= got.finish_ns:
                continue
            if at < got.scheduled_ns:
                waiting[place] += 1
                continue
            running[place] += 1
            if at < got.first_token_ns:
                held[place] += asked.prompt_tokens * (at - got.scheduled_ns) / (got.first_token_ns - got.scheduled_ns)
            else:
                share = (at - got.first_token_ns) / max(1, got.finish_ns - got.first_token_ns)
                held[place] += asked.prompt_tokens + asked.output_tokens * share
    return {
        "time_s": [round((at - start_ns) / NS_PER_S, 3) for at in times],
        "waiting": [float(one) for one in waiting],
        "running": [float(one) for one in running],
        "kv_share": [round(one / capacity, 5) if capacity else 0.0 for one in held],
    }


def _steps(job: Job, result: Result) -> dict[str, Any]:
    """The price lists of two steps of the first instance: a decode step at the run's mean batch and length, and a
    full prefill chunk of the longest prompt seen, no longer than the token budget. Microseconds."""
    deployed = deploy(job.cluster.instances[0], 0, job.bundle_root, job.allow_extrapolation, job.allow_projected)
    limits = deployed.deployment.limits
    ranks = len(deployed.groups[0].engines)
    engines = sum(len(one.engines) for one in result.deployments)
    finished = [
        (asked, got)
        for asked, got in zip(result.trace.requests, result.records, strict=True)
        if got.finish_ns is not None and got.first_token_ns is not None
    ]
    if not finished:
        return {}
    start_ns = result.trace.requests[0].arrival_ns
    span_ns = max(got.finish_ns or 0 for _, got in finished) - start_ns
    decoding_ns = sum((got.finish_ns or 0) - (got.first_token_ns or 0) for _, got in finished)
    batch = min(limits.max_num_seqs, max(1, round(decoding_ns / max(1, span_ns) / engines)))
    keys = max(1, round(sum(asked.prompt_tokens + asked.output_tokens / 2 for asked, _ in finished) / len(finished)))
    longest = max(asked.prompt_tokens for asked, _ in finished)
    chunk = min(longest, limits.max_num_batched_tokens)
    indexer = load_model(job.layout.model).indexer
    cap = indexer.attended_cap_tokens if indexer else keys
    decode = StepShape((), batch, batch * keys, keys, batch * min(keys, cap), batch)
    prefill = StepShape(((chunk, 0),), 0, 0, 0, 0, 1)
    explained = deployed.cost.explain([decode] * ranks)
    return {
        "decode": {
            "what": f"{batch} decoding requests per rank of {keys:,} tokens each, {ranks} rank{'s' * (ranks > 1)}",
            "lines": _lines(explained),
            "joules_per_token": _joules_per_token(job, deployed.deployment, explained, batch),
        },
        "prefill": {
            "what": f"one prompt chunk of {chunk:,} tokens on every rank, {ranks} rank{'s' * (ranks > 1)}",
            "lines": _lines(deployed.cost.explain([prefill] * ranks)),
        },
    }


def _lines(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [{"name": one.component, "us": round(one.us, 3), "provenance": one.provenance} for one in lines]


def _joules_per_token(job: Job, one: Deployment, lines: Sequence[Line], batch: int) -> float | None:
    """Energy of the GPUs of one rank over the tokens of its decode step, from the power samples of the bundle; None
    where it has none, or none for a part of the step."""
    path = find_bundle(job.bundle_root, one.tables.hardware, one.tables.model, one.tables.variant)
    if not (path / "meta.yaml").is_file():
        return None
    watts = kernel_watts(read_mapping(path / "meta.yaml"))
    if not watts:
        return None
    categories = {component.name: component.category for component, _ in fold(load_model(job.layout.model)).components}
    parts: dict[str, float] = {}
    for line in lines:
        outside = "other" if line.provenance in ("stated", "hardware file") else "collective"
        name = categories.get(line.component, outside)
        parts[name] = parts.get(name, 0.0) + line.us
    joules = step_joules(parts, watts)
    return None if joules is None else joules * one.parallel.tp / batch
