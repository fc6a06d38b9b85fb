"""How much of an engine's device time the catalog accounts for, and by name what it does not."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from profiler.bind import MATERIAL_SHARE, Matcher, calls_per_pass, matcher, stack_spec
from profiler.core.errors import CoverageError
from profiler.core.shots import Fill, MoeBatch, Shot
from profiler.core.types import Category, Component, ModelSpec
from profiler.engines.base import Binding, EngineInfo, ShotResult
from profiler.kernels._axes import Limits
from profiler.kernels._components import components_of, has_dense_regime, sparse_regime
from profiler.kernels.moe import local_load
from profiler.samples import Run
from profiler.sweep import choose_categories

_CHUNK: Final = 512
_CONTEXT: Final = 4_096
_DECODES: Final = 8
_EXPERT_TOKENS: Final = 64

Kind = str
KINDS: Final = ("prefill", "dense prefill", "decode", "mixed", "experts")


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A kernel that belongs to no component: its time over all shots of the kind, and its largest share of one."""

    kernel: str
    module: str
    us: float
    share: float

    @property
    def material(self) -> bool:
        return self.share > MATERIAL_SHARE


@dataclass(frozen=True, slots=True)
class Covered:
    """Shots of one kind: microseconds of one run of each, added.

    known_us: kernels that the binding names as outside the tables, with the reason. components: bound time by
    (category, component). failures: shots that did not run.
    """

    kind: Kind
    shots: int
    device_us: float
    bound_us: float
    known_us: float
    components: Mapping[tuple[Category, str], float]
    uncovered: tuple[Uncovered, ...]
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """kinds: in order of KINDS. missing: components of the catalog that had no kernel in any shot that runs them."""

    kinds: tuple[Covered, ...]
    missing: tuple[Component, ...]

    @property
    def complete(self) -> bool:
        material = any(kernel.material for kind in self.kinds for kernel in kind.uncovered)
        return not (material or self.missing or any(kind.failures for kind in self.kinds))


def representative_shots(spec: ModelSpec, limits: Limits) -> dict[Category, list[Shot]]:
    """One shot of each kind that the model has, with every component as its cells, keyed by the first table."""
    chunk = min(_CHUNK, limits.max_num_batched_tokens - 2 * _DECODES, limits.longest // 2)
    context = min(_CONTEXT, limits.longest - chunk)
    decodes = ((1, context),) * min(_DECODES, limits.max_num_seqs // 2)
    found = [
        _shot(spec, ((chunk, context),), sparse_regime(spec)),
        _shot(spec, decodes, "auto"),
        _shot(spec, (*decodes, (chunk, context)), sparse_regime(spec)),
    ]
    if has_dense_regime(spec) and spec.indexer is not None:
        cap = min(spec.indexer.attended_cap_tokens, limits.longest)
        found.append(_shot(spec, ((min(chunk, cap // 2), cap // 2),), "dense"))
    shots: dict[Category, list[Shot]] = {"dense": found}
    if spec.moe is not None and "moe" in choose_categories(spec, None, limits.tp):
        batches = [MoeBatch(ep, _EXPERT_TOKENS) for ep in limits.ep_degrees]
        names = tuple(component.name for component in components_of(spec, "moe"))
        shots["moe"] = [
            Shot((Fill("moe", (batch.ep, batch.tokens, *local_load(spec.moe, batch)), names),), moe=batch)
            for batch in batches
        ]
    return shots


def _shot(spec: ModelSpec, requests: tuple[tuple[int, int], ...], regime: Any) -> Shot:
    """A forward pass with one cell for each table that it can fill; the keys name no cell of a sweep."""
    tokens, decodes = sum(new for new, _ in requests), sum(new == 1 for new, _ in requests)
    keys: dict[Category, tuple[int, ...]] = {
        "dense": (tokens,),
        "per_sequence": (len(requests),),
        **dict.fromkeys(("attention", "indexer", "sparse_attention"), (tokens, 0, decodes, 0, 1)),
    }
    fills = []
    for category, key in keys.items():
        names = tuple(c.name for c in components_of(spec, category) if _runs(c, regime, bool(decodes)))
        if names:
            fills.append(Fill(category, key, names))
    return Shot(tuple(fills), requests, regime)


def _runs(component: Component, regime: str, decodes: bool) -> bool:
    """Whether a component must show in a pass of this regime. Selection may be left out of a dense prefill."""
    if component.when == "decode":
        return decodes
    if regime == "dense":
        return component.when == "prefill_dense" or (
            component.when == "always" and component.category in ("dense", "per_sequence")
        )
    return component.when != "prefill_dense"


def kind_of(shot: Shot) -> Kind:
    if shot.moe is not None:
        return "experts"
    decodes = sum(new == 1 and context > 0 for new, context in shot.requests)
    if decodes == len(shot.requests):
        return "decode"
    if decodes:
        return "mixed"
    return "dense prefill" if shot.regime == "dense" else "prefill"


def coverage(runs: Sequence[Run], spec: ModelSpec, binding: Binding) -> Coverage:
    """Accounts for every kernel of every shot of the runs, whichever tables they were for."""
    by_kind: dict[Kind, list[tuple[Shot, ShotResult]]] = defaultdict(list)
    for run in runs:
        for index, result in run.results.items():
            by_kind[kind_of(run.shots[index])].append((run.shots[index], result))
    match = matcher(binding.rules(stack_spec(spec, runs[-1].info)))
    kinds = tuple(_account(kind, by_kind[kind], match) for kind in KINDS if by_kind[kind])
    return Coverage(kinds, _missing(kinds, spec, runs[-1].info, binding.FUSED))


def _account(kind: Kind, shots: Iterable[tuple[Shot, ShotResult]], match: Matcher) -> Covered:
    components: dict[tuple[Category, str], float] = defaultdict(float)
    loose: dict[tuple[str, str], float] = defaultdict(float)
    largest: dict[tuple[str, str], float] = defaultdict(float)
    known = device = 0.0
    failures = []
    count = 0
    for shot, result in shots:
        count += 1
        if result.failure is not None:
            failures.append(f"{shot.label}: {result.failure}")
            continue
        repeats = len({sample.repeat for sample in result.samples}) or 1
        total = sum(sample.duration_us for sample in result.samples) / repeats
        device += total
        own: dict[tuple[str, str], float] = defaultdict(float)
        for sample in result.samples:
            us = sample.duration_us / repeats
            rule = match(sample.module, sample.kernel, shot.regime)
            if rule is None:
                own[sample.module, sample.kernel] += us
            elif rule.category is None:
                known += us
            else:
                components[rule.category, rule.name or sample.kernel] += us
        for name, us in own.items():
            loose[name] += us
            largest[name] = max(largest[name], us / total)
    uncovered = [Uncovered(kernel, module, us, largest[module, kernel]) for (module, kernel), us in loose.items()]
    uncovered.sort(key=lambda one: (-one.share, one.module, one.kernel))
    return Covered(
        kind, count, device, sum(components.values()), known, dict(components), tuple(uncovered), tuple(failures)
    )


def _missing(
    kinds: Sequence[Covered], spec: ModelSpec, info: EngineInfo, fused: Mapping[str, str]
) -> tuple[Component, ...]:
    """Components of the layers that ran which no shot of a kind that must run them showed, nor shows their carrier."""
    seen = {name for kind in kinds for _, name in kind.components}
    ran = calls_per_pass(spec, info) if info.layer_kinds else Counter()
    present = {kind.kind for kind in kinds if not kind.failures}
    wanted: dict[Component, None] = {}
    for category in ("dense", "per_sequence", "attention", "indexer", "sparse_attention", "moe"):
        for component in components_of(spec, category):
            if ran[component.category, component.name] and _needs(component) & present:
                wanted[component] = None
    return tuple(c for c in wanted if fused.get(c.name, c.name) not in seen)


def _needs(component: Component) -> set[Kind]:
    """Kinds of shots that show a component."""
    if component.when == "prefill_dense":
        return {"dense prefill"}
    return {"decode", "mixed"} | (set() if component.when == "decode" else {"prefill"})


def refuse_incomplete(found: Coverage) -> None:
    """CoverageError naming what is uncovered; nothing when all material time is bound."""
    if found.complete:
        return
    lines = [
        f"  {kernel.us:10.1f} us  {100 * kernel.share:5.1f} %  {kind.kind}: {kernel.module or '(no module)'}  "
        f"{kernel.kernel[:100]}"
        for kind in found.kinds
        for kernel in kind.uncovered
        if kernel.material
    ]
    lines += [f"  no kernel of {component.category}/{component.name} in any pass" for component in found.missing]
    lines += [f"  failed: {failure}" for kind in found.kinds for failure in kind.failures]
    raise CoverageError("device time that no component accounts for:\n" + "\n".join(lines))


def as_json(found: Coverage, run: Run) -> dict[str, Any]:
    """Plain JSON of the whole report, microseconds of one run of each shot."""
    return {
        "model": run.model,
        "hardware": run.hardware,
        "tp": run.tp,
        "engine": {"name": run.info.name, "versions": dict(run.info.versions)},
        "material_share": MATERIAL_SHARE,
        "complete": found.complete,
        "kinds": [
            {
                "kind": kind.kind,
                "shots": kind.shots,
                "device_us": round(kind.device_us, 3),
                "bound_us": round(kind.bound_us, 3),
                "known_us": round(kind.known_us, 3),
                "components": [
                    {"category": category, "name": name, "us": round(us, 3)}
                    for (category, name), us in sorted(kind.components.items(), key=lambda item: -item[1])
                ],
                "uncovered": [
                    {
                        "kernel": one.kernel,
                        "module": one.module,
                        "us": round(one.us, 3),
                        "share": round(one.share, 6),
                        "material": one.material,
                    }
                    for one in kind.uncovered
                ],
                "failures": list(kind.failures),
            }
            for kind in found.kinds
        ],
        "missing": [{"category": one.category, "name": one.name} for one in found.missing],
    }
