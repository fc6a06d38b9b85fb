"""`python -m profiler profile`: measure a model's kernels and write a bundle of tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiler.commands._options import (
    check_samples_options,
    engine_options,
    from_samples_option,
    job_of,
    measure_all,
    names,
    out_root_option,
    print_tables,
    save_samples_option,
    tp_option,
)

if TYPE_CHECKING:
    from profiler.acquire import Job, Target
    from profiler.borrow import Lender


@click.command("profile", context_settings={"show_default": True})
@click.argument("model")
@engine_options
@tp_option
@click.option("--grid", default="coarse", help="full, coarse, or tiny for a CPU.")
@click.option("--categories", callback=names, help="Comma-separated categories.  [default: all of the model]")
@click.option("--skip-skew", is_flag=True, help="Leave out batches of unequal requests (category skew).")
@click.option(
    "--expert-backend",
    default="TritonExperts",
    help="Kernels of expert slices, ep > 1: a class of vllm, or engine, what it takes there itself.",
)
@click.option("--power/--no-power", default=True, help="Sample power and clocks by kernel class, with engine vllm.")
@out_root_option
@click.option("--force", is_flag=True, help="Replace tables that exist.")
@click.option("--dry-run", is_flag=True, help="Print shots per category and minutes, and stop.")
@save_samples_option
@click.option("--resume", is_flag=True, help="Skip shots that --save-samples FILE holds already.")
@click.option("--samples-only", is_flag=True, help="Stop after measuring; build the bundle later from the samples.")
@from_samples_option
@click.option(
    "--moe-from",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Take the expert table from samples or a bundle of another KV layout. May be repeated.",
)
@click.option(
    "--shared-from",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Take the tables that the KV layout does not change (experts, the indexer of DSA) from this bundle.",
)
def command(model: str, **options: Any) -> None:
    """Measure the kernels of MODEL on the device here and write a bundle of latency tables.

    Prints the bundle's folder and one line per table. A table with a failed cell is not published: the others are, and
    the exit code is 6.
    """
    from dataclasses import replace

    from profiler import acquire, borrow
    from profiler.core.errors import ConfigError
    from profiler.core.paths import default_bundle_root
    from profiler.tabulate import config_sha256

    save_to, read_from = options["save_samples"], options["from_samples"]
    check_samples_options(options)
    job = job_of(model, options)
    if options["moe_from"] and job.categories and "moe" not in job.categories:
        job = replace(job, categories=(*job.categories, "moe"))
    target = acquire.prepare(job, options["model_config_root"])
    sources = None
    if options["moe_from"]:
        if 1 not in job.tps or "moe" not in target.categories[1]:
            raise ConfigError("--moe-from: experts are measured whole, so it goes with a model of experts, at --tp 1")
        sources = borrow.read_sources(
            options["moe_from"], target.spec.name, target.hardware, config_sha256(target.config)
        )
        target = acquire.without_category(target, borrow.CATEGORY)
    lender = None
    if options["shared_from"]:
        if options["moe_from"]:
            raise ConfigError("--moe-from and --shared-from both take experts: give one of the two")
        lender, job = _with_lender(options["shared_from"], job, target)
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
        by_tp = measure_all(job, target, save_to, options["resume"], None if unchecked else out_root)
        chosen = job.tps
    if options["samples_only"]:
        count = sum(len(run.results) for runs in by_tp.values() for run in runs)
        click.echo(f"{save_to}: {count} shots")
        return
    done = []
    if sources and sources.bundles:
        lender = borrow.Lender(sources.bundles[-1], (borrow.CATEGORY,))
    for tp in chosen:
        lent = borrow.expert_runs(sources, by_tp[tp][-1]) if sources and tp == borrow.TP else []
        own_lender = lender if tp == borrow.TP else None
        runs = [*lent, *by_tp[tp]]
        bundle, acquired = acquire.publish(runs, target, job, out_root, options["force"], own_lender)
        print_tables(bundle, acquired)
        if own_lender and bundle:
            for category in own_lender.categories:
                click.echo(f"  tp{tp}/{category}.csv: taken from {own_lender.bundle.path}")
        done.append(acquired)
    acquire.refuse_incomplete(done)


def _with_lender(path: Path, job: "Job", target: "Target") -> "tuple[Lender, Job]":
    """The bundle that lends tables, and the job without their categories."""
    from dataclasses import replace

    from profiler import borrow
    from profiler.core.errors import ConfigError
    from profiler.sweep import choose_categories
    from profiler.tabulate import config_sha256

    if borrow.TP not in job.tps[:1]:
        raise ConfigError(f"--shared-from: the tables taken are those of tp {borrow.TP}, so it goes first: --tp 1,...")
    lender = borrow.read_lender(path, target.spec, job.tps, target.hardware, config_sha256(target.config))
    wanted = job.categories or choose_categories(target.spec, None, borrow.TP, job.skip_skew)
    return lender, replace(job, categories=tuple(c for c in wanted if c not in lender.categories))


def _print_plan(job: "Job", target: "Target") -> None:
    from profiler.card import CPU, choose_engine
    from profiler.estimate import estimate

    engine = choose_engine(job.engine, target.hardware)
    if job.engine == "auto" and target.hardware != CPU:
        engine = "vllm"  # the plan may be made where it is not installed
    runs = job.warmup + job.repeats
    for tp, shots in target.shots.items():
        for category, found in shots.items():
            click.echo(f"tp{tp}/{category}: {len(found)} shots")
        planned = [shot for found in shots.values() for shot in found]
        expected = estimate(planned, target.spec, tp, target.hardware, engine, runs)
        most = max((shot.kv_tokens for shot in planned), default=0)
        click.echo(
            f"tp{tp}: {expected.shots} shots of engine {engine}, about {expected.minutes:.1f} minutes; "
            f"the largest needs {most} KV tokens, those beyond the card's memory are left out"
        )
    click.echo(f"each {job.warmup} times for warm-up and {job.repeats} times timed")
