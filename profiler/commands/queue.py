"""`python -m profiler queue`: many acquisitions, one after another on one card, without pauses between them."""

import copy
import importlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiler.commands._options import check_samples_options, job_of

if TYPE_CHECKING:
    from profiler.estimate import Estimate
    from profiler.queue_plan import Plan, QueueJob

_PREPARED = ("profile", "coverage")


@click.command("queue", context_settings={"show_default": True})
@click.argument("plan_file", metavar="PLAN.yaml", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of logs and state; an unfinished one is resumed.  [default: outputs/queue/NAME of the plan]",
)
@click.option("--only", "names", metavar="JOB,JOB,...", help="These jobs of the plan alone, in its order.")
@click.option("--dry-run", is_flag=True, help="Check the plan, print minutes, and stop; needs no GPU.")
def command(plan_file: Path, folder: Path | None, names: str | None, dry_run: bool) -> None:
    """Run the jobs of PLAN.yaml (see docs/guide/profiling.md) one after another on the card here.

    While one job measures, the process of the next imports what it needs. Every job has NAME.out and NAME.err in the
    folder; the same command again goes on behind the jobs that ended with 0. A job that fails does not stop the
    others: at the end there is one line for each, and the exit code is 6.
    """
    from profiler.core.errors import AcquisitionError
    from profiler.queue_plan import only, read_plan
    from profiler.queue_run import done_before, run_queue

    plan = read_plan(plan_file)
    if names is not None:
        plan = only(plan, names.split(","))
    folder = folder or Path("outputs", "queue", plan.name)
    contexts = {job.name: _parsed(plan, job) for job in plan.jobs}
    done = done_before(plan, folder)
    _check_compile(plan)
    if dry_run:
        _print_plan(plan, contexts, done)
        return
    for job in plan.jobs:
        if job.name not in done and job.argv[0] in _PREPARED:
            _prepare(plan, job, contexts[job.name], "tiny")
    began = time.monotonic()

    def say(line: str) -> None:
        click.echo(f"{time.monotonic() - began:8.1f} s  {line}", err=True)

    outcome = run_queue(plan, folder, say)
    click.echo(
        f"{folder}: {outcome.ran} jobs in {outcome.seconds:.0f} s, {outcome.between_s:.1f} s of it between jobs; "
        f"{outcome.earlier} done before"
    )
    if outcome.failures:
        raise AcquisitionError(f"jobs that failed: {len(outcome.failures)}\n  " + "\n  ".join(outcome.failures))


def _parsed(plan: "Plan", job: "QueueJob") -> click.Context:
    """The job's command line, read as its command would, without running it. Raises ConfigError naming the job."""
    from profiler.core.errors import ConfigError, SparsightError

    group = importlib.import_module(f"{job.module}.__main__").main  # by name: the profiler runs without serving
    found = group.get_command(click.Context(group), job.argv[0])
    reader = copy.copy(found)
    reader.params = [_may_come_later(parameter) for parameter in found.params]
    try:
        context: click.Context = reader.make_context(job.argv[0], list(job.argv[1:]))
        if job.argv[0] == "profile":
            check_samples_options(context.params)
    except click.exceptions.Exit:
        raise ConfigError(f"{plan.where(job)}: argv asks for help or a version, a job must measure") from None
    except click.UsageError as error:
        raise ConfigError(f"{plan.where(job)}: {job.argv[0]}: {error.format_message()}") from None
    except SparsightError as error:
        raise ConfigError(f"{plan.where(job)}: {job.argv[0]}: {error}") from None
    return context


def _may_come_later(parameter: click.Parameter) -> click.Parameter:
    """The parameter, whose file an earlier job may yet write."""
    if not isinstance(parameter.type, click.Path) or not parameter.type.exists:
        return parameter
    kind = copy.copy(parameter.type)
    kind.exists = False
    relaxed = copy.copy(parameter)
    relaxed.type = kind
    return relaxed


def _prepare(plan: "Plan", job: "QueueJob", context: click.Context, grid: str | None = None) -> "dict[int, Estimate]":
    """Checks a job against its model, with a smaller `grid` where the time counts; the estimate by degree without.

    Raises ConfigError naming the job.
    """
    from dataclasses import replace

    from profiler import acquire, borrow
    from profiler.card import CPU, choose_engine
    from profiler.core.errors import ConfigError, SparsightError, unknown
    from profiler.estimate import estimate
    from profiler.kernels._axes import GRIDS

    options: dict[str, Any] = dict(context.params)
    model = options.pop("model")
    try:
        wanted = job_of(model, options)
        if wanted.grid not in GRIDS:
            raise unknown("grid", wanted.grid, GRIDS)
        target = acquire.prepare(replace(wanted, grid=grid or wanted.grid), options["model_config_root"])
        if options.get("moe_from"):
            target = acquire.without_category(target, borrow.CATEGORY)
        engine = choose_engine(wanted.engine, target.hardware)
    except SparsightError as error:
        raise ConfigError(f"{plan.where(job)}: {error}") from None
    if grid is not None or job.argv[0] != "profile":
        return {}
    if wanted.engine == "auto" and target.hardware != CPU:
        engine = "vllm"  # the plan may be made where it is not installed
    return {
        tp: estimate(
            [shot for found in shots.values() for shot in found],
            target.spec,
            tp,
            target.hardware,
            engine,
            wanted.warmup + wanted.repeats,
        )
        for tp, shots in target.shots.items()
    }


def _check_compile(plan: "Plan") -> None:
    from profiler.core.errors import ConfigError, SparsightError
    from profiler.engines.vllm_support.jit import shapes_by_degree

    if plan.compile is None:
        return
    try:
        shapes_by_degree(plan.compile.model, plan.compile.tps)
    except SparsightError as error:
        raise ConfigError(f"{plan.path}: compile: {error}") from None


def _print_plan(plan: "Plan", contexts: dict[str, click.Context], done: set[str]) -> None:
    from profiler.engines.vllm_support.jit import shapes_by_degree

    step = plan.compile
    if step is not None:
        count = sum(map(len, shapes_by_degree(step.model, step.tps)))
        click.echo(f"compile: GEMMs of {count} shapes by {step.workers} processes, at most {step.max_seconds:g} s")
    minutes, unknown, left = 0.0, 0, 0.0
    for job in plan.jobs:
        options = contexts[job.name].params
        found = _prepare(plan, job, contexts[job.name]) if job.argv[0] in _PREPARED else {}
        notes = [f"{one.shots} shots at tp {tp}" for tp, one in found.items()]
        if options.get("from_samples"):
            found = {}
        own = sum(one.minutes for one in found.values())
        if found:
            notes.append(f"about {own:.1f} minutes")
        notes.append(f"at most {job.max_seconds / 60:.1f}{', which is less' if own * 60 > job.max_seconds else ''}")
        if options.get("save_samples") and options.get("resume") is False:
            notes.append("refused when its samples file exists, for lack of --resume")
        if job.name in done:
            notes.append("done before")
        else:
            minutes, unknown, left = minutes + own, unknown + (not found), left + job.max_seconds / 60
        click.echo(f"{job.name}: {job.argv[0]}: {', '.join(notes)}")
    rest = f", {unknown} without an estimate" if unknown else ""
    click.echo(f"{len(plan.jobs)} jobs, {len(done)} done before; about {minutes:.1f} minutes{rest}, at most {left:.1f}")
