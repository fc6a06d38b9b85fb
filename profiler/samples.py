"""Raw samples on disk: written as they come, read back to build tables without the device.

A file is a chain of gzip members, so it is appended to shot by shot and a killed run loses at most what was in flight.
Decompressed it is text: a run starts with a line `#run` and a JSON object (what ran, and its shots), then the CSV
header, then one row per sample; a failed shot is one row with its reason in the last column. A line `#reached` has the
number of a pass and how many experts its tokens picked. Power samples of a run are a line `#power` and a JSON object.
Several runs may follow each other, in one file or in several.
"""

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from profiler.core.errors import ConfigError
from profiler.core.shots import Fill, MoeBatch, Shot
from profiler.engines.base import EngineInfo, KernelSample, ShotResult

FORMAT: Final = 1
_MARK: Final = "#run "
_POWER_MARK: Final = "#power "
_REACHED_MARK: Final = "#reached "
_COLUMNS: Final = ("shot_index", "repeat", "module", "kernel", "duration_us", "launches", "failure")


@dataclass(slots=True)
class Run:
    """One engine start: what ran, its shots, and the results so far (shot index -> result).

    power: what the engine's `power` returned, where it was sampled.
    """

    model: str
    model_config_sha256: str
    hardware: str
    tp: int
    started_at: str
    command: str
    protocol: Mapping[str, Any]
    limits: Mapping[str, Any]
    info: EngineInfo
    shots: tuple[Shot, ...]
    left_out: tuple[Shot, ...]
    results: dict[int, ShotResult] = field(default_factory=dict)
    power: Mapping[str, Any] | None = None


def shot_to_json(shot: Shot) -> dict[str, Any]:
    """A shot as plain JSON; equal neighbouring requests are written once with their count."""
    requests: list[list[int]] = []
    for new, context in shot.requests:
        if requests and requests[-1][:2] == [new, context]:
            requests[-1][2] += 1
        else:
            requests.append([new, context, 1])
    fills = [[fill.category, list(fill.key), list(fill.components)] for fill in shot.fills]
    moe = asdict(shot.moe) if shot.moe else None
    return {"fills": fills, "requests": requests, "regime": shot.regime, "moe": moe}


def shot_from_json(value: Mapping[str, Any]) -> Shot:
    fills = tuple(Fill(category, tuple(key), tuple(names)) for category, key, names in value["fills"])
    requests = tuple((new, context) for new, context, count in value["requests"] for _ in range(count))
    moe = MoeBatch(**value["moe"]) if value["moe"] else None
    return Shot(fills, requests, value["regime"], moe)


def plain_info(info: EngineInfo) -> EngineInfo:
    """The same facts as JSON keeps them, so that a run in memory equals one read back (str subclasses, tuples)."""
    return _info(json.loads(json.dumps(asdict(info))))


def _info(fields: dict[str, Any]) -> EngineInfo:
    return EngineInfo(**fields | {"layer_kinds": tuple(fields["layer_kinds"])})


def _header(run: Run) -> str:
    info = asdict(run.info)
    fields = {
        "format": FORMAT,
        "model": run.model,
        "model_config_sha256": run.model_config_sha256,
        "hardware": run.hardware,
        "tp": run.tp,
        "started_at": run.started_at,
        "command": run.command,
        "protocol": dict(run.protocol),
        "limits": dict(run.limits),
        "info": info,
        "shots": [shot_to_json(shot) for shot in run.shots],
        "left_out": [shot_to_json(shot) for shot in run.left_out],
    }
    return _MARK + json.dumps(fields, separators=(",", ":")) + "\n" + ",".join(_COLUMNS) + "\n"


def _rows(result: ShotResult) -> str:
    stream = io.StringIO()
    if result.reached_experts is not None:
        stream.write(f"{_REACHED_MARK}{result.shot_index} {result.reached_experts!r}\n")
    writer = csv.writer(stream, lineterminator="\n")
    for s in result.samples:
        writer.writerow((s.shot_index, s.repeat, _line(s.module), _line(s.kernel), repr(s.duration_us), s.launches, ""))
    if result.failure is not None:
        writer.writerow((result.shot_index, -1, "", "", 0.0, 0, _line(result.failure) or "failed"))
    return stream.getvalue()


def _line(text: str) -> str:
    """One line of text: every run of white space becomes one blank."""
    return " ".join(text.split())


def _append(path: Path, text: str) -> None:
    with path.open("ab") as stream:
        stream.write(gzip.compress(text.encode(), compresslevel=6, mtime=0))
        stream.flush()
        os.fsync(stream.fileno())


def start_run(path: Path, run: Run) -> None:
    """Begins a run at the end of the file, which is created when missing and cut behind its last whole member."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        whole = _whole_members(path.read_bytes())[1]
        with path.open("r+b") as stream:
            stream.truncate(whole)
    _append(path, _header(run))


def append_result(path: Path, result: ShotResult) -> None:
    """Adds one shot's samples as a member of its own, flushed to disk."""
    _append(path, _rows(result))


def append_power(path: Path, power: Mapping[str, Any]) -> None:
    """Adds the power samples of the run as a member of its own."""
    _append(path, _POWER_MARK + json.dumps(power, separators=(",", ":")) + "\n")


def _whole_members(data: bytes) -> tuple[list[str], int]:
    """(texts of the complete gzip members, their length in bytes). A torn last member is left out."""
    texts: list[str] = []
    position = 0
    while position < len(data):
        inflate = zlib.decompressobj(wbits=31)
        try:
            text = inflate.decompress(data[position:])
        except zlib.error:
            break
        if not inflate.eof:
            break
        texts.append(text.decode())
        position = len(data) - len(inflate.unused_data)
    return texts, position


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """All runs of the files, in order. Raises ConfigError naming file and line when one is malformed."""
    runs: list[Run] = []
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        text = "".join(_whole_members(data)[0])
        found = _parse(path, text) if text else []
        if not found:
            raise ConfigError(f"{path}: holds no samples (a file written by --save-samples is needed)")
        runs += found
    return runs


def _parse(path: Path, text: str) -> list[Run]:
    runs: list[Run] = []
    samples: dict[int, list[KernelSample]] = {}
    failures: dict[int, str] = {}
    reached: dict[int, float] = {}
    for number, row in enumerate(text.rstrip("\n").split("\n"), start=1):
        if row.startswith(_MARK):
            _finish(runs, samples, failures, reached)
            samples, failures, reached = {}, {}, {}
            runs.append(_run(path, number, row.removeprefix(_MARK)))
            continue
        if row == ",".join(_COLUMNS):
            continue
        if not runs:
            raise ConfigError(f"{path}:{number}: a row before the first run")
        if row.startswith(_POWER_MARK):
            try:
                runs[-1].power = json.loads(row.removeprefix(_POWER_MARK))
            except ValueError:
                raise ConfigError(f"{path}:{number}: power samples that are no JSON") from None
            continue
        if row.startswith(_REACHED_MARK):
            index, experts = _reached(path, number, row, len(runs[-1].shots))
            reached[index] = experts
            continue
        try:
            shot, repeat, module, kernel, duration, launches, failure = next(csv.reader([row]))
            sample = KernelSample(int(shot), int(repeat), module, kernel, float(duration), int(launches))
        except (ValueError, StopIteration):
            raise ConfigError(f"{path}:{number}: not a sample: {row[:80]!r}") from None
        if not 0 <= sample.shot_index < len(runs[-1].shots):
            raise ConfigError(f"{path}:{number}: shot {shot} of {len(runs[-1].shots)}")
        if failure:
            failures[sample.shot_index] = failure
        else:
            samples.setdefault(sample.shot_index, []).append(sample)
    _finish(runs, samples, failures, reached)
    return runs


def _reached(path: Path, number: int, row: str, shots: int) -> tuple[int, float]:
    """(number of the shot, experts that it reached) of a line of counts."""
    try:
        shot, experts = row.removeprefix(_REACHED_MARK).split(" ")
        index, count = int(shot), float(experts)
    except ValueError:
        raise ConfigError(f"{path}:{number}: not a count of experts: {row[:80]!r}") from None
    if not (0 <= index < shots and 0 < count < float("inf")):
        raise ConfigError(f"{path}:{number}: not a count of experts of one of {shots} shots: {row[:80]!r}")
    return index, count


def _finish(
    runs: Sequence[Run],
    samples: Mapping[int, list[KernelSample]],
    failures: Mapping[int, str],
    reached: Mapping[int, float],
) -> None:
    for index in sorted(samples.keys() | failures.keys()):
        own = tuple(samples.get(index, ()))
        runs[-1].results[index] = ShotResult(index, own, failures.get(index), reached.get(index))


def _run(path: Path, number: int, text: str) -> Run:
    try:
        fields = cast(dict[str, Any], json.loads(text))
        if fields.pop("format") != FORMAT:
            raise ConfigError(f"{path}:{number}: samples of another format; this version reads {FORMAT}")
        info = _info(fields.pop("info"))
        shots = tuple(shot_from_json(shot) for shot in fields.pop("shots"))
        left_out = tuple(shot_from_json(shot) for shot in fields.pop("left_out"))
        return Run(**fields, info=info, shots=shots, left_out=left_out)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}:{number}: not the start of a run ({type(error).__name__}: {error})") from None
