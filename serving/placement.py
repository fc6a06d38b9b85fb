"""Placements of a model on N GPUs: every legal (tp, pp, dp, ep) with memory, verdict and what would make it fit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from profiler.core.errors import ConfigError
from profiler.core.hardware import Hardware
from profiler.core.shard import broken_rules, describe, is_launchable
from profiler.core.types import ModelSpec, Parallel
from profiler.core.units import GIB
from profiler.core.weights import nominal_weights
from serving.capacity import Budget, memory_budget

MAX_GPUS = 16384


@dataclass(frozen=True, slots=True)
class Placement:
    """One legal split with its budget.

    weights_gib: engine view, on the fullest rank. launchable: whether vLLM offers the split itself. natural: the
    layout with most data parallelism. reason: why it fits or not; suggestion: what would make it fit, or safe.
    """

    parallel: Parallel
    budget: Budget
    weights_gib: float
    weights_nominal_gib: float
    launchable: bool
    natural: bool
    reason: str
    suggestion: str | None

    @property
    def kv_tokens_total(self) -> int:
        """Tokens of all data-parallel ranks together, each with a cache of its own."""
        return self.budget.kv_tokens * self.parallel.dp


@dataclass(frozen=True, slots=True)
class Refusal:
    """A split that breaks rules, one sentence for each."""

    parallel: Parallel
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Legal placements, most data parallelism first, and the refused splits."""

    placements: tuple[Placement, ...]
    refused: tuple[Refusal, ...]

    @property
    def largest_safe_dp(self) -> Placement | None:
        """The launchable placement with most data parallelism that fits without a risk."""
        return next((p for p in self.placements if p.launchable and p.budget.fits and p.budget.risk is None), None)


def natural_layout(spec: ModelSpec, gpus: int) -> Parallel:
    """Most data parallelism: every GPU a data-parallel rank, the experts spread over all of them."""
    return Parallel(tp=1, pp=1, dp=gpus, ep=gpus if spec.moe else 1)


def splits(spec: ModelSpec, gpus: int, ep: int | None = None) -> Iterator[Parallel]:
    """Every (tp, pp, dp, ep) with tp x pp x dp = gpus, most data parallelism first; rules are not checked.

    With experts, ep runs over the multiples of dp that divide tp x dp, and 1; it is `ep` alone when that is given.
    """
    for dp in reversed(_divisors(gpus)):
        for tp in reversed(_divisors(gpus // dp)):
            choices = {1, *(dp * share for share in _divisors(tp))} if spec.moe else {1}
            for chosen in sorted(choices if ep is None else {ep}, reverse=True):
                yield Parallel(tp=tp, pp=gpus // dp // tp, dp=dp, ep=chosen)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def plan(
    spec: ModelSpec,
    hardware: Hardware,
    gpus: int,
    *,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    ep: int | None = None,
    **budget: Any,
) -> Plan:
    """Placements on `gpus` GPUs; degrees that are given keep only the splits that have them.

    The other keywords are those of serving.capacity.memory_budget. Raises ConfigError for a number of GPUs out of
    range, degrees that no split has, or when every remaining split is refused (with the rules that it breaks).
    """
    if not 1 <= gpus <= MAX_GPUS:
        raise ConfigError(f"gpus is {gpus}; it must be between 1 and {MAX_GPUS}")
    given = {name: value for name, value in (("tp", tp), ("pp", pp), ("dp", dp), ("ep", ep)) if value is not None}
    for name, value in given.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    chosen = [s for s in splits(spec, gpus, ep) if all(getattr(s, name) == value for name, value in given.items())]
    if not chosen:
        asked = " ".join(f"{name} {value}" for name, value in given.items() if name != "ep")
        raise ConfigError(f"no split of {gpus} GPUs has {asked}: tp x pp x dp must be {gpus}")
    dcp = budget.get("dcp", 1)
    broken = {split: broken_rules(spec, split, dcp) for split in chosen}
    refused = tuple(Refusal(split, reasons) for split, reasons in broken.items() if reasons)
    if len(refused) == len(chosen):
        closest = min(refused, key=lambda refusal: len(refusal.reasons))
        asked = " ".join(f"{name} {value}" for name, value in given.items())
        others = f"no split of {gpus} GPUs with {asked or 'any degrees'} is legal; for example " if refused[1:] else ""
        raise ConfigError(f"{others}{spec.name} with {describe(closest.parallel)}: {'; '.join(closest.reasons)}")
    legal = [split for split in chosen if not broken[split]]
    return Plan(tuple(place(spec, hardware, split, **budget) for split in legal), refused)


def place(spec: ModelSpec, hardware: Hardware, parallel: Parallel, **budget: Any) -> Placement:
    """One legal split with its budget and verdict. Keywords and errors as serving.capacity.memory_budget."""
    result = memory_budget(spec, hardware, parallel, **budget)
    weights = result.weights_bytes / GIB
    return Placement(
        parallel=parallel,
        budget=result,
        weights_gib=weights,
        weights_nominal_gib=nominal_weights(spec).per_rank_bytes(parallel) / GIB,
        launchable=is_launchable(parallel),
        natural=parallel == natural_layout(spec, parallel.gpus),
        reason=_reason(result),
        suggestion=_suggestion(spec, hardware, parallel, result, budget),
    )


def _reason(budget: Budget) -> str:
    requested = budget.total_gib * budget.utilization
    if budget.kv_available_gib <= 0:
        if budget.gib("weights") > requested:
            return (
                f"the weights need {budget.gib('weights'):.1f} GiB per rank of the {requested:.1f} GiB that "
                f"utilisation {budget.utilization:g} gives"
            )
        return f"weights and workspaces exceed the {requested:.1f} GiB by {-budget.kv_available_gib:.1f} GiB"
    need = f"one sequence of {budget.max_model_len:,} tokens needs {budget.needed_kv_gib:.2f} GiB of KV"
    if not budget.fits:
        return f"{need}, {budget.kv_available_gib:.2f} GiB are available"
    return f"{need} of {budget.kv_available_gib:.2f} GiB"


def _suggestion(
    spec: ModelSpec, hardware: Hardware, parallel: Parallel, result: Budget, budget: dict[str, Any]
) -> str | None:
    if result.fits:
        if result.risk is None:
            return None
        return f"max_model_len {result.safe_max_model_len}" if result.safe_max_model_len else "a larger tp or more GPUs"
    if result.largest_max_model_len:
        return f"max_model_len {result.largest_max_model_len}"
    wider = _enough_gpus(spec, hardware, parallel, budget)
    return "no larger max-DP layout fits either" if wider is None else f"{wider.gpus} GPUs as {describe(wider)}"


def _enough_gpus(spec: ModelSpec, hardware: Hardware, parallel: Parallel, budget: dict[str, Any]) -> Parallel | None:
    """The smallest doubling of the GPUs on which the widest layout fits: max-DP, or max-TP without experts; or else
    more data-parallel ranks of the same split, which leave the attention weights of a rank cut by its tp."""
    gpus = parallel.gpus
    while (gpus := 2 * gpus) <= MAX_GPUS:
        for wider in (natural_layout(spec, gpus), _more_ranks(parallel, gpus)) if spec.moe else (Parallel(tp=gpus),):
            if broken_rules(spec, wider):
                continue
            if memory_budget(spec, hardware, wider, **{**budget, "dcp": 1}).fits:
                return wider
    return None


def _more_ranks(parallel: Parallel, gpus: int) -> Parallel:
    """The split on `gpus` GPUs, its experts over all ranks of a stage or, as before, divided."""
    dp = gpus // (parallel.tp * parallel.pp)
    return replace(parallel, dp=dp, ep=1 if parallel.ep == 1 else parallel.tp * dp)
