"""`python -m serving replay` (the default command): replay a trace on a cluster."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from serving.api import Progress
    from serving.result import Result
    from serving.step_trace import StepTrace
    from serving.timeseries import Sampler

_FILE = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)
_STEPS_PER_UPDATE = 50


@click.command()
@click.option("--cluster-config", "cluster_path", type=_FILE, required=True, help="Cluster file, YAML or JSON.")
@click.option("--dataset", "trace_path", type=_FILE, required=True, help="Request trace.")
@click.option(
    "--output", "output_path", type=_FILE, required=True, help="CSV to write; <output>.summary.json beside it."
)
@click.option("--num-reqs", type=click.IntRange(min=0), default=0, help="Only the first rows of the trace; 0 for all.")
@click.option(
    "--max-concurrency",
    type=_COUNT,
    help="Most requests in flight: the next one arrives when one is done, as in `vllm bench serve`.",
)
@click.option("--max-num-seqs", type=_COUNT, help="Running requests per engine.")
@click.option("--max-num-batched-tokens", type=_COUNT, help="Tokens per step and engine.")
@click.option("--long-prefill-token-threshold", type=click.IntRange(min=0), help="Longest prefill chunk; 0 for no cut.")
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=None, help="Reuse KV of equal prefixes.")
@click.option("--enable-chunked-prefill/--no-enable-chunked-prefill", default=None, help="Cut prompts to the budget.")
@click.option(
    "--async-scheduling/--no-async-scheduling",
    default=None,
    help="Compose a step while the one before runs.  [default: as the tables' vLLM version does]",
)
@click.option("--scheduling-policy", "policy", help="Name of a file of serving/policies.  [default: fcfs]")
@click.option("--router", help="Name of a file of serving/routers.  [default: the cluster file's, else least_loaded]")
@click.option("--bundle-root", type=_FILE, help="Folder of bundles.  [default: profiler/perf-native]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the router's draws; kept in the summary.")
@click.option("--horizon", "horizon_s", type=click.FloatRange(min=0, min_open=True), help="Simulated seconds to run.")
@click.option(
    "--on-bad-row", type=click.Choice(["error", "skip"]), default="error", show_default=True, help="Bad trace rows."
)
@click.option(
    "--columns",
    type=click.Choice(["own", "peer"]),
    default="own",
    show_default=True,
    help="Columns of the CSV; peer: those of LLMServingSim, finished requests only.",
)
@click.option("--bench-json", "bench_path", type=_FILE, help="Also write the result JSON of `vllm bench serve`.")
@click.option("--bench-detailed", is_flag=True, help="With its lists per request, as --save-detailed does.")
@click.option("--goodput", "goals", multiple=True, metavar="METRIC:MS", help="For --bench-json: ttft, tpot or e2el.")
@click.option("--timeseries", "series_path", type=_FILE, help="Also write a CSV of load and throughput over time.")
@click.option("--tick", "tick_s", type=click.FloatRange(min=1e-9), default=1.0, show_default=True, help="Seconds.")
@click.option("--trace-steps", "steps_path", type=_FILE, help="Also write the steps as a Chrome trace (Perfetto).")
@click.option("--trace-window", metavar="START:END", help="Only steps that begin in these simulated seconds.")
@click.option("--trace-max-events", type=_COUNT, help="Most events of that trace, three per step and engine.")
@click.option("--allow-projected", is_flag=True, help="Take tables that were scaled from another GPU.")
@click.option("--allow-extrapolation", is_flag=True, help="Price shapes outside the tables too, and count them.")
def command(
    cluster_path: Path,
    trace_path: Path,
    output_path: Path,
    num_reqs: int,
    max_concurrency: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    long_prefill_token_threshold: int | None,
    enable_prefix_caching: bool | None,
    enable_chunked_prefill: bool | None,
    async_scheduling: bool | None,
    policy: str | None,
    router: str | None,
    bundle_root: Path | None,
    seed: int,
    horizon_s: float | None,
    on_bad_row: Any,
    columns: str,
    bench_path: Path | None,
    bench_detailed: bool,
    goals: tuple[str, ...],
    series_path: Path | None,
    tick_s: float,
    steps_path: Path | None,
    trace_window: str | None,
    trace_max_events: int | None,
    allow_projected: bool,
    allow_extrapolation: bool,
) -> None:
    """Replay a request trace on a cluster, on measured tables.

    Writes one CSV row per request, in trace order, and <output>.summary.json; prints a summary. The settings given
    here win over those of a cluster file of this project; in the peer's files an instance's own key wins.
    """
    from profiler.core.units import NS_PER_S
    from serving.api import replay
    from serving.bench_result import parse_goals
    from serving.config import Overrides
    from serving.metrics import summary
    from serving.step_trace import MAX_EVENTS, StepTrace, parse_window
    from serving.terminal import print_summary
    from serving.timeseries import Sampler

    files = _Files(output_path, output_path.with_name(f"{output_path.name}.summary.json"), bench_path, series_path,
                   steps_path)  # fmt: skip
    _check_outputs(files.named(), (cluster_path, trace_path))
    _check_companions(bench_path, bench_detailed or bool(goals), steps_path, trace_window or trace_max_events)
    goodput = parse_goals(goals)
    sampler = Sampler(round(tick_s * NS_PER_S)) if series_path else None
    window = parse_window(trace_window) if trace_window else (0, None)
    steps = StepTrace(window, trace_max_events or MAX_EVENTS) if steps_path else None
    with _progress() as progress:
        result = replay(
            cluster_path,
            trace_path,
            bundle_root=bundle_root,
            overrides=Overrides(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                long_prefill_threshold_tokens=long_prefill_token_threshold,
                prefix_caching=enable_prefix_caching,
                router=router,
                chunked_prefill=enable_chunked_prefill,
                policy=policy,
                async_scheduling=async_scheduling,
            ),
            num_reqs=num_reqs,
            on_bad_row=on_bad_row,
            horizon_ns=None if horizon_s is None else round(horizon_s * NS_PER_S),
            max_concurrency=max_concurrency,
            allow_extrapolation=allow_extrapolation,
            allow_projected=allow_projected,
            seed=seed,
            progress=progress,
            keep_itl=columns == "peer" or bench_path is not None or series_path is not None,
            wrap_cost=steps.wrap if steps else None,
            watches=[watch for watch in (sampler, steps) if watch is not None],
        )
    figures = summary(result)
    _write(files, result, figures, columns, goodput, bench_detailed, sampler, steps)
    for line, reason in result.trace.skipped:
        click.echo(f"skipped {trace_path}:{line}: {reason}", err=True)
    if steps is not None and steps.left_out:
        click.echo(
            f"{steps_path}: {steps.left_out:,} events beyond {steps.max_events:,} are left out; "
            "take a --trace-window, or more with --trace-max-events",
            err=True,
        )
    print_summary(figures, sys.stdout)


class _Files(NamedTuple):
    output: Path
    summary: Path
    bench: Path | None
    series: Path | None
    steps: Path | None

    def named(self) -> "list[tuple[str, Path]]":
        """The files that are asked for, each with the flag that asks for it."""
        flags = ("--output", "--output", "--bench-json", "--timeseries", "--trace-steps")
        return [(flag, path) for flag, path in zip(flags, self, strict=True) if path is not None]


def _write(
    files: _Files,
    result: "Result",
    figures: dict[str, Any],
    columns: str,
    goals: dict[str, float],
    detailed: bool,
    sampler: "Sampler | None",
    steps: "StepTrace | None",
) -> None:
    """All files, each put in place whole, and none unless all could be written."""
    from profiler.core.load import atomic_write
    from serving.bench_result import bench_result
    from serving.metrics import peer_csv_text, write_csv
    from serving.step_trace import write_trace
    from serving.timeseries import write_series

    with ExitStack() as stack:
        rows, overview = (stack.enter_context(atomic_write(path)) for path in (files.output, files.summary))
        if columns == "peer":
            rows.write(peer_csv_text(result))
        else:
            write_csv(result, rows)
        json.dump(figures, overview, indent=2, allow_nan=False)
        overview.write("\n")
        if files.bench is not None:
            bench = stack.enter_context(atomic_write(files.bench))
            json.dump(bench_result(result, goals=goals, detailed=detailed), bench, allow_nan=False)
            bench.write("\n")
        if files.series is not None and sampler is not None:
            write_series(sampler, result, stack.enter_context(atomic_write(files.series)))
        if files.steps is not None and steps is not None:
            write_trace(steps, result, stack.enter_context(atomic_write(files.steps)))


def _check_companions(bench: Path | None, for_bench: bool, steps: Path | None, for_steps: object) -> None:
    """Flags that say how to write a file that is not asked for are a mistake."""
    from profiler.core.errors import ConfigError

    if for_bench and bench is None:
        raise ConfigError("--bench-detailed and --goodput need --bench-json")
    if for_steps and steps is None:
        raise ConfigError("--trace-window and --trace-max-events need --trace-steps")


def _check_outputs(outputs: list[tuple[str, Path]], inputs: tuple[Path, ...]) -> None:
    """Refuse paths that could not be written, or that would overwrite an input or one another, before anything runs."""
    from profiler.core.errors import ConfigError

    taken: dict[Path, str] = {}
    for flag, path in outputs:
        if path.is_dir():
            raise ConfigError(f"{flag}: {path} is a folder, a file name is needed")
        if path.resolve() in [one.resolve() for one in inputs]:
            raise ConfigError(f"{flag}: {path} would overwrite an input")
        if path.resolve() in taken:
            raise ConfigError(f"{flag}: {path} is written by {taken[path.resolve()]} already")
        taken[path.resolve()] = flag
        blocked = next((one for one in path.absolute().parents if one.exists() and not one.is_dir()), None)
        if blocked is not None:
            raise ConfigError(f"{flag}: {blocked} is a file, not a folder")
        there = next(one for one in path.absolute().parents if one.is_dir())
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"{flag}: {path}: the folder {there} takes no files of this user")


@contextmanager
def _progress() -> "Iterator[Progress | None]":
    """A progress bar on stderr while it is a terminal, otherwise None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from profiler.core.units import NS_PER_S

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[simulated]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=None, simulated="")
        steps = 0

        def update(done: int, total: int, now_ns: int) -> None:
            nonlocal steps
            steps += 1
            if steps % _STEPS_PER_UPDATE == 0:
                bar.update(task, completed=done, total=total, simulated=f"{now_ns / NS_PER_S:.1f} s simulated")

        yield update
