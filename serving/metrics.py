"""Per-request rows and run-wide figures of a replay. Times are nanoseconds; only finished requests enter the figures.

TTFT = first token - arrival; TPOT = (finish - first token) / (output tokens - 1), undefined for a single token;
ITL = time between two consecutive tokens; E2E = finish - arrival; makespan = last finish - first arrival. A later call
of an agentic session arrives when it is released.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Final

from profiler.core.units import NS_PER_S
from serving.core.runlog import RequestRecord, percentile
from serving.result import Deployment, Result, Sent
from serving.speculation import Verified
from serving.traces import TraceRequest

COLUMNS: Final = (
    "request_id", "instance_id", "prompt_tokens", "output_tokens", "arrival_ns", "queued_ns", "scheduled_ns",
    "first_token_ns", "finish_ns", "ttft_ns", "tpot_ns", "itl_p50_ns", "itl_p99_ns", "preemptions",
    "prefix_hit_tokens", "outcome",
)  # fmt: skip
PEER_COLUMNS: Final = (
    "instance id", "request id", "model", "input", "output", "arrival", "end_time", "latency", "queuing_delay", "TTFT",
    "TPOT", "ITL",
)  # fmt: skip
PERCENTS: Final = (50, 90, 99)


def request_rows(result: Result) -> Iterator[tuple[str | int | None, ...]]:
    """One row of COLUMNS per request, in trace order; None where a request never got that far.

    instance_id: the engine (data-parallel rank), counted over the cluster; None when the request was never routed.
    tpot_ns: rounded to a whole nanosecond, None below two output tokens.
    """
    for asked, got in zip(result.trace.requests, result.records, strict=True):
        yield (
            asked.request_id, got.engine_index if got.engine_index >= 0 else None, asked.prompt_tokens,
            asked.output_tokens, got.arrival_ns, got.queued_ns, got.scheduled_ns, got.first_token_ns, got.finish_ns,
            _since(got.arrival_ns, got.first_token_ns), _tpot_ns(asked, got), got.itl_p50_ns, got.itl_p99_ns,
            got.preemptions, got.prefix_hit_tokens, got.outcome,
        )  # fmt: skip


def write_csv(result: Result, stream: IO[str]) -> None:
    """The rows as CSV with a header, empty cells for None; equal results give equal bytes."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(request_rows(result))


def csv_text(result: Result) -> str:
    """What write_csv writes."""
    stream = io.StringIO()
    write_csv(result, stream)
    return stream.getvalue()


def peer_csv_text(result: Result) -> str:
    """The finished requests in LLMServingSim's columns, by instance and then by finish; times in nanoseconds.

    Its definitions: queuing_delay until first scheduled, TPOT rounded down and 0 for a single token, ITL as a list.
    The result must have been made with keep_itl.
    """
    model_of = {engine: one.model for one in result.deployments for engine in one.engines}
    pairs = [pair for pair in zip(result.trace.requests, result.records, strict=True) if pair[1].outcome == "finished"]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(PEER_COLUMNS)
    for asked, got in sorted(pairs, key=lambda pair: (pair[1].engine_index, pair[1].finish_ns or 0, pair[1].index)):
        assert got.finish_ns is not None and got.first_token_ns is not None
        assert got.arrival_ns is not None and got.scheduled_ns is not None
        latency, ttft = got.finish_ns - got.arrival_ns, got.first_token_ns - got.arrival_ns
        tpot = (latency - ttft) // (asked.output_tokens - 1) if asked.output_tokens > 1 else 0
        writer.writerow(
            (
                got.engine_index, asked.request_id, model_of[got.engine_index], asked.prompt_tokens,
                asked.output_tokens, got.arrival_ns, got.finish_ns, latency, got.scheduled_ns - got.arrival_ns,
                ttft, tpot, list(result.itl_ns[got.index]),
            )
        )  # fmt: skip
    return stream.getvalue()


def summary(result: Result) -> dict[str, Any]:
    """The run as one JSON-ready mapping. Figures without any sample are None."""
    pairs = list(zip(result.trace.requests, result.records, strict=True))
    finished = [(asked, got) for asked, got in pairs if got.outcome == "finished"]
    outcomes = Counter(got.outcome for _, got in pairs)
    first_arrival_ns = pairs[0][0].arrival_ns
    makespan_ns = max((got.finish_ns or 0 for _, got in finished), default=first_arrival_ns) - first_arrival_ns
    prompt_tokens = sum(asked.prompt_tokens for asked, _ in finished)
    output_tokens = sum(asked.output_tokens for asked, _ in finished)
    return {
        "cluster": result.cluster,
        "router": result.router,
        "trace_format": result.trace.format,
        "seed": result.seed,
        "horizon_ns": result.horizon_ns,
        "max_concurrency": result.max_concurrency,
        "requests": {
            "total": len(pairs),
            "finished": outcomes["finished"],
            "rejected": outcomes["rejected"],
            "unfinished": outcomes["unfinished"],
            "bad_rows_skipped": len(result.trace.skipped),
        },
        "makespan_ns": makespan_ns,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": _rate(len(finished), makespan_ns),
        "output_tokens_per_s": _rate(output_tokens, makespan_ns),
        "total_tokens_per_s": _rate(prompt_tokens + output_tokens, makespan_ns),
        "ttft_ns": _spread(Counter(_since(got.arrival_ns, got.first_token_ns) for _, got in finished)),
        "tpot_ns": _spread(Counter(_tpot_ns(asked, got) for asked, got in finished)),
        "itl_ns": _gap_spread(*result.gaps_ns),
        "e2e_ns": _spread(Counter(_since(got.arrival_ns, got.finish_ns) for _, got in finished)),
        "preemptions": sum(got.preemptions for _, got in pairs),
        "prefix_hit_tokens": sum(got.prefix_hit_tokens for _, got in pairs),
        "steps": result.steps,
        "extrapolated_lookups": result.extrapolated_lookups,
        "kv_transfer": _sent(result.sent) if result.sent else None,
        "instances": [_deployment(one) for one in result.deployments],
    }


def _since(start_ns: int | None, end_ns: int | None) -> int | None:
    return None if end_ns is None or start_ns is None else end_ns - start_ns


def _tpot_ns(asked: TraceRequest, got: RequestRecord) -> int | None:
    if got.finish_ns is None or got.first_token_ns is None or asked.output_tokens < 2:
        return None
    return round((got.finish_ns - got.first_token_ns) / (asked.output_tokens - 1))


def _rate(count: int, duration_ns: int) -> float | None:
    return count * NS_PER_S / duration_ns if duration_ns else None


def _spread(counts: Mapping[int | None, int] | Mapping[int, int]) -> dict[str, float | None]:
    known = {value: count for value, count in counts.items() if value is not None}
    if not known:
        return {"mean": None, **{f"p{percent}": None for percent in PERCENTS}}
    mean = sum(value * count for value, count in known.items()) / sum(known.values())
    return {"mean": mean, **{f"p{percent}": percentile(known, percent) for percent in PERCENTS}}


def _gap_spread(values: Sequence[int], counts: Sequence[int]) -> dict[str, float | None]:
    """The same of values in no order that occurred `counts` times each, of which there may be millions."""
    import numpy as np

    each, times = np.asarray(values, dtype=np.int64), np.asarray(counts, dtype=np.int64)
    each, times = each[times > 0], times[times > 0]
    if not len(each):
        return _spread({})
    order = np.argsort(each)
    each, seen = each[order], np.cumsum(times[order])
    total = int(seen[-1])
    spread: dict[str, float | None] = {"mean": int((each * times[order]).sum()) / total}
    for percent in PERCENTS:
        rank = (total - 1) * percent / 100
        below = int(rank)
        value, following = (
            int(each[np.searchsorted(seen, at, side="right")]) for at in (below, min(below + 1, total - 1))
        )
        spread[f"p{percent}"] = value + (following - value) * (rank - below)
    return spread


def _deployment(one: Deployment) -> dict[str, Any]:
    return {
        "model": one.model,
        "layers": "all" if one.layers is None else one.layers,
        "hardware": one.hardware,
        "instance_ids": list(one.engines),
        "tp": one.parallel.tp,
        "pp": one.parallel.pp,
        "dp": one.parallel.dp,
        "ep": one.parallel.ep,
        "lockstep": one.lockstep,
        "kv_layout": one.kv_layout,
        "block_tokens": one.block_tokens,
        "num_gpu_blocks_per_rank": one.num_gpu_blocks,
        "num_gpu_blocks_source": one.blocks_source,
        "kv_tokens_per_rank": one.kv_tokens,
        "max_model_len": one.limits.max_model_len_tokens,
        "max_num_batched_tokens": one.limits.max_num_batched_tokens,
        "max_num_seqs": one.limits.max_num_seqs,
        "long_prefill_token_threshold": one.limits.long_prefill_threshold_tokens,
        "enable_chunked_prefill": one.limits.chunked_prefill,
        "enable_prefix_caching": one.prefix_caching,
        "policy": one.policy,
        "enforce_eager": one.eager,
        "host_overhead_us": one.host_overhead_us,
        "host_overhead_source": one.host_source,
        "async_scheduling": one.async_scheduling,
        "step_overhead_us": one.step_overhead_us,
        "step_overhead_source": one.step_overhead_source,
        "gate": one.gate,
        "expert_placement": one.expert_placement,
        "redundant_experts": one.redundant_experts,
        "all2all_backend": one.all2all_backend,
        "role": one.role,
        "kv_offload": _offload(one) if one.host and one.host_use else None,
        "speculative": _speculative(one.verified) if one.verified else None,
        "tables": {
            "hardware": one.tables.hardware,
            "model": one.tables.model,
            "variant": one.tables.variant,
            "provenance": one.tables.provenance,
            "engine": one.tables.engine,
        },
    }


def _speculative(one: Verified) -> dict[str, Any]:
    asked = one.speculation
    counts = one.verifications
    total = sum(counts)
    return {
        "tokens": asked.tokens,
        "verify_as": asked.verify_as,
        "seed": asked.acceptance.seed,
        "asked_rates": [
            {"up_to_context_tokens": end, "rates": list(rates)}
            for end, rates in zip(asked.acceptance.up_to_tokens, asked.acceptance.rates, strict=True)
        ],
        "verifications": total,
        "accepted_by_position": [sum(counts[i:]) / total for i in range(1, len(counts))] if total else None,
        "mean_acceptance_length": one.mean_length,
        "notes": list(one.notes),
    }


def _sent(one: Sent) -> dict[str, Any]:
    traffic, wire = one.traffic, one.wire
    count = traffic.transfers
    return {
        "transfers": count,
        "bytes_per_token_and_rank": one.bytes_per_token,
        "blocks_per_rank": traffic.blocks,
        "bytes_per_rank": traffic.blocks * wire.bytes_per_block,
        "bandwidth_gbps": wire.gbps,
        "latency_us": wire.latency_ns / 1e3,
        "link_source": one.link_source,
        "mean_admission_wait_ns": traffic.admission_wait_ns / count if count else None,
        "mean_link_wait_ns": traffic.link_wait_ns / count if count else None,
        "mean_transfer_ns": traffic.transfer_ns / count if count else None,
        "longest_admission_queue": traffic.longest_queue,
    }


def _offload(one: Deployment) -> dict[str, Any]:
    """Hit rates are shares of the full blocks of known content that requests brought when they were admitted."""
    host, use = one.host, one.host_use
    assert host is not None and use is not None
    return {
        "host_blocks_per_rank": host.blocks,
        "block_ns": host.block_ns,
        "latency_ns": host.latency_ns,
        "asked_blocks": use.asked,
        "gpu_hit_blocks": use.hit_gpu,
        "host_hit_blocks": use.hit_host,
        "gpu_hit_rate": use.hit_gpu / use.asked if use.asked else None,
        "host_hit_rate": use.hit_host / use.asked if use.asked else None,
        "stored_blocks": use.stored,
        "evicted_blocks": use.evicted,
        "longest_write_backlog_ns": use.longest_backlog_ns,
    }
