"""`python -m serving chakra`: steps as execution traces for network simulators."""

from pathlib import Path

import click

_FILE = click.Path(path_type=Path)


@click.command()
@click.option("--cluster-config", "cluster_path", type=_FILE, required=True, help="Cluster file with one instance.")
@click.option("--batch", "batches", multiple=True, help="One step: the ranks' batches, as `explain` takes them.")
@click.option("--dataset", "trace_path", type=_FILE, help="Steps of a replay of this trace, instead of --batch.")
@click.option("--first-step", type=click.IntRange(min=0), default=0, show_default=True, help="First of the replay.")
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="How many steps.")
@click.option("--output", "prefix", type=_FILE, required=True, help="Files are <output>.<gpu>.et, .groups.json.")
@click.option("--bundle-root", type=_FILE, help="Folder of bundles.  [default: profiler/perf-native]")
@click.option("--allow-projected", is_flag=True, help="Take tables that were scaled from another GPU.")
def command(
    cluster_path: Path,
    batches: tuple[str, ...],
    trace_path: Path | None,
    first_step: int,
    steps: int,
    prefix: Path,
    bundle_root: Path | None,
    allow_projected: bool,
) -> None:
    """Export steps as Chakra execution traces, one file per GPU, as ASTRA-Sim reads them.

    Needs the extra `chakra`. Every file is read back with the package's own reader and checked.
    """
    from profiler.core.errors import ConfigError
    from profiler.core.paths import default_bundle_root
    from serving.chakra_steps import export_steps, single, window
    from serving.config import load_cluster

    if bool(batches) == bool(trace_path):
        raise ConfigError("give --batch or --dataset, one of them")
    cluster, root = load_cluster(cluster_path), bundle_root or default_bundle_root()
    if len(cluster.instances) != 1:
        raise ConfigError(f"{cluster_path}: {len(cluster.instances)} instances; export needs a cluster of one")
    (instance,) = cluster.instances
    if trace_path:
        found = window(cluster, trace_path, root, first_step, steps, allow_projected)
    else:
        found = single(instance, batches)
    done = export_steps(instance, found, prefix, root, allow_projected)
    least, most = min(done.nodes), max(done.nodes)
    nodes = f"{most:,} nodes each" if least == most else f"{least:,} to {most:,} nodes"
    click.echo(f"{len(done.files)} traces of {len(found)} steps, {nodes}, read back and checked:")
    click.echo(f"  {done.files[0]} to {done.files[-1].name}, {done.groups.name}")
