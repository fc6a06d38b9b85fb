"""How long an acquisition takes, before it runs.

minutes = start of the engine + shots x (host time of one shot) + runs x (device time of every shot once)

Host time of the vLLM engine: 0.08 s a shot at 2 + 5 runs of two layers (eager launches, the profiler and its events),
and 60 s to start with warm compile caches on an H200; compiling everything anew adds minutes once. Device time is
that of every component at DEVICE_SHARE of the card's peak arithmetic or bandwidth, whichever bounds it, or LAUNCH_US
where the work is less. On a processor nothing is known of the device, and CPU_CALL_S stands for every timed call.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from profiler.card import CPU
from profiler.core.hardware import Hardware, load_hardware
from profiler.core.shots import Key, Shot
from profiler.core.stack import fold, one_of_each
from profiler.core.types import Category, ModelSpec
from profiler.kernels._components import ATTENTION_LIKE
from profiler.sweep import merge, rank_spec, work_of

START_S: Final = {"vllm": 60.0, "reference": 3.0}
HOST_S_PER_RUN: Final = {"vllm": 0.08 / 7, "reference": 0.0005}
# The share that the sweep of DeepSeek-V3.2 reached on an H200, all its kernels together.
DEVICE_SHARE: Final = 0.45
LAUNCH_US: Final = 4.0
CPU_CALL_S: Final = 0.03


@dataclass(frozen=True, slots=True)
class Estimate:
    """shots: as the engine runs them. device_s: one run of each. minutes: the whole acquisition of one tp."""

    shots: int
    device_s: float
    minutes: float


def estimate(shots: Iterable[Shot], spec: ModelSpec, tp: int, hardware: str, engine: str, runs: int) -> Estimate:
    """For one tp. runs: warm-up and timed runs of a shot. engine: "vllm" or "reference"."""
    planned = list(shots)
    whole = engine == "vllm"
    todo = merge(planned) if whole else planned
    if hardware == CPU:
        calls = sum(len(fill.components) for shot in todo for fill in shot.fills)
        return Estimate(len(todo), calls * CPU_CALL_S, (START_S[engine] + calls * runs * CPU_CALL_S) / 60)
    card = load_hardware(hardware)
    device_s = sum(_shot_us(shot, spec, tp, card, whole) for shot in todo) / 1e6
    total = START_S[engine] + len(todo) * runs * HOST_S_PER_RUN[engine] + runs * device_s
    return Estimate(len(todo), device_s, total / 60)


def _shot_us(shot: Shot, spec: ModelSpec, tp: int, card: Hardware, whole: bool) -> float:
    sizes = rank_spec(spec, tp)
    if shot.moe is not None and spec.moe is not None:
        pairs = round(shot.moe.tokens * spec.moe.topk / shot.moe.ep)
        key = (shot.moe.ep, shot.moe.tokens, min(pairs, spec.moe.num_experts // shot.moe.ep), pairs)
        return _us(sizes, "moe", "experts", key, card)
    wanted = Counter(_calls(spec) if whole else {(f.category, n): 1 for f in shot.fills for n in f.components})
    return sum(
        count * sum(_us(sizes, category, name, key, card) for key in _keys(category, shot, spec))
        for (category, name), count in wanted.items()
        if (name == "mla_dense_prefill") <= (shot.regime == "dense")
    )


def _calls(spec: ModelSpec) -> Counter[tuple[Category, str]]:
    """Calls of one pass over one layer of each kind."""
    stack = replace(spec, layers=tuple(spec.layers[layer] for layer in one_of_each(spec)))
    return Counter({(component.category, component.name): count for component, count in fold(stack).components})


def _keys(category: Category, shot: Shot, spec: ModelSpec) -> list[Key]:
    """Cells whose work adds up to that of the shot."""
    if category == "moe" and spec.moe is not None:
        pairs = shot.new_tokens * spec.moe.topk
        return [(1, shot.new_tokens, min(pairs, spec.moe.num_experts), pairs)]
    if category not in ATTENTION_LIKE and category != "skew":
        return [(shot.new_tokens if category == "dense" else len(shot.requests),)]
    keys: list[Key] = [(new, context, 0, 0, 0) for new, context in shot.requests if new > 1]
    decodes = Counter(context + 1 for new, context in shot.requests if new == 1)
    return keys + [(0, 0, count, kv, 1) for kv, count in decodes.items()]


def _us(sizes: ModelSpec, category: Category, name: str, key: Key, card: Hardware) -> float:
    work = work_of(sizes, category, name, key, sizes.quantization.weights) if category != "skew" else None
    if work is None:
        return LAUNCH_US
    peak = max(card.fp8_tflops, card.bf16_tflops) * 1e6
    bound = max(work.flops / peak, work.bytes / (card.hbm_gbps * 1e3))
    return max(LAUNCH_US, bound / DEVICE_SHARE)
