"""What the commands that start an engine share: its options, the job they make, progress on stderr."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from profiler.acquire import Job, Report, Target
    from profiler.samples import Run
    from profiler.tabulate import Acquired

_LINE_EVERY_S = 15.0

_Command = TypeVar("_Command", bound=Callable[..., Any])


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


def engine_options(command: _Command) -> _Command:
    """What an engine is started with, whatever is then run on it."""
    for option in reversed(_ENGINE_OPTIONS):
        command = option(command)
    return command


_ENGINE_OPTIONS = (
    click.option("--hardware", required=True, help="GPU name or alias, which must be the card here, or CPU."),
    click.option("--ep", default="1", callback=_integers, help="Expert-parallel degrees whose slices to run."),
    click.option("--engine", default="auto", help="auto, vllm or reference; auto is vllm on a GPU that has it."),
    click.option("--kv-cache-dtype", default="auto", help="As the engine names it: auto, bf16, fp8, ..."),
    click.option("--block-size", type=click.IntRange(min=1), help="KV block, tokens.  [default: the engine's choice]"),
    click.option(
        "--kv-cache-gib",
        type=click.FloatRange(min=0, min_open=True),
        help="Size of vllm's KV cache, for a card that others use too.  [default: what is free]",
    ),
    click.option(
        "--max-model-len", type=click.IntRange(min=1), help="Longest context in tokens.  [default: the model's]"
    ),
    click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=8192, help="Tokens of one step."),
    click.option("--max-num-seqs", type=click.IntRange(min=1), default=256, help="Requests of one step."),
    click.option("--warmup", type=click.IntRange(min=0), default=2, help="Untimed runs of each shot."),
    click.option("--repeats", type=click.IntRange(min=1), default=5, help="Timed runs of each shot."),
    click.option("--contract", default="serving", help="serving, or replay: the attention tail of DSA as one number."),
    click.option("--execution", default="auto", help="auto, or native: vLLM's own module of DeepSeek-V3.2."),
    click.option(
        "--model-config-root",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder of model configurations.  [default: the shipped ones]",
    ),
)

tp_option = click.option("--tp", callback=_integers, help="Tensor-parallel degrees to emulate.  [default: 1]")
out_root_option = click.option(
    "--out-root",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of bundles.  [default: the package's perf-native]",
)
from_samples_option = click.option(
    "--from-samples",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Saved samples to use instead of a device. May be repeated.",
)
save_samples_option = click.option(
    "--save-samples",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also append the raw samples to this file (gzip CSV).",
)
names = _names
integers = _integers


def check_samples_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError where the options of `profile` about samples do not go together."""
    from profiler.core.errors import ConfigError

    for flag in ("resume", "samples_only"):
        if options[flag] and (options["save_samples"] is None or options["from_samples"]):
            raise ConfigError(f"--{flag.replace('_', '-')} goes with --save-samples FILE and without --from-samples")
    if options["from_samples"] and options["save_samples"]:
        raise ConfigError("--from-samples reads samples and --save-samples measures them: give one of the two")


def job_of(model: str, options: dict[str, Any]) -> "Job":
    from profiler.acquire import Job

    return Job(
        model=model,
        hardware=options["hardware"],
        tps=options.get("tp") or (1,),
        ep_degrees=options["ep"],
        engine=options["engine"],
        grid=options.get("grid", "coarse"),
        categories=options.get("categories"),
        kv_cache_dtype=options["kv_cache_dtype"],
        block_tokens=options["block_size"],
        max_model_len=options["max_model_len"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        max_num_seqs=options["max_num_seqs"],
        warmup=options["warmup"],
        repeats=options["repeats"],
        command=_repeatable(model, options),
        skip_skew=options.get("skip_skew", False),
        contract=options["contract"],
        execution=options["execution"],
        power=options.get("power", False),
        expert_backend=options.get("expert_backend", "TritonExperts"),
        kv_cache_gib=options["kv_cache_gib"],
    )


def _repeatable(model: str, options: dict[str, Any]) -> str:
    """The command that measures the same again: every option that a cell depends on, and no path of this machine."""
    parts = [f"python -m profiler profile {model}"]
    for name in (
        *("hardware", "tp", "ep", "engine", "grid", "categories", "kv_cache_dtype", "block_size", "kv_cache_gib"),
        *("max_model_len", "max_num_batched_tokens", "max_num_seqs", "warmup", "repeats"),
    ):
        value = options.get(name)
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else _text(value)
            parts.append(f"--{name.replace('_', '-')} {text}")
    if options.get("skip_skew"):
        parts.append("--skip-skew")
    for name, usual in (("contract", "serving"), ("execution", "auto"), ("expert_backend", "TritonExperts")):
        if options.get(name, usual) != usual:
            parts.append(f"--{name} {options[name]}")
    return " ".join(parts)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def measure_all(
    job: "Job",
    target: "Target",
    save_to: Path | None,
    resume: bool,
    new_in: Path | None,
    apart: bool | None = None,
) -> "dict[int, list[Run]]":
    """Runs of every tp, those that `save_to` holds already first. new_in: see `profiler.acquire.measure`.

    apart: each tp in a process of its own; None: where there are several and vllm, which starts once in a process and
    keeps its memory, measures them.
    """
    from profiler import acquire
    from profiler.card import choose_engine
    from profiler.core.errors import ConfigError

    earlier: dict[int, list[Run]] = {}
    if save_to is not None and save_to.exists():
        if not resume:
            raise ConfigError(f"{save_to}: exists; --resume continues it, another name starts anew")
        earlier = acquire.load_samples([save_to], target)
    if apart is None:
        apart = len(job.tps) > 1 and choose_engine(job.engine, target.hardware) == "vllm"
    if apart:
        return _measure_apart(job, target, save_to, new_in, earlier)
    return {
        tp: [*earlier.get(tp, []), measure_one(job, target, tp, save_to, earlier.get(tp, []), new_in)] for tp in job.tps
    }


def measure_one(
    job: "Job", target: "Target", tp: int, save_to: Path | None, earlier: "Sequence[Run]", new_in: Path | None
) -> "Run":
    """`profiler.acquire.measure` with its progress on stderr."""
    from profiler import acquire

    with progress_bar(f"{target.spec.name} on {target.hardware}, tp {tp}") as report:
        return acquire.measure(job, target, tp, report, save_to=save_to, earlier=earlier, new_in=new_in)


def _measure_apart(
    job: "Job", target: "Target", save_to: Path | None, new_in: Path | None, earlier: "Mapping[int, list[Run]]"
) -> "dict[int, list[Run]]":
    from profiler import acquire
    from profiler.apart import run_apart

    with tempfile.TemporaryDirectory(prefix="sparsight-samples-") as folder:
        samples = save_to or Path(folder, "samples.csv.gz")
        advice = (
            f"--save-samples {save_to} --resume continues"
            if save_to is not None
            else "its samples are lost, --save-samples FILE keeps them and --resume continues"
        )
        for tp in job.tps:
            arguments = (job, target, tp, samples, earlier.get(tp, []), new_in)
            run_apart(measure_one, arguments, f"tp {tp}", advice)
        found = acquire.load_samples([samples], target)
    return {tp: found[tp] for tp in job.tps}


def line_now_and_then(title: str, clock: "Callable[[], float]") -> "Report":
    """Reports as lines on stderr, _LINE_EVERY_S apart, and the last one where any was written."""
    started = last = clock()

    def report(done: int, total: int, label: str) -> None:
        nonlocal last
        now = clock()
        if now - last >= _LINE_EVERY_S or (done == total and last > started):
            last = now
            print(f"{title}: {done} of {total} shots, {now - started:.0f} s", file=sys.stderr, flush=True)

    return report


@contextmanager
def progress_bar(title: str) -> "Iterator[Report]":
    """A progress bar with the time left on stderr; where that is no terminal, a line now and then."""
    if not sys.stderr.isatty():
        yield line_now_and_then(title, time.monotonic)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, TextColumn("{task.fields[shot]}"), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task(title, total=None, shot="starting")
        yield lambda done, total, label: progress.update(task, completed=done, total=total, shot=label[:60])


def skew_lines(fit: Mapping[str, Any]) -> "Iterator[str]":
    """Per kernel and kind of unequal batch: the error of each form on batches that were not fitted."""
    for kernel, kinds in fit.items():
        for kind, report in kinds.items():
            forms = {form: found for form, found in report.items() if isinstance(found, Mapping)}
            errors = "; ".join(
                f"{form} p50 {e['p50']:.1%} p90 {e['p90']:.1%} p99 {e['p99']:.1%}" for form, e in forms.items()
            )
            yield f"unequal batches, {kernel}, {kind}: {report['batches']} not fitted: {errors or 'none in the table'}"


def print_tables(bundle: Path | None, acquired: "Acquired") -> None:
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
    for line in skew_lines(acquired.grid.get(f"tp{acquired.tp}/skew", {}).get("fit", {})):
        click.echo(f"  {line}")
    if acquired.unbound:
        click.echo(
            f"  {1 - acquired.bound_share:.2%} of kernel time at most, in {len(acquired.unbound)} kernels, "
            "belongs to no component"
        )
