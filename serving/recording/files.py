"""The files of a recorded run, in the layout that `serving compare` reads.

DIR/config.json       cluster file: the same deployment for `serving replay`
DIR/vllm/meta.json    model, version, engine settings, trace and its SHA-256, start and end
DIR/vllm/engine.json  memory in GiB as the engine counted it, KV blocks, card
DIR/vllm/requests.jsonl, timeseries.csv (one row per tick), steps.csv.gz (one row per scheduler iteration)

A row of steps.csv.gz has the fields of serving.recording.steps.Step, empty where there is none; its batch is text:
chunks "request:tokens@context ...", joined "request@keys ...", left "request ...".
"""

import csv
import gzip
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from math import ceil
from pathlib import Path
from typing import Any, Final

from profiler.core.errors import ConfigError
from profiler.core.load import atomic_write
from serving.recording.drive import Finished
from serving.recording.steps import Chunk, Decode, Step

TICK_COLUMNS = ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct")
_STEP_FIELDS: Final = tuple(field.name for field in fields(Step))
_SIX_DIGITS: Final = ("start_s", "updated_s", "gpu_start_s", "kv_usage")
_FLOATS: Final = frozenset(field.name for field in fields(Step) if "float" in str(field.type))
_OPTIONAL: Final = frozenset(field.name for field in fields(Step) if "None" in str(field.type))


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
    _write_compressed(run / "steps.csv.gz", steps_text(steps))
    with atomic_write(run / "timeseries.csv") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(TICK_COLUMNS)
        writer.writerows(ticks(steps, tick_s))
    _json(run / "meta.json", meta)


def steps_text(steps: Sequence[Step]) -> str:
    """The step log as CSV."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["step", *_STEP_FIELDS])
    for index, step in enumerate(steps):
        writer.writerow([index, *(_cell(name, getattr(step, name)) for name in _STEP_FIELDS)])
    return stream.getvalue()


def read_steps(path: Path) -> list[Step]:
    """The step log of a recording's folder, or of one that holds it as `vllm`.

    Raises ConfigError naming the file and line when it is missing or malformed.
    """
    folder = path / "vllm" if (path / "vllm").is_dir() else path
    file = folder / "steps.csv.gz"
    try:
        with gzip.open(file, "rt", encoding="utf-8", newline="") as stream:
            lines = list(csv.reader(stream))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; `python -m serving record` writes it") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not a gzip file of text: {error}") from None
    if not lines or lines[0] != ["step", *_STEP_FIELDS]:
        raise ConfigError(f"{file}:1: the header must be step,{','.join(_STEP_FIELDS)}")
    steps = []
    for number, cells in enumerate(lines[1:], start=2):
        try:
            values = dict(zip(lines[0], cells, strict=True))
            steps.append(Step(**{name: _value(name, values[name]) for name in _STEP_FIELDS}))
        except ValueError as error:
            raise ConfigError(f"{file}:{number}: {error}") from None
    return steps


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


def _cell(name: str, value: Any) -> Any:
    if value is None:
        return ""
    if name == "chunks":
        return " ".join(f"{one.request}:{one.tokens}@{one.context}" for one in value)
    if name == "joined":
        return " ".join(f"{one.request}@{one.keys}" for one in value)
    if name == "left":
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.6f}" if name in _SIX_DIGITS else f"{value:.1f}"
    return value


def _value(name: str, text: str) -> Any:
    """The inverse of `_cell`."""
    if name == "chunks":
        split = (part.replace("@", ":").split(":") for part in text.split())
        return tuple(Chunk(*map(int, parts)) for parts in split)
    if name == "joined":
        return tuple(Decode(*map(int, part.split("@"))) for part in text.split())
    if name == "left":
        return tuple(map(int, text.split()))
    if name == "graph":
        return text
    if name in _OPTIONAL and not text:
        return None
    return float(text) if name in _FLOATS else int(text)


def _write_compressed(path: Path, text: str) -> None:
    """gzip without a name or time in it, so that equal content gives equal bytes; in place whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _json(path: Path, value: Mapping[str, Any]) -> None:
    with atomic_write(path) as stream:
        json.dump(value, stream, indent=2)
        stream.write("\n")
