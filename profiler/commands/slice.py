"""`python -m profiler slice`: measure one table of an existing bundle anew."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from profiler.commands._options import (
    engine_options,
    from_samples_option,
    job_of,
    measure_all,
    out_root_option,
    print_tables,
    save_samples_option,
)


@click.command("slice", context_settings={"show_default": True})
@click.argument("model")
@engine_options
@click.option("--tp", type=click.IntRange(min=1), required=True, help="Tensor-parallel degree of the table.")
@click.option("--category", required=True, help="Which table.")
@click.option("--variant", help="Variant of the bundle.  [default: the only one]")
@click.option("--grid", default="coarse", help="full, coarse, or tiny for a CPU.")
@out_root_option
@click.option("--dry-run", is_flag=True, help="Print the settings and the number of shots, and stop.")
@save_samples_option
@from_samples_option
@click.option(
    "--moe-from",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Take the table of experts from this bundle of another KV layout, instead of measuring it; above tp 1 that of "
    "divided experts.",
)
def command(model: str, tp: int, category: str, variant: str | None, dry_run: bool, **options: Any) -> None:
    """Measure one table of an existing bundle of MODEL anew, and leave all others as they are.

    Options that are not given are those that the table was measured with. The bundle's other facts (engine version, KV
    layout, protocol) must come out the same; otherwise nothing is written.
    """
    from profiler import acquire, borrow, refresh
    from profiler.core.errors import ConfigError
    from profiler.core.paths import default_bundle_root

    if options["from_samples"] and options["save_samples"]:
        raise ConfigError("--from-samples reads samples and --save-samples measures them: give one of the two")
    out_root: Path = options["out_root"] or default_bundle_root()
    if options["moe_from"]:
        if category != borrow.CATEGORY or options["from_samples"] or options["save_samples"]:
            raise ConfigError("--moe-from goes with --category moe and without samples")
        bundle = refresh.measured_bundle(out_root, model, options["hardware"], variant, options["model_config_root"])
        click.echo(f"{options['moe_from']}: gives tp{tp}/{category}.csv")
        if not dry_run:
            click.echo(f"{borrow.take_experts(out_root, bundle, options['moe_from'], tp)}")
        return
    given = {name for name in options if _given(name)}
    settings, bundle = refresh.recorded_settings(
        out_root, model, options["hardware"], variant, tp, category, options["model_config_root"]
    )
    merged = options | {name: value for name, value in settings.items() if name not in given}
    job = job_of(model, merged | {"tp": (tp,), "categories": (category,)})
    target = acquire.prepare(job, options["model_config_root"])
    if dry_run:
        for name, value in sorted(settings.items()):
            click.echo(f"{name}: {merged[name]}{'' if merged[name] == value else f' (measured with {value})'}")
        click.echo(f"tp{tp}/{category}: {sum(map(len, target.shots[tp].values()))} shots")
        return
    if options["from_samples"]:
        by_tp = acquire.load_samples(options["from_samples"], target)
        if tp not in by_tp:
            raise ConfigError(f"the samples hold tp {', '.join(map(str, sorted(by_tp)))}, not {tp}")
    else:
        by_tp = measure_all(job, target, options["save_samples"], False, None)
    refresh.check_same(bundle, by_tp[tp], target)
    path, acquired = acquire.publish(by_tp[tp], target, job, out_root, force=True)
    print_tables(path, acquired)
    acquire.refuse_incomplete([acquired])


def _given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
