"""`python -m serving plan`: what fits where."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import click

from profiler.core.errors import CapacityError, ConfigError
from profiler.core.hardware import Hardware, load_hardware
from profiler.core.kv import INDEX_DTYPES, KV_DTYPES, KvLayout, gqa_bytes_per_token, kv_layout
from profiler.core.registry import load_model, load_model_config
from profiler.core.types import ModelSpec, Parallel
from profiler.core.units import GIB
from profiler.core.weights import engine_weights, nominal_weights
from serving.capacity import CUDA_GRAPH_GIB_PER_LAYER, DEFAULT_UTILIZATION, HEADROOM_GIB, OTHER_ACTIVATION_GIB
from serving.placement import Placement, Plan, plan

_COLUMNS = (
    "tp",
    "pp",
    "dp",
    "ep",
    "weights_gib",
    "weights_nominal_gib",
    "kv_available_gib",
    "bytes_per_token_per_rank",
    "num_gpu_blocks",
    "kv_tokens_per_rank",
    "kv_tokens_total",
    "max_concurrency",
    "fits",
    "launchable",
    "natural",
    "risk",
    "reason",
    "suggestion",
)


@click.command("plan", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.option("--hardware", required=True, help="GPU name or alias, such as H200 or 'NVIDIA H200'.")
@click.option("--gpus", required=True, type=int, help="Number of GPUs.")
@click.option("--tp", type=int, help="Only placements with this tensor-parallel degree.")
@click.option("--pp", type=int, help="Only placements with this pipeline-parallel degree.")
@click.option("--dp", type=int, help="Only placements with this data-parallel degree.")
@click.option("--ep", type=int, help="Only placements with this expert-parallel degree, over the whole dp group.")
@click.option("--kv-dtype", default="auto", show_default=True, help=f"KV cache: {', '.join(KV_DTYPES)}.")
@click.option("--index-dtype", default="auto", show_default=True, help=f"Block index cache: {', '.join(INDEX_DTYPES)}.")
@click.option("--max-model-len", type=int, help="Longest sequence in tokens; default: the model's own.")
@click.option("--utilization", type=float, default=DEFAULT_UTILIZATION, show_default=True, help="Share of the memory.")
@click.option("--available-kv-gib", type=float, help="KV memory per rank as a log prints it; replaces the budget.")
@click.option(
    "--mtp",
    type=int,
    is_flag=False,
    flag_value=1,
    default=0,
    help="Speculative tokens by multi-token prediction: adds the layers' weights and caches.",
)
@click.option("--dcp", type=int, default=1, show_default=True, help="Decode context parallelism, a divisor of tp.")
@click.option("--block-tokens", type=int, help="KV block size in tokens; default: the engine's choice.")
@click.option("--max-num-batched-tokens", type=int, help="Tokens per step; default: the engine's for this GPU.")
@click.option("--max-num-seqs", type=int, help="Sequences per step; default: the engine's for this GPU.")
@click.option("--non-torch-gib", type=float, help="Replaces the reserve for memory outside torch.")
@click.option(
    "--cuda-graph-gib",
    type=float,
    help=f"Replaces the reserve for CUDA graphs, {CUDA_GRAPH_GIB_PER_LAYER:.3f} GiB per layer; 0 for eager.",
)
@click.option(
    "--other-activation-gib",
    type=float,
    default=OTHER_ACTIVATION_GIB,
    show_default=True,
    help="Reserve for activations without a formula.",
)
@click.option(
    "--headroom-gib",
    type=float,
    default=HEADROOM_GIB,
    show_default=True,
    help="Memory beyond one sequence under which a placement is marked risky.",
)
@click.option("--format", "style", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@click.option("--require-fit", is_flag=True, help="Exit 5 when no placement fits.")
@click.option("--model-config-root", type=click.Path(path_type=Path), help="Folder of org/name.json configurations.")
def command(
    model: str,
    hardware: str,
    gpus: int,
    tp: int | None,
    pp: int | None,
    dp: int | None,
    ep: int | None,
    mtp: int,
    max_model_len: int | None,
    style: str,
    require_fit: bool,
    model_config_root: Path | None,
    **budget: Any,
) -> None:
    """Weights, KV cache and every legal placement of MODEL on a number of GPUs.

    MODEL is org/name of a stored configuration, or the path of a config.json.
    """
    spec, config = load_model(model, model_config_root), load_model_config(model, model_config_root)
    gpu = load_hardware(hardware)
    mtp_layers = _mtp_layers(spec, mtp)
    length = spec.max_position if max_model_len is None else max_model_len
    result = plan(spec, gpu, gpus, tp=tp, pp=pp, dp=dp, ep=ep, max_model_len=length, mtp_layers=mtp_layers, **budget)
    layout = kv_layout(
        spec,
        Parallel(tp=tp or 1, pp=pp or 1),
        gpu.architecture,
        budget["kv_dtype"],
        index_dtype=budget["index_dtype"],
        block_tokens=budget["block_tokens"],
        mtp_layers=mtp_layers,
    )
    document = _document(spec, gpu, gpus, length, budget["utilization"], layout, gqa_bytes_per_token(config), result)
    for note in (*spec.notes, *layout.notes):
        click.echo(f"note: {note}", err=True)
    _WRITERS[style](document)
    if require_fit and not any(placement.budget.fits for placement in result.placements):
        raise CapacityError(_nothing_fits(spec, gpus, gpu, result))


def _mtp_layers(spec: ModelSpec, speculative_tokens: int) -> int:
    """Layers that speculation by multi-token prediction loads: one per token up to those of the checkpoint."""
    if speculative_tokens < 0:
        raise ConfigError(f"mtp is {speculative_tokens}; it must be at least 0")
    if speculative_tokens and not spec.mtp_layers:
        raise ConfigError(f"{spec.name} has no multi-token prediction layers")
    return min(speculative_tokens, spec.mtp_layers)


def _nothing_fits(spec: ModelSpec, gpus: int, gpu: Hardware, result: Plan) -> str:
    closest = max(result.placements, key=lambda placement: placement.budget.kv_available_gib)
    hint = f"; {closest.suggestion} would fit" if closest.suggestion else ""
    return f"no placement of {spec.name} on {gpus} x {gpu.name} fits; the closest: {closest.reason}{hint}"


def _document(
    spec: ModelSpec,
    gpu: Hardware,
    gpus: int,
    max_model_len: int,
    utilization: float,
    layout: KvLayout,
    gqa_bytes: int,
    result: Plan,
) -> dict[str, Any]:
    nominal = nominal_weights(spec)
    whole = engine_weights(spec, Parallel(), mtp_layers=0)
    safe = result.largest_safe_dp
    return {
        "model": spec.name,
        "hardware": gpu.name,
        "gpus": gpus,
        "memory_total_gib": gpu.memory_total_gib,
        "memory_source": gpu.sources["memory_total_gib"],
        "utilization": utilization,
        "max_model_len": max_model_len,
        "notes": [*spec.notes, *layout.notes],
        "kv": {
            "layout": layout.layout,
            "backend": layout.backend or None,
            "block_tokens": layout.block_tokens,
            "bytes_per_token_per_rank": layout.bytes_per_token,
            "bytes_per_block": layout.bytes_per_block,
            "caches": [
                {
                    "name": cache.name,
                    "bytes_per_token_layer": cache.bytes_per_token_layer,
                    "layers": cache.layers,
                    "tp_sharded": cache.tp_sharded,
                }
                for cache in layout.caches
            ],
            "gqa_bytes_per_token": gqa_bytes,
        },
        "weights": {
            "nominal": {
                "dense_gib": _round(nominal.dense_bytes / GIB),
                "experts_gib": _round(nominal.experts_bytes / GIB),
                "expert_share": _round(nominal.expert_share),
            },
            "engine": {
                "total_gib": _round(whole.total_bytes / GIB),
                **{f"{group}_gib": _round(size / GIB) for group, size in whole.groups.items()},
            },
        },
        "largest_safe_dp": _degrees(safe) if safe else None,
        "placements": [_row(placement) for placement in result.placements],
        "refused": [
            {
                "tp": refusal.parallel.tp,
                "pp": refusal.parallel.pp,
                "dp": refusal.parallel.dp,
                "ep": refusal.parallel.ep,
                "reason": "; ".join(refusal.reasons),
            }
            for refusal in result.refused
        ],
    }


def _round(value: float) -> float:
    return round(value, 4)


def _degrees(placement: Placement) -> dict[str, int]:
    parallel = placement.parallel
    return {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp, "ep": parallel.ep}


def _row(placement: Placement) -> dict[str, Any]:
    budget = placement.budget
    return {
        **_degrees(placement),
        "weights_gib": _round(placement.weights_gib),
        "weights_nominal_gib": _round(placement.weights_nominal_gib),
        "kv_available_gib": _round(budget.kv_available_gib),
        "bytes_per_token_per_rank": budget.layout.bytes_per_token,
        "num_gpu_blocks": budget.num_gpu_blocks,
        "kv_tokens_per_rank": budget.kv_tokens,
        "kv_tokens_total": placement.kv_tokens_total,
        "max_concurrency": _round(budget.max_concurrency),
        "fits": budget.fits,
        "launchable": placement.launchable,
        "natural": placement.natural,
        "risk": budget.risk,
        "reason": placement.reason,
        "suggestion": placement.suggestion,
        "terms": {name: _round(gib) for name, gib in budget.parts().items()},
    }


def _write_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2))


def _write_csv(document: dict[str, Any]) -> None:
    writer = csv.DictWriter(sys.stdout, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(document["placements"])


def _write_table(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    kv, weights = document["kv"], document["weights"]
    nominal = weights["nominal"]
    console.print(
        f"{document['model']} on {document['gpus']} x {document['hardware']} "
        f"({document['memory_total_gib']} GiB: {document['memory_source']})",
        markup=False,
    )
    console.print(
        f"utilization {document['utilization']:g}, max_model_len {document['max_model_len']:,}, "
        f"KV layout {kv['layout']}, block {kv['block_tokens']} tokens",
        markup=False,
    )
    caches = Table(
        "cache", "B/token/layer", "layers", "B/token/rank", "split by tp", title="KV cache", title_justify="left"
    )
    for cache in kv["caches"]:
        size = cache["bytes_per_token_layer"]
        caches.add_row(
            cache["name"],
            f"{size:,}",
            str(cache["layers"]),
            f"{size * cache['layers']:,}",
            "yes" if cache["tp_sharded"] else "no",
        )
    caches.add_row("sum", "", "", f"{kv['bytes_per_token_per_rank']:,}", "")
    caches.add_row("(read as plain GQA, bf16)", "", "", f"{kv['gqa_bytes_per_token']:,}", "")
    console.print(caches)
    console.print(
        f"weights, nominal (one dtype): dense {nominal['dense_gib']:.1f} GiB, experts {nominal['experts_gib']:.1f} GiB "
        f"({nominal['expert_share']:.1%}); as the engine holds them, unsplit: {weights['engine']['total_gib']:.1f} GiB",
        markup=False,
    )
    table = Table(title="placements (GiB and tokens per rank)", title_justify="left")
    for name in ("tp", "pp", "dp", "ep", "weights", "nominal", "KV", "blocks", "tokens", "tokens, all", "seqs"):
        table.add_column(name, justify="right")
    table.add_column("verdict", overflow="fold", ratio=1)
    for row in document["placements"]:
        table.add_row(
            *(str(row[name]) for name in ("tp", "pp", "dp", "ep")),
            f"{row['weights_gib']:.1f}",
            f"{row['weights_nominal_gib']:.1f}",
            f"{row['kv_available_gib']:.1f}",
            f"{row['num_gpu_blocks']:,}",
            f"{row['kv_tokens_per_rank']:,}",
            f"{row['kv_tokens_total']:,}",
            f"{row['max_concurrency']:.2f}",
            _verdict(row),
        )
    console.print(table)
    safe = document["largest_safe_dp"]
    if safe and nominal["experts_gib"]:
        console.print(
            f"max-DP is the natural layout: {nominal['expert_share']:.1%} of the weights are experts, which ep splits "
            f"and tp does not. The largest data parallelism that fits safely: {_spell(safe)}",
            markup=False,
        )
    for refusal in document["refused"]:
        console.print(f"refused: {_spell(refusal)}: {refusal['reason']}", markup=False)
    for risk in sorted({row["risk"].split("; ", 1)[1] for row in document["placements"] if row["risk"]}):
        console.print(f"risky: {risk}", markup=False)


def _spell(degrees: dict[str, Any]) -> str:
    return " ".join(f"{name} {degrees[name]}" for name in ("tp", "pp", "dp", "ep"))


def _verdict(row: dict[str, Any]) -> str:
    verdict = "no" if not row["fits"] else "risky" if row["risk"] else "fits"
    marks = [mark for mark, on in (("max-DP", row["natural"]), ("not launchable by vLLM", not row["launchable"])) if on]
    parts = [verdict, *marks]
    text = ", ".join(parts)
    if verdict != "fits":
        text += f": {row['reason'] if verdict == 'no' else row['risk'].split(', under', 1)[0].removeprefix('risky: ')}"
        text += f"; try {row['suggestion']}" if row["suggestion"] else ""
    return text


_WRITERS = {"table": _write_table, "json": _write_json, "csv": _write_csv}
