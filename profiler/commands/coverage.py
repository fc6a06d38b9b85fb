"""`python -m profiler coverage`: device time bound to catalog components against all device time."""

import json
from typing import TYPE_CHECKING, Any

import click

from profiler.commands._options import (
    engine_options,
    from_samples_option,
    job_of,
    measure_all,
    save_samples_option,
    tp_option,
)

if TYPE_CHECKING:
    from profiler.coverage import Coverage
    from profiler.samples import Run

_SMALL_SHARE = 0.0005


@click.command("coverage", context_settings={"show_default": True})
@click.argument("model")
@engine_options
@tp_option
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", help="What stdout gets.")
@click.option("--components", is_flag=True, help="In the table, also every component's share.")
@save_samples_option
@from_samples_option
def command(model: str, form: str, components: bool, **options: Any) -> None:
    """Run a few representative batches of MODEL, or read saved samples, and account for every kernel.

    Prints, per kind of batch, the device time, how much of it belongs to components of the catalog, and every other
    kernel with its module and time. Exit code 3 when a kernel above 1 % of a batch is uncovered, when a component has
    no kernel, or when a batch failed.
    """
    from profiler import acquire, coverage
    from profiler.core.errors import ConfigError
    from profiler.engines.base import find_binding

    job = job_of(model, options)
    target = acquire.prepare(job, options["model_config_root"])
    if options["from_samples"]:
        by_tp = acquire.load_samples(options["from_samples"], target)
        chosen = options["tp"] or tuple(sorted(by_tp))
        if missing := [tp for tp in chosen if tp not in by_tp]:
            raise ConfigError(f"the samples hold tp {', '.join(map(str, sorted(by_tp)))}, not {missing[0]}")
    else:
        shots = {tp: coverage.representative_shots(target.spec, target.limits[tp]) for tp in job.tps}
        by_tp = measure_all(job, acquire.with_shots(target, shots), options["save_samples"], False, None)
        chosen = job.tps
    found = {
        tp: coverage.coverage(by_tp[tp], target.spec, find_binding(by_tp[tp][-1].info, job.contract)) for tp in chosen
    }
    if form == "json":
        click.echo(json.dumps([coverage.as_json(found[tp], by_tp[tp][-1]) for tp in chosen], indent=1))
    else:
        for tp in chosen:
            _print(found[tp], by_tp[tp][-1], components)
    for tp in chosen:
        coverage.refuse_incomplete(found[tp])


def _print(found: "Coverage", run: "Run", components: bool) -> None:
    click.echo(f"{run.model} on {run.hardware}, tp {run.tp}, engine {run.info.name}")
    click.echo(f"  {'batches':<16}{'shots':>6}{'device us':>14}{'bound us':>14}{'bound':>9}{'uncovered':>11}")
    for kind in found.kinds:
        share = kind.bound_us / kind.device_us if kind.device_us else 0.0
        loose = sum(kernel.us for kernel in kind.uncovered)
        click.echo(
            f"  {kind.kind:<16}{kind.shots:>6}{kind.device_us:>14.1f}{kind.bound_us:>14.1f}{share:>9.2%}{loose:>11.1f}"
        )
    if components:
        for kind in found.kinds:
            for (category, name), us in sorted(kind.components.items(), key=lambda item: -item[1]):
                click.echo(f"  {kind.kind}: {us:12.1f} us {us / kind.device_us:7.2%}  {category}/{name}")
    for kind in found.kinds:
        for kernel in kind.uncovered:
            mark = "MATERIAL" if kernel.material else "small" if kernel.share >= _SMALL_SHARE else "tiny"
            click.echo(
                f"  {kind.kind}: {kernel.us:10.1f} us {kernel.share:7.3%}  {mark:<9}"
                f"{kernel.module or '(no module)'}  {kernel.kernel}"
            )
    for component in found.missing:
        click.echo(f"  no kernel of {component.category}/{component.name} in any pass")
    click.echo("  complete" if found.complete else "  not complete")
