"""The files of a recorded run, in the layout that `serving compare` reads.

DIR/config.json       cluster file: the same deployment for `serving replay`
DIR/vllm/meta.json    model, version, engine settings, trace and its SHA-256, start and end
DIR/vllm/engine.json  memory in GiB as the engine counted it, KV blocks, card
DIR/vllm/requests.jsonl, timeseries.csv (one row per second), steps.csv (one row per scheduler iteration)
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from math import ceil
from pathlib import Path
from typing import Any

from profiler.core.load import atomic_write
from serving.recording.drive import Finished
from serving.recording.steps import Step

TICK_COLUMNS = ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct")


def write_recording(
    folder: Path,
    cluster: Mapping[str, Any],
    meta: Mapping[str, Any],
    engine: Mapping[str, Any],
    requests: Sequence[Finished],
    steps: Sequence[Step],
    tick_s: float,
) -> None:
    """Writes every file of a run, each atomically; meta.json last, so that a folder with it is whole."""
    _json(folder / "config.json", cluster)
    run = folder / "vllm"
    _json(run / "engine.json", engine)
    with atomic_write(run / "requests.jsonl") as stream:
        for one in requests:
            row = asdict(one)
            row = {"request_id": row.pop("request_id"), "input_toks": row.pop("prompt_tokens"),
                   "output_toks": row.pop("output_tokens"), **row}  # fmt: skip
            stream.write(json.dumps(row) + "\n")
    with atomic_write(run / "steps.csv") as stream:
        names = [field.name for field in fields(Step)]
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["step", *names])
        for index, step in enumerate(steps):
            writer.writerow([index, *(_cell(getattr(step, name)) for name in names)])
    with atomic_write(run / "timeseries.csv") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(TICK_COLUMNS)
        writer.writerows(ticks(steps, tick_s))
    _json(run / "meta.json", meta)


def ticks(steps: Sequence[Step], tick_s: float) -> list[tuple[float, float, float, int, int, float]]:
    """(time, prompt tokens/s, sampled tokens/s, running, waiting, KV use in percent) at the end of every tick.

    Tokens count in the tick in which their step was scheduled; running, waiting and KV use are those of the last step
    scheduled before the tick's end.
    """
    if not steps:
        return []
    rows = []
    count = ceil((steps[-1].start_s + 1e-9) / tick_s)
    index, last = 0, steps[0]
    for tick in range(1, count + 1):
        prompt = sampled = 0
        while index < len(steps) and steps[index].start_s < tick * tick_s:
            last = steps[index]
            prompt += last.prefill_tokens
            sampled += last.decode_requests
            index += 1
        rows.append(
            (round(tick * tick_s, 6), prompt / tick_s, sampled / tick_s, last.running, last.waiting,
             round(100 * last.kv_usage, 2))
        )  # fmt: skip
    return rows


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return round(value, 6) if isinstance(value, float) else value


def _json(path: Path, value: Mapping[str, Any]) -> None:
    with atomic_write(path) as stream:
        json.dump(value, stream, indent=2)
        stream.write("\n")
