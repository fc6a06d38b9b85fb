"""`python -m profiler profile`: measure a model's kernels and write a bundle of tables."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from profiler.acquire import Job, Report, Target
    from profiler.samples import Run
    from profiler.tabulate import Acquired


def _integers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """A comma-separated list of positive integers, ascending, each once."""
    if value is None:
        return None
    try:
        numbers = sorted({int(part) for part in value.split(",")})
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a comma-separated list of integers") from None
    if numbers[0] < 1:
        raise click.BadParameter(f"{numbers[0]} is below 1")
    return tuple(numbers)


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(part.strip() for part in value.split(","))


@click.command("profile", context_settings={"show_default": True})
@click.argument("model")
@click.option("--hardware", required=True, help="GPU name or alias, which must be the card here, or CPU.")
@click.option("--tp", callback=_integers, help="Tensor-parallel degrees to emulate on the one card.  [default: 1]")
@click.option("--ep", default="1", callback=_integers, help="Expert-parallel degrees whose slices of experts to run.")
@click.option("--engine", default="auto", help="auto, vllm or reference; auto is vllm on a GPU that has it.")
@click.option("--grid", default="coarse", help="full, coarse, or tiny for a CPU.")
@click.option("--categories", callback=_names, help="Comma-separated categories.  [default: all of the model]")
@click.option("--skip-skew", is_flag=True, help="Leave out batches of unequal requests (category skew).")
@click.option("--kv-cache-dtype", default="auto", help="As the engine names it: auto, bf16, fp8, ...")
@click.option("--block-size", type=click.IntRange(min=1), help="KV block in tokens.  [default: the engine's choice]")
@click.option("--max-model-len", type=click.IntRange(min=1), help="Longest context in tokens.  [default: the model's]")
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=8192, help="Tokens of one step.")
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=256, help="Requests of one step.")
@click.option("--warmup", type=click.IntRange(min=0), default=2, help="Untimed runs of each shot.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, help="Timed runs of each shot.")
@click.option(
    "--out-root",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of bundles.  [default: the package's perf-native]",
)
@click.option(
    "--model-config-root",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of model configurations.  [default: the shipped ones]",
)
@click.option("--force", is_flag=True, help="Replace tables that exist.")
@click.option("--dry-run", is_flag=True, help="Print the number of shots per category and stop.")
@click.option(
    "--save-samples",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also append the raw samples to this file (gzip CSV).",
)
@click.option("--resume", is_flag=True, help="Skip shots that --save-samples FILE holds already.")
@click.option("--samples-only", is_flag=True, help="Stop after measuring; build the bundle later from the samples.")
@click.option(
    "--from-samples",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Build the tables from saved samples, without a device. May be repeated.",
)
def command(model: str, **options: Any) -> None:
    """Measure the kernels of MODEL on the device here and write a bundle of latency tables.

    Prints the bundle's folder and one line per table. A table with a failed cell is not published: the others are, and
    the exit code is 6.
    """
    from profiler import acquire
    from profiler.core.errors import ConfigError
    from profiler.core.paths import default_bundle_root

    save_to, read_from = options["save_samples"], options["from_samples"]
    for flag in ("resume", "samples_only"):
        if options[flag] and (save_to is None or read_from):
            raise ConfigError(f"--{flag.replace('_', '-')} goes with --save-samples FILE and without --from-samples")
    if read_from and save_to:
        raise ConfigError("--from-samples reads samples and --save-samples measures them: give one of the two")
    job = _job(model, options)
    target = acquire.prepare(job, options["model_config_root"])
    if options["dry_run"]:
        _print_plan(job, target)
        return
    out_root = options["out_root"] or default_bundle_root()
    if read_from:
        by_tp = acquire.load_samples(read_from, target)
        chosen = options["tp"] or tuple(sorted(by_tp))
        if missing := [tp for tp in chosen if tp not in by_tp]:
            raise ConfigError(f"the samples hold tp {', '.join(map(str, sorted(by_tp)))}, not {missing[0]}")
    else:
        unchecked = options["force"] or options["resume"] or options["samples_only"]
        by_tp = _measure(job, target, save_to, options["resume"], None if unchecked else out_root)
        chosen = job.tps
    if options["samples_only"]:
        count = sum(len(run.results) for runs in by_tp.values() for run in runs)
        click.echo(f"{save_to}: {count} shots")
        return
    done = []
    for tp in chosen:
        bundle, acquired = acquire.publish(by_tp[tp], target, job, out_root, options["force"])
        _print_tables(bundle, acquired)
        done.append(acquired)
    acquire.refuse_incomplete(done)


def _job(model: str, options: dict[str, Any]) -> "Job":
    from profiler.acquire import Job

    return Job(
        model=model,
        hardware=options["hardware"],
        tps=options["tp"] or (1,),
        ep_degrees=options["ep"],
        engine=options["engine"],
        grid=options["grid"],
        categories=options["categories"],
        kv_cache_dtype=options["kv_cache_dtype"],
        block_tokens=options["block_size"],
        max_model_len=options["max_model_len"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        max_num_seqs=options["max_num_seqs"],
        warmup=options["warmup"],
        repeats=options["repeats"],
        command=_repeatable(model, options),
        skip_skew=options["skip_skew"],
    )


def _repeatable(model: str, options: dict[str, Any]) -> str:
    """The command that measures the same again: every option that a cell depends on, and no path of this machine."""
    parts = [f"python -m profiler profile {model}"]
    for name in (
        *("hardware", "tp", "ep", "engine", "grid", "categories", "kv_cache_dtype", "block_size", "max_model_len"),
        *("max_num_batched_tokens", "max_num_seqs", "warmup", "repeats"),
    ):
        value = options[name]
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            parts.append(f"--{name.replace('_', '-')} {text}")
    if options["skip_skew"]:
        parts.append("--skip-skew")
    return " ".join(parts)


def _measure(
    job: "Job", target: "Target", save_to: Path | None, resume: bool, new_in: Path | None
) -> "dict[int, list[Run]]":
    from profiler import acquire
    from profiler.core.errors import ConfigError

    earlier: dict[int, list[Run]] = {}
    if save_to is not None and save_to.exists():
        if not resume:
            raise ConfigError(f"{save_to}: exists; --resume continues it, another name starts anew")
        earlier = acquire.load_samples([save_to], target)
    runs: dict[int, list[Run]] = {}
    for tp in job.tps:
        with _progress(f"{target.spec.name} on {target.hardware}, tp {tp}") as report:
            before = earlier.get(tp, [])
            runs[tp] = [
                *before,
                acquire.measure(job, target, tp, report, save_to=save_to, earlier=before, new_in=new_in),
            ]
    return runs


@contextmanager
def _progress(title: str) -> "Iterator[Report]":
    """A progress bar with the time left on stderr; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, label: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, TextColumn("{task.fields[shot]}"), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task(title, total=None, shot="starting")
        yield lambda done, total, label: progress.update(task, completed=done, total=total, shot=label[:60])


def _print_plan(job: "Job", target: "Target") -> None:
    from profiler.sweep import merge

    for tp, shots in target.shots.items():
        for category, found in shots.items():
            click.echo(f"tp{tp}/{category}: {len(found)} shots")
        together = merge(shot for found in shots.values() for shot in found)
        most = max((shot.kv_tokens for shot in together), default=0)
        click.echo(
            f"tp{tp}: {sum(map(len, shots.values()))} shots run alone, {len(together)} as whole forward passes; "
            f"the largest needs {most} KV tokens, those beyond the card's memory are left out"
        )
    click.echo(f"each {job.warmup} times for warm-up and {job.repeats} times timed")


def _skew_lines(fit: Mapping[str, Any]) -> "Iterator[str]":
    """Per kernel and kind of unequal batch: the error of each form on batches that were not fitted."""
    for kernel, kinds in fit.items():
        for kind, report in kinds.items():
            forms = {form: found for form, found in report.items() if isinstance(found, Mapping)}
            errors = "; ".join(
                f"{form} p50 {e['p50']:.1%} p90 {e['p90']:.1%} p99 {e['p99']:.1%}" for form, e in forms.items()
            )
            yield f"unequal batches, {kernel}, {kind}: {report['batches']} not fitted: {errors or 'none in the table'}"


def _print_tables(bundle: Path | None, acquired: "Acquired") -> None:
    from profiler.timing import percentile

    if bundle is not None:
        click.echo(f"{bundle}")
    for category, table in acquired.tables.items():
        times = [float(value) for value in table.columns["time_us"]]
        spreads = [float(v) for v in table.columns["spread_rel"] if float(v) == float(v)]
        spread = f"spread p50 {percentile(spreads, 50):.1%} p90 {percentile(spreads, 90):.1%}" if spreads else ""
        click.echo(
            f"  tp{acquired.tp}/{category}.csv: {len(table)} rows of {', '.join(table.names[:4])}"
            f"{', ...' if len(table.names) > 4 else ''}; {min(times):.2f} to {max(times):.2f} us; {spread}".rstrip("; ")
        )
    for line in _skew_lines(acquired.grid.get(f"tp{acquired.tp}/skew", {}).get("fit", {})):
        click.echo(f"  {line}")
    if acquired.unbound:
        click.echo(
            f"  {1 - acquired.bound_share:.2%} of kernel time at most, in {len(acquired.unbound)} kernels, "
            "belongs to no component"
        )
