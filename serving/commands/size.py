"""`python -m serving size`: the highest rate and the fewest GPUs that keep an SLO."""

import sys
from pathlib import Path

import click

_FILE = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.option("--hardware", required=True, multiple=True, help="GPU name; may be given several times.")
@click.option("--gpus", type=_COUNT, required=True, multiple=True, help="GPUs of one instance; several times for more.")
@click.option("--workload", type=_FILE, required=True, help="Trace, or a description (YAML).")
@click.option("--rate", "rate_per_s", type=float, help="Requests per second to size for.")
@click.option("--ttft-ms", type=float, help="Bound of the time to the first token.")
@click.option("--tpot-ms", type=float, help="Bound of the time per output token.")
@click.option("--itl-ms", type=float, help="Bound of the time between two tokens.")
@click.option("--e2e-ms", type=float, help="Bound of the time of a request.")
@click.option("--percentile", type=float, help="Percentile of each latency that keeps its bound.")
@click.option("--goodput-share", type=float, help="Instead: share of requests that keep every bound.")
@click.option("--requests", type=_COUNT, default=500, show_default=True, help="Requests per replay.")
@click.option("--seeds", default="1,2,3", show_default=True, help="Seeds, separated by commas; 0 is the trace itself.")
@click.option("--tolerance", type=float, default=0.03, show_default=True, help="Relative width of the last bracket.")
@click.option("--max-model-len", type=_COUNT, help="Longest sequence.  [default: the model's own]")
@click.option("--max-num-batched-tokens", type=_COUNT, help="Tokens per step.  [default: the engine's for the GPU]")
@click.option("--max-num-seqs", type=_COUNT, help="Running requests per engine.  [default: the engine's for the GPU]")
@click.option("--kv-dtype", "kv_dtypes", multiple=True, default=("auto",), show_default=True, help="KV cache.")
@click.option("--utilization", type=float, default=0.9, show_default=True, help="Share of the memory.")
@click.option("--router", default="least_loaded", show_default=True, help="Between instances.")
@click.option("--bundle-root", type=_FILE, help="Folder of bundles.  [default: profiler/perf-native]")
@click.option("--allow-extrapolation", is_flag=True, help="Price shapes outside the tables too, and count them.")
@click.option("--allow-projected", is_flag=True, help="Take tables scaled from another GPU; marked so everywhere.")
@click.option("--pipelines", is_flag=True, help="Search splits with pipeline stages, too; takes longer.")
@click.option("--prices", type=_FILE, help="Price file; adds cost columns.")
@click.option("--workers", type=_COUNT, help="Searches at a time.  [default: the CPUs]")
@click.option("--output", "folder", type=_FILE, required=True, help="Folder of results, for report; resumed if there.")
def command(
    model: str,
    hardware: tuple[str, ...],
    gpus: tuple[int, ...],
    workload: Path,
    rate_per_s: float | None,
    ttft_ms: float | None,
    tpot_ms: float | None,
    itl_ms: float | None,
    e2e_ms: float | None,
    percentile: float | None,
    goodput_share: float | None,
    requests: int,
    seeds: str,
    tolerance: float,
    max_model_len: int | None,
    max_num_batched_tokens: int | None,
    max_num_seqs: int | None,
    kv_dtypes: tuple[str, ...],
    utilization: float,
    router: str,
    bundle_root: Path | None,
    allow_extrapolation: bool,
    allow_projected: bool,
    pipelines: bool,
    prices: Path | None,
    workers: int | None,
    folder: Path,
) -> None:
    """Search the highest rate of every layout of MODEL within an SLO, and size --rate if it is given.

    Exit code 5 when no layout keeps the SLO; the message says the nearest and what limits it. When no layout could be
    replayed the exit code is that of the refusals, as of a sweep.
    """
    from profiler.core.errors import CapacityError, ConfigError
    from profiler.core.paths import default_bundle_root
    from serving.commands.sweep import progress_bar
    from serving.pricing import read_prices
    from serving.report.terminal import print_results, print_tables
    from serving.routers import create_router
    from serving.sweeps.refusal import nothing_ran
    from serving.sweeps.results import read_results
    from serving.sweeps.size import size
    from serving.sweeps.slo import slo_of
    from serving.sweeps.spec import LimitSet, Sweep

    if not 0 < utilization <= 1:
        raise ConfigError(f"--utilization is {utilization}; it must be above 0 and at most 1")
    create_router(router)
    bounds = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "itl_ms": itl_ms, "e2e_ms": e2e_ms}
    sweep = Sweep(
        name=f"{model} on {', '.join(hardware)}",
        mode="replay",
        models=(model,),
        hardware=tuple(dict.fromkeys(hardware)),
        gpus=tuple(dict.fromkeys(gpus)),
        placements="launchable",
        kv_dtypes=tuple(dict.fromkeys(kv_dtypes)),
        utilizations=(utilization,),
        limits=(LimitSet(max_model_len, max_num_batched_tokens, max_num_seqs),),
        replicas=(1,),
        router=router,
        workload=workload,
        requests=requests,
        rates_per_s=(),
        seeds=_seeds(seeds),
        slo=slo_of(bounds | {"percentile": percentile, "goodput_share": goodput_share}, "SLO"),
        bundle_root=bundle_root or default_bundle_root(),
        allow_extrapolation=allow_extrapolation,
        allow_projected=allow_projected,
        pipelines=pipelines,
    )
    paid = read_prices(prices) if prices else None
    with progress_bar("searches") as progress:
        found = size(
            sweep, folder, rate_per_s=rate_per_s, tolerance=tolerance, workers=workers, prices=paid, progress=progress
        )
    if not found.met:
        raise nothing_ran(found.rows) or CapacityError(found.verdict[0])
    answer = read_results(folder)[0]["size"]
    print_tables(found.verdict, answer["text"], [*answer["tables"], answer["front"]], sys.stdout)
    print_results([row for row in found.rows if row["status"] != "limit"], sys.stdout)


def _seeds(text: str) -> tuple[int, ...]:
    from profiler.core.errors import ConfigError

    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--seeds: {text!r} is not a list of whole numbers such as 1,2,3") from None
    if min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds: {text!r}: seeds must be at least 0 and different")
    return seeds
