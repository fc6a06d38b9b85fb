"""`python -m serving record`: run traces on a real vLLM engine and keep what happened."""

import datetime
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiler.core.errors import AcquisitionError, ConfigError

if TYPE_CHECKING:
    from serving.recording.plays import Asked

_MODES = ("decode-graphs", "eager", "piecewise", "engine")


@click.command("record")
@click.argument("model")
@click.option("--hardware", required=True, help="GPU name or alias; must be the card that is here.")
@click.option(
    "--dataset",
    "datasets",
    required=True,
    multiple=True,
    metavar="TRACE[:LIMITS]",
    help="Trace to play, in any known format; several are played one after another on one engine. LIMITS hold for its "
    "plays alone, for example chat.jsonl:max_num_seqs=32,num_gpu_blocks=3000.",
)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the recording; of several traces each has its own in it, named after its file.",
)
@click.option("--layers", type=click.IntRange(1), help="Play on the first N layers only.  [default: all]")
@click.option("--num-reqs", type=click.IntRange(1), help="Only the first N requests of each trace.")
@click.option("--max-model-len", type=click.IntRange(1), help="[default: the model's]")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=8192, show_default=True)
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, show_default=True)
@click.option("--kv-cache-dtype", default="auto", show_default=True)
@click.option("--block-size", "block_tokens", type=click.IntRange(1), help="[default: the engine's choice]")
@click.option("--utilization", type=click.FloatRange(0, 1, min_open=True), default=0.9, show_default=True)
@click.option("--num-gpu-blocks", type=click.IntRange(2), help="Override the number of KV blocks, to saturate them.")
@click.option(
    "--mode",
    type=click.Choice(_MODES),
    default="decode-graphs",
    show_default=True,
    help="decode-graphs: nothing is compiled, so the kernels are those of the tables; decode steps run in CUDA "
    "graphs. eager: without graphs. piecewise: as decode-graphs, but steps with prefills run in graphs of parts of "
    "layers, up to the largest of --capture-sizes. engine: compiled and with graphs of all kinds, vLLM's own default.",
)
@click.option("--capture-sizes", metavar="N,N,...", help="Batch sizes of the CUDA graphs.  [default: the engine's]")
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True)
@click.option("--async-scheduling/--no-async-scheduling", default=True, show_default=True)
@click.option("--single-stream", is_flag=True, help="Shared experts behind the routed ones, as in the tables.")
@click.option("--plays", type=click.IntRange(1), default=4, show_default=True, help="Most plays until none stalls.")
@click.option("--max-seconds", type=click.FloatRange(0, min_open=True), help="Start no play that would end later.")
@click.option("--tick-seconds", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True)
@click.option("--seed", type=int, default=42, show_default=True)
@click.option("--force", is_flag=True, help="Replace recordings that exist.")
def command(**options: Any) -> None:
    """Play traces on a real vLLM engine with MODEL's architecture, strict lengths and random weights.

    A trace is played until a play has no step that stalls (just-in-time compilation); that play is kept: requests,
    time series, step log, memory and blocks of the engine, and a cluster file with which `replay` simulates the same.
    """
    run(**options)


def run(
    *,
    model: str,
    hardware: str,
    datasets: Sequence[str],
    output: Path,
    layers: int | None,
    num_reqs: int | None,
    max_model_len: int | None,
    capture_sizes: str | None,
    plays: int,
    max_seconds: float | None,
    tick_seconds: float,
    force: bool,
    **engine: Any,
) -> None:
    from profiler.core.hardware import load_hardware
    from profiler.core.registry import load_model, load_model_config
    from profiler.core.stack import cut
    from serving.recording import vllm_driver
    from serving.recording.files import write_recording
    from serving.recording.plays import asked_plays, play_until_smooth

    begun = time.monotonic()
    spec, card = load_model(model), load_hardware(hardware)
    if layers is not None and layers > spec.num_layers:
        raise ConfigError(f"--layers {layers}: {spec.name} has {spec.num_layers}")
    length = max_model_len or spec.max_position
    asked = asked_plays(datasets, output, num_reqs, length)
    for one in asked:
        if (one.folder / "vllm" / "meta.json").exists() and not force:
            raise ConfigError(f"{one.folder}: holds a recording already; --force replaces it")
    count = layers or spec.num_layers
    arguments = vllm_driver.EngineArguments(
        max_model_len=length, capture_sizes=_sizes(capture_sizes) if capture_sizes else None, **engine
    )
    vllm_driver.check_card(card.name)
    driver = vllm_driver.VllmDriver(cut(spec, load_model_config(model), count), arguments, spec.moe)
    click.echo(f"engine started after {time.monotonic() - begun:.0f} s", err=True)
    if driver.missing:
        click.echo(f"warning: the step log lacks {', '.join(driver.missing)} of this engine", err=True)
    until = None if max_seconds is None else begun + max_seconds
    kept = 0
    for one in asked:
        started = _now()
        found = play_until_smooth(driver, one, plays, until, _say, _progress)
        if found is None:
            click.echo(f"{one.name}: not played, the time is out", err=True)
            continue
        if wrong := vllm_driver.wrong_lengths(one.requests, found.finished):
            raise AcquisitionError("lengths differ from the trace: " + "; ".join(wrong[:3]))
        facts = driver.facts()
        meta = {
            "schema_version": 2,
            "model": spec.name,
            "layers": count,
            "mode": arguments.mode,
            "vllm_version": facts["vllm"],
            "engine_kwargs": arguments.keywords(),
            **_dataset(one),
            "started_at": started,
            "finished_at": _now(),
            "tick_seconds": tick_seconds,
            "plays": found.plays,
            "play_seconds": round(found.seconds, 3),
            "stalled_steps": len(found.stalls),
        }
        cluster = vllm_driver.cluster_file(spec.name, card.name, count, arguments, facts)
        write_recording(one.folder, cluster, meta, facts, found.finished, found.steps, tick_seconds)
        kept += 1
        result = {"recording": str(one.folder), "steps": len(found.steps), "requests": len(found.finished)}
        click.echo(json.dumps(result | {"plays": found.plays, "stalled_steps": len(found.stalls)}))
    if not kept:
        raise AcquisitionError(f"--max-seconds {max_seconds}: no trace could be played in that time")


def _dataset(one: "Asked") -> dict[str, Any]:
    from profiler.core.load import sha256_of

    return {
        "dataset_path": one.dataset.name,
        "dataset_hash": sha256_of(one.dataset),
        "limits": one.limits_text,
        "num_requests": len(one.requests),
    }


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--capture-sizes {text}: must be positive integers with commas between")
    return tuple(sorted({int(part) for part in parts}))


def _say(text: str) -> None:
    click.echo(text, err=True)


def _progress(label: str) -> Any:
    import sys

    if not sys.stderr.isatty():
        return lambda done, total: None

    def report(done: int, total: int) -> None:
        click.echo(f"\r{label}: {done} of {total} requests", err=True, nl=done == total)

    return report


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
