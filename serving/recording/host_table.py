"""What a step costs the host's thread, from the step logs of recordings: a table, and the numbers of a hardware file.

A part of the host's work is taken as `fixed_us` per step and `per_request_us` for every request of its batch, fitted to
the means by number of requests, neither of them negative: what requests wait for adds up, so a thread that is slow now
and then is slower than its median. Stalls, of more than three medians, are left out. Waits for the device are no part
of it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from profiler.core.errors import ConfigError
from profiler.core.hardware import OPTIONAL_HOST_PARTS, Host, host_of
from profiler.core.load import read_mapping
from profiler.core.registry import load_model
from profiler.core.stack import component_calls
from profiler.core.types import ModelSpec
from serving.host_rules import waits_for_device
from serving.recording.files import read_steps
from serving.recording.steps import Step

KINDS: Final = ("decode", "prefill", "mixed")
STALL = 3.0  # medians
LONG_US = 5_000.0  # more than preparing a step takes: a device that was busy for so long was waited for
LEAST_STEPS = 5  # of one number of requests, for its mean to count
WAITED_US = 50.0  # so long before the device's end a thread has come for one to say that it waited for it

# Modes of recordings whose launches count, the first that have some: as the tables have the layers, or as served.
_LAUNCHED: Final = (("decode-graphs", "eager"), ("engine",), ("piecewise",))
_PIECEWISE: Final = (("engine",), ("piecewise",))

Part = Callable[[Step], float | None]


def _delivery(step: Step) -> float | None:
    """From the device's end to the thread's having the tokens, of steps for whose end the thread has waited."""
    if None in (step.updated_s, step.update_us, step.gpu_start_s, step.gpu_us, step.wait_us):
        return None
    assert step.updated_s and step.gpu_start_s is not None and step.gpu_us and step.wait_us is not None
    took_us = step.updated_s * 1e6 - (step.update_us or 0.0) - step.gpu_start_s * 1e6 - step.gpu_us
    return took_us if step.wait_us >= took_us + WAITED_US else None


def _handover(step: Step) -> float | None:
    """From the device's end to the update, of a thread that does nothing else: books and tokens."""
    if None in (step.updated_s, step.update_us, step.gpu_start_s, step.gpu_us):
        return None
    assert step.updated_s and step.update_us is not None and step.gpu_start_s is not None and step.gpu_us
    return step.updated_s * 1e6 - step.update_us - step.gpu_start_s * 1e6 - step.gpu_us


def _less(whole: float | None, part: float | None) -> float | None:
    return None if whole is None else whole - (part or 0.0)


# prepare: what execute_model does around the layers. sample: taking the tokens is in it, waiting for them is not, and
# without asynchronous scheduling the log cannot tell one from the other.
PARTS: Final[Mapping[str, Part]] = {
    "schedule": lambda step: step.schedule_us,
    "prepare": lambda step: _less(_less(step.launch_us, step.input_wait_us), step.forward_launch_us),
    "forward_launch": lambda step: step.forward_launch_us,
    "sample": lambda step: _less(step.sample_us, step.bookkeep_us),
    "bookkeep": lambda step: step.bookkeep_us,
    "tokens": _delivery,
    "update": lambda step: step.update_us,
    "output": lambda step: step.output_us,
    "log": lambda step: step.log_us,
    "wait": lambda step: step.wait_us,
    "gpu_prepare": lambda step: step.prepare_us,
    "gpu_forward": lambda step: step.forward_us,
    "gpu_sample": lambda step: step.sample_gpu_us,
}


@dataclass(frozen=True, slots=True)
class Log:
    """The steps of one recording. asynchronous: its engine scheduled a step while the one before ran. mode: of
    serving.recording.vllm_driver.MODES. engine: model, version and card, for the source of what is found. components:
    per layer; None for a model that is not known here. behind: (requests, microseconds from the device's end of the
    step before to the first launch) of steps that were prepared with a wait for it; such steps have no launch_us."""

    path: Path
    layers: int
    asynchronous: bool
    steps: tuple[Step, ...]
    mode: str = "decode-graphs"
    engine: str = ""
    components: float | None = None
    behind: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """Medians in microseconds of the steps of one kind and graph mode with requests in [least, 2 least)."""

    kind: str
    graph: str
    asynchronous: bool
    layers: int
    least_requests: int
    steps: int
    median_us: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Linear:
    """fixed_us + per_request_us x requests."""

    fixed_us: float
    per_request_us: float


def read_log(path: Path) -> Log:
    """A recording's folder. Raises ConfigError when a file of it is missing or malformed."""
    folder = path / "vllm" if (path / "vllm").is_dir() else path
    meta, engine = read_mapping(folder / "meta.json"), read_mapping(folder / "engine.json")
    return log_of(path, meta, engine, read_steps(folder))


def log_of(path: Path, meta: Mapping[str, Any], engine: Mapping[str, Any], steps: Sequence[Step]) -> Log:
    """From what read_log reads of the recording in `path`. Raises ConfigError when a key is missing."""
    behind: tuple[tuple[int, float], ...] = ()
    try:
        spec = _known_model(str(meta["model"]))
        if spec is not None and waits_for_device(spec):
            steps, behind = told_apart(steps)
        layers = meta["layers"]
        if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
            raise ConfigError(f"{path}: meta.json: layers must be a positive whole number, found {layers!r}")
        name = f"{meta['model']}, vLLM {meta['vllm_version']}, {(engine.get('gpu') or {}).get('name', 'unknown GPU')}"
        return Log(
            path,
            layers,
            bool(engine["async_scheduling"]),
            tuple(steps),
            str(meta["mode"]),
            name,
            None if spec is None else component_calls(spec, layers) / layers,
            behind,
        )
    except KeyError as error:
        raise ConfigError(f"{path}: meta.json and engine.json lack {error}; recorded by an older version") from None


def _known_model(name: str) -> ModelSpec | None:
    try:
        return load_model(name)
    except ConfigError:
        return None


def told_apart(steps: Sequence[Step]) -> tuple[tuple[Step, ...], tuple[tuple[int, float], ...]]:
    """Steps of a model that is prepared for prefills with a wait for the device, and what Log.behind is of them.

    Work is told from waiting where the device had ended the step before when preparing began, and what is left behind
    the wait where it went on for LONG_US. The launch_us of the others, and of those that waited, is taken out.
    """
    kept, behind = list(steps[:1]), []
    for before, step in pairwise(steps):
        if step.prefill_requests and before.gpu_start_s is not None and before.gpu_us and step.launch_us is not None:
            ended_us = before.gpu_start_s * 1e6 + before.gpu_us
            begun_us = step.start_s * 1e6 + (step.add_us or 0.0) + (step.schedule_us or 0.0)
            if ended_us > begun_us + LONG_US:
                launched_us = begun_us + step.launch_us - (step.forward_launch_us or 0.0)
                behind.append((_requests(step), launched_us - ended_us))
            if ended_us > begun_us:
                step = replace(step, launch_us=None)
        kept.append(step)
    return tuple(kept), tuple(behind)


def kind_of(step: Step) -> str:
    """decode, prefill or mixed."""
    if not step.prefill_requests:
        return "decode"
    return "mixed" if step.decode_requests else "prefill"


def rows(logs: Iterable[Log]) -> list[Row]:
    """The table, by kind, graph mode, scheduling, layers and number of requests."""
    groups: dict[tuple[Any, ...], list[Step]] = defaultdict(list)
    for log in logs:
        for step in log.steps:
            requests = step.prefill_requests + step.decode_requests
            least = 1 << (requests.bit_length() - 1)
            groups[KINDS.index(kind_of(step)), step.graph, log.asynchronous, log.layers, least].append(step)
    return [
        Row(KINDS[kind], graph, asynchronous, layers, least, len(steps),
            {name: _median(part, steps) for name, part in PARTS.items()})
        for (kind, graph, asynchronous, layers, least), steps in sorted(groups.items())
    ]  # fmt: skip


def _requests(step: Step) -> int:
    return step.prefill_requests + step.decode_requests


def linear(
    logs: Iterable[Log],
    part: Part,
    wanted: Callable[[Log, Step], bool],
    requests: Callable[[Step], int] = _requests,
) -> Linear | None:
    """Least squares over the usual values by number of `requests`, each with the weight of its steps; None without two
    numbers of requests that have enough steps."""
    return _fitted(
        (requests(step), value)
        for log in logs
        for step in log.steps
        if wanted(log, step) and (value := part(step)) is not None
    )


def _fitted(values: Iterable[tuple[int, float]]) -> Linear | None:
    """As `linear`, of (requests, value) of every step."""
    by_requests: dict[int, list[float]] = defaultdict(list)
    for requests, value in values:
        by_requests[requests].append(value)
    points = [(n, _usual(found), len(found)) for n, found in by_requests.items() if len(found) >= LEAST_STEPS]
    if len(points) < 2:
        return None
    return Linear(*_fit(points))


def layer_launch(logs: Iterable[Log], wanted: Callable[[Log, Step], bool]) -> tuple[float, float] | None:
    """(fixed_us, per_layer_us) of launching the layers one kernel at a time.

    From the usual value of each number of layers; of a single one all of it counts as its layers'. None without steps.
    """
    by_layers: dict[int, list[float]] = defaultdict(list)
    for log in logs:
        found = (step.forward_launch_us for step in log.steps if wanted(log, step))
        by_layers[log.layers] += [value for value in found if value is not None]
    points = [(layers, _usual(found), len(found)) for layers, found in by_layers.items() if len(found) >= LEAST_STEPS]
    if not points:
        return None
    if len(points) == 1:
        layers, us, _ = points[0]
        return 0.0, us / layers
    return _fit(points)


def host_block(logs: Sequence[Log]) -> dict[str, Any]:
    """The `host` block of a hardware file, as far as these recordings hold it; see profiler.core.hardware.Host.

    launch counts steps that ran without a graph, launch_mixed those of them with prefills and decodes, both of layers
    that are not compiled where there are such; piecewise those in graphs of parts of layers, of engines that compile as
    vLLM does by default where there are such, but for the first of each captured size; replay those in whole ones.
    launch_components only where all are of one stack. Raises ConfigError where no recording has asynchronous
    scheduling, whose log alone tells work from waiting.
    """
    logs = [log for log in logs if log.asynchronous]
    if not logs:
        raise ConfigError("no recording with asynchronous scheduling; without it the log cannot tell work from waiting")
    return _block(logs)


def own_host(log: Log, otherwise: Host | None) -> Host:
    """The host as it was in one recording; what its log does not tell is as in `otherwise`.

    Raises ConfigError where that is None and the log lacks a part.
    """
    block = _block([log])
    if not log.asynchronous:
        # Its books wait for the tokens and go on behind them, so one is not told from the other.
        block |= {"tokens": _part([log], _handover), "bookkeep": {"fixed_us": 0.0, "per_request_us": 0.0}}
        block = {name: one for name, one in block.items() if one is not None}
    lacking = [one.name for one in fields(Host) if one.name not in block and one.name not in OPTIONAL_HOST_PARTS]
    if otherwise is None and lacking:
        raise ConfigError(f"{log.path}: its log does not tell {', '.join(lacking)} of the host")
    known = asdict(otherwise) if otherwise else {}
    if otherwise and otherwise.launch_components and log.components:
        # What is launched in layers of another stack counts by its components, as what this log has does.
        for name in ("launch", "launch_mixed"):
            if name not in block and known[name] is not None:
                known[name]["per_layer_us"] *= log.components / otherwise.launch_components
        block["launch_components"] = log.components
    return host_of(log.path, {name: one for name, one in (known | block).items() if one is not None})


def _part(
    logs: Sequence[Log],
    part: Part,
    wanted: Callable[[Log, Step], bool] = lambda log, step: True,
    requests: Callable[[Step], int] = _requests,
) -> dict[str, float] | None:
    return _rounded(linear(logs, part, wanted, requests))


def _rounded(found: Linear | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {"fixed_us": round(found.fixed_us, 1), "per_request_us": round(found.per_request_us, 2)}


def _block(logs: Sequence[Log]) -> dict[str, Any]:
    block: dict[str, Any] = {}
    settled = list(map(_settled, logs))

    def part(name: str, of: str, wanted: Callable[[Log, Step], bool], requests: Any = _requests) -> None:
        if (found := _part(logs, PARTS[of], wanted, requests)) is not None:
            block[name] = found

    def launch(name: str, modes: Sequence[tuple[str, ...]], wanted: Callable[[Step], bool]) -> None:
        """Of recordings in the first modes that have such steps."""
        for some in modes:
            found = layer_launch([log for log in settled if log.mode in some], lambda log, step: wanted(step))
            if found is not None:
                block[name] = {"fixed_us": round(found[0], 1), "per_layer_us": round(found[1], 1)}
                return

    part("schedule", "schedule", lambda log, step: True)
    part("prepare", "prepare", lambda log, step: not step.prefill_requests)
    prefills = attrgetter("prefill_requests")
    part("prepare_prefill", "prepare", lambda log, step: bool(step.prefill_requests), prefills)
    if (behind := _rounded(_fitted(one for log in logs for one in log.behind))) is not None:
        block["prepare_behind"] = behind
    part("replay", "forward_launch", lambda log, step: step.graph == "FULL")
    for name in ("sample", "bookkeep", "tokens", "update", "output"):
        part(name, name, lambda log, step: True)
    launch("launch", _LAUNCHED, lambda step: step.graph == "NONE" and kind_of(step) != "mixed")
    launch("launch_mixed", _LAUNCHED, lambda step: step.graph == "NONE" and kind_of(step) == "mixed")
    launch("piecewise", _PIECEWISE, lambda step: step.graph == "PIECEWISE")
    components = {log.components for log in logs}
    if len(components) == 1 and (one := components.pop()) is not None and "launch" in block:
        block["launch_components"] = round(one, 2)
    steps = sum(len(log.steps) for log in logs)
    block["source"] = f"{steps:,} steps of {len(logs)} recordings ({'; '.join(sorted({log.engine for log in logs}))})"
    return block


def _settled(log: Log) -> Log:
    """Without the first step of each size in graphs of parts of layers, whose launch can take twice as long."""
    sizes: set[int | None] = set()
    kept = []
    for step in log.steps:
        if step.graph != "PIECEWISE" or step.padded_tokens in sizes:
            kept.append(step)
        else:
            sizes.add(step.padded_tokens)
    return replace(log, steps=tuple(kept))


def _usual(values: Sequence[float]) -> float:
    """Mean of all that are no stalls."""
    most = STALL * median(values)
    return fmean(value for value in values if value <= most)


def _median(part: Part, steps: Iterable[Step]) -> float | None:
    found = [value for step in steps if (value := part(step)) is not None]
    return median(found) if found else None


def _fit(points: Sequence[tuple[float, float, int]]) -> tuple[float, float]:
    """(intercept, slope) of weighted least squares over (x, y, weight), neither of them negative."""
    total = sum(weight for *_, weight in points)
    mean_x = sum(x * weight for x, _, weight in points) / total
    mean_y = sum(y * weight for _, y, weight in points) / total
    spread = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    slope = sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points) / spread
    if slope < 0:
        return max(0.0, mean_y), 0.0
    if mean_y < slope * mean_x:
        through = sum(x * y * weight for x, y, weight in points) / sum(x * x * weight for x, _, weight in points)
        return 0.0, max(0.0, through)
    return mean_y - slope * mean_x, slope
