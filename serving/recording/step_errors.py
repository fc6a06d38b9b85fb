"""Recorded steps against the price of their exact batches, one by one.

Every step is priced from the state in which the recording has it: the thread begins when the step was scheduled, the
device when it had ended the step before. So an error is that of one step and does not add up. Two times are compared:

device: from the first work of the step on the device to its sampled tokens; the price is that of its kernels, or longer
where they are launched later than they could run.
step: from the step before until its tokens are known; the price follows the rule of serving.core.hosted.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from serving.core.hosted import Behind, HostCost, HostTimes
from serving.core.runlog import rank_value
from serving.core.shape import StepCost, StepShape
from serving.recording.steps import Chunk, Decode, Step, batches

KINDS: Final = ("decode", "padded decode", "prefill", "mixed", "first")
IDLE_US: Final = 1_000.0  # a step scheduled so long after the tokens of the one before is the first of an idle engine


@dataclass(frozen=True, slots=True)
class PricedStep:
    """Microseconds of one step, (recorded, priced); None where the log has no such time. kernels_us: of the price,
    what the device needs if nothing holds it up."""

    index: int
    kind: str
    tokens: int
    kernels_us: float
    device_us: tuple[float, float] | None
    step_us: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors in per cent of the recorded time. total: of the summed times; median, p90: of the absolute errors."""

    steps: int
    recorded_ms: float
    total: float
    median: float
    p90: float


def shapes(steps: Sequence[Step], cap_tokens: int | None) -> Iterator[StepShape]:
    """What the cost model sees of each recorded batch. cap_tokens: most keys that one query attends, None for all."""
    for step, (chunks, decodes) in zip(steps, batches(steps), strict=True):
        keys = [one.keys for one in decodes]
        capped = keys if cap_tokens is None else [min(key, cap_tokens) for key in keys]
        rows = tuple((one.tokens, one.context) for one in chunks)
        yield StepShape(rows, len(keys), sum(keys), max(keys, default=0), sum(capped), step.sampled)


def priced_steps(
    steps: Sequence[Step],
    cost: StepCost,
    host: HostCost | None,
    cap_tokens: int | None,
    behind: Behind | None = None,
    inputs_ns: int = 0,
) -> list[PricedStep]:
    """Every step with its price. cost: of the device; host: of the thread, None for one that takes no time.
    behind, inputs_ns: see serving.core.hosted.

    Raises CoverageError for a batch outside the tables.
    """
    found = []
    asked = list(shapes(steps, cap_tokens))
    hosts = [host.times([shape]) if host else HostTimes(0, 0, 0, 0) for shape in asked]
    for index, (step, shape) in enumerate(zip(steps, asked, strict=True)):
        kernels_us = cost.step_ns([shape]) / 1e3
        before = steps[index - 1] if index else None
        idle = before is None or _us(before.updated_s) + IDLE_US < step.start_s * 1e6
        device = wall = None
        if step.gpu_us is not None and step.gpu_start_s is not None:
            free_us = _device_end_us(before) if before else 0.0
            begin_us = hosts[index].begin_ns(round(step.start_s * 1e9), round(free_us * 1e3)) / 1e3
            launched_us = begin_us + hosts[index].launch_ns / 1e3
            if behind is not None:
                launched_us = max(launched_us, behind.end_ns(round(begin_us * 1e3), hosts[index], [shape]) / 1e3)
            gpu_start_us = step.gpu_start_s * 1e6
            ready_us = begin_us - inputs_ns / 1e3
            device = step.gpu_us, max(max(gpu_start_us, ready_us) + kernels_us, launched_us) - gpu_start_us
            end_us = max(max(free_us, ready_us) + kernels_us, launched_us)
            following = steps[index + 1] if index + 1 < len(steps) else None
            if following is not None and following.start_s < (step.updated_s or 0.0):
                more = hosts[index + 1]
                more_ns = more.begin_ns(round(following.start_s * 1e9), round(end_us * 1e3)) + more.launch_ns
                end_us = max(end_us, more_ns / 1e3)
            since_us = step.start_s * 1e6 if idle or before is None else _us(before.updated_s)
            if step.updated_s is not None:
                priced_us = end_us + hosts[index].update_ns / 1e3
                wall = step.updated_s * 1e6 - since_us, priced_us - since_us
        found.append(PricedStep(index, _kind(step, idle), step.tokens, kernels_us, device, wall))
    return found


def by_kind(priced: Iterable[PricedStep], what: str) -> dict[str, Errors]:
    """Errors of each kind of step and of all, of "device" or "step" times."""
    groups: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for one in priced:
        pair = one.device_us if what == "device" else one.step_us
        if pair is not None and pair[0] > 0:
            groups[one.kind].append(pair)
    everything = [pair for pairs in groups.values() for pair in pairs]
    return {kind: _errors(pairs) for kind, pairs in [*groups.items(), ("all", everything)] if pairs}


def token_gaps_ns(steps: Sequence[Step], prompts: Mapping[int, int]) -> list[int]:
    """Nanoseconds between any two tokens of one request that follow each other, in no order.

    prompts: prompt tokens by row in the trace. A chunk yields a token when nothing of prompt and output is missing
    behind it; a preempted request computes both again.
    """
    known_ns: dict[int, list[int]] = {}
    for step, (chunks, decodes) in zip(steps, batches(steps), strict=True):
        if step.updated_s is None:
            continue
        for request in _emitting(chunks, decodes, prompts, known_ns):
            known_ns.setdefault(request, []).append(round(step.updated_s * 1e9))
    return [after - before for times in known_ns.values() for before, after in pairwise(times)]


def _emitting(
    chunks: Sequence[Chunk], decodes: Sequence[Decode], prompts: Mapping[int, int], known: Mapping[int, Sequence[int]]
) -> Iterator[int]:
    for one in chunks:
        if one.context + one.tokens == prompts[one.request] + len(known.get(one.request, ())):
            yield one.request
    for decode in decodes:
        yield decode.request


def p90_absolute(errors: Sequence[float]) -> float:
    """The 90th percentile of absolute values, by rank, to six decimals."""
    return rank_value(sorted(round(abs(one) * 1e6) for one in errors), 90) / 1e6


def _errors(pairs: Sequence[tuple[float, float]]) -> Errors:
    percent = [100.0 * (priced / recorded - 1.0) for recorded, priced in pairs]
    absolute = list(map(abs, percent))
    recorded_us = sum(recorded for recorded, _ in pairs)
    total = 100.0 * (sum(priced for _, priced in pairs) / recorded_us - 1.0)
    return Errors(len(pairs), recorded_us / 1e3, total, median(absolute), p90_absolute(percent))


def _kind(step: Step, idle: bool) -> str:
    if idle:
        return "first"
    if step.prefill_requests:
        return "mixed" if step.decode_requests else "prefill"
    padded = step.padded_tokens is not None and step.padded_tokens > step.tokens
    return "padded decode" if padded else "decode"


def _us(seconds: float | None) -> float:
    return (seconds or 0.0) * 1e6


def _device_end_us(step: Step) -> float:
    return _us(step.gpu_start_s) + (step.gpu_us or 0.0)
