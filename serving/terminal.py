"""The summary of a replay on the terminal."""

from collections.abc import Iterator, Mapping
from typing import IO, Any

from profiler.core.units import NS_PER_MS, NS_PER_S

_LATENCIES = (("TTFT", "ttft_ns"), ("TPOT", "tpot_ns"), ("ITL", "itl_ns"), ("E2E", "e2e_ns"))
_COLUMNS = ("mean", "p50", "p90", "p99")


def print_summary(figures: Mapping[str, Any], stream: IO[str]) -> None:
    """Write the figures of serving.metrics.summary to `stream` as two tables: run-wide lines and latencies in ms."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream, highlight=False, width=None if stream.isatty() else 120)
    run = Table(box=None, show_header=False, pad_edge=False)
    run.add_column(no_wrap=True)
    run.add_column(overflow="fold")
    for label, text in run_lines(figures):
        run.add_row(label, text)
    latency = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    latency.add_column("ms")
    for column in _COLUMNS:
        latency.add_column(column, justify="right")
    for label, key in _LATENCIES:
        latency.add_row(label, *(_ms(figures[key][column]) for column in _COLUMNS))
    console.print(run)
    console.print(latency)


def run_lines(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Label and text of each run-wide line."""
    requests = figures["requests"]
    yield "requests", ", ".join(f"{requests[key]} {key}" for key in ("finished", "rejected", "unfinished"))
    if requests["bad_rows_skipped"]:
        yield "bad rows skipped", f"{requests['bad_rows_skipped']}"
    if figures["max_concurrency"]:
        yield "concurrency", f"at most {figures['max_concurrency']:,} requests in flight"
    yield "makespan", f"{figures['makespan_ns'] / NS_PER_S:,.3f} s in {figures['steps']:,} steps"
    yield "request throughput", _rate(figures["requests_per_s"], "requests/s")
    yield "output throughput", _rate(figures["output_tokens_per_s"], "tokens/s")
    yield "total throughput", _rate(figures["total_tokens_per_s"], "tokens/s")
    yield "preemptions", f"{figures['preemptions']:,}"
    yield "prefix hit tokens", f"{figures['prefix_hit_tokens']:,}"
    if figures["extrapolated_lookups"]:
        yield "extrapolated lookups", f"{figures['extrapolated_lookups']:,}"
    if sent := figures["kv_transfer"]:
        waits = ", ".join(
            f"{label} {_ms(sent[f'mean_{key}_ns'])} ms"
            for label, key in (("admission", "admission_wait"), ("link", "link_wait"), ("transfer", "transfer"))
        )
        yield "KV transfers", f"{sent['transfers']:,}, {sent['bytes_per_rank'] / 1e9:,.2f} GB per rank; mean {waits}"
    for one in figures["instances"]:
        yield from _instance_lines(one)


def _instance_lines(one: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    first, last = one["instance_ids"][0], one["instance_ids"][-1]
    name = f"instance {first}" if first == last else f"instances {first}-{last}"
    tables = one["tables"]
    blocks, tokens = one["num_gpu_blocks_per_rank"], one["kv_tokens_per_rank"]
    source = f"{one['kv_layout']}, from {one['num_gpu_blocks_source']}"
    model = one["model"] if one["layers"] == "all" else f"{one['model']}, first {one['layers']} layers,"
    role = "" if one["role"] == "both" else f"{one['role']}: "
    yield name, f"{role}{model} on {one['hardware']}, tp {one['tp']} pp {one['pp']} dp {one['dp']} ep {one['ep']}"
    yield "  KV per rank", f"{blocks:,} blocks of {one['block_tokens']}, {tokens:,} tokens ({source})"
    if drafts := one["speculative"]:
        length = drafts["mean_acceptance_length"]
        mean = "no verification" if length is None else f"{length:.2f} tokens per verification"
        yield "  speculative", f"{drafts['tokens']} drafts, {mean}; " + "; ".join(drafts["notes"])
    if tier := one["kv_offload"]:
        rates = [tier["gpu_hit_rate"], tier["host_hit_rate"]]
        found = "nothing asked" if None in rates else f"hits {rates[0]:.1%} in the cache, {rates[1]:.1%} in the host"
        yield "  host memory", f"{tier['host_blocks_per_rank']:,} blocks per rank; {found}"
    owner = tables["model"]
    kin = "" if owner == one["model"] else f" of {owner}, whose kernels are the same"
    yield "  tables", f"{tables['provenance']}: {tables['hardware']}/{tables['variant']}{kin}, {tables['engine']}"


def _rate(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.2f} {unit}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value / NS_PER_MS:,.2f}"
