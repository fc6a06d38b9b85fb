"""`python -m serving record`: run a trace on a real vLLM engine and keep what happened."""

import datetime
import json
from pathlib import Path
from typing import Any

import click

from profiler.core.errors import AcquisitionError, ConfigError


@click.command("record")
@click.argument("model")
@click.option("--hardware", required=True, help="GPU name or alias; must be the card that is here.")
@click.option("--dataset", required=True, type=click.Path(path_type=Path), help="Trace to play, in any known format.")
@click.option(
    "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder of the recording."
)
@click.option("--layers", type=click.IntRange(1), help="Play on the first N layers only.  [default: all]")
@click.option("--num-reqs", type=click.IntRange(1), help="Only the first N requests.")
@click.option("--max-model-len", type=click.IntRange(1), help="[default: the model's]")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=8192, show_default=True)
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, show_default=True)
@click.option("--kv-cache-dtype", default="auto", show_default=True)
@click.option("--block-size", "block_tokens", type=click.IntRange(1), help="[default: the engine's choice]")
@click.option("--utilization", type=click.FloatRange(0, 1, min_open=True), default=0.9, show_default=True)
@click.option("--num-gpu-blocks", type=click.IntRange(2), help="Override the number of KV blocks, to saturate them.")
@click.option("--eager/--graphs", default=False, show_default=True, help="Without or with CUDA graphs.")
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True)
@click.option("--async-scheduling/--no-async-scheduling", default=True, show_default=True)
@click.option("--plays", type=click.IntRange(1), default=4, show_default=True, help="Most plays until none stalls.")
@click.option("--tick-seconds", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True)
@click.option("--seed", type=int, default=42, show_default=True)
@click.option("--force", is_flag=True, help="Replace a recording that exists.")
def command(**options: Any) -> None:
    """Play a trace on a real vLLM engine with MODEL's architecture, strict lengths and random weights.

    The trace is played until a play has no step that stalls (just-in-time compilation); that play is kept: requests,
    time series, step log, memory and blocks of the engine, and a cluster file with which `replay` simulates the same.
    """
    run(**options)


def run(
    *,
    model: str,
    hardware: str,
    dataset: Path,
    output: Path,
    layers: int | None,
    num_reqs: int | None,
    max_model_len: int | None,
    plays: int,
    tick_seconds: float,
    force: bool,
    **engine: Any,
) -> None:
    from profiler.core.hardware import load_hardware
    from profiler.core.load import sha256_of
    from profiler.core.registry import load_model, load_model_config
    from profiler.core.stack import cut
    from serving.recording import vllm_driver
    from serving.recording.drive import play
    from serving.recording.files import write_recording
    from serving.recording.steps import stand_outs
    from serving.traces import read_trace

    spec, card = load_model(model), load_hardware(hardware)
    if layers is not None and layers > spec.num_layers:
        raise ConfigError(f"--layers {layers}: {spec.name} has {spec.num_layers}")
    if (output / "vllm" / "meta.json").exists() and not force:
        raise ConfigError(f"{output}: holds a recording already; --force replaces it")
    length = max_model_len or spec.max_position
    trace = read_trace(dataset)
    requests = trace.requests[:num_reqs]
    for index, request in enumerate(requests):
        if request.prompt_tokens + request.output_tokens > length:
            raise ConfigError(f"{dataset}: request {index} needs more than --max-model-len {length}")
    vllm_driver.check_card(card.name)
    count = layers or spec.num_layers
    arguments = vllm_driver.EngineArguments(max_model_len=length, **engine)
    config = cut(spec, load_model_config(model), count)
    driver = vllm_driver.VllmDriver(config, arguments)
    for number in range(1, plays + 1):
        driver.begin()
        started = _now()
        finished = play(driver, requests, _progress(number, plays))
        steps = driver.steps()
        stalls = stand_outs(steps)
        click.echo(f"play {number}: {len(steps)} steps, {len(stalls)} stall", err=True)
        if not stalls:
            break
    if wrong := vllm_driver.wrong_lengths(requests, finished):
        raise AcquisitionError("lengths differ from the trace: " + "; ".join(wrong[:3]))
    facts = driver.facts()
    meta = {
        "schema_version": 1,
        "model": spec.name,
        "layers": count,
        "vllm_version": facts["vllm"],
        "engine_kwargs": arguments.keywords(),
        "dataset_path": dataset.name,
        "dataset_hash": sha256_of(dataset),
        "num_requests": len(requests),
        "started_at": started,
        "finished_at": _now(),
        "tick_seconds": tick_seconds,
        "plays": number,
        "stalled_steps": len(stalls),
    }
    cluster = vllm_driver.cluster_file(spec.name, card.name, count, arguments, facts)
    write_recording(output, cluster, meta, facts, finished, steps, tick_seconds)
    click.echo(json.dumps({"recording": str(output), "steps": len(steps), "requests": len(finished)}))
    if stalls:
        click.echo(f"warning: {len(stalls)} steps still stall after {plays} plays; they are in steps.csv", err=True)


def _progress(number: int, plays: int) -> Any:
    import sys

    if not sys.stderr.isatty():
        return lambda done, total: None

    def report(done: int, total: int) -> None:
        click.echo(f"\rplay {number} of at most {plays}: {done} of {total} requests", err=True, nl=done == total)

    return report


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
