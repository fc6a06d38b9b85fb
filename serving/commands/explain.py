"""`python -m serving explain`: what one step costs, and why."""

import json
from pathlib import Path

import click

_FILE = click.Path(path_type=Path)


@click.command()
@click.option("--cluster-config", "cluster_path", type=_FILE, required=True, help="Cluster file, YAML or JSON.")
@click.option("--instance", type=click.IntRange(min=0), default=0, show_default=True, help="Which of its instances.")
@click.option(
    "--batch",
    "batches",
    multiple=True,
    required=True,
    help="One rank's requests: '32x8192' decodes with 8,192 keys each, '1x4096@1024' a prefill of 4,096 tokens behind "
    "1,024, 'idle' none. Once: all ranks have it. Again for each further rank: the ranks differ, the rest are idle.",
)
@click.option("--bundle-root", type=_FILE, help="Folder of bundles.  [default: profiler/perf-native]")
@click.option("--allow-extrapolation", is_flag=True, help="Price shapes outside the tables too.")
@click.option("--allow-projected", is_flag=True, help="Take tables that were scaled from another GPU.")
@click.option("--format", "style", type=click.Choice(["tree", "json", "html"]), default="tree", show_default=True)
@click.option("--output", "output_path", type=_FILE, help="File to write instead of stdout.")
def command(
    cluster_path: Path,
    instance: int,
    batches: tuple[str, ...],
    bundle_root: Path | None,
    allow_extrapolation: bool,
    allow_projected: bool,
    style: str,
    output_path: Path | None,
) -> None:
    """Print the cost of one step as a tree of layer kinds, kernels and collectives.

    Every line has its calls, time and share, its roofline bound, how much of the bound is reached, and where the
    number is from. Times are those of the busiest rank and of what all ranks run together; they add up to the step
    that a replay would charge. A pipeline's tree is by stage, with what is sent between them, and says how long each
    stage waits with one step in flight and with as many as the engine keeps.
    """
    from profiler.core.errors import ConfigError
    from profiler.core.load import atomic_write
    from profiler.core.paths import default_bundle_root
    from serving.config import load_cluster
    from serving.explain import document, page, tree_text
    from serving.explain_stages import StagedExplanation, staged_document, staged_page, staged_text
    from serving.explained import explain_instance

    cluster = load_cluster(cluster_path)
    if instance >= len(cluster.instances):
        raise ConfigError(f"--instance {instance}: {cluster_path} has instances 0 to {len(cluster.instances) - 1}")
    found, title = explain_instance(
        cluster.instances[instance],
        batches,
        bundle_root or default_bundle_root(),
        allow_extrapolation,
        allow_projected,
    )
    if style == "json":
        content = staged_document(found) if isinstance(found, StagedExplanation) else document(found)
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    elif style == "html":
        text = staged_page(found, title) if isinstance(found, StagedExplanation) else page(found, title)
    else:
        tree = staged_text(found) if isinstance(found, StagedExplanation) else tree_text(found)
        text = f"{title}\n\n{tree}\n"
    if output_path is None:
        click.echo(text, nl=False)
        return
    with atomic_write(output_path) as stream:
        stream.write(text)
