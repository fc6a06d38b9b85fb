"""`python -m profiler import`: bundles from tables that others measured."""

import sys
from pathlib import Path
from typing import Any

import click

from profiler.commands._options import integers, out_root_option

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.group("import")
def command() -> None:
    """Turn tables that others measured into bundles, marked as imported."""


@command.command("aiconfigurator")
@click.option("--system", required=True, help="h200_sxm, b200_sxm, gb200, rtx_pro_6000_server, h100_sxm, ...")
@click.option("--model", required=True, help="Model configuration, such as MiniMaxAI/MiniMax-M3.")
@click.option("--backend", default="vllm", show_default=True, help="vllm, sglang or trtllm.")
@click.option("--version", help="Version of the back end.  [default: the newest with the model's attention modules]")
@click.option(
    "--tp", default="1,2,4,8", show_default=True, callback=integers, help="Tensor-parallel degrees to import."
)
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="As the engine names it: auto, bf16, fp8.")
@click.option(
    "--extend-context",
    type=click.IntRange(min=1),
    help="Derive prefills beyond the longest measured prompt up to this many tokens.",
)
@click.option("--tables", type=_FOLDER, help="Folder of tables in the package's layout.  [default: the package]")
@click.option("--model-config-root", type=_FOLDER, help="Folder of model configurations.  [default: the shipped ones]")
@out_root_option
@click.option("--force", is_flag=True, help="Replace a bundle that exists.")
def aiconfigurator(system: str, model: str, backend: str, **options: Any) -> None:
    """Import the measured tables of NVIDIA's AIConfigurator (pip install aiconfigurator-core==0.12.0).

    Writes a bundle of module granularity with provenance `imported` and the hardware's collectives, and prints which
    rows were dropped or corrected.
    """
    from profiler.aiconfigurator.convert import Request, convert
    from profiler.aiconfigurator.source import systems_root
    from profiler.core.bundle import write_bundle
    from profiler.core.collective_table import add_run, write_collectives
    from profiler.core.paths import default_bundle_root

    asked = Request(
        system=system,
        model=model,
        backend=backend,
        version=options["version"],
        tps=options["tp"],
        kv_dtype=options["kv_cache_dtype"],
        extend_context_tokens=options["extend_context"],
    )
    imported = convert(asked, systems_root(options["tables"]), options["model_config_root"])
    root = options["out_root"] or default_bundle_root()
    folder = write_bundle(root, imported.meta, imported.tables, force=options["force"])
    click.echo(f"{folder}")
    if imported.collectives:
        path = write_collectives(root, imported.meta["hardware"], imported.collectives, force=True)
        add_run(root, imported.meta["hardware"], imported.collectives_run)
        click.echo(f"{path}: {len(imported.collectives)} rows")
    for (tp, category), table in sorted(imported.tables.items()):
        click.echo(f"  tp{tp}/{category}.csv: {len(table)} rows of {', '.join(table.names)}")
    for reason, count in imported.changes.items():
        click.echo(f"  {reason}: {count}")
    click.echo(f"  computed by the package's rule for small kernels: {', '.join(imported.meta['computed'])}")
    for reason in imported.left_out:
        click.echo(f"  left out: {reason}")
    click.echo(imported.meta["imported_from"]["licence"], file=sys.stderr)


@command.command("llmservingsim")
@click.argument("path", type=_FOLDER)
@out_root_option
@click.option("--force", is_flag=True, help="Replace a bundle that exists.")
def llmservingsim(path: Path, out_root: Path | None, force: bool) -> None:
    """Import a bundle folder of LLMServingSim's profiler, with its old or its new columns."""
    from profiler.core.paths import default_bundle_root
    from profiler.formats.llmservingsim import convert

    folder, tables = convert(path, out_root or default_bundle_root(), force)
    click.echo(f"{folder}")
    for (tp, category), table in sorted(tables.items()):
        click.echo(f"  tp{tp}/{category}.csv: {len(table)} rows of {', '.join(table.names)}")
