"""`python -m serving plan`: what fits where."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiler.core.errors import CapacityError, ConfigError
from profiler.core.hardware import Hardware, load_hardware
from profiler.core.kv import INDEX_DTYPES, KV_DTYPES, gqa_bytes_per_token, kv_layout
from profiler.core.paths import default_bundle_root
from profiler.core.registry import load_model, load_model_config
from profiler.core.types import ModelSpec, Parallel
from serving.capacity import CUDA_GRAPH_GIB_PER_LAYER, DEFAULT_UTILIZATION, HEADROOM_GIB, OTHER_ACTIVATION_GIB
from serving.placement import Plan, plan
from serving.plan_document import WRITERS, plan_document

if TYPE_CHECKING:
    from serving.placement_speed import Speed

MAX_SPECULATIVE_TOKENS = 32


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
@click.option(
    "--step-context",
    type=int,
    help="Also estimate steps from measured tables: keys of every decoding request, and tokens of a prompt.",
)
@click.option("--step-requests", type=int, help="Decoding requests of all ranks together; default: what the KV holds.")
@click.option(
    "--bundle-root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of bundles.  [default: profiler/perf-native]",
)
@click.option("--format", "style", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@click.option("--require-fit", is_flag=True, help="Exit 5 when no placement fits.")
@click.option(
    "--model-config-root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of org/name.json configurations.",
)
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
    step_context: int | None,
    step_requests: int | None,
    bundle_root: Path | None,
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
        _described_split(result, tp or 1, pp or 1),
        gpu.architecture,
        budget["kv_dtype"],
        index_dtype=budget["index_dtype"],
        block_tokens=budget["block_tokens"],
        dcp=budget["dcp"] if (tp or 1) % budget["dcp"] == 0 else 1,
        mtp_layers=mtp_layers,
    )
    found = _speeds(spec, gpu, result, step_context, step_requests, bundle_root, mtp, budget)
    document = plan_document(
        spec, gpu, gpus, length, budget["utilization"], layout, gqa_bytes_per_token(config), result, found
    )
    for note in document["notes"]:
        click.echo(f"note: {note}", err=True)
    WRITERS[style](document)
    if require_fit and not any(placement.budget.fits for placement in result.placements):
        raise CapacityError(_nothing_fits(spec, gpus, gpu, result))


def _speeds(
    spec: ModelSpec,
    gpu: Hardware,
    result: Plan,
    context: int | None,
    requests: int | None,
    root: Path | None,
    mtp: int,
    budget: dict[str, Any],
) -> "list[Speed]":
    if context is None:
        if requests is not None:
            raise ConfigError("--step-requests needs --step-context")
        return []
    if mtp or budget["dcp"] > 1:
        raise ConfigError("--step-context: steps with mtp or dcp are not priced")
    from serving.placement_speed import Load, speeds  # prices steps, which most of a plan does without

    return speeds(
        spec,
        gpu,
        result.placements,
        Load(context, requests),
        root or default_bundle_root(),
        max_num_batched_tokens=budget["max_num_batched_tokens"],
        max_num_seqs=budget["max_num_seqs"],
    )


def _described_split(result: Plan, tp: int, pp: int) -> Parallel:
    """The split whose cache is described: of these degrees, taken from the plan where it has such a placement."""
    found = (p.parallel for p in result.placements if (p.parallel.tp, p.parallel.pp) == (tp, pp))
    return next(found, Parallel(tp=tp, pp=pp))


def _mtp_layers(spec: ModelSpec, speculative_tokens: int) -> int:
    """Layers that speculation by multi-token prediction loads: one per token up to those of the checkpoint."""
    if not 0 <= speculative_tokens <= MAX_SPECULATIVE_TOKENS:
        raise ConfigError(f"mtp is {speculative_tokens}; it must be between 0 and {MAX_SPECULATIVE_TOKENS} tokens")
    if speculative_tokens and not spec.mtp_layers:
        raise ConfigError(f"{spec.name} has no multi-token prediction layers")
    return min(speculative_tokens, spec.mtp_layers)


def _nothing_fits(spec: ModelSpec, gpus: int, gpu: Hardware, result: Plan) -> str:
    closest = max(result.placements, key=lambda placement: placement.budget.kv_available_gib)
    hint = f"; {closest.suggestion} would fit" if closest.suggestion else ""
    return f"no placement of {spec.name} on {gpus} x {gpu.name} fits; the closest: {closest.reason}{hint}"
