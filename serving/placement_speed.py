"""How fast a placement steps, from measured tables: what plan prints beside what fits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from profiler.core.bundle import Bundle, find_bundle, variants
from profiler.core.errors import ConfigError, ContractError, CoverageError
from profiler.core.hardware import Hardware
from profiler.core.naming import variant_name
from profiler.core.siblings import tables_model
from profiler.core.types import ModelSpec
from serving.capacity import default_batched_tokens, default_num_seqs
from serving.core.shape import StepShape
from serving.cost import TableCost, build_cost, default_capture_sizes
from serving.cost.build import priced_from
from serving.degree_tables import read_degrees
from serving.placement import Placement


@dataclass(frozen=True, slots=True)
class Speed:
    """Of all GPUs of a placement together. reason: why there are no numbers, None where there are.

    requests: decoding in the step, all ranks together. decode_step_ms: the step in which each emits a token.
    prefill_tokens_per_s: in steps of full token budgets of new prompts; None where a table ends before, and then
    prefill_budget_tokens is the largest budget that the tables price. tables: the bundle, and what its numbers are.
    """

    requests: int = 0
    decode_step_ms: float | None = None
    decode_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    prefill_budget_tokens: int | None = None
    reason: str | None = None
    tables: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """context_tokens: keys of every decoding request. requests: of all ranks together; None is what the KV holds."""

    context_tokens: int
    requests: int | None = None


def speeds(
    spec: ModelSpec,
    hardware: Hardware,
    placements: Sequence[Placement],
    load: Load,
    bundle_root: Path,
    *,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
) -> list[Speed]:
    """A Speed for each placement. Raises ConfigError for a load of no tokens or no requests.

    None of them is an error of the plan: a missing table, a split that is not priced, or a load that does not fit is
    the Speed's reason.
    """
    if load.context_tokens < 1 or (load.requests is not None and load.requests < 1):
        raise ConfigError("a step needs at least one request with at least one token")
    tokens = max_num_batched_tokens or default_batched_tokens(hardware)
    sequences = max_num_seqs or default_num_seqs(hardware)
    found = []
    for placement in placements:
        try:
            found.append(_speed(spec, hardware, placement, load, bundle_root, tokens, sequences))
        except (ConfigError, ContractError, CoverageError) as error:
            found.append(Speed(reason=str(error)))
    return found


def _speed(
    spec: ModelSpec, hardware: Hardware, one: Placement, load: Load, root: Path, tokens: int, sequences: int
) -> Speed:
    if not one.budget.fits:
        return Speed(reason="does not fit")
    dp = one.parallel.dp
    held = min(sequences, one.budget.kv_tokens // load.context_tokens)
    per_rank = held if load.requests is None else -(-load.requests // dp)
    if not held or per_rank > held:
        needed = f"{max(per_rank, 1)} are needed"
        return Speed(reason=f"a rank holds {held} requests of {load.context_tokens:,} tokens at once, {needed}")
    lockstep = spec.moe is not None and dp > 1
    bundle = _bundle(spec, hardware, one, root)
    cost = build_cost(
        bundle=bundle,
        spec=spec,
        parallel=one.parallel if lockstep else replace(one.parallel, dp=1),
        hardware=hardware,
        max_num_batched_tokens=tokens,
        kv=one.budget.layout,
        capture_sizes=default_capture_sizes(sequences),
        step_us=hardware.step_overhead_us or 0.0,
        step_source="hardware file",
    )
    cap = spec.indexer.attended_cap_tokens if spec.indexer else None
    keys = load.context_tokens
    decode = StepShape((), per_rank, per_rank * keys, keys, per_rank * min(keys, cap or keys), per_rank)
    ranks = dp if lockstep else 1
    step_s = _step_ns(cost, decode, ranks) / 1e9
    rate = _prefill_rate(cost, tokens, min(keys, tokens), dp, ranks)
    return Speed(
        requests=per_rank * dp,
        decode_step_ms=step_s * 1e3,
        decode_tokens_per_s=per_rank * dp / step_s,
        prefill_tokens_per_s=rate,
        prefill_budget_tokens=_priced_budget(cost, tokens, keys, ranks) if rate is None else None,
        tables=f"{bundle.path.relative_to(root).as_posix()}, {priced_from(bundle, one.parallel)}",
    )


def _prefill_rate(cost: TableCost, budget: int, prompt: int, dp: int, ranks: int) -> float | None:
    """Tokens per second of whole prompts of `prompt` tokens filling the budget; None where a table ends before."""
    prompts = max(1, budget // prompt)
    step_ns = _prefill_ns(cost, (prompt,) * prompts, ranks)
    return None if step_ns is None else 1e9 * prompts * prompt * dp / step_ns


def _priced_budget(cost: TableCost, above: int, prompt: int, ranks: int) -> int | None:
    """The largest budget below `above` that prompts fill to its last token within the tables; None where none does."""
    good, bad = 0, above
    while bad - good > 1:
        budget = (good + bad) // 2
        length = min(prompt, budget)
        rest = (budget % length,) if budget % length else ()
        if _prefill_ns(cost, (length,) * (budget // length) + rest, ranks) is None:
            bad = budget
        else:
            good = budget
    return good or None


def _prefill_ns(cost: TableCost, prompts: tuple[int, ...], ranks: int) -> int | None:
    try:
        return _step_ns(cost, StepShape(tuple((one, 0) for one in prompts), 0, 0, 0, 0, len(prompts)), ranks)
    except CoverageError:
        return None


def _step_ns(cost: TableCost, shape: StepShape, ranks: int) -> int:
    return cost.step_ns([shape] * ranks)


def _bundle(spec: ModelSpec, hardware: Hardware, one: Placement, root: Path) -> Bundle:
    owner = tables_model(root, hardware.name, spec)
    there = variants(root, hardware.name, owner)
    own = variant_name(spec.quantization.weights, one.budget.layout.layout)
    path = find_bundle(root, hardware.name, owner, own if own in there else None)
    return read_degrees(path, spec, one.parallel)
