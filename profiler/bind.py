"""From kernel samples to table rows: which component each kernel belongs to, how often it ran, what is left over."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from profiler.core.errors import ConfigError
from profiler.core.shots import Fill, Key, Shot
from profiler.core.stack import fold
from profiler.core.types import Category, ModelSpec
from profiler.engines.base import Binding, EngineInfo, KernelSample, Rule, ShotResult
from profiler.kernels._components import categories_of
from profiler.timing import median, spread_rel

# A kernel without a component is material when it takes more than this share of the kernel time of any shot.
MATERIAL_SHARE: Final = 0.01

Name = tuple[Category, str]


@dataclass(slots=True)
class Spent:
    """What a component took in one repeat: its usual calls together, and by module those that stand in for one."""

    usual_us: float = 0.0
    standing_in: dict[str, float] = field(default_factory=dict)

    def per_call(self, calls: int) -> float:
        """Microseconds of one of so many calls; where all stand in, they are all there is."""
        usual = calls - len(self.standing_in)
        return self.usual_us / usual if usual > 0 else (self.usual_us + sum(self.standing_in.values())) / calls


Spending = Mapping[tuple[Category, str, int], Spent]


@dataclass(frozen=True, slots=True)
class Row:
    """One cell: the median over repeats of one call of a component, and (p90 - p10) / median. shot: its number."""

    category: Category
    name: str
    key: Key
    time_us: float
    spread_rel: float
    shot: int


@dataclass(frozen=True, slots=True)
class Unbound:
    """A kernel that no rule binds: its largest share of a shot's kernel time, and its time in that shot."""

    module: str
    kernel: str
    duration_us: float
    share: float

    @property
    def material(self) -> bool:
        return self.share > MATERIAL_SHARE


@dataclass(frozen=True, slots=True)
class Bound:
    """rows: the cells; problems: per category, why a shot's cells are missing; unbound: kernels without a component;
    bound_share: the least share of kernel time that rules account for, over all shots."""

    rows: tuple[Row, ...]
    problems: Mapping[Category, tuple[str, ...]]
    unbound: tuple[Unbound, ...]
    bound_share: float


def calls_per_pass(spec: ModelSpec, info: EngineInfo) -> Counter[Name]:
    """How often each component runs in one forward pass of the stack that the engine ran.

    Raises ConfigError when the engine reports a layer kind that the model does not have.
    """
    counts: Counter[Name] = Counter()
    for component, count in fold(stack_spec(spec, info)).components:
        counts[component.category, component.name] += count
    return counts


def stack_spec(spec: ModelSpec, info: EngineInfo) -> ModelSpec:
    """The model with the layers of the engine's stack, by which the rules of a binding count.

    Raises ConfigError when the engine reports a layer kind that the model does not have.
    """
    by_name = {kind.name: kind for kind in spec.kinds}
    unknown_kinds = sorted(set(info.layer_kinds) - by_name.keys())
    if unknown_kinds:
        raise ConfigError(f"{spec.name} has no layer kind {', '.join(unknown_kinds)}; it has {', '.join(by_name)}")
    return replace(spec, layers=tuple(by_name[name] for name in info.layer_kinds))


def bind(
    results: Iterable[ShotResult], shots: Sequence[Shot], spec: ModelSpec, info: EngineInfo, binding: Binding
) -> Bound:
    """Rows of every complete shot.

    A component's time in one repeat is the sum over its kernels, divided by its calls in the pass, without those that a
    rule says stand in for one; an expert shot and an engine that runs components alone count one call. Components of
    `binding.FUSED` share their carrier's time in equal parts, so sums over a pass stay exact. A shot that failed, or in
    which an expected component is missing in some repeat, gives no rows of that category and a line in `problems`.
    Dense cells that the engine never runs dense are left out.
    """
    calls = calls_per_pass(spec, info)
    _check_fused(binding.FUSED, calls)
    match = matcher(binding.rules(stack_spec(spec, info)))
    table_of = categories_of(spec)
    rows: list[Row] = []
    problems: dict[Category, list[str]] = defaultdict(list)
    worst: dict[tuple[str, str], Unbound] = {}
    bound_share = 1.0
    for result in results:
        shot = shots[result.shot_index]
        if result.failure is not None:
            for category in dict.fromkeys(fill.category for fill in shot.fills):
                problems[category].append(f"{shot.label}: {result.failure}")
            continue
        if never_dense(shot, info):
            continue
        times, unbound = _sum_by_component(result.samples, shot, match)
        bound_share = min(bound_share, 1.0 - _note_unbound(result.samples, unbound, worst))
        alone = shot.moe is not None or not info.whole_forward
        repeats = sorted({sample.repeat for sample in result.samples})
        for fill in shot.fills:
            measured = _rows(
                result.shot_index, fill, times, repeats, Counter() if alone else calls, binding.FUSED, table_of
            )
            if isinstance(measured, str):
                problems[fill.category].append(f"{shot.label}: {measured}")
            else:
                rows += measured
    found = tuple(sorted(worst.values(), key=lambda u: (-u.share, u.module, u.kernel)))
    return Bound(tuple(rows), {c: tuple(p) for c, p in problems.items()}, found, bound_share)


def functions(
    results: Iterable[ShotResult], shots: Sequence[Shot], spec: ModelSpec, info: EngineInfo, binding: Binding
) -> dict[tuple[Category, str, Key], tuple[str, ...]]:
    """The device functions of every cell by category, component and key, that of most time first.

    An engine names them as its profiler does, template arguments included.
    """
    match = matcher(binding.rules(stack_spec(spec, info)))
    found: dict[tuple[Category, str, Key], tuple[str, ...]] = {}
    for result in results:
        shot = shots[result.shot_index]
        if result.failure is not None or never_dense(shot, info):
            continue
        times: dict[tuple[Category, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for sample in result.samples:
            rule = match(sample.module, sample.kernel, shot.regime)
            if rule is not None and rule.category is not None:
                times[rule.category, rule.name or sample.kernel][sample.kernel] += sample.duration_us
        for fill in shot.fills:
            for name in fill.components:
                if own := times.get((fill.category, name)):
                    ordered = [function for _, function in sorted((-us, function) for function, us in own.items())]
                    found.setdefault((fill.category, name, fill.key), tuple(ordered))
    return found


def decode_threshold_tokens(info: EngineInfo) -> int:
    """Longest chunk that the engine's main attention runs as a decode; 0 when it has no such rule."""
    return int(info.settings.get("mla_decode_threshold_tokens") or 0)


def never_dense(shot: Shot, info: EngineInfo) -> bool:
    """Whether a shot asks for the dense kernel with a chunk that this engine runs as a decode: not a cell here."""
    longest = max((new for new, _ in shot.requests), default=0)
    never = info.settings.get("dense_prefill") == "never"
    return shot.regime == "dense" and (never or longest <= decode_threshold_tokens(info))


def selection_in_dense_prefill(
    results: Iterable[ShotResult], shots: Sequence[Shot], spec: ModelSpec, info: EngineInfo, binding: Binding
) -> bool:
    """Whether the engine selects in passes whose prefills all attend every key, as kernels of such passes show."""
    match = matcher(binding.rules(stack_spec(spec, info)))
    for result in results:
        shot = shots[result.shot_index]
        decodes = any(new == 1 and context for new, context in shot.requests)
        if shot.regime == "dense" and not decodes and not never_dense(shot, info):
            times, _ = _sum_by_component(result.samples, shot, match)
            if any(category == "indexer" for category, _, _ in times):
                return True
    return False


def _check_fused(fused: Mapping[str, str], calls: Counter[Name]) -> None:
    counts: dict[str, int] = defaultdict(int)
    for (_, name), count in calls.items():
        counts[name] += count
    for name, carrier in fused.items():
        if counts[name] != counts[carrier]:
            raise ConfigError(
                f"binding: {name!r} runs {counts[name]} times a pass and its carrier {carrier!r} {counts[carrier]} "
                "times; only components that run equally often can share a kernel's time"
            )


def matcher(rules: Sequence[Rule]) -> "Matcher":
    return Matcher(tuple((re.compile(rule.module), re.compile(rule.kernel), rule) for rule in rules), {})


@dataclass(frozen=True, slots=True)
class Matcher:
    """First matching rule of (module, kernel, regime), remembered, since samples repeat the same few thousand."""

    rules: tuple[tuple[re.Pattern[str], re.Pattern[str], Rule], ...]
    known: dict[tuple[str, str, str], Rule | None]

    def __call__(self, module: str, kernel: str, regime: str) -> Rule | None:
        key = (module, kernel, regime)
        if key not in self.known:
            self.known[key] = next(
                (
                    rule
                    for in_module, in_kernel, rule in self.rules
                    if (not rule.regimes or regime in rule.regimes)
                    and in_module.search(module)
                    and in_kernel.search(kernel)
                ),
                None,
            )
        return self.known[key]


def _sum_by_component(
    samples: Sequence[KernelSample], shot: Shot, match: Matcher
) -> tuple[Spending, dict[tuple[str, str], float]]:
    """(what each category, component and repeat took; microseconds by unbound module and kernel over all repeats)."""
    times: dict[tuple[Category, str, int], Spent] = defaultdict(Spent)
    unbound: dict[tuple[str, str], float] = defaultdict(float)
    for sample in samples:
        rule = match(sample.module, sample.kernel, shot.regime)
        if rule is None:
            unbound[sample.module, sample.kernel] += sample.duration_us
        elif rule.category is not None:
            spent = times[rule.category, rule.name or sample.kernel, sample.repeat]
            if rule.stands_in:
                spent.standing_in[sample.module] = spent.standing_in.get(sample.module, 0.0) + sample.duration_us
            else:
                spent.usual_us += sample.duration_us
    return times, unbound


def _note_unbound(
    samples: Sequence[KernelSample],
    unbound: Mapping[tuple[str, str], float],
    worst: dict[tuple[str, str], Unbound],
) -> float:
    """Keeps each unbound kernel's largest share in `worst`; returns the unbound share of this shot."""
    total = sum(sample.duration_us for sample in samples)
    if not total:
        return 0.0
    repeats = len({sample.repeat for sample in samples})
    for (module, kernel), duration in unbound.items():
        share = duration / total
        if (module, kernel) not in worst or worst[module, kernel].share < share:
            worst[module, kernel] = Unbound(module, kernel, duration / repeats, share)
    return sum(unbound.values()) / total


def _rows(
    shot: int,
    fill: Fill,
    times: Spending,
    repeats: Sequence[int],
    calls: Counter[Name],
    fused: Mapping[str, str],
    table_of: Mapping[str, Category],
) -> list[Row] | str:
    """The cells of one fill, or what is missing. A component absent from `calls` counts one call."""
    rows = []
    for name in fill.components:
        carrier = fused.get(name, name)
        sharers = 1 + sum(other == carrier for other in fused.values())
        category = table_of.get(name, fill.category)
        count, none = max(1, calls[category, name]), Spent()
        values = [times.get((category, carrier, repeat), none).per_call(count) / sharers for repeat in repeats]
        if not values or min(values) <= 0.0:
            at = [str(r) for r, value in zip(repeats, values, strict=True) if value <= 0.0]
            return f"no kernel of {name!r} in repeat {', '.join(at)}" if at else f"no samples of {name!r}"
        spread = spread_rel(values)
        spread = spread if math.isfinite(spread) else math.nan
        rows.append(Row(fill.category, name, fill.key, median(values), spread, shot))
    return rows
