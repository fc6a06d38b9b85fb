"""Which modules stand for a kernel class when its power is sampled, and the watts per class that a bundle keeps."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from profiler.bind import matcher, stack_spec
from profiler.core.shots import MoeBatch, Shot
from profiler.core.types import Category, ModelSpec
from profiler.engines.base import Binding, Engine, PowerTarget
from profiler.samples import Run
from profiler.visits import latest

Phase = Literal["decode", "prefill"]

SECONDS: Final = 1.0
# A module stands for a class when at least this share of its time is of that class, and it is no mere launch.
_LEAST_SHARE: Final = 0.8
_LEAST_US: Final = 15.0
# Modules that copy what a step is told, whose kernels leave the card as idle as it was.
_OUTSIDE: Final = "runner.prepare"
# A sample within this share of the idle card is of waiting, not of its class.
_IDLE_SHARE: Final = 1.05
_DECODE_CONTEXT_TOKENS: Final = 16_384
_PREFILL_TOKENS: Final = 8_192
_EXPERT_TOKENS: Final[Mapping[Phase, int]] = {"decode": 256, "prefill": 8_192}


def sample_power(engine: Engine, runs: Sequence[Run], spec: ModelSpec, binding: Binding) -> Mapping[str, Any] | None:
    """Power by kernel class at the end of the last run's passes, as the engine's `power` returns it.

    None where the engine cannot, earlier runs have it, no pass was measured, or it failed: that is told on stderr and
    costs no table.
    """
    sampler = getattr(engine, "power", None)
    if sampler is None or any(run.power for run in runs) or not any(run.results for run in runs):
        return None
    try:
        found: Mapping[str, Any] = sampler(power_targets(runs, spec, binding), SECONDS)
    except Exception as error:
        print(f"power was not sampled: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    return found if found.get("samples") else None


def power_targets(runs: Sequence[Run], spec: ModelSpec, binding: Binding) -> list[PowerTarget]:
    """Targets from passes that the runs measured: of each, the module where a class spends the most time.

    A large decode batch, a long prefill behind a context and a prefill on the dense path are looked at; whole
    experts run as a shot of their own, at tp 1.
    """
    measured = latest(runs)
    match = matcher(binding.rules(stack_spec(spec, runs[-1].info)))
    found: dict[tuple[Category, Phase], PowerTarget] = {}
    done = [i for i, result in measured.results.items() if result.failure is None and measured.shots[i].moe is None]
    for phase, index in _passes([(i, measured.shots[i]) for i in done]):
        shot, result = measured.shots[index], measured.results[index]
        repeats = len({sample.repeat for sample in result.samples}) or 1
        times: dict[str, dict[Category | None, float]] = defaultdict(lambda: defaultdict(float))
        for sample in result.samples:
            rule = match(sample.module, sample.kernel, shot.regime)
            times[sample.module][rule.category if rule else None] += sample.duration_us / repeats
        best: dict[Category, tuple[float, str]] = {}
        for module, by_category in times.items():
            for category, us in by_category.items():
                if not category or not module or module.startswith(_OUTSIDE):
                    continue
                if us >= _LEAST_US and us >= _LEAST_SHARE * sum(by_category.values()):
                    best[category] = max(best.get(category, (0.0, "")), (us, module))
        for category, (_, module) in best.items():
            if category != "moe":
                found.setdefault((category, phase), PowerTarget(category, phase, shot, module))
    if spec.moe is not None and runs[-1].tp == 1:
        for phase, tokens in _EXPERT_TOKENS.items():
            found["moe", phase] = PowerTarget("moe", phase, Shot((), moe=MoeBatch(1, tokens)), None)
    return list(found.values())


def _passes(shots: Sequence[tuple[int, Shot]]) -> list[tuple[Phase, int]]:
    """The decode batch and the prefills to look at, by index."""
    decodes, prefills, dense = [], [], []
    for index, shot in shots:
        kinds = set(shot.requests)
        if all(new == 1 and context for new, context in kinds):
            if len(kinds) == 1:
                context = shot.requests[0][1]
                decodes.append(((len(shot.requests), -abs(context - _DECODE_CONTEXT_TOKENS)), index))
        elif len(shot.requests) == 1:
            new, context = shot.requests[0]
            if shot.regime == "dense":
                dense.append(((new, context), index))
            elif new <= _PREFILL_TOKENS:
                prefills.append(((new, -abs(context - _DECODE_CONTEXT_TOKENS)), index))
    chosen: list[tuple[Phase, int]] = []
    if decodes:
        chosen.append(("decode", max(decodes)[1]))
    chosen += [("prefill", max(found)[1]) for found in (prefills, dense) if found]
    return chosen


def with_power(meta: Mapping[str, Any], runs: Sequence[Run], old: Mapping[str, Any]) -> dict[str, Any]:
    """`meta` of a bundle with the power of its last run that has some, and what the bundle's old meta has beyond it.

    A bundle has one value per class, those of tp 1 before those of another degree.
    """
    sampled = next((run.power for run in reversed(runs) if run.power), None)
    own = {"tp": runs[-1].tp, **power_meta(sampled)} if sampled else None
    before = old.get("power")
    if own and isinstance(before, Mapping):
        first, second = (before, own) if before.get("tp") == 1 != own["tp"] else (own, before)
        found: Any = {**first, "watts": {**second.get("watts", {}), **first.get("watts", {})}}
    else:
        found = own or before
    return {**meta, **({"power": found} if found else {})}


def power_meta(power: Mapping[str, Any]) -> dict[str, Any]:
    """As meta.yaml has it: `watts` by class, of decode batches where there are any, `other` being the idle card.
    A sample that draws no more than that stands for its class only where it has no other."""
    watts: dict[str, float] = {}
    idle = _IDLE_SHARE * power["idle"].get("watts", 0.0)
    for waits in (False, True):
        for phase in ("decode", "prefill"):
            for sample in power["samples"]:
                if sample["phase"] == phase and (sample["watts"] <= idle) == waits:
                    watts.setdefault(sample["category"], sample["watts"])
    if "watts" in power["idle"]:
        watts["other"] = power["idle"]["watts"]
    return {"watts": watts, **{key: value for key, value in power.items() if value}}
