"""`python -m profiler show`: what a bundle holds and how good it is; optionally one page with plots."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from profiler.core.bundle import Bundle
    from profiler.summary import TableSummary


@click.command("show", context_settings={"show_default": True})
@click.argument("bundle")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", help="What stdout gets.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write a page with plots here.")
@click.option(
    "--out-root",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of bundles.  [default: the package's perf-native]",
)
def command(bundle: str, form: str, html: Path | None, out_root: Path | None) -> None:
    """Summarise a BUNDLE: a folder, or HARDWARE/ORG/MODEL/VARIANT below the folder of bundles.

    Figures of quality are computed from the tables: repeat spread of cells of 20 us and more, error of leaving a cell
    out and reading it from its neighbours, neighbours in which more keys take less time.
    """
    from profiler.core.bundle import bundle_named, read_bundle
    from profiler.core.load import atomic_write
    from profiler.core.paths import default_bundle_root
    from profiler.summary import summarise

    folder = bundle_named(out_root or default_bundle_root(), bundle)
    read = read_bundle(folder)
    summaries = summarise(read)
    if form == "json":
        import json

        click.echo(json.dumps(_as_json(read, summaries), indent=1))
    else:
        _print(read, summaries)
    if html is not None:
        from profiler.page import page

        with atomic_write(html) as stream:
            stream.write(page(read))
        click.echo(f"page: {html}", err=True)


def _as_json(bundle: "Bundle", summaries: "list[TableSummary]") -> dict[str, Any]:
    from profiler.summary import skew_of

    meta = {key: value for key, value in bundle.meta.items() if key not in ("files", "grid")}
    tables = [
        {
            "tp": one.tp,
            "category": one.category,
            "rows": one.rows,
            "components": list(one.components),
            "axes": {name: list(values) for name, values in one.axes.items()},
            "least_us": one.least_us,
            "most_us": one.most_us,
            "quality": dict(one.quality),
            **({"from": dict(one.origin)} if one.origin else {}),
            **({"whole_passes": [dict(passes) for passes in one.whole_passes]} if one.whole_passes else {}),
        }
        for one in summaries
    ]
    skew = {f"tp{tp}": found for tp in bundle.tps if (found := skew_of(bundle, tp))}
    return {"meta": meta, "tables": tables, "skew": skew}


def _print(bundle: "Bundle", summaries: "list[TableSummary]") -> None:
    from profiler.summary import origin_text, percent, share

    meta = bundle.meta
    engine = meta.get("engine") or {}
    versions = engine.get("versions") or {}
    gpu, kv = meta.get("gpu") or {}, meta.get("kv") or {}
    click.echo(
        f"{meta['model']} on {meta['hardware']}, {meta['variant']}: {meta['provenance']}, for {meta['contract']}"
    )
    driver = f", driver {gpu['driver']}" if gpu.get("driver") else ""
    watts = f", {gpu['power_limit_w']} W" if gpu.get("power_limit_w") else ""
    click.echo(f"  card    {gpu.get('name', 'not recorded')}{driver}{watts}")
    click.echo(f"  engine  {engine.get('name')} {', '.join(f'{name} {version}' for name, version in versions.items())}")
    caches = ", ".join(f"{c['name']} {c['bytes_per_token_layer']} B" for c in kv.get("caches") or ())
    click.echo(
        f"  KV      {kv.get('layout')}, blocks of {kv.get('block_tokens')} tokens, {caches or 'caches not recorded'}"
    )
    click.echo(f"  made    {meta.get('measured_at')} by {meta.get('command')}")
    width = max(len(one.category) for one in summaries)
    head = f"  {'tp':>3} {'table':<{width}} {'rows':>5} {'microseconds':>22}"
    click.echo(f"{head}  {'spread from 20 us':<20}{'leave one out':<22}{'out of order':<14}")
    for one in summaries:
        span = f"{one.least_us:.2f} to {one.most_us:.1f}"
        click.echo(
            f"  {one.tp:>3} {one.category:<{width}} {one.rows:>5} {span:>22}  "
            f"{percent(one.quality, 'spread_from_20_us'):<19} {percent(one.quality, 'leave_one_out'):<21} "
            f"{share(one.quality):<13} {origin_text(one.origin, one.whole_passes)}".rstrip()
        )
    open_at: dict[str, list[int]] = {}
    for one in summaries:
        for where in one.quality.get("open_changes") or {}:
            open_at.setdefault(where, []).append(one.tp)
    for where, tps in open_at.items():
        click.echo(f"  {where}: no points at a change of kernel, at tp {', '.join(map(str, tps))}")
    _print_skew(bundle)


def _print_skew(bundle: "Bundle") -> None:
    from profiler.commands._options import skew_lines
    from profiler.summary import skew_of

    for tp in bundle.tps:
        for line in skew_lines(skew_of(bundle, tp)):
            click.echo(f"  tp {tp} {line}")
