"""`python -m serving replay` (the default command): replay a trace on a cluster."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from serving.api import Progress

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
@click.option("--allow-projected", is_flag=True, help="Take tables that were scaled from another GPU.")
@click.option("--allow-extrapolation", is_flag=True, help="Price shapes outside the tables too, and count them.")
def command(
    cluster_path: Path,
    trace_path: Path,
    output_path: Path,
    num_reqs: int,
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
    allow_projected: bool,
    allow_extrapolation: bool,
) -> None:
    """Replay a request trace on a cluster, on measured tables.

    Writes one CSV row per request, in trace order, and <output>.summary.json; prints a summary. The settings given
    here win over those of a cluster file of this project; in the peer's files an instance's own key wins.
    """
    from profiler.core.load import atomic_write
    from profiler.core.units import NS_PER_S
    from serving.api import replay
    from serving.config import Overrides
    from serving.metrics import peer_csv_text, summary, write_csv
    from serving.terminal import print_summary

    summary_path = output_path.with_name(f"{output_path.name}.summary.json")
    _check_outputs((output_path, summary_path), (cluster_path, trace_path))
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
            allow_extrapolation=allow_extrapolation,
            allow_projected=allow_projected,
            seed=seed,
            progress=progress,
            keep_itl=columns == "peer",
        )
    figures = summary(result)
    with atomic_write(output_path) as rows, atomic_write(summary_path) as overview:
        if columns == "peer":
            rows.write(peer_csv_text(result))
        else:
            write_csv(result, rows)
        json.dump(figures, overview, indent=2, allow_nan=False)
        overview.write("\n")
    for line, reason in result.trace.skipped:
        click.echo(f"skipped {trace_path}:{line}: {reason}", err=True)
    print_summary(figures, sys.stdout)


def _check_outputs(outputs: tuple[Path, ...], inputs: tuple[Path, ...]) -> None:
    """Refuse paths that could not be written, or that would overwrite an input, before anything runs."""
    from profiler.core.errors import ConfigError

    for path in outputs:
        if path.is_dir():
            raise ConfigError(f"--output: {path} is a folder, a file name is needed")
        if path.resolve() in [one.resolve() for one in inputs]:
            raise ConfigError(f"--output: {path} would overwrite an input")
        blocked = next((one for one in path.absolute().parents if one.exists() and not one.is_dir()), None)
        if blocked is not None:
            raise ConfigError(f"--output: {blocked} is a file, not a folder")


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
